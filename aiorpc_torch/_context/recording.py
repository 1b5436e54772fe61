"""Records of the calls that are made in a context of torch's distributed autograd.

torch records a message in the context that is open in the sending thread. On an event loop one
thread sends for every task. So a context variable holds the context. It is open in the thread only
while one of its messages is sent. A thread for each context would cost each call two more changes
of threads.
"""

import asyncio
import threading
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from .._aio.loops import call_soon
from .._torch.autograd import attach_recv_edge, attach_send_edges, detach_all
from .._torch.compat import RawFuture, current_context_id
from .._torch.transport import classify_error, enter_context_id
from .._wire.exceptions import RemoteFailure
from ..errors import RpcError

T = TypeVar("T")


class ContextRecord:
    """Calls in context `context_id`, made by its opener or by one call in it. Thread-safe.

    The record is settled when all these calls are answered. The record of a call, unlike that of an
    opener, begins with the call's own receive edge.
    """

    def __init__(self, context_id: int, recv_edge: Tensor | None = None) -> None:
        self.id = context_id
        self.carries = recv_edge is not None  # whether gradients go to the caller
        self.is_open = True
        self.lost: list[str] = []  # calls whose gradients are lost
        self.keeps_graph = True
        self._recv_edges = [] if recv_edge is None else [recv_edge]
        self._keeps_edges = True
        self._closes = False  # close as soon as the record is settled
        self._made: dict[str, int] = {}
        self.peers: set[str] = set()  # names of the callees
        self._pending: dict[object, str] = {}
        self._settled: list[Callable[[], None]] = []
        self._lock = threading.Lock()

    @property
    def recv_edges(self) -> list[Tensor]:
        """Return the receive edges: further roots of the backward pass."""
        return self._recv_edges[:]

    @property
    def pending(self) -> list[str]:
        """Return the names of unanswered calls."""
        return [*self._pending.values()]

    def begin(self, name: str, peer: str, among: "set[RecordedCall]") -> "RecordedCall | None":
        """Record a call of `name` on `peer`; return None if the record is closed.

        The call is in the set `among` until it is answered.
        """
        label = f"{name} of worker {peer!r}"
        with self._lock:
            if not self.is_open:
                return None
            recorded = RecordedCall(self, label, peer, among)
            among.add(recorded)
            self._pending[recorded] = label
            self._made[label] = self._made.get(label, 0) + 1
            self.peers.add(peer)
        return recorded

    def describe_calls(self) -> str:
        """Return the calls and their counts, as text for an error."""
        counts = [*self._made.items()]
        return ", ".join(f"{label} ({count})" for label, count in counts) or "no calls"

    def hold(self, key: object, label: str) -> None:
        """Keep the record unsettled until `release` is called for `key`."""
        with self._lock:
            self._pending[key] = label

    async def hold_when_settled(self, key: object, label: str) -> list[Tensor]:
        """Wait until the record is settled, hold it, and return its receive edges."""
        settled, loop = asyncio.Event(), asyncio.get_running_loop()
        while True:
            with self._lock:
                if not self._pending:
                    self._pending[key] = label
                    return self._recv_edges[:]
                settled.clear()
                self._settled.append(lambda: call_soon(loop, settled.set))
            await settled.wait()

    def release(self, key: object, recv_edge: Tensor | None = None) -> None:
        """Release a call or `key`; add the receive edge of its answer."""
        with self._lock:
            self._pending.pop(key, None)
            if recv_edge is not None and self._keeps_edges:
                self._recv_edges.append(recv_edge)
            if self._pending:
                return
            settled, self._settled = self._settled, []
            self.is_open = self.is_open and not self._closes
        for then in settled:
            then()

    def when_settled(self, then: Callable[[], None], *, close: bool = False) -> None:
        """Call `then` as soon as the record is settled, in any thread.

        With `close`, the record closes at the same moment, so no other thread adds a call.
        """
        with self._lock:
            self._closes = self._closes or close
            if self._pending:
                self._settled.append(then)
                return
            self.is_open = self.is_open and not self._closes
        then()

    def drop_graph(self, name: str) -> None:
        """Drop the graph of this call: `name` computes for several contexts together.

        Raises:
            TypeError: if the caller needs gradients of the arguments.
        """
        if self.carries:
            raise TypeError(
                f"{name} computes for several autograd contexts together and returns no gradient: "
                "detach() its arguments"
            )
        self.keeps_graph = False

    def close(self) -> None:
        """Record nothing more and drop the receive edges; a task may keep the record for long."""
        with self._lock:
            self.is_open = self._keeps_edges = False
            self._recv_edges.clear()

    def run(self, function: Callable[[], T]) -> T:
        """Run `function` with the context open in this thread, for calls by plain torch RPC."""
        with enter_context_id(self.id):
            return function()


@dataclass(slots=True, eq=False)
class RecordedCall:
    """A call in a context, at the caller. It is in `_among` until it is answered."""

    _record: ContextRecord
    _label: str
    _peer: str
    _among: "set[RecordedCall]"
    _carries: bool = False

    @property
    def context(self) -> int:
        """Return the id of the context."""
        return self._record.id

    def attach_arguments(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the tensors to send for the tensors of the arguments."""
        if not torch.is_grad_enabled():  # torch would send them as leaves, to no use
            return detach_all(tensors)
        self._carries = any(tensor.requires_grad for tensor in tensors)
        return attach_send_edges(tensors)[0]

    def done(self, answer: "RawFuture[Any]") -> None:
        """Handle the end of the torch message. In any thread, as the event loop may be closed."""
        try:
            results = answer.wait()
            if isinstance(results, RemoteFailure):
                results.raise_()
            self.answered(results)
        except BaseException as exc:  # of any class: the peer chooses it
            self.failed(exc if isinstance(exc, RpcError) else classify_error(exc, self._peer))

    def answered(self, answer: Any) -> None:
        """Handle the reply: bytes, or a tuple of bytes, tensors, a token, names of lost calls."""
        recv_edge = None
        if isinstance(answer, tuple):
            _, tensors, token, lost = answer
            recv_edge = attach_recv_edge(tensors, token)
            self._record.lost += lost
        if self._carries and recv_edge is None:
            self.failed("was answered without being served")
        else:
            self._end(recv_edge)

    def move(self, among: "set[RecordedCall]") -> None:
        """Be one of the unanswered calls of another connection."""
        self._among.discard(self)
        among.add(self)
        self._among = among

    def failed(self, why: object) -> None:
        """Note that no reply will arrive."""
        if self._carries and self in self._among:
            self._record.lost.append(f"{self._label}: {why}")
        self._end(None)

    def _end(self, recv_edge: Tensor | None) -> None:
        self._among.discard(self)
        self._record.release(self, recv_edge)


# ── the current record ─────────────────────────────────────────────────────────────────────────

_current: ContextVar[ContextRecord | None] = ContextVar("aiorpc_context_record", default=None)

current_record = _current.get
"""Return the record of this task or thread, None if there is none. A function of C."""


enter_record = _current.set
"""Make this task or thread a part of a record. A function of C."""


def record_for_call() -> ContextRecord | None:
    """Return the record for a call made now, also in a context opened by plain torch.

    Return None under no_grad(): torch would record one end only, and then wait for the other.
    """
    found = _current.get()
    if found is not None and found.is_open:
        return found if torch.is_grad_enabled() else None
    return record_of_torch_context()


def record_of_torch_context() -> ContextRecord | None:
    """Return a new record of the context that is open in this thread, None if there is none."""
    context_id = current_context_id()
    return None if context_id < 0 else ContextRecord(context_id)
