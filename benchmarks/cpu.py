"""What does a call cost: processor time of caller and callee, both pinned to one core.

On two cores of a virtual machine, waking the other core costs more than all of our code. So both
processes share one core, and their processor time is counted, with a small tensor there and back.

    python -m benchmarks.cpu [--quick] [--repeat N] [--against PATH]

`--against` is the root of another checkout of this project. Both take turns, each run in processes
of its own, and the last column is the median of the ratios of neighbours in time.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

from ._compare import Row, Runs, parse, show

HERE = Path(__file__).parent.parent
RUN = Path(__file__).parent / "_cpu_run.py"


def run(
    source: Path, mode: str = "off", *, lone: int, rounds: int
) -> dict[str, tuple[float, float]]:
    """Return the microseconds of caller and callee, measured in new processes.

    Args:
        source: root of the checkout whose library runs.
        mode: what is switched on in both.
        lone: number of lone calls.
        rounds: how often 3,000 calls are made at once.
    """
    done = subprocess.run(
        [
            sys.executable,
            "-P",
            str(RUN),
            mode,
            str(lone),
            str(rounds),
        ],  # -P: modules here have names of packages
        env={**os.environ, "PYTHONPATH": str(source)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--against", type=Path, metavar="PATH", help="another checkout")
    given = parse(parser)
    sources = [HERE, *([given.against] if given.against else [])]
    lone, rounds = (300, 1) if given.quick else (10_000, 10)
    found = [[run(e, lone=lone, rounds=rounds) for e in sources] for _ in range(given.repeat)]
    rows = []
    for kind in found[0][0]:
        for part, pick in (("both", sum), ("caller", _first), ("callee", _second)):
            runs = Runs(*([pick(run[kind]) for run in runs] for runs in zip(*found, strict=True)))
            rows.append(Row(f"{kind}: {part}", "µs", runs))
    show(rows, other="other")


def _first(both: tuple[float, float]) -> float:
    return both[0]


def _second(both: tuple[float, float]) -> float:
    return both[1]


if __name__ == "__main__":
    main()
