"""The display of the demo: a live table while it trains, and the learning curve."""

import argparse
import statistics
import time
from typing import Protocol, Self

from rich.live import Live
from rich.table import Table

from ._plot import curves

RECENT = 20  # episodes in a running mean

Speeds = dict[str, list[float]]  # by method: agent steps/s of each run


class Progress(Protocol):
    """The values that the table shows."""

    rewards: list[float]
    steps: int
    batches: int


class Display:
    """A live table of an agent's progress, as a context manager."""

    def __init__(self, agent: Progress) -> None:
        self._agent = agent
        self._start = self._since = time.monotonic()
        self._steps = self._batches = 0
        self._rate = self._size = 0.0
        self._live = Live(get_renderable=self._table, refresh_per_second=4)

    def __enter__(self) -> Self:
        self._live.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        self._live.__exit__(None, None, None)
        if not self._live.console.is_terminal:
            self._live.console.print()  # rich omits the last newline of a redirected table

    def _table(self) -> Table:
        self._measure()
        table = Table(title="CartPole-v1: one agent, batched")
        for name in (
            "seconds",
            "episodes",
            f"reward (last {RECENT})",
            "agent steps/s",
            "mean batch",
        ):
            table.add_column(name, justify="right")
        rewards = self._agent.rewards
        table.add_row(
            f"{time.monotonic() - self._start:.0f}",
            f"{len(rewards):,}",
            f"{statistics.mean(rewards[-RECENT:]):.1f}" if rewards else "-",
            f"{self._rate:,.0f}",
            f"{self._size:.1f}",
        )
        return table

    def _measure(self) -> None:
        now, steps, batches = time.monotonic(), self._agent.steps, self._agent.batches
        if now - self._since < 0.5:  # a shorter window makes the rate flicker
            return
        self._rate = (steps - self._steps) / (now - self._since)
        self._size = (steps - self._steps) / max(1, batches - self._batches)
        self._since, self._steps, self._batches = now, steps, batches


def report(rewards: list[float], speeds: Speeds, options: argparse.Namespace) -> None:
    """Print the figures and write the learning curve."""
    if all(speeds.values()):
        batched, alone = (statistics.mean(each) for each in speeds.values())
        print(
            f"agent steps/s with {options.observers} x {options.environments} environments: "
            f"batched {batched:,.0f}, unbatched {alone:,.0f} ({batched / alone:.2f} x)"
        )
    if len(rewards) < RECENT:
        print(f"only {len(rewards)} episodes: give it more --seconds")
        return
    first, last = statistics.mean(rewards[:10]), statistics.mean(rewards[-10:])
    print(f"reward, first ten episodes: {first:.1f}, last ten of {len(rewards)}: {last:.1f}")
    means = [statistics.mean(rewards[max(0, n - RECENT + 1) : n + 1]) for n in range(len(rewards))]
    picture = curves(
        options.plot,
        {"episode": rewards, f"mean of the last {RECENT}": means},
        title="REINFORCE on CartPole-v1, batched inference",
        xlabel="episode",
        ylabel="reward",
    )
    print(f"learning curve: {picture}")
