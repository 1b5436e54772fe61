"""Objects for tests of `supervised`: what ran, and in which process, is told by a file."""

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

from aiorpc_torch import WorkerLost, call, register
from aiorpc_torch.testing import kill


class Diary:
    """Writes into a file what runs, and counts calls."""

    def __init__(self, file: Path, number: int = 0) -> None:
        self.file = file
        self.number = number
        self.write("made")

    def write(self, line: str) -> None:
        with self.file.open("a") as out:
            out.write(f"{line}\n")

    async def add(self, amount: int = 1) -> int:
        self.number += amount
        return self.number

    async def pid(self) -> int:
        return os.getpid()

    async def hang(self) -> None:
        self.write("hang")
        await asyncio.Event().wait()

    async def count(self, items: int) -> AsyncIterator[int]:
        self.write("count")
        for item in range(items):
            yield self.number + item

    async def twice(self, item: int) -> int:
        return 2 * item

    async def lose(self, worker: str) -> None:
        self.write("lose")
        raise WorkerLost(worker, method="another call", may_have_run=False)


def picky(file: Path, refusal: Path) -> Diary:
    """Make a Diary, unless the file `refusal` exists."""
    if refusal.exists():
        raise LookupError("refused")
    return Diary(file)


def mortal(file: Path, refusal: Path) -> Diary:
    """Make a Diary; while the file `refusal` exists, end the process instead."""
    if refusal.exists():
        refusal.unlink()
        os._exit(9)
    return Diary(file)


def registered(file: Path) -> Diary:
    """Make a Diary, and register it on its worker."""
    diary = Diary(file)
    register("diary", diary)
    return diary


async def lose(worker: str) -> None:
    """Kill a worker; return when this process knows that it is lost."""
    pending = asyncio.create_task(call(worker, asyncio.sleep, 600))
    await call(worker, os.getpid)
    kill(worker)
    try:
        await pending
    except WorkerLost:
        return
    raise AssertionError("the call has returned")


class Refused(BaseException):
    """What a factory may raise that is no Exception."""


def once(file: Path) -> Diary:
    """Make a Diary, the first time."""
    if file.exists():
        raise Refused
    return Diary(file)


async def endless(file: Path) -> Diary:
    """Make a Diary; the second time it takes for ever."""
    if os.path.exists(file):  # noqa: ASYNC240
        await asyncio.Event().wait()
    return Diary(file)


async def awaiting(file: Path, go: Path) -> Diary:
    """Make a Diary; the second time, and later, only when the file `go` exists."""
    has_begun = os.path.exists(file)  # noqa: ASYNC240
    diary = Diary(file)
    while has_begun and not os.path.exists(go):  # noqa: ASYNC110, ASYNC240
        await asyncio.sleep(0.01)
    return diary
