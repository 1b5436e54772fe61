"""What does a change cost rank 0's directory, and when do all workers know of it?

Eight network namespaces at one bridge play eight hosts. The workers are forked from this process,
which has imported torch. Each phase counts the messages and bytes of the directory: the start, the
join of one more, a death, a worker that leaves, and a while in which nothing happens. Questions
whether the directory is there, and their answers, are not counted: they come with time. Each worker
notes when it learns of a change. Needs root on Linux.

    python -m benchmarks.directory_scale [--quick] [--sizes N ...]
    python -m benchmarks.directory_scale --simulate [--sizes N ...] [--save FILE] [--before FILE]

The second one needs no root: it simulates the workers of worlds of thousands, without sockets. A
run with `--before` prints the ratio to the figures that another one has saved, of an older version.
"""

import argparse
import asyncio
import contextlib
import ctypes
import logging
import multiprocessing
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import aiorpc_torch as aiorpc
from aiorpc_torch._directory.directory import Directory
from aiorpc_torch._directory.directory_messages import Greet, Here
from aiorpc_torch._directory.directory_server import DirectoryServer
from aiorpc_torch._directory.directory_stream import encode

from . import _directory_simulation as simulation
from ._compare import lay_out, machine
from ._hosts import Host, hosts
from ._process import private_memory

SIZES, QUICK = [8, 16, 32, 64], [8, 16]
HOSTS = 8
PORT = 29500  # in namespaces of their own
QUIET = 3.0  # seconds in which nothing happens
SETTLE = 1.0  # seconds after the last news of a phase, for answers to it
PATIENCE = 300.0  # seconds for a phase
NEWNET = 0x40000000  # CLONE_NEWNET


class Counts(NamedTuple):
    """Messages and bytes of the directory, and the memory of rank 0's process."""

    received: int
    received_bytes: int
    sent: int
    sent_bytes: int
    memory: int

    def since(self, before: "Counts") -> "Counts":
        """Return what has come since."""
        return Counts._make(new - old for new, old in zip(self, before, strict=True))


# ── in a worker ─────────────────────────────────────────────────────────────────────────────────

_counts = [0, 0, 0, 0]


def count_messages() -> None:
    """Count what the directory of this process receives and sends from now on."""
    receive, send = Directory.receive, DirectoryServer.send

    def counted_receive(self: Any, connection: int, message: Any) -> None:
        if isinstance(message, Greet):
            receive(self, connection, message)
            return
        _counts[0] += 1
        _counts[1] += len(encode(message))
        receive(self, connection, message)

    def counted_send(self: Any, connections: Any, message: Any) -> None:
        numbers = [each for each in connections if each in self._streams]
        if not isinstance(message, Here):
            _counts[2] += len(numbers)
            _counts[3] += len(numbers) * len(encode(message))
        send(self, numbers, message)

    changed: Any = (Directory, DirectoryServer)
    changed[0].receive, changed[1].send = counted_receive, counted_send


def live(pipe: Connection, namespace: str, options: dict[str, Any]) -> None:
    """Be a worker in a namespace until told to leave; tell of changes, and of the counts."""
    with open(namespace) as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), NEWNET):
            raise OSError(ctypes.get_errno(), "setns")
    logging.disable(logging.WARNING)  # that w1 is dead is known
    count_messages()
    asyncio.run(_live(pipe, options))
    pipe.send(("ended", "", time.monotonic()))


async def _live(pipe: Connection, options: dict[str, Any]) -> None:
    leaving = asyncio.Event()

    def obey() -> None:
        if pipe.recv() == "leave":
            leaving.set()
        else:
            pipe.send(("counts", "", Counts._make([*_counts, private_memory()])))

    async def tell(me: aiorpc.types.Worker) -> None:
        async for change in me.changes():
            pipe.send((change.kind, change.name, time.monotonic()))

    async with aiorpc.worker(**options, start_timeout=PATIENCE) as me:
        telling = asyncio.create_task(tell(me))
        await asyncio.sleep(0)
        asyncio.get_running_loop().add_reader(pipe.fileno(), obey)
        pipe.send(("in", me.name, time.monotonic()))
        await leaving.wait()
        asyncio.get_running_loop().remove_reader(pipe.fileno())
    await telling


# ── the world ───────────────────────────────────────────────────────────────────────────────────


@dataclass
class Phase:
    """Costs of one phase of one world; `news` in seconds, of each worker that learns of it."""

    workers: int
    name: str
    counts: Counts
    news: Sequence[float] = ()


class World:
    """The processes of one world."""

    def __init__(self, hosts: Sequence[Host]) -> None:
        self._hosts = hosts
        self._members: dict[str, tuple[BaseProcess, Connection]] = {}
        self._heard: list[tuple[str, str, Any]] = []

    def start(self, name: str, **options: Any) -> None:
        """Start a worker on the next host."""
        ours, theirs = multiprocessing.Pipe()
        host = self._hosts[len(self._members) % len(self._hosts)]
        where = {"init_method": f"tcp://{self._hosts[0].address}:{PORT}"}
        args = (theirs, host.network, {"name": name, **where, **options})
        process = multiprocessing.get_context("fork").Process(target=live, args=args, daemon=True)
        process.start()
        theirs.close()
        self._members[name] = process, ours

    def tell(self, name: str, command: str) -> None:
        """Tell a worker to do something."""
        self._members[name][1].send(command)

    def kill(self, name: str) -> None:
        """Kill a worker, and listen to it no more."""
        process, pipe = self._members.pop(name)
        process.kill()
        process.join()
        pipe.close()

    def hear(self, kind: str, count: int, name: str = "") -> list[Any]:
        """Return what so many workers tell of a change (default: of any worker)."""
        found: list[Any] = []
        end = time.monotonic() + PATIENCE
        while True:
            wanted = [each for each in self._heard if each[0] == kind and name in ("", each[1])]
            for each in wanted:
                self._heard.remove(each)
            found += [value for *_, value in wanted]
            if len(found) >= count:
                return found
            if time.monotonic() > end:
                sys.exit(f"{len(found)} of {count} workers told {kind!r} of {name!r}")
            self._listen()

    def _listen(self) -> None:
        """Wait until a worker tells something, or ends."""
        ready = wait([pipe for _, pipe in self._members.values()], PATIENCE)
        for name, (_, pipe) in [*self._members.items()]:
            if pipe in ready:
                try:
                    self._heard.append(pipe.recv())
                except EOFError:
                    del self._members[name]

    def counts(self) -> Counts:
        """Return the counts of rank 0."""
        self.tell("w0", "count")
        [found] = self.hear("counts", 1)
        assert isinstance(found, Counts)
        return found

    def end(self) -> None:
        """Let all leave."""
        for name in self._members:
            self.tell(name, "leave")
        for process, _ in self._members.values():
            process.join(PATIENCE)

    def close(self) -> None:
        """Kill what is left."""
        for name in [*self._members]:
            self.kill(name)


def measure(size: int, hosts: Sequence[Host]) -> Iterator[Phase]:
    """Let a world live through all phases."""
    with contextlib.closing(World(hosts)) as world:
        begin = time.monotonic()
        for rank in range(size):
            world.start(f"w{rank}", rank=rank, world_size=size)
        entered = world.hear("in", size)
        time.sleep(SETTLE)
        before = world.counts()
        yield Phase(size, "start", before, [at - begin for at in entered])

        def phase(name: str, begin: float, times: Sequence[float]) -> Phase:
            nonlocal before
            time.sleep(SETTLE)
            last, before = before, world.counts()
            return Phase(size, name, before.since(last), [at - begin for at in times])

        begin = time.monotonic()
        world.start("late", join=True)
        world.hear("in", 1)
        yield phase("join", begin, world.hear("joined", size))
        time.sleep(QUIET)
        yield phase("nothing", 0.0, [])
        begin = time.monotonic()
        world.kill("w1")
        yield phase("death", begin, world.hear("lost", size, "w1"))
        begin = time.monotonic()
        world.tell("late", "leave")
        news = world.hear("left", size - 1, "late")
        world.hear("ended", 1)
        yield phase("leave", begin, news)
        world.end()


HEAD = ("workers", "phase", "to rank 0", "bytes", "from rank 0", "bytes", "a worker", "news, ms")


def row(phase: Phase) -> tuple[str, ...]:
    """Return a phase as texts."""
    counts = phase.counts
    news = [1e3 * each for each in phase.news]
    when = f"{median(news):,.0f}; {max(news):,.0f}" if news else ""
    figures = (counts.received, counts.received_bytes, counts.sent, counts.sent_bytes)
    each = (counts.received_bytes + counts.sent_bytes) / phase.workers
    return (str(phase.workers), phase.name, *(f"{n:,}" for n in figures), f"{each:,.0f}", when)


def main(given: argparse.Namespace) -> None:
    """Print a row for each phase of each world."""
    if given.simulate:
        quick = simulation.QUICK if given.quick else simulation.SIZES
        simulation.simulate(given.sizes or quick, given.save, given.before)
        return
    phases: list[Phase] = []
    with hosts(HOSTS) as found:
        for size in given.sizes or (QUICK if given.quick else SIZES):
            phases += measure(size, found)
    lay_out([HEAD, *map(row, phases)])
    print("\nbytes a worker: both directions; news: median; last\n")
    starts = [each for each in phases if each.name == "start"]
    memory = [(str(each.workers), f"{each.counts.memory / 1e6:.1f}") for each in starts]
    lay_out([("workers", "memory of rank 0's process alone, MB"), *memory])
    print(f"\n{machine()}")
    if any(each.name == "nothing" and any(each.counts[:4]) for each in phases):
        sys.exit("messages were sent while nothing happened")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="The cost of changes at rank 0.")
    parser.add_argument("--quick", action="store_true", help="small worlds only")
    parser.add_argument("--sizes", type=int, nargs="+", metavar="N", help="numbers of workers")
    parser.add_argument("--simulate", action="store_true", help="the directory alone")
    parser.add_argument("--save", type=Path, metavar="FILE", help="save what was simulated")
    parser.add_argument("--before", type=Path, metavar="FILE", help="compare with what was saved")
    main(parser.parse_args())
