"""A worker's watch over its peers: whoever is lost is told to those who wait for it.

A killed peer breaks what is outstanding with it: a caller always has a message outstanding, and
for the callee a watch that the caller never answers stands in. One that is frozen or cut off breaks
nothing: it is asked, and an RPC thread of its answers, so a busy loop is no lost worker. When to
ask and whom to give up is `_pulse`'s to decide.
"""

import asyncio
import functools
import logging
import time
from collections.abc import Sequence
from typing import Any

from torch._C import Future
from torch._C._distributed_rpc import WorkerInfo

from . import _doors
from ._bridge import send, transport_error, when_done
from ._outbox import Outbox
from ._pulse import Pulse
from ._server import Server
from .errors import RpcError, WorkerLost

log = logging.getLogger("aiorpc_torch")


class Vigil:
    """On the loop that it was made on, until `close`."""

    def __init__(
        self, outbox: Outbox, server: Server, workers: Sequence[WorkerInfo], heartbeat: float
    ) -> None:
        self._outbox = outbox
        self._server = server
        self._workers = {info.name: info for info in workers if info.name != outbox.name}
        self._heartbeat = heartbeat
        self._pulse = Pulse(heartbeat)
        self._loop = asyncio.get_running_loop()
        self._met: set[str] = set()
        self._open = True
        self._timer = self._loop.call_later(self._pulse.interval, self._look)
        outbox.heard = server.heard = self._heard
        for caller in server.callers():  # who was quicker than this worker's start
            self._heard(caller)

    def __repr__(self) -> str:
        return f"<Vigil of {self._outbox.name}: {self._pulse}>"

    def close(self) -> None:
        """Watch no more."""
        self._open = False
        self._timer.cancel()

    def _heard(self, peer: str) -> None:
        """A message or an answer came. In any thread."""
        self._pulse.heard(peer, time.monotonic())
        if peer not in self._met and peer in self._workers:
            self._met.add(peer)
            self._loop.call_soon_threadsafe(self._watch, peer)

    def _watch(self, peer: str) -> None:
        self._send(peer, _doors.watch, self._outbox.name.encode())

    def _look(self) -> None:
        waited_for = self._outbox.waited_for() | self._server.callers()
        ask, lost = self._pulse.look(time.monotonic(), waited_for & self._workers.keys())
        for peer in ask:
            self._send(peer, _doors.ping, b"")
        for peer in lost:
            silence = f"no sign of life for {self._heartbeat:g} s"
            self._lost(peer, WorkerLost(peer, silence))
        self._timer = self._loop.call_later(self._pulse.interval, self._look)

    def _send(self, peer: str, door: Any, data: bytes) -> None:
        if not self._open:
            return
        try:
            answer = send(self._workers[peer], door, data)
        except Exception as exc:
            self._lost(peer, transport_error(exc, peer))
        else:
            when_done(answer, functools.partial(self._answered, peer))

    def _answered(self, peer: str, answer: "Future[Any]") -> None:
        try:
            answer.wait()
        except BaseException as exc:  # of whatever class the peer names
            self._lost(peer, transport_error(exc, peer))
        else:
            self._pulse.heard(peer, time.monotonic())

    def _lost(self, peer: str, error: RpcError) -> None:
        if self._open:
            log.info("%s: %s", self._outbox.name, error)
            self._outbox.lost(peer, error)
            self._server.lost(peer)
