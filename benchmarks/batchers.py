"""How do `@batched`, TorchRL's inference server and Ray Serve's `@serve.batch` form batches?

Clients ask one small policy for the action of one observation each, again and again. All clients
are in one process, and the server is in another; two further columns have both in one. In each
repetition the systems are started, measured and stopped one after the other, in processes of their
own. A system that is not installed, fails or hangs is named below the table.

    pip install '.[torchrl]' 'ray[serve]'
    python -m benchmarks.batchers [--quick] [--repeat N] [--clients N ...] [--only NAME ...]
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec

from ._batchers_work import UNITS, Figures, take_turn
from ._compare import lay_out, machine, parse, spread
from ._peers_process import process, take_figures
from .peers import version

LIMIT = 180.0
"""Seconds for a system to start and to be measured once."""


@dataclass
class System:
    """A column of the table: its module, and the package that it needs."""

    name: str
    module: str
    package: str
    failures: list[str] = field(default_factory=list)
    figures: list[dict[int, Figures]] = field(default_factory=list)

    def cell(self, clients: int, column: int) -> str:
        return spread([each[clients][column] for each in self.figures])

    def note(self) -> str:
        if not find_spec(self.package):
            return f"{self.name}: left out, since {self.package} is not installed"
        lost = f"; FAILED {len(self.failures)}×: {self.failures[-1]}" if self.failures else ""
        return f"{self.name}: {version(self.package) or self.package}{lost}"


def all_systems() -> list[System]:
    return [
        System("ours", "_batchers_ours", "aiorpc_torch"),
        System("TorchRL", "_batchers_torchrl", "torchrl"),
        System("Ray Serve", "_batchers_serve", "ray"),
        System("ours, one process", "_batchers_ours_local", "aiorpc_torch"),
        System("TorchRL, threads", "_batchers_torchrl_threads", "torchrl"),
    ]


def measure(system: System, clients: Sequence[int], seconds: float) -> None:
    """Measure a system once; what goes wrong is one of its failures."""
    with process(take_turn, system.module, clients, seconds) as child:
        take_figures(child, LIMIT, system)


def show(systems: Sequence[System], clients: Sequence[int], repeat: int) -> None:
    shown = [system for system in systems if system.figures]
    table = [("clients", "", *(system.name for system in shown))]
    for number in clients:
        for column, unit in enumerate(UNITS):
            cells = (system.cell(number, column) for system in shown)
            table.append((f"{number}", unit, *cells))
    lay_out(table)
    print(f"\nmedians of {repeat} repetitions [min–max]")
    print(*(system.note() for system in systems), machine(), sep="\n")


def main(systems: Sequence[System], given: argparse.Namespace) -> None:
    here = [system for system in systems if find_spec(system.package)]
    for repetition in range(given.repeat):
        # The second one finds a warmer machine, so the order alternates too.
        for system in here if repetition % 2 == 0 else reversed(here):
            print(f"repetition {repetition + 1}: {system.name}", file=sys.stderr)
            measure(system, given.clients, given.seconds)
    show(systems, given.clients, given.repeat)
    if any(system.failures for system in systems):
        sys.exit(1)


def arguments() -> argparse.Namespace:
    names = [system.name for system in all_systems()]
    parser = argparse.ArgumentParser(description="Batches from single observations, by system.")
    add = parser.add_argument
    add("--clients", type=int, nargs="+", default=[1, 16, 64], help="numbers of clients")
    add("--seconds", type=float, default=4.0, help="seconds of each measurement")
    add("--only", nargs="+", choices=names, default=names, metavar="NAME")
    given = parse(parser)
    if given.quick:
        given.seconds = 0.5
    return given


if __name__ == "__main__":
    given = arguments()
    main([system for system in all_systems() if system.name in given.only], given)
