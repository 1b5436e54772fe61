"""One worker of `benchmarks.between_hosts_soak`, on a host of its own.

    python -m benchmarks._between_hosts_soak_side RANK NAME SEED ROUNDS MESSAGES

Rank 0 makes the calls. It prints lines of JSON: what is to be done to the hosts in the middle of a
round, the samples after it, and at the end what is wrong. The others print their process id.
"""

import asyncio
import contextlib
import gc
import json
import os
import sys
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import aiorpc_torch as aiorpc
from aiorpc_torch import (
    Group,
    GroupError,
    RpcError,
    RRef,
    WorkerLost,
    WorkerUnreachable,
    call,
    create,
    remote,
)
from aiorpc_torch._carrier import socket_threads, tensor_sockets
from aiorpc_torch._carrier.memory import receive_memory_of

from . import _shared_memory_shelf as shelf
from ._process import mapped_segments, open_descriptors, swept_memory

INIT = "tcp://10.94.7.1:29513"
WORKERS = ["main", "a", "b"]  # "main" is alone on its host; "b" is killed and replaced
SURVIVORS = WORKERS[:2]
EVENTS = ["kill", "cut", "slow", "none"]
HEARTBEAT = 2.0  # seconds
CLIENTS = 12
PATIENCE = 240.0  # seconds for a round
REST = 60.0  # seconds until which threads and memory have to be gone

shelf.LARGEST = 16 << 20
tensor_sockets.IDLE_SECONDS = 2.0
socket_threads.SILENCE = 6.0


class Sample(NamedTuple):
    """What a process holds."""

    memory: int  # bytes of its own
    descriptors: int
    threads: int  # that send and receive
    received: int  # bytes of memory for transfers
    mapped: int  # segments
    pending: int  # calls


_stopped = asyncio.Event()


async def stop() -> None:
    """Let the process that runs this leave its world."""
    _stopped.set()


async def sample() -> Sample:
    """Return the sample of the process that runs this."""
    memory, stats = swept_memory(), aiorpc.observe.stats()
    names = [each.name for each in threading.enumerate()]
    threads = sum(each in ("aiorpc-send", "aiorpc-receive") for each in names)
    received = receive_memory_of(asyncio.get_running_loop()).pool.total
    pending = stats.in_flight + stats.running
    return Sample(memory, open_descriptors(), threads, received, mapped_segments(), pending)


def tell(kind: str, value: Any = None) -> None:
    print(json.dumps([kind, value]), flush=True)


class Soak:
    """Rounds of calls between the hosts, each with an event in the middle."""

    def __init__(self, me: aiorpc.types.Worker, seed: str) -> None:
        self.messages = self.bytes = self.losses = 0
        self.problems: list[str] = []
        self._me = me
        self._clients = [shelf.Client(f"{seed}/{number}") for number in range(CLIENTS)]
        self._shelves = Group[shelf.Shelf]([])
        self._event = "none"

    async def start(self) -> None:
        await self._meet([await self._made(each) for each in WORKERS])

    async def _made(self, worker: str) -> RRef[shelf.Shelf]:
        """Create a shelf, once the worker is there."""
        while True:
            try:
                return await create(worker, shelf.Shelf)
            except (WorkerLost, WorkerUnreachable):
                await self._me.wait_for(worker)

    async def _meet(self, shelves: list[RRef[shelf.Shelf]]) -> None:
        """Let the shelves know each other, over a link that may have been cut."""
        while True:
            try:
                await remote(Group(shelves)).meet(Group(shelves), WORKERS)
                break
            except (GroupError, ReferenceError):  # of a worker that is lost just now
                await asyncio.sleep(0.2)
        self._shelves = Group(shelves)

    async def round(self, messages: int, event: str) -> None:
        self._event = event
        middle, until = self.messages + messages // 2, self.messages + messages
        tasks = [asyncio.create_task(self._run(each, until)) for each in self._clients]
        tasks.append(asyncio.create_task(self._disturb(middle)))
        _, unended = await asyncio.wait(tasks, timeout=PATIENCE)
        if unended:
            raise TimeoutError(f"{len(unended)} tasks do not end: {aiorpc.observe.pending()[:5]}")
        for each in tasks:
            each.result()

    async def _run(self, client: shelf.Client, until: int) -> None:
        while self.messages < until:
            try:
                found = await client.call(self._shelves)
                self.messages += len(found)
                self.bytes += 4 * sum(found)
            except Exception as exc:
                self.losses += 1
                if self._event == "none" or not is_loss(exc):
                    self.problems.append(f"{self._event}: {exc!r}")
                    self.messages += 1  # so that the round ends
                await asyncio.sleep(0.05)

    async def _disturb(self, middle: int) -> None:
        """Have something done to the hosts, and wait until the world is whole again."""
        while self.messages < middle:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        tell(self._event)
        await asyncio.to_thread(sys.stdin.readline)
        shelves = [*self._shelves]
        if self._event == "kill":
            self._shelves = Group(shelves[:2])
            shelves[2] = await self._made("b")
        await self._meet(shelves)

    async def rest(self, start: Sequence[Sample] = ()) -> list[Sample]:
        """Drop every tensor; return samples when no thread is left, or much later."""
        for client in self._clients:
            client.drop()
        await remote(self._shelves).drop()
        found, gone = await samples(), asyncio.get_running_loop().time() + REST
        while any(left(each) for each in found) and asyncio.get_running_loop().time() < gone:
            await asyncio.sleep(0.5)
            found = await samples()
        return found


def is_loss(exc: BaseException) -> bool:
    """Return whether a call ended since its worker was lost, or its connection; or a nested one."""
    if isinstance(exc, GroupError):
        return all(map(is_loss, exc.exceptions))
    return isinstance(exc, WorkerLost | WorkerUnreachable)


async def samples() -> list[Sample]:
    return [await call(each, sample) for each in WORKERS]


def left(found: Sample) -> list[str]:
    """Return what a process must not hold at rest."""
    return [
        f"{getattr(found, each)} {each}" for each in ("threads", "received") if found[2:4] != (0, 0)
    ]


async def drive(seed: str, rounds: int, messages: int) -> None:
    async with aiorpc.worker(
        "main", rank=0, world_size=len(WORKERS), init_method=INIT, heartbeat=HEARTBEAT
    ) as me:
        soak = Soak(me, seed)
        await soak.start()
        try:
            for event in EVENTS:  # all paths are warm
                await soak.round(messages, event)
            rests = [await soak.rest()]
            quarters = [part * rounds // 4 for part in (1, 2, 3)]
            for number in range(rounds):
                if number in quarters:
                    rests.append(await soak.rest())
                await soak.round(messages, EVENTS[number % len(EVENTS)])
                totals = soak.messages, soak.bytes, soak.losses
                tell("round", [number, *totals, await samples()])
            tell("rest", [*rests, await soak.rest()])
        except Exception as exc:
            soak.problems.append(f"stopped by {exc!r}")
        for each in WORKERS[1:]:
            with contextlib.suppress(RpcError):
                await call(each, stop)
        tell("end", [soak.problems, aiorpc.observe.stats().socket_messages])


async def serve(rank: int, name: str) -> None:
    tell("pid", os.getpid())
    async with aiorpc.worker(
        name, rank=rank, world_size=len(WORKERS), init_method=INIT, heartbeat=HEARTBEAT
    ):
        await _stopped.wait()  # `serve` would end with a cut, after which no live peer is left


def main(rank: str, name: str, seed: str, rounds: str, messages: str) -> None:
    gc.freeze()
    if rank == "0":
        asyncio.run(drive(seed, int(rounds), int(messages)))
    else:
        asyncio.run(serve(int(rank), name))


if __name__ == "__main__":
    main(*sys.argv[1:])
