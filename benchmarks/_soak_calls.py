"""The kinds of calls of the soak. Each returns how its call ended or raises `Unexpected`."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any, NoReturn

import torch

import aiorpc_torch as aiorpc
from aiorpc_torch import CallTimeout, RRef, remote
from aiorpc_torch.types import RemoteTraceback

from ._soak_server import ENDLESS, Refused, Server

LONG = 120.0  # seconds of a timeout that must not expire
SHORT = 0.004  # seconds of a timeout that expires
LARGE = 32_768  # floats: 128 KiB, which travels by torch RPC


class Unexpected(AssertionError):
    """A call ended in a wrong way."""


def expect(got: Any, wanted: Any) -> None:
    if got != wanted:
        raise Unexpected(f"got {got!r} in place of {wanted!r}")


class Caller:
    """A client that draws its calls from a seed of its own and checks their results."""

    def __init__(self, seed: str, servers: list[RRef[Server]]) -> None:
        self.random = random.Random(seed)
        self._servers = servers

    def _draw(self) -> tuple[Any, int]:
        """Return a server, with a timeout or without, and a random token."""
        timeout = LONG if self.random.random() < 0.2 else None
        server = remote(self.random.choice(self._servers), timeout=timeout)
        return server, self.random.randrange(1 << 40)

    def _soon(self) -> float:
        return self.random.uniform(0.0, SHORT)

    # ── with a result ──────────────────────────────────────────────────────────────────────────

    async def plain(self) -> str:
        server, token = self._draw()
        expect(await server.plain(token), token)
        return "value"

    async def on_loop(self) -> str:
        server, token = self._draw()
        expect(await server.on_loop(token, twice=True), 2 * token)
        return "value"

    async def tensor(self) -> str:
        server, token = self._draw()
        large = self.random.random() < 0.02
        x = torch.full((LARGE if large else 4,), float(token % 1_000))
        answer = await server.tensor(x)
        expect(torch.equal(answer, x + 1.0), True)
        return "large" if large else "small"

    async def batch(self) -> str:
        server, token = self._draw()
        if token % 8 == 7:
            return await refused(server.batch(token), token)
        expect(await server.batch(token), -token)
        return "value"

    async def relay(self) -> str:
        server, token = self._draw()
        path = self.random.choices(range(len(self._servers)), k=self.random.randint(1, 3))
        expect(await server.relay(token, path), token + len(path))
        return f"{len(path)} further"

    # ── failing ─────────────────────────────────────────────────────────────────────────────────

    async def error(self) -> str:
        server, token = self._draw()
        method = self.random.choice([server.refuse, server.refuse_in_thread])
        return await refused(method(token), token)

    async def unsendable(self) -> str:
        server, _ = self._draw()
        return await failed(server.unsendable(), TypeError)

    async def unreadable(self) -> str:
        server, _ = self._draw()
        return await failed(server.unreadable(), ValueError)

    # ── given up ───────────────────────────────────────────────────────────────────────────────

    async def cancel(self) -> str:
        server, _ = self._draw()
        return await cancelled(server.hang(), self._soon())

    async def cancel_far(self) -> str:
        """Cancel a call whose callee waits for another worker."""
        server, _ = self._draw()
        call = server.hang_there(self.random.randrange(len(self._servers)))
        return await cancelled(call, self._soon())

    async def cancel_batch(self) -> str:
        """Cancel in a race with the answer: exactly one must win."""
        server, token = self._draw()
        return await cancelled(server.slow_batch(token), 2 * self._soon(), or_value=-token)

    async def cancel_nap(self) -> str:
        server, _ = self._draw()
        seconds = self._soon()
        return await cancelled(server.nap(seconds), 2 * self._soon(), or_value=seconds)

    async def timeout(self) -> str:
        return await late(remote(self.random.choice(self._servers), timeout=SHORT).hang())

    async def timeout_far(self) -> str:
        server = remote(self.random.choice(self._servers))
        with aiorpc.timeout(SHORT):
            return await late(server.hang_there(self.random.randrange(len(self._servers))))

    async def timeout_nap(self) -> str:
        """Let a timeout race with the answer."""
        server, seconds = self.random.choice(self._servers), 2 * self._soon()
        call = remote(server, timeout=SHORT).nap(seconds)
        return await late(call, or_value=seconds)

    # ── streams ─────────────────────────────────────────────────────────────────────────────────

    def _stream(self, server: Any, start: int, count: int) -> Any:
        method = self.random.choice([server.stream, server.stream_in_thread])
        return method(start, count)

    async def stream(self) -> str:
        server, start = self._draw()
        count = self.random.choice([0, 1, 10, 200])
        expect(
            [x async for x in self._stream(server, start, count)], [*range(start, start + count)]
        )
        return f"{count} items"

    async def leave_stream(self) -> str:
        server, start = self._draw()
        taken, enough = 0, self.random.choice([1, 10, 150])
        async for token in self._stream(server, start, ENDLESS):
            expect(token, start + taken)
            taken += 1
            if taken == enough:
                break
        expect(taken, enough)
        return f"left after {enough}"

    async def broken_stream(self) -> str:
        server, start = self._draw()
        due = start
        try:
            async for token in server.broken_stream(start, 5):
                expect(token, due)
                due += 1
        except Refused as exc:
            expect((exc.token, due), (start, start + 5))
            return "Refused"
        raise Unexpected("the stream ended without its error")


# ── ends of a call ──────────────────────────────────────────────────────────────────────────────


async def refused(call: Awaitable[Any], token: int) -> str:
    try:
        got = await call
    except Refused as exc:
        expect((exc.token, type(exc.__cause__)), (token, RemoteTraceback))
        return "Refused"
    no_value(got)


async def failed(call: Awaitable[Any], kind: type[Exception]) -> str:
    try:
        got = await call
    except kind as exc:
        expect("pickling" in "".join(exc.__notes__), True)
        return kind.__name__
    no_value(got)


async def cancelled(call: Any, seconds: float, or_value: Any = None) -> str:
    """Cancel a call after `seconds`; return how it ended."""
    task = asyncio.create_task(call)
    await asyncio.sleep(seconds)
    task.cancel()
    try:
        got = await task
    except asyncio.CancelledError:
        return "cancelled"
    expect(got, or_value) if or_value is not None else no_value(got)
    return "value"


async def late(call: Awaitable[Any], or_value: Any = None) -> str:
    try:
        got = await call
    except CallTimeout:
        return "CallTimeout"
    expect(got, or_value) if or_value is not None else no_value(got)
    return "value"


def no_value(got: Any) -> NoReturn:
    raise Unexpected(f"got {got!r} in place of an exception")


KINDS: dict[Callable[[Caller], Awaitable[str]], int] = {
    Caller.plain: 20,
    Caller.on_loop: 20,
    Caller.batch: 15,
    Caller.tensor: 10,
    Caller.relay: 6,
    Caller.error: 6,
    Caller.unsendable: 2,
    Caller.unreadable: 2,
    Caller.cancel: 3,
    Caller.cancel_far: 2,
    Caller.cancel_batch: 2,
    Caller.cancel_nap: 2,
    Caller.timeout: 2,
    Caller.timeout_far: 1,
    Caller.timeout_nap: 2,
    Caller.stream: 2,
    Caller.leave_stream: 2,
    Caller.broken_stream: 1,
}
"""Each kind of call, and its share in percent."""
