"""What is called in a context of torch's distributed autograd: by its opener, or by one call in it.

torch records a message in the context that is open in the thread that sends it, and on an event
loop one thread sends for everybody. So the context is known by a context variable, and open in the
thread only while a message of its own is sent. Knows contexts and the calls in them; not links,
and not how a call is answered.
"""

import asyncio
import threading
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any, TypeVar

import torch
from torch import Tensor

from .._torch.autograd import arrive, cut, leave
from .._torch.compat import RawFuture, autograd_context
from .._torch.transport import in_autograd_context, transport_error
from ..errors import RpcError
from .exceptions import Failure

T = TypeVar("T")

Answer = Any
"""What answers a message: bytes; or bytes, tensors, a token or None, and which calls were lost."""


class Recording:
    """The calls that are made in context `number` by one opener of it, or by one call in it.

    It is settled when all of them are answered. In any thread.
    """

    def __init__(self, number: int, end: Tensor | None = None) -> None:
        self.id = number
        self.carries = end is not None  # gradients, back to whoever called
        self.is_open = True
        self.lost: list[str] = []  # calls for which no gradient will ever come back
        self.keeps_graph = True
        self._ends = [] if end is None else [end]
        self._keeps_ends = True
        self._closes = False  # as soon as it is settled
        self._made: dict[str, int] = {}
        self.peers: set[str] = set()  # of whom they were made
        self._pending: dict[object, str] = {}
        self._settled: list[Callable[[], None]] = []
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        state = "open" if self.is_open else "closed"
        return f"<Recording in context {self.id}, {state}, {len(self._pending)} calls pending>"

    @property
    def ends(self) -> list[Tensor]:
        """Where a backward has to start beside its roots."""
        return self._ends[:]

    @property
    def pending(self) -> list[str]:
        """The calls that have not been answered."""
        return [*self._pending.values()]

    def begin(self, name: str, peer: str, among: "set[Recorded]") -> "Recorded | None":
        """A call of that name is made, of `peer`; None if it comes too late to be recorded.

        It is in the set `among` until it is answered.
        """
        what = f"{name} of worker {peer!r}"
        with self._lock:
            if not self.is_open:
                return None
            recorded = Recorded(self, what, peer, among)
            self._pending[recorded] = what
            self._made[what] = self._made.get(what, 0) + 1
            self.peers.add(peer)
        return recorded

    def made(self) -> str:
        """The calls that were made, in words."""
        counts = [*self._made.items()]
        return ", ".join(f"{what} ({count})" for what, count in counts) or "no calls at all"

    def hold(self, key: object, what: str) -> None:
        """It is not settled before that has `ended`."""
        with self._lock:
            self._pending[key] = what

    def hold_settled(self, key: object, what: str) -> list[Tensor] | None:
        """`hold`, if all is answered: the ends of all. None if something is not."""
        with self._lock:
            if self._pending:
                return None
            self._pending[key] = what
            return self._ends[:]

    def ended(self, key: object, end: Tensor | None = None) -> None:
        """A call has been answered."""
        with self._lock:
            self._pending.pop(key, None)
            if end is not None and self._keeps_ends:
                self._ends.append(end)
            if self._pending:
                return
            settled, self._settled = self._settled, []
            self.is_open = self.is_open and not self._closes
        for then in settled:
            then()

    def when_settled(self, then: Callable[[], None], *, close: bool = False) -> None:
        """Call `then`, at once or on any thread, once all calls that were made are answered.

        With `close`, nothing is recorded from that very moment: another thread may be about to.
        """
        with self._lock:
            self._closes = self._closes or close
            if self._pending:
                self._settled.append(then)
                return
            self.is_open = self.is_open and not self._closes
        then()

    def leave_graph(self, name: str) -> None:
        """What `name` computes for this call is for callers in other contexts as well.

        Raises:
            TypeError: if gradients of its arguments are asked for.
        """
        if self.carries:
            raise TypeError(
                f"{name} computes for calls in many autograd contexts together, so no gradient can "
                "come back: detach() its arguments"
            )
        self.keeps_graph = False

    def close(self) -> None:
        """From now on nothing is recorded, and no graph is kept: a task may keep this for long."""
        with self._lock:
            self.is_open = self._keeps_ends = False
            self._ends.clear()

    def run(self, function: Callable[[], T]) -> T:
        """Run `function` with the context open in this thread, for what calls by plain torch."""
        with in_autograd_context(self.id):
            return function()


class Recorded:
    """One call in a context, on the caller's side."""

    __slots__ = ("_among", "_carries", "_peer", "_recording", "_what")

    def __init__(self, recording: Recording, what: str, peer: str, among: "set[Recorded]") -> None:
        self._recording = recording
        self._what = what
        self._peer = peer
        self._carries = False
        self._among = among
        among.add(self)

    def __repr__(self) -> str:
        return f"<Recorded {self._what} in {self._recording!r}>"

    @property
    def context(self) -> int:
        """The id of the context."""
        return self._recording.id

    def leave(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """What to send for its arguments' tensors."""
        if not torch.is_grad_enabled():  # torch would send them as leaves, to nobody's use
            return cut(tensors)
        self._carries = any(tensor.requires_grad for tensor in tensors)
        return leave(tensors)[0]

    def done(self, answer: "RawFuture[Any]") -> None:
        """Its message is answered, or will not be. In any thread: its loop may be closed by now."""
        try:
            results = answer.wait()
            if isinstance(results, Failure):
                results.get()
            self.answered(results)
        except BaseException as exc:  # of whatever class the peer names
            self.failed(exc if isinstance(exc, RpcError) else transport_error(exc, self._peer))

    def answered(self, answer: Answer) -> None:
        """Its message was answered."""
        end = None
        if isinstance(answer, tuple):
            _, tensors, token, lost = answer
            end = arrive(tensors, token)
            self._recording.lost += lost
        if self._carries and end is None:
            self.failed("was answered without having been served")
        else:
            self._end(end)

    def failed(self, why: object) -> None:
        """No answer came, or none ever will."""
        if self._carries and self in self._among:
            self._recording.lost.append(f"{self._what}: {why}")
        self._end(None)

    def _end(self, end: Tensor | None) -> None:
        self._among.discard(self)
        self._recording.ended(self, end)


def plain_answer(answer: Answer) -> Answer:
    """The answer to a message in a context, without what is added for gradients."""
    return answer[:2] if isinstance(answer, tuple) else answer


# ── in which context this is ────────────────────────────────────────────────────────────────────

_current: ContextVar[Recording | None] = ContextVar("aiorpc_recording", default=None)


def entered() -> Recording | None:
    """What this task, or thread, is a part of."""
    return _current.get()


def enter(recording: Recording | None) -> None:
    """From now on, this is a part of it."""
    _current.set(recording)


def current() -> Recording | None:
    """Where a call that is made here is recorded; also in a context that plain torch has opened.

    None under no_grad(): torch would record one end of it, and then wait for the other.
    """
    found = _current.get()
    if found is not None and found.is_open:
        return found if torch.is_grad_enabled() else None
    return in_torchs()


def in_torchs() -> Recording | None:
    """What is called in the context that is open in this thread, if one is."""
    number = autograd_context()
    return None if number < 0 else Recording(number)


async def settle(recording: Recording) -> None:
    """Wait until all its calls are answered."""
    loop = asyncio.get_running_loop()
    settled = asyncio.Event()

    def tell() -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(settled.set)

    if recording.pending:
        recording.when_settled(tell)
        await settled.wait()
