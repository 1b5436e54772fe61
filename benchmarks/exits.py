"""Does every process end, with its own exit code, while plain `def` methods of it still run?

Each process is forked from this one, which has imported torch, and is a world of one. Some of its
methods log, the others compute, when its program ends with code 3. A row is an exit code, or
`killed` for a process that did not end.

    python -m benchmarks.exits [--runs N] [--at-once N] [--load N]
"""

import argparse
import asyncio
import contextlib
import logging
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator

import torch

import aiorpc_torch as aiorpc

from ._compare import lay_out, machine

CODE = 3
LIMIT = 60.0  # seconds until a process counts as hung
METHODS = 4

log = logging.getLogger("benchmarks.exits")
begun = threading.Semaphore(0)


def compute() -> None:
    """Call operators, for ever."""
    weights = torch.ones(100, 100, requires_grad=True)
    begun.release()
    while True:
        (weights @ weights).sum().backward()  # type: ignore[no-untyped-call]
        weights.grad = None


def write() -> None:
    """Log, for ever."""
    begun.release()
    while True:
        log.warning("still here")


async def be_busy() -> None:
    """Enter a world, start the methods, and leave it."""
    async with aiorpc.worker("solo", rank=0, world_size=1) as me:
        functions = [compute, write] * (METHODS // 2)
        calls = [asyncio.ensure_future(aiorpc.call(me.name, each)) for each in functions]
        for _ in calls:
            await asyncio.to_thread(begun.acquire)
    await asyncio.gather(*calls, return_exceptions=True)


def program() -> None:
    """Run as a user's program, to the end of the interpreter."""
    logging.getLogger("aiorpc_torch").setLevel(logging.ERROR)  # its warning of these methods
    torch.set_num_threads(1)
    log.addHandler(logging.FileHandler(os.devnull))
    log.propagate = False
    asyncio.run(be_busy())
    sys.exit(CODE)


def start() -> int:
    """Fork a process that returns from here as `program` does; return its pid."""
    pid = os.fork()
    if not pid:
        program()
    return pid


@contextlib.contextmanager
def loaded(count: int) -> Iterator[None]:
    """Keep `count` processes busy."""
    owner, pids = os.getpid(), list[int]()
    for _ in range(count):
        if not (pid := os.fork()):
            while True:
                pass
        pids.append(pid)
    try:
        yield
    finally:
        for pid in pids if os.getpid() == owner else ():  # not at the end of a fork
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def collect(running: dict[int, float], found: Counter[str]) -> list[float]:
    """Count the processes that have ended, kill those that hang; return the seconds of each."""
    seconds = []
    for pid, began in [*running.items()]:
        taken = time.monotonic() - began
        if is_late := taken > LIMIT:
            os.kill(pid, signal.SIGKILL)
        ended, status = os.waitpid(pid, 0 if is_late else os.WNOHANG)
        if ended:
            found["killed" if is_late else str(os.waitstatus_to_exitcode(status))] += 1
            seconds.append(taken)
            del running[pid]
    return seconds


def main(given: argparse.Namespace) -> None:
    found, seconds, running = Counter[str](), list[float](), dict[int, float]()
    left = given.runs
    with loaded(given.load):
        while left or running:
            while left and len(running) < given.at_once:
                running[start()] = time.monotonic()
                left -= 1
            seconds += collect(running, found)
            time.sleep(0.01)
    lay_out([("exit code", "processes"), *((code, str(n)) for code, n in sorted(found.items()))])
    print(f"\n{max(seconds):.1f} s at most; {given.load} other busy processes; {machine()}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Ends of processes beside methods that run.")
    parser.add_argument("--runs", type=int, default=200, metavar="N", help="processes in all")
    parser.add_argument("--at-once", type=int, default=4, metavar="N", help="processes at once")
    parser.add_argument("--load", type=int, default=2, metavar="N", help="busy processes beside")
    main(parser.parse_args())
