"""How long is a world without its directory, and what is left of 200 moves?

Three workers meet at a file. The one that keeps the directory is killed, again and again, and a
process takes its place. The third one stays: it calls the other survivor all the time, and counts
its descriptors, threads and memory. The exit code is 1 if a call of the survivors fails, a number
is given twice, or the third worker holds more with each move.

    python -m benchmarks.successions [--quick] [--moves N] [--place file|tcp]
"""

import argparse
import asyncio
import multiprocessing
import os
import socket
import statistics
import tempfile
import threading
import time
from multiprocessing.connection import Connection
from typing import Any

import aiorpc_torch as aiorpc
from aiorpc_torch import WorkerGone, call

from ._compare import lay_out, machine, number
from ._process import open_descriptors, swept_memory
from ._soak_end import end, parse_sizes

HEARTBEAT = 10.0  # seconds, the default
SIZE = 3
STAYS = SIZE - 1  # rank of the worker that is not killed
PATIENCE = 60.0  # seconds
KILOBYTES = 30.0  # that may be left of a move: torch keeps the name and the pipe of each process
SPARE = 4  # descriptors and threads that may come and go
FORK = multiprocessing.get_context("fork")  # torch is imported once


class Process:
    """A worker of the world."""

    def __init__(self, url: str, rank: int) -> None:
        self.rank = rank
        self._pipe, theirs = FORK.Pipe()
        self._process = FORK.Process(target=live, args=(url, rank, theirs), daemon=True)
        self._process.start()
        theirs.close()

    def hear(self) -> Any:
        if not self._pipe.poll(PATIENCE):
            raise TimeoutError(f"rank {self.rank} says nothing")
        return self._pipe.recv()

    def ask(self, *words: Any) -> Any:
        self._pipe.send(words)
        return self.hear()

    def kill(self) -> None:
        self._process.kill()
        self._process.join()
        self._pipe.close()

    def leave(self) -> None:
        self._pipe.send(("end",))

    def wait(self) -> None:
        self._process.join(PATIENCE)


def live(url: str, rank: int, pipe: Connection) -> None:
    asyncio.run(_live(url, rank, pipe))
    os._exit(0)  # not the exit functions of the process that was forked


async def _live(url: str, rank: int, pipe: Connection) -> None:
    options: dict[str, Any] = {"init_method": url, "heartbeat": HEARTBEAT, "interface": "lo"}
    async with aiorpc.worker(f"w{rank}", rank=rank, world_size=SIZE, **options) as me:
        pipe.send((me._node.members.own.worker_id, me.restarts))
        calls = Calls()
        while True:
            word, *given = await asyncio.to_thread(pipe.recv)
            match word:
                case "end":
                    return
                case "call":
                    calls.begin(given[0])
                    pipe.send(None)
                case "called":
                    pipe.send(await calls.finish())
                case "where":
                    pipe.send(me.coordinator)
                case "census":
                    aiorpc.observe.stats()
                    pipe.send((swept_memory(), open_descriptors(), threading.active_count()))


class Calls:
    """Calls of the survivors, one after the other: the longest, and those that failed."""

    def __init__(self) -> None:
        self._task: asyncio.Task[tuple[float, int]] | None = None
        self._is_over = False

    def begin(self, name: str) -> None:
        self._is_over = False
        self._task = asyncio.create_task(self._call(name))

    async def _call(self, name: str) -> tuple[float, int]:
        longest, failed = 0.0, 0
        while not self._is_over:
            start = time.monotonic()
            try:
                await call(name, os.getpid)
            except WorkerGone:
                failed += 1
            longest = max(longest, time.monotonic() - start)
            await asyncio.sleep(0.001)
        return longest, failed

    async def finish(self) -> tuple[float, int]:
        assert self._task is not None
        self._is_over = True
        return await self._task


class Soak:
    """A world whose directory moves."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.workers = [Process(url, rank) for rank in range(SIZE)]
        self.ids = [each.hear()[0] for each in self.workers]
        self.entries: list[float] = []  # seconds from a kill until its replacement was in
        self.pauses: list[float] = []  # the longest call of the survivors meanwhile
        self.problems: list[str] = []

    def move(self) -> None:
        """Kill the worker that keeps the directory; let a process take its place."""
        stays = self.workers[STAYS]
        keeper = int(stays.ask("where")[1:])
        if keeper == STAYS:
            self.problems.append("the worker with the highest rank keeps the directory")
            keeper = 0
        other = next(rank for rank in range(SIZE) if rank not in (keeper, STAYS))
        stays.ask("call", f"w{other}")
        start = time.monotonic()
        self.workers[keeper].kill()
        self.workers[keeper] = Process(self._url, keeper)
        worker_id, _ = self.workers[keeper].hear()
        self.entries.append(time.monotonic() - start)
        self.ids.append(worker_id)
        longest, failed = stays.ask("called")
        self.pauses.append(longest)
        if failed:
            self.problems.append(f"{failed} calls between the survivors failed")

    def end(self) -> None:
        for each in self.workers:
            each.leave()
        for each in self.workers:
            each.wait()


def run(url: str, moves: int) -> list[str]:
    soak = Soak(url)
    before: tuple[int, int, int] = (0, 0, 0)
    half = moves // 2
    for count in range(moves):
        if count == half:
            before = soak.workers[STAYS].ask("census")
        soak.move()
    after = soak.workers[STAYS].ask("census")
    soak.end()
    if len({*soak.ids}) != len(soak.ids):
        soak.problems.append("a worker id was given twice")
    memory, descriptors, threads = (b - a for a, b in zip(before, after, strict=True))
    left = max(1, moves - half)
    if memory > 1e3 * KILOBYTES * left + 4e6:
        soak.problems.append(f"{memory / left / 1e3:.1f} kB are left of each move")
    if max(descriptors, threads) > SPARE:
        soak.problems.append(f"{descriptors} descriptors and {threads} threads are left")
    show(soak, (memory / left / 1e3, descriptors, threads))
    return soak.problems


def show(soak: Soak, left: tuple[float, int, int]) -> None:
    table: list[tuple[str, ...]] = [("seconds", "median", "90 %", "longest")]
    for name, found in (("kill to entry", soak.entries), ("longest call", soak.pauses)):
        tenths = statistics.quantiles(found, n=10) if len(found) > 1 else [found[0]] * 9
        table.append((name, *map(number, (statistics.median(found), tenths[-1], max(found)))))
    lay_out(table)
    memory, descriptors, threads = left
    print(
        f"\n{len(soak.entries)} moves; of each of the second half {memory:+.2f} kB are left, of all"
        f" {descriptors:+d} descriptors and {threads:+d} threads"
    )
    print(machine())


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="A directory that moves 200 times.")
    parser.add_argument("--quick", action="store_true", help="10 moves")
    parser.add_argument("--moves", type=int, metavar="N", help="number of moves (200)")
    parser.add_argument("--place", choices=["file", "tcp"], default="file")
    return parse_sizes(parser, moves=(10, 200))


def main() -> None:
    given = arguments()
    with tempfile.TemporaryDirectory() as folder:
        url = f"file://{folder}/world"
        if given.place == "tcp":
            with socket.create_server(("127.0.0.1", 0)) as held:
                url = f"tcp://127.0.0.1:{held.getsockname()[1]}"
        end(run(url, given.moves), "\n")


if __name__ == "__main__":
    main()
