"""How many descriptors does a worker have for its world, and how many for each peer?

The workers of a world are forked from this process, as programs that a launcher has started. They
count after the start, then after rank 0 has called all of them. `--apart` gives each a PID
namespace of its own, as on a host of its own: TensorPipe then chooses other channels. It needs
root on Linux.

    python -m benchmarks.descriptors [--sizes N ...] [--channels NAME ...] [--apart]
"""

import argparse
import asyncio
import ctypes
import multiprocessing
import os
import socket
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from statistics import median
from typing import NamedTuple

import aiorpc_torch as aiorpc

from ._compare import lay_out, machine
from ._process import open_descriptors

SIZES = [2, 16, 32, 48]
PATIENCE = 300.0  # seconds for a phase
NEWPID = 0x20000000  # CLONE_NEWPID


class Found(NamedTuple):
    """Descriptors of one worker beyond those that its process had before."""

    started: int
    called: int
    kinds: dict[str, int]
    """After the calls, by what they are: sockets of TCP and of Unix, pipes, events, files."""


# ── in a worker ─────────────────────────────────────────────────────────────────────────────────


async def nothing() -> None:
    """Do nothing: a call of this opens a connection."""


def kinds() -> Counter[str]:
    """Return the descriptors of this process by what they are."""
    found: Counter[str] = Counter()
    for number in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{number}")
        except OSError:  # that of the folder
            continue
        kind = target.partition(":")[0]
        if kind == "socket":
            with socket.socket(fileno=os.dup(int(number))) as found_socket:
                kind = found_socket.family.name.removeprefix("AF_")
        found[kind] += 1
    return found


class Options(NamedTuple):
    """Options of a world."""

    size: int
    url: str
    channels: Sequence[str] | None
    is_apart: bool


def live(pipe: Connection, rank: int, options: Options) -> None:
    """Be a worker; count descriptors whenever asked."""
    if options.is_apart:
        if ctypes.CDLL(None, use_errno=True).unshare(NEWPID):
            raise OSError(ctypes.get_errno(), "unshare")
        if child := os.fork():  # the namespace is that of children
            os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) & 0xFF)
    asyncio.run(_live(pipe, rank, options))


async def _live(pipe: Connection, rank: int, options: Options) -> None:
    before, before_kinds = open_descriptors(), kinds()
    async with aiorpc.worker(
        f"w{rank}",
        rank=rank,
        world_size=options.size,
        init_method=options.url,
        interface="lo",
        start_timeout=PATIENCE,
        channels=options.channels,
    ) as me:
        pipe.send(None)
        await asyncio.to_thread(pipe.recv)  # its pool has a thread from here on
        started = open_descriptors() - before
        if rank == 0:
            await asyncio.gather(*(aiorpc.call(peer, nothing) for peer in me.peers))
        pipe.send(None)
        await asyncio.to_thread(pipe.recv)
        found = Found(started, open_descriptors() - before, kinds() - before_kinds)
        pipe.send(found)
        await asyncio.to_thread(pipe.recv)


# ── all of them ─────────────────────────────────────────────────────────────────────────────────


def measure(size: int, given: argparse.Namespace) -> list[Found]:
    """Return what each worker of a world counts, by rank."""
    context, pipes, processes = multiprocessing.get_context("fork"), [], []
    with tempfile.TemporaryDirectory() as folder:
        options = Options(size, f"file://{folder}/world", given.channels, given.apart)
        for rank in range(size):
            ours, theirs = context.Pipe()
            args = (theirs, rank, options)
            process = context.Process(target=live, args=args, daemon=True)
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        _hear(pipes)
        for phase in range(2):
            for pipe in pipes:
                pipe.send(phase)
            found = _hear(pipes)
        for pipe in pipes:
            pipe.send(None)
        for process in processes:
            process.join(PATIENCE)
    return found


def _hear(pipes: Sequence[Connection]) -> list[Found]:
    for pipe in pipes:
        if not pipe.poll(PATIENCE):
            sys.exit("a worker did not answer")
    return [pipe.recv() for pipe in pipes]


def rows(given: argparse.Namespace) -> Iterator[tuple[str, ...]]:
    """Return the table's rows."""
    yield ("workers", "", "after the start", "after calls of rank 0", "of these")
    for size in given.sizes:
        first, *others = measure(size, given)
        kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(first.kinds.items()))
        yield (str(size), "rank 0", str(first.started), str(first.called), kinds)
        started = median(each.started for each in others)
        called = median(each.called for each in others)
        kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(others[-1].kinds.items()))
        yield ("", "others, median", f"{started:g}", f"{called:g}", f"last rank: {kinds}")


def main(given: argparse.Namespace) -> None:
    lay_out([*rows(given)])
    print(f"\n{machine()}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="The descriptors of a worker.")
    parser.add_argument("--sizes", type=int, nargs="+", metavar="N", default=SIZES)
    parser.add_argument("--channels", nargs="+", metavar="NAME", help="of TensorPipe")
    parser.add_argument("--apart", action="store_true", help="as on several hosts")
    main(parser.parse_args())
