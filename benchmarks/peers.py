"""How does aiorpc_torch compare with other ways to call another process from asyncio?

The same work for each system: one client, one server, this machine's loopback. In each repetition
the systems are started, measured and stopped one after the other, in processes of their own. So no
threads, garbage or daemons of one disturb another. Systems that are not installed are left out.
Before it `benchmarks.starts` runs once: 8 and 32 workers of each system.

    python -m benchmarks.peers [--quick] [--repeat N] [--only NAME ...] [--plot PATH]
"""

import argparse
import os
import platform
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from . import starts
from ._compare import lay_out, parse, processor, spread
from ._peers_client import Figures, take_turn
from ._peers_plot import ROWS, draw
from ._peers_process import process, take_figures
from ._peers_work import QUICK, Sizes, Workload, workloads
from ._starts_work import ON

LIMIT = 120.0
"""Seconds for one measurement of one system."""


@dataclass
class System:
    """A column of the table: the module of the system, and the package that it imports."""

    name: str
    module: str
    package: str
    distributions: tuple[str, ...]
    failures: list[str] = field(default_factory=list)
    figures: list[Figures] = field(default_factory=list)

    def measured(self, workload: Workload) -> list[float]:
        found = [figures[workload.method] for figures in self.figures]
        return [figure for figure in found if figure is not None]

    def cell(self, workload: Workload) -> str:
        return spread(self.measured(workload))

    def note(self) -> str:
        if not find_spec(self.package):
            return f"{self.name}: left out, since {self.package} is not installed"
        used = ", ".join(filter(None, map(version, self.distributions)))
        lost = f"; FAILED {len(self.failures)}×: {self.failures[-1]}" if self.failures else ""
        return f"{self.name}: {used}{lost}"


def all_systems() -> list[System]:
    return [
        System("ours", "_peers_ours", "aiorpc_torch", ("aiorpc_torch", "torch")),
        System("ours-uvloop", "_peers_uvloop", "uvloop", ("aiorpc_torch", "uvloop")),
        System("raw-torch", "_peers_raw", "torch", ("torch",)),
        System("ray", "_peers_ray", "ray", ("ray", "uvloop")),
        System("xoscar", "_peers_xoscar", "xoscar", ("xoscar", "uvloop")),
        System("grpc.aio", "_peers_grpc", "grpc", ("grpcio", "uvloop")),
        System("monarch", "_peers_monarch", "monarch", ("torchmonarch",)),
        System("torchrl", "_peers_torchrl", "torchrl", ("torchrl",)),
    ]


def main(systems: Sequence[System], sizes: Sizes, repeat: int, plot: Path | None) -> None:
    here = [system for system in systems if find_spec(system.package)]
    for repetition in range(repeat):
        # The second one finds a warmer machine, so the order alternates too.
        for system in here if repetition % 2 == 0 else reversed(here):
            if len(system.failures) < 2 + len(system.figures):  # one failure may be the machine's
                print(f"repetition {repetition + 1} of {repeat}: {system.name}", file=sys.stderr)
                measure(system, sizes)
    show(systems, workloads(sizes), repeat)
    if plot is not None:
        picture(systems, workloads(sizes), plot)
    if any(system.failures for system in systems):
        sys.exit(1)


def many_workers(systems: Sequence[System], sizes: Sequence[int]) -> None:
    """Print the second table: many workers of each system."""
    names = {system.name.replace("-", " ") for system in systems}
    chosen = [each for each in starts.installed() if each.name in names]
    starts.show(starts.main(chosen, sizes, repeat=1), repeat=1)


def measure(system: System, sizes: Sizes) -> None:
    with tempfile.TemporaryDirectory(prefix="peers-", ignore_cleanup_errors=True) as scratch:
        with process(take_turn, system.module, sizes, scratch) as client:
            take_figures(client, LIMIT, system)


def show(systems: Sequence[System], rows: Sequence[Workload], repeat: int) -> None:
    shown = [system for system in systems if system.figures]
    heads = ("", "unit", *(system.name for system in shown))
    lay_out(
        [heads, *((row.what, row.unit, *(system.cell(row) for system in shown)) for row in rows)]
    )
    print(f"\nmedians of {repeat} repetitions [min–max]; –: the system has no such thing")
    for system in systems:
        print(system.note())
    print(
        f"{processor()}, {os.cpu_count()} cores, {platform.system()} {platform.release()}; "
        f"Python {platform.python_version()}, OMP_NUM_THREADS={os.environ['OMP_NUM_THREADS']}"
    )


def picture(systems: Sequence[System], rows: Sequence[Workload], path: Path) -> None:
    by_method = {row.method: row for row in rows}
    drawn = [by_method[method] for method in ROWS]
    bars = [{each.name: each.measured(row) for each in systems if each.figures} for row in drawn]
    draw([*zip(drawn, bars, strict=True)], path)


def version(distribution: str) -> str:
    try:
        return f"{distribution} {metadata.version(distribution)}"
    except metadata.PackageNotFoundError:
        return ""


def arguments() -> argparse.Namespace:
    names = [system.name for system in all_systems()]
    parser = argparse.ArgumentParser(description="aiorpc_torch compared with other systems.")
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="NAME")
    parser.add_argument("--plot", type=Path, metavar="PATH", help="draw three rows as bars")
    return parse(parser)


if __name__ == "__main__":
    given = arguments()
    chosen = [system for system in all_systems() if system.name in given.only]
    many_workers(chosen, [ON] if given.quick else [ON, 32])
    main(chosen, QUICK if given.quick else Sizes(), given.repeat, given.plot)
