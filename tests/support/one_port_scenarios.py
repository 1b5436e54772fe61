"""What the workers of tests/network/test_one_port.py run: each has one port.

`python one_port_scenarios.py scenario '{"its": "arguments"}'` starts one.
"""

import asyncio
import json
import logging
import os
import sys
from typing import Any

import psutil
import torch
from torch.distributed import rpc

import aiorpc_torch as aiorpc
from aiorpc_torch import autograd, create, fetch, register, remote
from tests.support.network_scenarios import tell, told

MARKER = "a-secret-that-is-told-to-nobody"
LARGE = 3_000_000  # bytes


class Echo:
    """Returns what it is given."""

    def __init__(self, secret: str) -> None:
        self.secret = secret

    async def echo(self, value: Any) -> Any:
        return value

    async def items(self, count: int) -> Any:
        for each in range(count):
            yield each

    async def die(self) -> None:
        os._exit(9)  # a first process cannot kill itself


def marked(size: int) -> torch.Tensor:
    """A tensor whose bytes are the marker, again and again."""
    text = MARKER.encode()
    return torch.frombuffer(bytearray(text * (size // len(text))), dtype=torch.uint8)


def ports() -> list[list[Any]]:
    """The addresses and ports at which this process listens, but for the loopback interface."""
    found = psutil.Process().net_connections("tcp")
    listening = {(c.laddr.ip, c.laddr.port) for c in found if c.status == psutil.CONN_LISTEN}
    return sorted([ip, port] for ip, port in listening if not ip.startswith("127."))


def world(tls: list[str] | None, **more: Any) -> Any:
    return aiorpc.worker(tls=None if tls is None else aiorpc.Tls(*tls), **more)


async def first(tls: list[str] | None, **more: Any) -> None:
    """Calls the second one, sees a third one join and die, and leaves."""
    async with world(tls, **more) as me:
        tell("ready", ports())
        await _use("second")
        tell("used", [aiorpc.observe.stats().socket_messages])
        await _by_torch("second")
        tell("used by torch")
        kinds = []
        async for change in me.changes():
            kinds.append([change.kind, change.name])
            if change.kind == "joined":
                tell("joined", change.name)
                await _use(change.name)
                dying = await create(change.name, Echo, MARKER)
                try:
                    await remote(dying).die()
                except aiorpc.WorkerLost as exc:
                    tell("lost", str(exc))
            elif change.kind == "lost":
                break
        tell("changes", kinds)
    tell("left")


async def second(tls: list[str] | None, **more: Any) -> None:
    async with world(tls, **more) as me:
        register(MARKER, Echo(MARKER))
        tell("ready", ports())
        await me.serve(until="first")
    tell("left")


async def third(tls: list[str] | None, **more: Any) -> None:
    async with world(tls, join=True, **more) as me:
        tell("ready", ports())
        await _use("second")
        tell("used")
        await me.serve()


async def blocked(tls: list[str] | None, **more: Any) -> None:
    """One whose start may fail."""
    try:
        async with world(tls, **more):
            tell("started")
            await told()
    except Exception as exc:
        tell("failed", [type(exc).__name__, str(exc)])


async def _use(peer: str) -> None:
    echo = await create(peer, Echo, MARKER)
    assert await remote(echo).echo(MARKER) == MARKER
    small = marked(100)
    for _ in range(3):
        assert torch.equal(await remote(echo).echo(small), small)
    large = marked(LARGE)
    for _ in range(3):
        assert torch.equal(await remote(echo).echo(large), large)
    await asyncio.gather(*(remote(echo).echo(large) for _ in range(4)))
    # Which tensor sockets do not take: these travel by torch RPC.
    sparse = torch.eye(200).to_sparse()
    assert torch.equal((await remote(echo).echo(sparse)).to_dense(), torch.eye(200))
    text = MARKER * 10_000
    assert await remote(echo).echo(text) == text
    assert [each async for each in remote(echo).items(100)] == [*range(100)]
    assert (await fetch(echo)).secret == MARKER


async def _by_torch(peer: str) -> None:
    """What torch's RPC carries: gradients, and calls of plain torch clients."""
    echo = await create(peer, Echo, MARKER)
    weights = marked(LARGE // 4).float().requires_grad_()
    async with autograd.context() as context:
        result = await remote(echo).echo(3 * weights)
        await context.backward(result.sum())
        gradients = await context.gradients()
        assert torch.equal(gradients[weights], torch.full_like(weights, 3))
    one = marked(LARGE)
    assert torch.equal(rpc.rpc_sync(peer, torch.add, (one, 1)), one + 1)
    assert await asyncio.to_thread(lambda: echo.to_here().secret) == MARKER


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    _, scenario, arguments = sys.argv
    asyncio.run(globals()[scenario](**json.loads(arguments)))
