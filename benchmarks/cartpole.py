"""How long does an episode of batch CartPole take? The figure of PyTorch's tutorial.

One agent, one to ten observers in processes of their own, each with one environment, with batching
and without; and the same number of environments as coroutines of one process. They are compared
with the tutorial's own program as published, and with the plain form in `examples/_reference`: its
pattern in its fastest form. Ours and the plain form train from the same seed with the same
episodes, so they do the same work. The sides' processes are started, measured and ended one after
the other; they are forked from a process that has imported torch.

    python -m benchmarks.cartpole [--quick] [--repeat N] [--plot PATH] [--transports shm uv]
"""

import argparse
import multiprocessing
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from types import ModuleType

from . import _cartpole_ours as ours, _cartpole_plain as plain, _cartpole_tutorial as tutorial
from ._cartpole_work import Sizes
from ._compare import Row, Runs, parse, show
from ._plot import ALSO_OURS, OURS, RAW, Curve, Panel, draw

TABLE = [1, 10]  # observers in the table; the figure has all of FIGURE
FIGURE = range(1, 11)
EPISODE = 500  # steps of an observer, in the tutorial's figure
PATIENCE = 300.0  # seconds for one measurement of a side

Found = dict[tuple[str, int], list[float]]
"""Steps/s and the agent's CPU in µs/step of every repetition, by name and environments."""


def measure_side(side: ModuleType, sizes: Sizes) -> dict[str, float]:
    """Start a side's processes, measure and end them; return steps/s, and CPU in µs/step."""
    with TemporaryDirectory() as folder, processes(side, sizes, folder) as report:
        if not report.poll(PATIENCE):
            raise SystemExit(f"{side.__name__} did not end within {PATIENCE:.0f} s: {sizes}")
        found = report.recv()
    figures: dict[str, float] = {}
    for variant, rounds in found.items():
        steps, seconds, cpu = map(sum, zip(*rounds, strict=True))
        figures |= {variant: steps / seconds, f"{variant}, CPU": cpu / steps * 1e6}
    return figures


@contextmanager
def processes(side: ModuleType, sizes: Sizes, folder: str) -> Iterator[Connection]:
    """Run the agent and its observers; yield the connection for the agent's report."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([ours.__name__, plain.__name__, tutorial.__name__])
    mine, its = context.Pipe(duplex=False)
    where = f"file://{folder}/store"
    started = [
        context.Process(target=side.live, args=(rank, sizes, where, its))
        for rank in range(sizes.processes + 1)
    ]
    try:
        for process in started:
            process.start()
        its.close()
        yield mine
        for process in started:
            process.join(PATIENCE)
    finally:
        for process in started:
            if process.is_alive():
                process.kill()
                process.join()


def measure(given: argparse.Namespace, observers: Sequence[int]) -> Found:
    """Measure all sides at all sizes, `repeat` times, one after the other."""
    rates: Found = {}
    steps = 40 if given.quick else given.steps
    for _ in range(given.repeat):
        for count in observers:
            spread = Sizes(count, 1, steps, transports=given.transports)
            together = Sizes(1, count, steps, transports=given.transports)
            for name, side, sizes in (
                ("ours", ours, spread),
                ("tutorial", tutorial, spread),
                ("plain form", plain, spread),
                ("together", ours, together),
            ):
                for variant, rate in measure_side(side, sizes).items():
                    rates.setdefault((f"{name}, {variant}", count), []).append(rate)
    return rates


def rows(rates: Found) -> list[Row]:
    """Return the table: ours against the better variant of the tutorial's and of the plain form."""
    found = []
    counts = sorted({count for _, count in rates})
    for other, aims in (("tutorial", ("≥ 1.3", "≥ 5")), ("plain form", ("", ""))):
        for count in [each for each in TABLE if each in counts]:
            found += against(other, rates, count, aims if count > 1 else ("", ""))
    one = Runs(rates["ours, batched", counts[0]], rates["ours, unbatched", counts[0]])
    ratio = median(each / other for each, other in zip(one.ours, one.raw, strict=True))
    if counts[0] == 1:
        print(f"one observer: batched {ratio:.2f} x unbatched (aim: ≥ 0.95)\n")
    return found


def against(other: str, rates: Found, count: int, aims: tuple[str, str]) -> list[Row]:
    """Return the rows of ours at `count` observers; `aims`: batched, and in one process."""
    what = f"{count} observer{'s' * (count > 1)}"
    pairs = [(f"{what}, batched", "ours, batched", aims[0])]
    if other == "plain form":
        pairs.append((f"{what}, unbatched", "ours, unbatched", ""))
    if count > 1:
        pairs.append((f"{count} environments in one observer", "together, batched", aims[1]))
    best = better(other, rates, count)
    found = [
        Row(f"{name}, against the {other}", "steps/s", Runs(rates[way, count], best), aim)
        for name, way, aim in pairs
    ]
    if other == "plain form":
        cpu = Runs(rates["ours, batched, CPU", count], rates[f"{other}, batched, CPU", count])
        found.append(Row(f"{what}: the agent's CPU, against the {other}", "µs/step", cpu))
    return found


def better(other: str, rates: Found, count: int) -> list[float]:
    """Return the rates of that side's variant with the higher median."""
    variants = [rates[f"{other}, {variant}", count] for variant in ("batched", "unbatched")]
    return max(variants, key=median)


def panel(rates: Found) -> Panel:
    """Return the panel: seconds for an episode against the size of the world."""
    looks = {
        "tutorial, unbatched": ("the tutorial, unbatched", ("#999999", "v")),
        "tutorial, batched": ("the tutorial, batched", ("#666666", "^")),
        "plain form, unbatched": ("plain torch, unbatched", ("#cc79a7", "v")),
        "plain form, batched": ("plain torch, batched", RAW),
        "ours, unbatched": ("ours, unbatched", ("#009e73", "D")),
        "ours, batched": ("ours, batched", OURS),
        "together, batched": ("ours, all in one observer", ALSO_OURS),
    }
    counts = sorted({count for _, count in rates})
    curves = [
        Curve(
            label,
            look,
            [count + 1 for count in counts],
            [[EPISODE * count / rate for rate in rates[name, count]] for count in counts],
        )
        for name, (label, look) in looks.items()
    ]
    title = f"{EPISODE} steps of every observer"
    return Panel(title, "world size: the agent and its observers", "seconds", curves, log="")


def main() -> None:
    parser = argparse.ArgumentParser(description="Batch CartPole, against the tutorial's pattern.")
    parser.add_argument("--plot", type=Path, metavar="PATH", help="draw a figure: .svg or .png")
    parser.add_argument("--steps", type=int, default=500, help="steps of an environment in a round")
    parser.add_argument("--observers", type=int, nargs="+", help="numbers of observers (1 10)")
    parser.add_argument("--transports", nargs="+", help="of TensorPipe; default: each side's")
    given = parse(parser)
    few = [1, 2] if given.quick else TABLE
    observers = given.observers or (list(FIGURE) if given.plot and not given.quick else few)
    before = os.getloadavg()[0]
    rates = measure(given, observers)
    show(rows(rates), other="the other side's better variant")
    # The second figure includes the benchmark's own processes.
    print(f"load average of the machine before and after: {before:.1f}, {os.getloadavg()[0]:.1f}")
    draw([panel(rates)], given.plot)


if __name__ == "__main__":
    main()
