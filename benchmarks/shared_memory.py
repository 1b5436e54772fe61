"""How fast do large CPU tensors travel between processes of one host?

Each side runs in processes of its own, since plain torch's shared memory polls. The sides take
turns. An argument of a group, and one of a call to each worker, are compared with `rpc_async` in a
loop.

    python -m benchmarks.shared_memory [--quick] [--repeat N]
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence

from ._compare import Row, Runs, parse, show

SIZES = [64 << 10, 1 << 20, 16 << 20, 128 << 20, 256 << 20]  # bytes
MEMBERS = [2, 4, 8]
ARGUMENT = 64 << 20  # bytes of a group's argument
SIDES = ("ours", "torch", "uv")
CALLS = 7  # in each run, of which the median counts

Found = dict[str, list[float]]


def run(side: str, sizes: Sequence[int], members: Sequence[int], argument: int) -> Found:
    """Run one side in a fresh process; return its figures."""
    words = map(json.dumps, (CALLS, sizes, members, argument))
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks._shared_memory_side", side, *words],
        check=True,
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    found: Found = json.loads(done.stdout.splitlines()[-1])
    return found


def main(given: argparse.Namespace) -> tuple[list[Row], list[Row]]:
    sizes = SIZES[:3] if given.quick else SIZES
    members, argument = ([2], 4 << 20) if given.quick else (MEMBERS, ARGUMENT)
    runs: dict[str, list[Found]] = {side: [] for side in SIDES}
    for _ in range(given.repeat):
        for side in SIDES:
            found = run(side, sizes, [], argument)
            for count in members if side != "uv" else ():
                found |= run(side, [], [count], argument)
            runs[side].append(found)
    both = [*tables(runs, "torch", sizes)]
    for count in members:
        plain = seconds(runs, "torch", f"group {count}")
        for form, way in ("group", ""), ("calls", ", a call each"):
            pair = seconds(runs, "ours", f"{form} {count}"), plain
            what = f"{argument >> 20} MB to {count} workers{way}"
            both.append(Row(what, "ms", Runs(*([1e3 * each for each in side] for side in pair))))
    both.append(Row("peak memory of the caller", "MB", Runs(*(peaks(runs, s) for s in SIDES[:2]))))
    return both, tables(runs, "uv", sizes)


def tables(runs: dict[str, list[Found]], other: str, sizes: Sequence[int]) -> list[Row]:
    rows = []
    for size in sizes:
        what = f"{size >> 10:,} KiB there and back"
        rates = [
            [2 * size / 1e6 / each for each in seconds(runs, side, f"echo {size}")]
            for side in ("ours", other)
        ]
        rows.append(Row(what, "MB/s", Runs(*rates)))
        counts = [seconds(runs, side, f"faults {size}") for side in ("ours", other)]
        rows.append(Row("page faults a call", "", Runs(*counts)))
    return rows


def seconds(runs: dict[str, list[Found]], side: str, what: str) -> list[float]:
    return [each[what][0] for each in runs[side]]


def peaks(runs: dict[str, list[Found]], side: str) -> list[float]:
    return [each["peak"][1] / 1e6 for each in runs[side]]


if __name__ == "__main__":
    given = parse(argparse.ArgumentParser(description=__doc__))
    plain, uv = main(given)
    show(plain, other="torch, default transports")
    print()
    show(uv, other="torch over uv")
