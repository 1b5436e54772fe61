"""Processes that join a world: what they tell the test by a pipe, and what others call in them."""

import asyncio
import contextlib
import gc
import multiprocessing
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from torch import Tensor

import aiorpc_torch as aiorpc
from aiorpc_torch._children.forkserver import ProcessOptions
from aiorpc_torch._directory.directory_server import (
    MAX_STRANGERS as MAX_STRANGERS,
    DirectoryServer,
)
from aiorpc_torch._endpoint import entry_points
from aiorpc_torch._world.directory_client import DirectoryClient

PATIENCE = 60.0  # seconds for anything that a test waits for

_leaving = asyncio.Event()


async def leave() -> None:
    """To be called in a joiner: end its block."""
    _leaving.set()


async def peers() -> tuple[tuple[str, ...], int]:
    """To be called: return the peers and the world size of the worker."""
    return _me[-1].peers, _me[-1].world_size


_me: list[aiorpc.types.Worker] = []
kept: list[Any] = []
"""What a test keeps in a process until its end."""


def member(pipe: Connection, name: str, options: dict[str, Any], stop_at: str) -> None:
    """Be a worker until `leave` is called; with `stop_at` it stands still before that step."""

    async def stand_still(*_: Any) -> None:
        pipe.send(("at", stop_at))
        await asyncio.Event().wait()

    async def live() -> None:
        async with aiorpc.worker(name, **options) as me:
            _me.append(me)
            pipe.send(("in", me.rank, me.peers))
            await _leaving.wait()
        pipe.send(("left",))

    os.environ.update(options.pop("environment", {}))
    if stop_at:
        setattr(DirectoryClient, stop_at, stand_still)
    try:
        asyncio.run(live())
    except Exception as exc:
        pipe.send((type(exc).__name__, str(exc)))
    os._exit(0)


class Joiner:
    """A process that is, or tries to be, a worker."""

    def __init__(self, process: BaseProcess, pipe: Connection) -> None:
        self.process = process
        self._pipe = pipe

    async def hear(self) -> tuple[Any, ...]:
        """Return the next that it tells."""
        assert await asyncio.to_thread(self._pipe.poll, PATIENCE), "it tells nothing"
        told: tuple[Any, ...] = self._pipe.recv()
        return told

    def kill(self) -> None:
        """Kill it as `kill -9` does, and wait for its end."""
        self.process.kill()
        self.process.join()


class Joiners:
    """The processes of one test."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._options = options
        self._started: list[Joiner] = []

    async def start(self, name: str, stop_at: str = "", **options: Any) -> Joiner:
        """Start a worker that joins, or with `rank` and `world_size` one of the first."""
        make = await ProcessOptions().factory(PATIENCE)
        ours, theirs = multiprocessing.Pipe()
        entry = {} if "rank" in options else {"join": True}
        args = (theirs, name, {**self._options, **entry, **options}, stop_at)
        process = make(member, args, name)
        process.start()
        theirs.close()
        self._started.append(Joiner(process, ours))
        return self._started[-1]

    async def enter(self, *names: str, **options: Any) -> Sequence[Joiner]:
        """Start workers that join, all at once; return them when they are in."""
        found = [await self.start(name, **options) for name in names]
        for each in found:
            kind, *_ = await each.hear()
            assert kind == "in"
        return found

    def close(self) -> None:
        """Kill those that are left."""
        for each in self._started:
            each.kill()
            each.process.close()


@contextlib.asynccontextmanager
async def growing(
    init_method: str | None, **options: Any
) -> AsyncIterator[tuple[aiorpc.types.Worker, Joiners]]:
    """Be rank 0, at first alone, of a world that others join."""
    common = {"init_method": init_method, "interface": "lo"}
    joiners = Joiners(common)
    try:
        async with aiorpc.worker("main", rank=0, world_size=1, **common, **options) as me:
            yield me, joiners
    finally:
        joiners.close()


async def pid() -> int:
    """To be called: return the process."""
    return os.getpid()


class Env:
    """An object of a joiner: everything that a call may be."""

    def step(self, tensor: Tensor) -> Tensor:
        return tensor + 1

    async def number(self, number: int) -> int:
        return number

    async def count(self, number: int) -> AsyncIterator[int]:
        for each in range(number):
            yield each

    @aiorpc.batched(aiorpc.Round(2, timeout=30))
    async def both(self, numbers: list[int]) -> int:
        return sum(numbers)


# ── faults in such a process ─────────────────────────────────────────────────────────────────


async def cut_from_rank_0(refusals: int) -> bool:
    """To be called in a child: end its connection to rank 0, and let it connect again."""
    [client] = [each for each in gc.get_objects() if isinstance(each, DirectoryClient)]
    meeting: Any = client._meeting
    connect = meeting.connect

    def refused() -> Any:
        nonlocal refusals
        refusals -= 1
        if refusals < 0:
            return connect()
        raise ConnectionRefusedError("as a proxy without an endpoint does")

    meeting.connect = refused
    first = client._stream
    assert first is not None
    first.abort()
    while client._stream is first:  # noqa: ASYNC110 - nothing tells of it
        await asyncio.sleep(0.01)
    return True


async def keep_unaware(envs: list[Any]) -> None:
    """Keep the RRefs here, where no news of workers that leave comes any more."""
    node: Any = entry_points.here
    node.membership.on_leave_message = lambda *_: None
    kept.append(envs)


def strangers_of_directories() -> int:
    """Return how many connections a directory of this process has from strangers, and may have."""
    servers = [each for each in gc.get_objects() if type(each) is DirectoryServer]
    return max(len(each._strangers) for each in servers)
