"""A worker's watch over its peers: whoever is lost is told to those who wait for it.

The connections of a killed peer end. It is asked at once whether it lives, and torch says that it
does not. The connections of one that is frozen or cut off do not end: it is asked when it has been
silent for some time. A thread of torch's answers, so a busy loop is no lost worker. When to ask
and whom to give up is `_pulse`'s to decide.
"""

import asyncio
import contextlib
import functools
import logging
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from .._client.pool import Outbox
from .._protocol import endpoints
from .._server.server import Server
from .._torch.agent import Member
from .._torch.compat import RawFuture
from .._torch.transport import send, transport_error, when_done
from ..errors import RemoteTraceback, RpcError, WorkerLost
from .heartbeat import Pulse

log = logging.getLogger("aiorpc_torch")


class Vigil:
    """On the loop that it was made on, until `close`."""

    def __init__(
        self, outbox: Outbox, server: Server, members: Sequence[Member], heartbeat: float
    ) -> None:
        self.gone: dict[str, RpcError] = {}  # the lost, and how they were
        self._outbox = outbox
        self._server = server
        self._peers = {each.name: each.info for each in members if each.name != outbox.name}
        self._heartbeat = heartbeat
        self._pulse = Pulse(heartbeat)
        self._loop = asyncio.get_running_loop()
        self._open = True
        self.on_loss: Callable[[RpcError], None] | None = None
        self._for_good: dict[str, RpcError] = {}
        self._back: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)
        self._asked: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)
        self._timer = self._loop.call_later(self._pulse.interval, self._look)
        self.has_left: Callable[[str], Awaitable[bool]] = _nobody_has
        self._tasks: set[asyncio.Task[None]] = set()
        outbox.heard = server.observed = self._heard
        outbox.suspected = server.suspected = self._suspected
        outbox.parted = self._parted
        server.peers.failed = self._failed
        for caller in server.callers():  # who was quicker than this worker's start
            self._heard(caller)

    def __repr__(self) -> str:
        return f"<Vigil of {self._outbox.name}: {self._pulse}, lost: {', '.join(self.gone)}>"

    def close(self) -> None:
        """Watch no more."""
        self._open = False
        self._timer.cancel()

    async def presence(self, peer: str) -> None:
        """Wait until a peer that is lost is back; return at once if it is not lost.

        Raises:
            WorkerLost: if it will not come back.
        """
        if peer in self._asked:  # it is not known yet whether it lives
            await self._asked[peer].wait()
        if peer in self.gone:
            await self._back[peer].wait()
        if (error := self._for_good.get(peer)) is not None:
            raise error

    def replace(self, member: Member) -> None:
        """A peer has a successor, which is watched from now on."""
        self._peers[member.name] = member.info
        self._heard(member.name)
        self._is_back(member.name)

    def give_up(self, peer: str, error: RpcError) -> None:
        """That peer will not come back."""
        self._for_good[peer] = error
        self.gone.setdefault(peer, error)
        self._back[peer].set()

    def _is_back(self, peer: str) -> None:
        self._asked[peer].set()
        if self.gone.pop(peer, None) is not None:
            log.info("%s: worker %r is back", self._outbox.name, peer)
            self._back.pop(peer, asyncio.Event()).set()

    def _heard(self, peer: str) -> None:
        """A message or an answer came. In any thread."""
        self._pulse.heard(peer, time.monotonic())
        if peer in self.gone:  # it was frozen, or cut off
            self._loop.call_soon_threadsafe(self._is_back, peer)

    def _suspected(self, peer: str, number: int) -> None:
        """A connection has ended without a last frame. In any thread."""
        if asyncio._get_running_loop() is self._loop:  # before those who waited go on
            self._ask(peer, number)
            return
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._ask, peer, number)

    def _parted(self, peer: str, number: int, what: str, text: str) -> None:
        """A peer has closed a connection and said why. In any thread."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._server.peers.part, peer, number, what, text)

    def ask(self, peer: str) -> None:
        """Find out whether a peer lives: one that does not is lost."""
        self._ask(peer, self._peers[peer].id)

    def _ask(self, peer: str, number: int) -> None:
        if peer in self._peers and self._peers[peer].id == number:
            self._asked[peer].clear()
            self._send(peer, endpoints.ping, b"")

    def _look(self) -> None:
        waited_for = self._outbox.waited_for() | self._server.callers()
        ask, lost = self._pulse.look(time.monotonic(), waited_for & self._peers.keys())
        for peer in ask:
            self._send(peer, endpoints.ping, b"")
        for peer in lost:
            silence = f"no sign of life for {self._heartbeat:g} s"
            self._lost(peer, WorkerLost(peer, silence))
        self._timer = self._loop.call_later(self._pulse.interval, self._look)

    def _send(self, peer: str, door: Any, data: bytes) -> None:
        if not self._open:
            return
        info = self._peers[peer]
        try:
            answer = send(info, door, data)
        except Exception as exc:
            self._lost(peer, transport_error(exc, peer))
        else:
            when_done(answer, functools.partial(self._answered, peer, info.id))

    def _answered(self, peer: str, number: int, answer: "RawFuture[Any]") -> None:
        if self._peers[peer].id != number:
            return  # of a predecessor
        try:
            answer.wait()
        except BaseException as exc:  # of whatever class the peer names
            self._lost(peer, transport_error(exc, peer))
        else:
            self._asked[peer].set()
            self._heard(peer)

    def _failed(self, peer: str, failure: str) -> None:
        """It says so itself, and leaves."""
        summary, _, text = failure.partition("\n")
        error = WorkerLost(peer, summary)
        error.__cause__ = RemoteTraceback(peer, text) if text else None
        self._lost(peer, error)

    def _lost(self, peer: str, error: RpcError) -> None:
        if not self._open:
            return
        log.info("%s: %s", self._outbox.name, error)
        self.gone[peer] = error
        self._asked[peer].set()
        self._outbox.lost(peer, error)
        self._server.lost(peer)
        if self.on_loss is not None and peer not in self._server.peers.goodbyes:
            task = self._loop.create_task(self._tell_unless_left(peer, error))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        elif self.on_loss is not None and self._server.peers.goodbyes[peer]:
            self.on_loss(error)

    async def _tell_unless_left(self, peer: str, error: RpcError) -> None:
        """Who has left in order may be gone before this worker is."""
        if not await self.has_left(peer) and self.on_loss is not None:
            self.on_loss(error)


async def _nobody_has(_: str) -> bool:
    return False
