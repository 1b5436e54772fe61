"""Two nodes in this process, joined by socket pairs: calls without torch's RPC and without a world.

`call("far", ...)` reaches the far node as it would reach another process. There are no RRefs.
"""

import asyncio
import contextlib
import socket
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextvars import ContextVar
from typing import Any

from aiorpc_torch._client.connection import Connection
from aiorpc_torch._client.introduction import Introductions, Start
from aiorpc_torch._endpoint import entry_points
from aiorpc_torch._node.config import NodeConfig
from aiorpc_torch._node.node import Node
from aiorpc_torch._peers.peers import Peers
from aiorpc_torch._server.exports import Export, checked_exports
from aiorpc_torch._server.server import Server
from aiorpc_torch._server.session import Session
from aiorpc_torch._torch.agent import PeerInfo
from aiorpc_torch._torch.compat import WorkerInfo
from aiorpc_torch._wire.handshake import read_number

WORKERS = [PeerInfo("near", 0, 0, ""), PeerInfo("far", 1, 1, "")]
SOON = 30.0  # seconds after which something will never happen
END = 0.5  # seconds for cancelled calls to end


class Gate:
    """Where calls of the far node wait, and what became of them."""

    def __init__(self) -> None:
        self.began = threading.Semaphore(0)
        self.is_open = threading.Event()
        self.cancelled = 0
        self._opened = asyncio.Event()

    def open(self) -> None:
        self.is_open.set()
        self._opened.set()

    async def wait_for(self, calls: int = 1) -> None:
        """Wait until so many further calls wait here."""
        for _ in range(calls):
            assert await asyncio.to_thread(self.began.acquire, timeout=SOON)

    async def pass_(self) -> None:
        self.began.release()
        try:
            await self._opened.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise


_gate: ContextVar[Gate] = ContextVar("gate")  # calls run in copies of the context of their node


async def gated(value: Any) -> Any:
    """To be called: returns its argument when the gate is open."""
    await _gate.get().pass_()
    return value


def gated_in_a_thread(value: Any) -> Any:
    """To be called: the same, as a plain function."""
    gate = _gate.get()
    gate.began.release()
    assert gate.is_open.wait(SOON)
    return value


async def until(is_true: Callable[[], object]) -> None:
    """Let the loop run on until this is true."""
    async with asyncio.timeout(SOON):
        while not is_true():  # noqa: ASYNC110 - of whatever kind it is
            await asyncio.sleep(0)


class SocketPairs(Introductions):
    """Connects to a server of this process."""

    def __init__(self, members: Peers, server: Server) -> None:
        super().__init__(members)
        self._server = server

    async def connect(self, peer: WorkerInfo, number: int, start: Start) -> None:
        loop = asyncio.get_running_loop()
        near, far = socket.socketpair()
        theirs, _ = await loop.create_connection(asyncio.Protocol, sock=far)
        self._server.accept(self._members.me, number).start(theirs)
        ours, _ = await loop.create_connection(asyncio.Protocol, sock=near)
        start(ours, b"")

    async def dial(self, peer: WorkerInfo, number: int) -> socket.socket:
        near, far = socket.socketpair()
        self._server.accept_socket(self._members.me, *read_number(number), far)
        return near


class TwoEnds:
    """A node that calls, and a node that is called."""

    def __init__(self, exports: Sequence[Export] | None) -> None:
        self.gate = Gate()
        _gate.set(self.gate)
        config = NodeConfig(
            threads=2, exports=None if exports is None else checked_exports(exports)
        )
        self.far = Node(Peers("far", WORKERS), config)
        members = Peers("near", WORKERS)
        pairs = SocketPairs(members, self.far.server)
        self.near = Node(members, NodeConfig(threads=1), introductions=pairs)

    @property
    def server(self) -> Server:
        return self.far.server

    @property
    def connection(self) -> Connection:
        """The caller's end; it opens with the first call."""
        return self.near.pool.connection("far")

    @property
    def session(self) -> Session:
        """The callee's end."""
        (session,) = self.server.sessions.values()
        return session


@contextlib.asynccontextmanager
async def two_ends(exports: Sequence[Export] | None = None) -> AsyncIterator[TwoEnds]:
    """Let `call` and its like reach the worker `far`."""
    ends = TwoEnds(exports)
    ends.near.pool.open()
    entry_points.enter(ends.near)
    try:
        yield ends
    finally:
        ends.gate.open()
        await ends.near.pool.close()
        for node in (ends.far, ends.near):
            node.membership.close()
            await node.server.close(END)
        entry_points.leave(ends.near)
