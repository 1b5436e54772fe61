"""How long do workers take to start and to end on one machine, and what memory is their own?

Each row is a program of its own: it starts so many workers, calls each, and ends them, twice. The
first start counts from the start of the program, with its imports. Eight workers then hold 1,000
objects, made at once, and take one argument of 16 MB; then one of them is killed while a call to
it waits. Systems that are not installed are left out.

    python -m benchmarks.starts [--quick] [--repeat N] [--sizes N ...] [--only NAME ...]
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, fields
from importlib.util import find_spec
from statistics import median

from rich.console import Console
from rich.table import Table

from ._compare import number, parse, processor
from ._starts_work import ARGUMENT, OBJECTS, ON, PATIENCE, Start

SIZES, QUICK = [1, 8, 32, 64], [1, 8]
LIMIT = 240.0  # seconds for one program: a system that hangs is a row without figures


@dataclass(frozen=True, slots=True)
class System:
    """A way to start workers: the module that does it, and the package that it needs."""

    name: str
    module: str
    package: str
    option: str = ""
    most: int = 32  # workers; more would take minutes and gigabytes


SYSTEMS = [
    System("ours", "_starts_ours", "aiorpc_torch", "forkserver", most=1_000),
    System('ours, start="spawn"', "_starts_ours", "aiorpc_torch", "spawn", most=8),
    System("raw torch", "_starts_raw", "torch"),
    System("ray", "_starts_ray", "ray"),
    System("xoscar", "_starts_xoscar", "xoscar"),
    System("grpc.aio", "_starts_grpc", "grpc"),
    System("monarch", "_starts_monarch", "monarch"),
]

HEADS = {
    "first": "first start, s",
    "start": "next start, s",
    "memory": "own memory of a worker, MB",
    "end": "end, s",
    "objects": f"{OBJECTS:,} objects, s",
    "taken": f"{ARGUMENT // 1_000_000} MB to {ON}, ms",
    "lost": "error after a kill, s",
}

Found = dict[tuple[str, int], list[Start]]


def installed() -> list[System]:
    return [system for system in SYSTEMS if find_spec(system.package)]


def measure(system: System, size: int) -> Start | str:
    """Run one program; return its figures, or why it has none."""
    line = [sys.executable, "-m", f"benchmarks.{system.module}", str(size), system.option]
    # Files, since a process that is left would hold a pipe open.
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        program = subprocess.Popen(line, stdout=out, stderr=err, start_new_session=True)
        with contextlib.suppress(subprocess.TimeoutExpired):
            program.wait(LIMIT)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(program.pid, signal.SIGKILL)
        program.wait()
        out.seek(0)
        err.seek(0)
        figures = [line for line in out if line.startswith("{")]
        if not figures:
            return (err.read().strip().splitlines() or [f"no figures in {LIMIT:.0f} s"])[-1]
        return Start(**json.loads(figures[-1]))


def main(systems: Sequence[System], sizes: Sequence[int], repeat: int) -> Found:
    found: Found = {}
    for _ in range(repeat):
        for system in systems:
            for size in sizes:
                if size > system.most:
                    continue
                print(f"{system.name}: {size} workers", file=sys.stderr)
                start = measure(system, size)
                if isinstance(start, str):
                    print(f"{system.name}, {size} workers: FAILED: {start}", file=sys.stderr)
                else:
                    found.setdefault((system.name, size), []).append(start)
    return found


def middle(starts: Sequence[Start], what: str) -> str:
    known = [value for each in starts if (value := getattr(each, what)) is not None]
    return number(median(known)) if known else "–"


def show(found: Found, repeat: int) -> None:
    table = Table("system", "workers", *HEADS.values())
    for (name, size), starts in found.items():
        table.add_row(name, str(size), *(middle(starts, each.name) for each in fields(Start)))
    Console(width=130, highlight=False).print(table)
    load = os.getloadavg()[0]
    print(f"medians of {repeat}; {processor()}, {os.cpu_count()} cores, load {load:.1f} at the end")
    print(f"objects, argument and kill: {ON} workers; –: no error in {PATIENCE:.0f} s")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Start and end of workers on one machine.")
    parser.add_argument("--sizes", type=int, nargs="+", metavar="N", help="workers of a program")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="of these systems")
    given = parse(parser)
    given.sizes = given.sizes or (QUICK if given.quick else SIZES)
    return given


if __name__ == "__main__":
    given = arguments()
    here = [system for system in installed() if not given.only or system.name in given.only]
    show(main(here, given.sizes, given.repeat), given.repeat)
