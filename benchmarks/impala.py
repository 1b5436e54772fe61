"""What does asynchronous training gain, by how stale the weights of its rollouts may get?

`examples.impala` and `examples.replay` train with several seeds in each form: in turns, and at the
same time with limits of staleness. The forms alternate. All runs of a program make the same number
of steps, the environments' for IMPALA and the learner's for DQN. Rewards are means of the last
episodes.

    python -m benchmarks.impala [--quick] [--seeds N] [--only NAME ...] [--plot PATH]
"""

import argparse
import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

from examples import impala, replay

from ._compare import lay_out, machine, spread
from ._plot import ALSO_OURS, OTHER, OURS, RAW, Curve, Panel, draw

FORMS = {
    "in turns": (["--synchronous"], OTHER),
    "staleness 0": (["--staleness", "0"], RAW),
    "staleness 1": (["--staleness", "1"], ("#e69f00", "v")),
    "staleness 4": (["--staleness", "4"], OURS),
    "staleness 16": (["--staleness", "16"], ALSO_OURS),
}
HEADS = ("", "environment steps/s", "learner's steps/s", "reward, last tenth", "seconds to half")
POINTS = 20  # of a curve


class Run(NamedTuple):
    """The progress of one run."""

    progress: Sequence[Any]

    @property
    def seconds(self) -> float:
        return float(self.progress[-1].seconds)

    def rate(self, name: str) -> float:
        return float(getattr(self.progress[-1], name)) / self.seconds

    def last(self) -> float:
        """Return the mean reward in the last tenth of the run."""
        rewards = [each.reward for each in self.progress[-max(1, len(self.progress) // 10) :]]
        return fmean(rewards)

    def reached(self, reward: float) -> float:
        """Return the seconds until a reward was reached, infinity if it was not."""
        return next((each.seconds for each in self.progress if each.reward >= reward), float("inf"))

    def reward_at(self, seconds: float) -> float:
        found = [each.reward for each in self.progress if each.seconds <= seconds]
        return float(found[-1]) if found else 0.0


class Program(NamedTuple):
    """A program, and the steps of its runs."""

    title: str
    train: Callable[..., Any]
    parse: Callable[..., argparse.Namespace]
    steps: int
    quick: int

    def run(self, form: str, seed: int, *, quick: bool) -> Run:
        steps = self.quick if quick else self.steps
        given = self.parse(*FORMS[form][0], "--seed", str(seed), "--steps", str(steps))
        found = list[Any]()
        asyncio.run(self.train(given, found.append))
        return Run(found)


PROGRAMS = {
    "impala": Program("IMPALA on CartPole-v1", impala.train, impala.parse, 150_000, 5_000),
    "replay": Program("DQN on CartPole-v1", replay.train, replay.parse, 3_000, 200),
}
Runs = dict[str, list[Run]]


def measure(program: Program, given: argparse.Namespace) -> Runs:
    """Train in each form with each seed."""
    runs: Runs = {form: [] for form in given.forms}
    for seed in range(given.seeds):
        for form, found in runs.items():
            found.append(program.run(form, seed, quick=given.quick))
            print(f"{program.title}, seed {seed}, {form}: {found[-1].seconds:.0f} s", flush=True)
    return runs


def rows(runs: Runs) -> list[tuple[str, ...]]:
    """Return a line of the table for each form."""
    return [
        (
            form,
            spread([each.rate("steps") for each in found]),
            spread([each.rate("updates") for each in found]),
            spread([each.last() for each in found]),
            spread([each.reached(HALF) for each in found]),
        )
        for form, found in runs.items()
    ]


HALF = 250.0  # half of the largest reward of CartPole-v1


def panel(program: Program, runs: Runs) -> Panel:
    """Return the reward against seconds, of each form until its median run ended."""
    curves = []
    for form, found in runs.items():
        end = median(each.seconds for each in found)
        xs = [end * number / POINTS for number in range(1, POINTS + 1)]
        rewards = [[each.reward_at(x) for each in found] for x in xs]
        curves.append(Curve(form, FORMS[form][1], xs, rewards))
    return Panel(program.title, "seconds", "reward of an episode", curves, log="")


def main(given: argparse.Namespace) -> None:
    """Run the programs; print a table for each, and draw the figure."""
    panels = []
    for name in given.only:
        runs = measure(PROGRAMS[name], given)
        print(f"\n{PROGRAMS[name].title}")
        lay_out([HEADS, *rows(runs)])
        print()
        panels.append(panel(PROGRAMS[name], runs))
    print(f"medians of {given.seeds} seeds [min–max]; half: a reward of {HALF:.0f}; {machine()}")
    if given.plot:
        draw(panels, given.plot)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Training in turns and at the same time.")
    add = parser.add_argument
    add("--quick", action="store_true", help="one seed and few steps, as a check")
    add("--seeds", type=int, help="number of seeds (5)")
    add("--only", nargs="+", choices=[*PROGRAMS], default=[*PROGRAMS], metavar="NAME")
    add("--forms", nargs="+", choices=[*FORMS], default=[*FORMS], metavar="FORM")
    add("--plot", type=Path, metavar="PATH", help="draw a figure: .svg or .png")
    given = parser.parse_args()
    given.seeds = given.seeds or (1 if given.quick else 5)
    return given


if __name__ == "__main__":
    main(arguments())
