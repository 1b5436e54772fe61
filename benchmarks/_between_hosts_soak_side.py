"""One worker of `benchmarks.between_hosts_soak`.

    python -m benchmarks._between_hosts_soak_side NAME INIT SEED [PORT]

With PORT workers have one port each, from that one on, and plain torch's calls are made too.

Workers "main" and "a" call all others, and "main" follows the weights of "a". Each worker prints
its process id, and a line once it is in the world. Then "main" answers each line of its input with
one of JSON.
"""

import asyncio
import contextlib
import faulthandler
import gc
import itertools
import json
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed import rpc

import aiorpc_torch as aiorpc
from aiorpc_torch import Group, GroupError, RpcError, RRef, call, lookup, remote, wrap_future
from aiorpc_torch._carrier import socket_threads, tensor_sockets
from aiorpc_torch._carrier.memory import receive_memory_of
from aiorpc_torch._endpoint import entry_points
from aiorpc_torch._server import server as servers
from aiorpc_torch.training import Weights, follow

from . import _shared_memory_shelf as shelf
from ._process import mapped_segments, open_descriptors, swept_memory

WORKERS = ["main", "a", "b", "c"]  # "a" and "b" share a host
CALLERS = WORKERS[:2]  # the others are replaced
HEARTBEAT = 2.0  # seconds
TENSOR = 1 << 18  # bytes
ITEMS = 100  # of a stream
MIXED = 3  # clients whose calls are drawn from a seed
PAUSE = 0.005  # seconds between two calls of a client
PATIENCE = 120.0  # seconds until which calls have to end, or to work
REST = 30.0  # seconds until which threads and memory have to be gone

shelf.LARGEST = 16 << 20
tensor_sockets.IDLE_SECONDS = 1.0
socket_threads.SILENCE = 6.0

_open = asyncio.Event()  # the clients may call
_stopped = asyncio.Event()
_true_time = time.time


class Target(shelf.Shelf):
    """What other workers call. It counts how often each call has run."""

    def __init__(self) -> None:
        super().__init__()
        self._ran: Counter[tuple[str, int]] = Counter()

    async def meet(self, others: Group[Any], workers: Iterable[str]) -> None:
        """Know the others. Torch's own connections may need as long as the last cut has lasted."""
        self.others = others

    async def small(self, caller: str, number: int) -> int:
        self._ran[caller, number] += 1
        return number

    async def tensor(self, caller: str, number: int, x: Tensor) -> Tensor:
        self._ran[caller, number] += 1
        return x

    async def stream(self, caller: str, number: int) -> AsyncIterator[int]:
        self._ran[caller, number] += 1
        for each in range(ITEMS):
            yield each

    async def ran(self, caller: str, numbers: list[int]) -> list[int]:
        """Return how often these calls have run."""
        return [self._ran.pop((caller, each), 0) for each in numbers]


class Caller:
    """The calls of this worker to the others: one after another of each kind to each worker.

    Attributes:
        done, lost: calls that worked by kind, and errors by kind and type.
        problems: what is wrong.
        may_lose: whether calls may end with an error now.
    """

    def __init__(self, me: str, seed: str, *, is_by_torch: bool) -> None:
        self.done, self.lost = Counter[str](), Counter[str]()
        self.problems: list[str] = []
        self.may_lose = True
        self._me = me
        self._others = [each for each in WORKERS if each != me]
        self._numbers = itertools.count()
        self._targets: dict[str, RRef[Target]] = {}
        self._shelves = Group[shelf.Shelf]([])
        # Ended calls: their numbers, how often each has run at least, and at most.
        self._ended: dict[str, list[tuple[int, int, int]]] = {each: [] for each in WORKERS}
        kinds = itertools.product((self._small, self._tensor, self._stream), self._others)
        steps: dict[tuple[str, str], Callable[[int], Awaitable[object]]] = {
            (kind.__name__[1:], each): partial(self._one, kind, each) for kind, each in kinds
        }
        steps["group", "all"] = self._group
        if is_by_torch:  # of those whose process is not replaced
            steps |= {("torch", each): partial(self._torch, each) for each in CALLERS if each != me}
        self._latest = dict.fromkeys(steps, 0.0)  # starts of the last calls that worked
        self._clients = [shelf.Client(f"{seed}/{each}") for each in range(MIXED) if me == "main"]
        for number, client in enumerate(self._clients):
            steps["mixed", str(number)] = partial(self._mixed, client)
        self._running = set[tuple[str, str]]()
        self.tasks = [asyncio.create_task(self._repeat(*each)) for each in steps.items()]

    async def _repeat(self, key: tuple[str, str], step: Callable[[int], Awaitable[object]]) -> None:
        while True:
            await _open.wait()
            begin = time.monotonic()
            self._running.add(key)
            try:
                await step(next(self._numbers))
                self.done[key[0]] += 1
                if key in self._latest:
                    self._latest[key] = begin
            except Exception as exc:
                self._on_error(" ".join(key), exc)
            self._running.remove(key)
            await asyncio.sleep(PAUSE)

    async def _mixed(self, client: shelf.Client, _: int) -> None:
        await client.call(self._shelves)

    def _on_error(self, what: str, exc: Exception) -> None:
        """Count errors of lost calls; note others."""
        for each in exc.exceptions if isinstance(exc, GroupError) else [exc]:
            self.lost[type(each).__name__] += 1
            if not (self.may_lose and is_loss(each)):
                self.problems.append(f"{self._me}: {what}: {each!r}")

    # ── calls that are counted where they run ───────────────────────────────────────────────────

    async def _target(self, worker: str) -> RRef[Target]:
        if worker not in self._targets:
            self._targets[worker] = await lookup("target", on=worker)
        return self._targets[worker]

    async def _one(self, kind: Any, worker: str, number: int) -> None:
        target = await self._target(worker)
        try:
            await kind(remote(target), number)
        except Exception as exc:
            self._note(worker, target, number, exc)
            raise
        self._note(worker, target, number, None)

    async def _group(self, number: int) -> None:
        targets = [await self._target(each) for each in self._others]
        x = torch.full((TENSOR // 4,), float(number))
        try:
            results: list[Any] = await remote(Group(targets)).tensor(self._me, number, x)
        except GroupError as exc:
            results = exc.results
        for worker, target, result in zip(self._others, targets, results, strict=True):
            self._note(worker, target, number, result)
        if failed := [each for each in results if isinstance(each, Exception)]:
            raise failed[0]
        for each in results:
            shelf.check(each, len(x), float(number))

    def _note(self, worker: str, target: RRef[Target], number: int, result: object) -> None:
        """Remember how often a call has run, unless its process was replaced meanwhile."""
        least = 0 if isinstance(result, Exception) else 1
        most = int(result.may_have_run) if isinstance(result, RpcError) else least
        if self._targets.get(worker) is target:
            self._ended[worker].append((number, least, most))

    async def _small(self, far: Any, number: int) -> None:
        shelf.expect(await far.small(self._me, number), number)

    async def _tensor(self, far: Any, number: int) -> None:
        x = torch.full((TENSOR // 4,), float(number))
        shelf.check(await far.tensor(self._me, number, x), len(x), float(number))

    async def _stream(self, far: Any, number: int) -> None:
        found = [each async for each in far.stream(self._me, number)]
        shelf.expect(found, [*range(ITEMS)])

    async def _torch(self, worker: str, number: int) -> None:
        """Call as plain torch does: no other connection carries it."""
        x = torch.full((TENSOR // 4,), float(number))
        found = await wrap_future(rpc.rpc_async(worker, torch.add, (x, 1)))
        shelf.check(found, len(x), float(number + 1))

    async def audit(self) -> None:
        """Compare how the calls have ended with how often they have run."""
        for worker in self._others:
            ended, self._ended[worker] = self._ended[worker], []
            target = remote(await self._target(worker))
            try:
                found = await target.ran(self._me, [number for number, _, _ in ended])
            except RpcError:  # torch may tell late of a cut: the counts may be gone
                continue
            self.problems += [
                f"{self._me}: a call to {worker} has run {times} times, due {least} to {most}"
                for (_, least, most), times in zip(ended, found, strict=True)
                if not least <= times <= most
            ]

    # ── commands ────────────────────────────────────────────────────────────────────────────────

    async def until_all_work(self) -> None:
        """Wait until a call of each kind to each worker that begins from now on has worked."""
        begin = time.monotonic()
        while min(self._latest.values()) < begin:  # noqa: ASYNC110
            await asyncio.sleep(0.002)

    async def until_idle(self) -> None:
        """Wait until each call has ended."""
        while self._running:  # noqa: ASYNC110
            await asyncio.sleep(0.01)

    def forget(self, worker: str) -> None:
        """Forget a process that was replaced; nothing can tell which calls it has run."""
        del self._targets[worker]
        self._ended[worker].clear()

    async def meet(self) -> None:
        """Let the targets of all workers know each other."""
        found = Group[shelf.Shelf]([await self._target(each) for each in WORKERS])
        await remote(found).meet(found, WORKERS)
        self._shelves = found

    async def drop(self) -> None:
        for each in self._clients:
            each.drop()
        await remote(self._shelves).drop()


def is_loss(exc: BaseException) -> bool:
    """Return whether a call ended since its worker was lost or replaced, or its connection."""
    return isinstance(exc, aiorpc.errors.WorkerGone | ReferenceError)


caller: Caller | None = None


# ── what "main" has other workers run ───────────────────────────────────────────────────────────


async def listening() -> int:
    """Return the port at which the worker takes connections of other hosts."""
    server = entry_points.serving()
    assert isinstance(server, servers.Server)
    assert server._listener is not None
    assert server._listener.addresses.tcp is not None
    return server._listener.addresses.tcp[1]


def port_of_calls(peer: str) -> int:
    """Return the port of this end of the connection for calls."""
    node = entry_points.here
    assert node is not None
    return int(node.pool.connection(peer).transport.get_extra_info("sockname")[1])


async def go(*, on: bool) -> None:
    """Let the clients of this worker call, or not."""
    if on:
        _open.set()
    else:
        _open.clear()


async def jump(seconds: float) -> None:
    """Let Python's wall clock be wrong by so much."""
    time.time = lambda: _true_time() + seconds


async def stop() -> None:
    _stopped.set()


async def sample() -> dict[str, int]:
    """Return what this process holds."""
    node, server = entry_points.here, entry_points.serving()
    assert node is not None
    assert isinstance(server, servers.Server)
    memory, stats = swept_memory(), aiorpc.observe.stats()
    names = [each.name for each in threading.enumerate()]
    return {
        "kB": memory >> 10,
        "descriptors": open_descriptors(),
        "tasks": len(asyncio.all_tasks()),
        "threads": len(os.listdir("/proc/self/task")),
        "transfer threads": sum(each in ("aiorpc-send", "aiorpc-receive") for each in names),
        "bytes for transfers": receive_memory_of(asyncio.get_running_loop()).pool.total,
        "segments": mapped_segments(),
        "calls": stats.in_flight + stats.running,
        "connections": len(node.pool.connections()),
        "watches": len(node.pool._watches),
        "sessions": len(server.sessions),
        "ended": len(server.sessions._ended),
    }


async def on_caller(method: str, *args: Any) -> None:
    assert caller is not None
    found = getattr(caller, method)(*args)
    if found is not None:
        await found


async def allow(*, losses: bool) -> list[Any]:
    """Let calls end with errors, or not; return what was wrong, and what was lost and done."""
    assert caller is not None
    found = [caller.problems, caller.lost, caller.done]
    caller.problems, caller.lost, caller.done = [], Counter(), Counter()
    caller.may_lose = losses
    return found


async def on_all(what: Callable[..., Awaitable[Any]], *args: Any, **named: Any) -> list[Any]:
    """Run it on both callers, again if torch tells late of a cut."""
    found: list[Any] = []
    while len(found) < len(CALLERS):
        with contextlib.suppress(aiorpc.WorkerLost, aiorpc.WorkerUnreachable):
            found.append(await call(CALLERS[len(found)], what, *args, **named))
    return found


async def works_there() -> bool:
    with contextlib.suppress(RpcError):
        await call("a", on_caller, "until_all_work")
        return True
    return False


def is_busy(found: dict[str, int]) -> bool:
    """Return whether a transfer is under way, or has left memory beside that of the weights."""
    return found["transfer threads"] > 0 or found["bytes for transfers"] > TENSOR


async def rest() -> list[dict[str, int]]:
    """Let all calls end; return samples once nothing of a transfer is left, or much later."""
    await on_all(go, on=False)
    await on_all(on_caller, "until_idle")
    await on_caller("drop")
    found, gone = await on_all(sample), time.monotonic() + REST
    while any(map(is_busy, found)) and time.monotonic() < gone:
        await asyncio.sleep(0.5)
        found = await on_all(sample)
    await on_all(go, on=True)
    return found


async def obey(words: list[str], follower: Any) -> Any:
    """Do what a line of the input asks for; return the answer."""
    match words:
        case ["ports"]:
            return await on_all(listening)
        case ["calls"]:
            return port_of_calls("a")
        case ["meet"]:
            return await on_caller("meet")
        case ["forget", worker]:
            return await on_all(on_caller, "forget", worker)
        case ["go"]:
            return await on_all(go, on=True)
        case ["wait"]:  # until each kind of call works
            begin, version = time.monotonic(), follower.version
            await on_caller("until_all_work")
            own = time.monotonic() - begin
            while not await works_there():
                pass
            await follower.wait(version + 1)
            return [own, time.monotonic() - begin]
        case ["begin", losses]:
            await on_all(on_caller, "audit")
            return await on_all(allow, losses=losses == "losses")
        case ["jump", seconds]:
            return [await call(each, jump, float(seconds)) for each in WORKERS]
        case ["rest"]:
            return await rest()
    raise ValueError(words)


async def drive() -> None:
    """Answer the lines of the input, and let all leave."""
    follower = await follow("policy", poll=0.01)
    while line := await asyncio.to_thread(sys.stdin.readline):
        try:
            answer = await asyncio.wait_for(obey(line.split(), follower), PATIENCE)
        except TimeoutError:
            raise RuntimeError(f"calls do not end: {aiorpc.observe.pending()}") from None
        print(json.dumps(answer), flush=True)
    await follower.aclose()
    for each in WORKERS:
        await call(each, stop)


async def publish(weights: Weights) -> None:
    while True:
        await _open.wait()
        await weights.publish({"w": torch.ones(TENSOR // 4)})
        await asyncio.sleep(0.02)


async def main(name: str, init: str, seed: str, port: str = "") -> None:
    global caller
    print(os.getpid(), flush=True)
    gc.freeze()
    options: Any = {"rank": WORKERS.index(name), "world_size": len(WORKERS)}
    if port:
        options["port"] = int(port) + options["rank"]
    async with aiorpc.worker(name, init_method=init, heartbeat=HEARTBEAT, **options) as me:
        target, weights = Target(), Weights({"w": torch.zeros(TENSOR // 4)})
        aiorpc.register("target", target)
        print("in", flush=True)
        tasks = []
        if name in CALLERS:
            caller = Caller(me.name, seed, is_by_torch=bool(port))
            tasks += caller.tasks
        if name == "a":
            aiorpc.register("policy", weights)
            tasks.append(asyncio.create_task(publish(weights)))
        if name == "main":
            await drive()
        await _stopped.wait()
        for each in tasks:
            each.cancel()
        await asyncio.wait(tasks) if tasks else None


if __name__ == "__main__":
    faulthandler.register(signal.SIGUSR1)
    asyncio.run(main(*sys.argv[1:]))
