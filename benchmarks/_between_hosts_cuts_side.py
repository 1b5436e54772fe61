"""One worker of `benchmarks.between_hosts_cuts`, on a host of its own.

    python -m benchmarks._between_hosts_cuts_side RANK

Both workers call each other: small calls, tensors, streams, and rank 0 follows the weights of rank
1. Rank 0 answers each line of its input with one of JSON.
"""

import asyncio
import contextlib
import faulthandler
import json
import os
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import torch
from torch import Tensor

import aiorpc_torch as aiorpc
from aiorpc_torch import RpcError, call, create, remote
from aiorpc_torch._carrier import socket_threads, tensor_sockets
from aiorpc_torch._endpoint import entry_points
from aiorpc_torch._server import server as servers
from aiorpc_torch.training import Weights, follow

from ._process import open_descriptors, swept_memory

INIT = "tcp://10.94.7.1:29513"
WORKERS = ["main", "peer"]
HEARTBEAT = 2.0  # seconds
KINDS = ("small", "tensor", "stream")
TENSOR = 1 << 18  # bytes
REST = 3.0  # seconds until idle threads and sockets have ended

tensor_sockets.IDLE_SECONDS = 1.0
socket_threads.SILENCE = 6.0

_open = asyncio.Event()  # the clients may call
_stopped = asyncio.Event()
_done: Counter[str] = Counter()  # calls by kind
_latest = dict.fromkeys(KINDS, 0.0)  # `time.monotonic()` at the start of the last call that worked
_lost: Counter[str] = Counter()  # errors by type


class Echo:
    """What the other worker calls."""

    async def double(self, x: int) -> int:
        return 2 * x

    async def echo(self, x: Tensor) -> Tensor:
        return x

    async def count(self, until: int) -> AsyncIterator[int]:
        for each in range(until):
            yield each


async def listening() -> tuple[str, int] | None:
    """Return the address at which the worker takes connections of other hosts."""
    server = entry_points.serving()
    assert isinstance(server, servers.Server)
    assert server._listener is not None
    return server._listener.addresses.tcp


def port_of_calls(peer: str) -> int:
    """Return the port of this end of the connection for calls."""
    node = entry_points.here
    assert node is not None
    return int(node.pool.connection(peer)._transport.get_extra_info("sockname")[1])


async def go(*, on: bool) -> None:
    """Let the clients of this worker call, or not."""
    if on:
        _open.set()
    else:
        _open.clear()


async def stop() -> None:
    _stopped.set()


async def sample() -> dict[str, int]:
    """Return what this process holds."""
    node = entry_points.here
    assert node is not None
    server = entry_points.serving()
    assert isinstance(server, servers.Server)
    memory, pool = swept_memory(), node.pool
    return {
        "kB": memory >> 10,
        "descriptors": open_descriptors(),
        "tasks": len(asyncio.all_tasks()),
        "threads": len(os.listdir("/proc/self/task")),
        "connections": len(pool.all_connections()),
        "watches": len(pool._watches),
        "sessions": len(server.sessions),
        "ended": len(server.sessions._ended),
        "objects": sys.getallocatedblocks(),
    }


async def repeat(kind: str, step: Callable[[], Awaitable[object]]) -> None:
    """Call again and again; a connection that is cut may end a call, and nothing else may."""
    while True:
        await _open.wait()
        begin = time.monotonic()
        try:
            await step()
            _done[kind] += 1
            _latest[kind] = begin
        except RpcError as exc:
            _lost[f"{kind}: {type(exc).__name__}"] += 1
            await asyncio.sleep(0.01)
        except Exception:
            traceback.print_exc()
            raise
        await asyncio.sleep(0)


async def clients(echo: Any) -> list[asyncio.Task[None]]:
    """Return the tasks that call the other worker."""
    far, x = remote(echo), torch.ones(TENSOR // 4)

    async def small() -> None:
        assert await far.double(21) == 42

    async def tensor() -> None:
        assert torch.equal(await far.echo(x), x)

    async def stream() -> None:
        assert [each async for each in far.count(100)] == [*range(100)]

    kinds = {"small": small, "tensor": tensor, "stream": stream}
    return [asyncio.create_task(repeat(kind, step)) for kind, step in kinds.items()]


async def until_all_work() -> None:
    """Wait until a call of each kind that begins from now on has worked."""
    begin = time.monotonic()
    while min(_latest.values()) < begin:  # noqa: ASYNC110
        await asyncio.sleep(0.002)


async def works_there(peer: str) -> bool:
    with contextlib.suppress(RpcError):
        await call(peer, until_all_work)
        return True
    return False


async def drive(peer: str) -> None:
    """Answer the lines of the input, until the worker is to leave."""
    follower = await follow("policy", poll=0.01)
    while line := await asyncio.to_thread(sys.stdin.readline):
        match line.strip():
            case "ports":
                ports = [await listening(), await call(peer, listening)]
                told: Any = [each[1] for each in ports if each is not None]
            case "calls":
                told = port_of_calls(peer)
            case "on":
                _open.set()
                await call(peer, go, on=True)
                told = None
            case "wait":  # until each kind of call works
                begin, version = time.monotonic(), follower.version
                await until_all_work()
                told = time.monotonic() - begin
                while not await works_there(peer):
                    pass
                await follower.wait(version + 1)
                told = [told, time.monotonic() - begin]
            case "sample":
                await asyncio.wait_for(call(peer, go, on=False), 20)
                _open.clear()
                await asyncio.sleep(REST)
                told = [await sample(), await call(peer, sample)]
            case _:
                told = [_done, _lost, follower.version]
                await call(peer, stop)
        print(json.dumps(told), flush=True)
    await follower.aclose()


async def publish(weights: Weights) -> None:
    while True:
        await _open.wait()
        await weights.publish({"w": torch.ones(TENSOR // 4)})
        await asyncio.sleep(0.02)


async def main(rank: int) -> None:
    async with aiorpc.worker(
        WORKERS[rank], rank=rank, world_size=2, init_method=INIT, heartbeat=HEARTBEAT
    ):
        peer = WORKERS[1 - rank]
        tasks = await clients(await create(peer, Echo))
        if rank == 0:
            await drive(peer)
        else:
            weights = Weights({"w": torch.zeros(TENSOR // 4)})
            aiorpc.register("policy", weights)
            tasks.append(asyncio.create_task(publish(weights)))
            await _stopped.wait()
        for each in tasks:
            each.cancel()
        for each in tasks:
            with contextlib.suppress(asyncio.CancelledError):
                await each


if __name__ == "__main__":
    faulthandler.register(signal.SIGUSR1)
    asyncio.run(main(int(sys.argv[1])))
