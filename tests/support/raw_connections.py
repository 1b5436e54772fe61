"""A connection whose bytes tests write by hand, and a recorder of the frames that are sent."""

import asyncio
import contextlib
import os
import warnings
from collections.abc import Coroutine, Iterator
from dataclasses import astuple
from typing import Any

from torch.distributed import rpc

from aiorpc_torch import _channel as channel, call
from aiorpc_torch._aio.sockets import connect_unix
from aiorpc_torch._client import pool
from aiorpc_torch._endpoint import entry_points
from aiorpc_torch._peers.peers import Peer
from aiorpc_torch._server import result_sender, session
from aiorpc_torch._server.server import Server
from aiorpc_torch._torch.agent import PeerInfo
from aiorpc_torch._wire import plain
from aiorpc_torch._wire.frames import (
    CALLS,
    CLOSE,
    HEADER,
    RESULTS,
    SHARED,
    SLOT,
    TRANSFERRED,
    WHERE,
    FrameReader,
    frame,
)
from aiorpc_torch._wire.handshake import (
    NONCE,
    PROOF,
    Addresses,
    Credentials,
    encode_hello,
    is_callee_proven,
    new_nonce,
)
from tests.support.malformed import dump

read = plain.reader(Any)

SOON = 30.0  # seconds after which something will never happen
CONNECTION = 1 << 40  # no connection of ours has that number


def server() -> Server:
    """This process's."""
    found = entry_points.serving()
    assert found is not None
    return found


def introduction(caller: str = "stranger") -> tuple[Credentials, Addresses]:
    """As torch's RPC would bring it to that caller."""
    listener = server()._listener
    assert listener is not None
    return listener.introduce(Peer(PeerInfo(caller, 0, rpc.get_worker_info().id, "")))


class Stranger:
    """One end of a connection to this process's worker."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self.session: Any = None  # what the worker has of it, once it is proven

    @classmethod
    async def come(cls, kind: str = "unix") -> "Stranger":
        """Connect, and prove nothing."""
        _, addresses = introduction()
        if kind == "unix":
            unix = connect_unix(addresses.unix)  # uvloop connects to no abstract address itself
            return cls(*await asyncio.open_unix_connection(sock=unix))
        assert addresses.tcp is not None
        return cls(*await asyncio.open_connection(*addresses.tcp))

    @classmethod
    async def proven(cls, kind: str = "unix", number: int = CONNECTION) -> "Stranger":
        """Connect as an honest caller does."""
        stranger = await cls.come(kind)
        credentials, _ = introduction()
        theirs, mine = await stranger.nonce(), new_nonce()
        stranger.writer.write(encode_hello(credentials, number, theirs, mine))
        proof = await stranger.reader.readexactly(PROOF)
        assert is_callee_proven(credentials, number, theirs, mine, proof)
        stranger.session = server().sessions[(*astuple(credentials.caller), number)]
        return stranger

    async def nonce(self) -> bytes:
        return await self.reader.readexactly(NONCE)

    def send(self, kind: int, fields: Any) -> None:
        """One frame: of bytes, or of plain values."""
        self.writer.write(frame(kind, dump(fields)))

    async def frame(self, *, is_plain: bool = True) -> tuple[int, Any] | None:
        """Kind and content of the next frame, or its bytes if not `is_plain`; None at the end."""
        async with asyncio.timeout(SOON):
            with contextlib.suppress(OSError, asyncio.IncompleteReadError):
                length, kind = HEADER.unpack(await self.reader.readexactly(HEADER.size))
                data = await self.reader.readexactly(length)
                return kind, read(data) if is_plain else data
        return None

    async def frames(self) -> list[tuple[int, Any]]:
        """All that come until the end."""
        return [found async for found in self]

    async def __aiter__(self) -> Any:
        while (found := await self.frame()) is not None:
            yield found

    async def is_refused(self) -> None:
        """Nothing comes any more."""
        async with asyncio.timeout(SOON):
            with contextlib.suppress(OSError):
                assert await self.reader.read() == b""
        await self.leave()

    async def leave(self) -> None:
        """Close it, and wait until the worker has seen that."""
        self.writer.close()
        with contextlib.suppress(OSError):
            await self.writer.wait_closed()
        if self.session is not None:
            async with asyncio.timeout(SOON):
                await self.session.ended.wait()


NAMES = {
    CALLS: "calls",
    RESULTS: "results",
    SLOT: "slot",
    CLOSE: "close",
    SHARED: "shared",
    TRANSFERRED: "transferred",
    WHERE: "where",
}


class Tap:
    """The frames that leave on all connections of this process, in order."""

    def __init__(self, patch: Any) -> None:
        self.frames: list[tuple[str, int, bytes]] = []
        write = channel.Channel.write

        def tapped(end: channel.Channel, data: bytes) -> None:
            reader = FrameReader()
            view = memoryview(data)
            while view:
                count = min(len(view), len(buffer := reader.buffer()))
                buffer[:count] = view[:count]
                reader.end += count
                view = view[count:]
                while (found := reader.next()) is not None:
                    self.frames.append((type(end).__name__, *found))
            write(end, data)

        patch.setattr(channel.Channel, "write", tapped)

    @property
    def names(self) -> list[str]:
        """The kind of each frame: "calls", "results", "slot", "shared", and so on, or "other"."""
        return [NAMES.get(kind, "other") for _, kind, _ in self.frames]

    def count(self, name: str) -> int:
        """How many frames of that kind there were."""
        return self.names.count(name)

    def closes(self) -> list[bytes]:
        """Return the closing frames of this process's own connections."""
        return [data for end, kind, data in self.frames if kind == CLOSE and end == "Connection"]


# ── callers ─────────────────────────────────────────────────────────────────────────────────────


def start(*coroutines: Coroutine[Any, Any, Any]) -> list["asyncio.Task[Any]"]:
    return [asyncio.ensure_future(each) for each in coroutines]


async def ends(*tasks: "asyncio.Task[Any]") -> list[Any]:
    async with asyncio.timeout(SOON):
        return await asyncio.gather(*tasks, return_exceptions=True)


def call_on_a_loop(number: int, worker: str = "main") -> int:
    async def ask() -> int:
        return int(await call(worker, int, number))

    return asyncio.run(ask())


@contextlib.contextmanager
def child() -> Iterator[None]:
    """A forked process that does nothing but keep its descriptors, until the end of the block."""
    here, there = os.pipe()
    begun, begins = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # 3.12: this process has threads
        pid = os.fork()
    if pid == 0:
        os.close(there)
        os.write(begins, b"x")
        os.read(here, 1)
        os._exit(0)
    try:
        os.read(begun, 1)
        yield
    finally:
        os.close(there)
        os.waitpid(pid, 0)
        for each in (here, begun, begins):
            os.close(each)


# ── on workers of other processes ───────────────────────────────────────────────────────────────


def sessions() -> list[str]:
    """Who has a connection to this worker."""
    return [caller for caller, _, _ in server().sessions]


async def ask(worker: str, number: int) -> int:
    """Call another worker from here."""
    return int(await call(worker, int, number))


async def send_junk(to: str, frames: list[tuple[int, bytes]]) -> int:
    """Send each frame on a connection of its own; how many of those were answered or closed."""
    connections = pool.current()
    answered = 0
    for number, (kind, data) in enumerate(frames):
        peer = connections._members.workers[to]
        junk = Junk(frame(kind, data))
        await connections._introductions.connect(peer, CONNECTION + number, junk.start)
        async with asyncio.timeout(SOON):
            await junk.answered.wait()
        answered += 1
        junk.transport.abort()
    return answered


class Junk(asyncio.Protocol):
    """Sends something after the handshake, and waits for whatever comes."""

    transport: asyncio.Transport

    def __init__(self, data: bytes) -> None:
        self.answered = asyncio.Event()
        self._data = data

    def start(self, transport: asyncio.Transport, _: bytes) -> None:
        self.transport = transport
        transport.set_protocol(self)
        transport.write(self._data)

    def data_received(self, _: bytes) -> None:
        self.answered.set()

    def connection_lost(self, _: Exception | None) -> None:
        self.answered.set()


async def answer_junk(junk: bytes) -> None:
    """The result after this one is junk."""
    # Of a lone result, and of all others.
    real_lone, real_frame = session.dump, result_sender.frame
    left: list[bytes | None] = [junk, None]

    def lied(data: bytes) -> bytes:
        if (lie := left.pop()) is None:
            return data
        session.dump, result_sender.frame = real_lone, real_frame
        return lie

    def lying_lone(*result: Any) -> bytes:
        return lied(real_lone(*result))

    def lying_frame(kind: int, data: bytes) -> bytes:
        return real_frame(kind, lied(data) if kind == RESULTS else data)

    session.dump, result_sender.frame = lying_lone, lying_frame
