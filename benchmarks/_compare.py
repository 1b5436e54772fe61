"""How do two ways of doing one thing compare on a machine that is noisy?

They alternate in one run and one world. A ratio compares two neighbours in time, so a slow phase of
the machine slows both. A row shows the median of the ratios and the spread of each way.
"""

import argparse
import gc
import os
import platform
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import TypeVar

import torch

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Runs:
    """Measurements of each repetition; `raw` is empty where torch has no counterpart."""

    ours: Sequence[float]
    raw: Sequence[float] = ()


@dataclass(frozen=True, slots=True)
class Row:
    """A row of the table: name, unit, measurements, and the figure aimed at."""

    what: str
    unit: str
    runs: Runs
    aim: str = ""

    def cells(self) -> tuple[str, ...]:
        ours, raw = self.runs.ours, self.runs.raw
        ratios = [mine / theirs for mine, theirs in zip(ours, raw, strict=False)]
        ratio = f"{median(ratios):.2f}" if ratios else ""
        return self.what, self.unit, spread(ours), spread(raw), ratio, self.aim


def arguments(description: str) -> argparse.Namespace:
    """Parse the command line with the options of `parse` and `--plot`, a path or None."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--plot", type=Path, metavar="PATH", help="draw a figure: .svg or .png")
    return parse(parser)


def parse(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Parse the command line with the parser's options, `--quick` and `--repeat`."""
    parser.add_argument("--quick", action="store_true", help="few calls, as a check")
    parser.add_argument("--repeat", type=int, metavar="N", help="repetitions (5; quick: 2)")
    given = parser.parse_args()
    if given.repeat is None:
        given.repeat = 2 if given.quick else 5
    elif given.repeat < 1:
        parser.error("--repeat is at least 1")
    return given


async def take_turns(
    repeat: int, ours: Callable[[], Awaitable[float]], raw: Callable[[], float]
) -> Runs:
    """Measure both ways `repeat` times.

    `raw` blocks the loop, since torch's own callers have none. In a thread beside a loop it would
    pay for switching threads.
    """
    runs: tuple[list[float], list[float]] = [], []
    for repetition in range(repeat + 1):
        # The second one finds a warmer machine, so the order alternates too.
        for way in (0, 1) if repetition % 2 else (1, 0):
            settle()
            runs[way].append(raw() if way else await ours())
    return Runs(runs[0][1:], runs[1][1:])  # the first repetition warms up


async def repeated(repeat: int, ours: Callable[[], Awaitable[float]]) -> Runs:
    """Measure a way for which torch has no counterpart."""
    runs = []
    for _ in range(repeat + 1):
        settle()
        runs.append(await ours())
    return Runs(runs[1:])


async def swept(
    repeat: int,
    points: Sequence[T],
    ours: Callable[[T], Awaitable[float]],
    raw: Callable[[T], float],
) -> list[Runs]:
    """Measure both ways at each point of a sweep."""
    return [await take_turns(repeat, partial(ours, x), partial(raw, x)) for x in points]


def settle() -> None:
    """Collect garbage, so that no measurement pays for an earlier one.

    Nothing is frozen here, since our worlds do that themselves (`freeze_gc`).
    """
    gc.collect()


def freeze() -> None:
    """Exclude existing objects from garbage collections, as our worlds do for themselves."""
    gc.collect()
    gc.freeze()


def show(rows: Sequence[Row], *, ours: str = "ours", other: str = "raw torch") -> None:
    """Print the table and the machine. `other` names the column compared with `ours`."""
    ratio = "ratio" if any(row.runs.raw for row in rows) else ""
    heads = ("", "unit", f"{ours} [min–max]", f"{other} [min–max]" if ratio else "", ratio, "aim")
    lay_out([heads, *(row.cells() for row in rows)])
    repetitions = len(rows[0].runs.ours)
    meaning = f"; ratio: {ours} / {other}" if ratio else ""
    print(f"\nmedians of {repetitions} repetitions{meaning}")
    print(machine())


def machine() -> str:
    """Return a line that names the processor, the system and the versions."""
    return (
        f"{processor()}, {os.cpu_count()} cores, {platform.system()} {platform.release()}; "
        f"torch {torch.__version__}, Python {platform.python_version()}, "
        f"OMP_NUM_THREADS={os.environ['OMP_NUM_THREADS']}"
    )


def lay_out(table: Sequence[Sequence[str]]) -> None:
    """Print rows of cells without empty columns. The first row holds the headings."""
    columns = [each for each in zip(*table, strict=True) if set("".join(each[1:])) - {"–"}]
    widths = [max(map(len, column)) for column in columns]
    lines = [*zip(*columns, strict=True)]
    for cells in (lines[0], ["─" * width for width in widths], *lines[1:]):
        print("  ".join(map(str.ljust, cells, widths)).rstrip())


def spread(values: Sequence[float]) -> str:
    if not values:
        return "–"
    return f"{number(median(values))} [{number(min(values))}–{number(max(values))}]"


def number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100.0 else f"{value:.3g}"


def processor() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            names = [line.partition(":")[2].strip() for line in file if "model name" in line]
    except OSError:
        names = []
    return names[0] if names else platform.machine()
