"""What is called in a context of torch's distributed autograd: by its opener, or by one call in it.

torch records a message in the context that is open in the thread that sends it, and on an event
loop one thread sends for everybody. So the context is known by a context variable, and open in the
thread only while a message of its own is sent. Knows contexts and the calls in them; not links,
and not how a call is answered.
"""

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any, TypeVar

import torch
from torch import Tensor

from ._bridge import autograd_context, in_autograd_context
from ._passage import arrive, cut, leave

log = logging.getLogger("aiorpc_torch")

T = TypeVar("T")

Answer = Any
"""What answers a message: bytes; or bytes, tensors and which calls were never answered."""


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
        self._made: dict[str, int] = {}
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

    def begin(self, what: str, among: "set[Recorded]") -> "Recorded | None":
        """A call of that name is made; None if it comes too late to be recorded.

        It is in the set `among` until it is answered.
        """
        with self._lock:
            if not self.is_open:
                return None
            recorded = Recorded(self, what, among)
            self._pending[recorded] = what
            self._made[what] = self._made.get(what, 0) + 1
        return recorded

    def made(self) -> str:
        """The calls that were made, in words."""
        counts = [*self._made.items()]
        return ", ".join(f"{what} ({count})" for what, count in counts) or "no calls at all"

    def hold(self, key: object, what: str) -> None:
        """It is not settled before that has `ended`."""
        with self._lock:
            self._pending[key] = what

    def ended(self, key: object, end: Tensor | None = None) -> None:
        """A call has been answered."""
        with self._lock:
            self._pending.pop(key, None)
            if end is not None:
                self._ends.append(end)
            settled, self._settled = ([], self._settled) if self._pending else (self._settled, [])
        for then in settled:
            then()

    def when_settled(self, then: Callable[[], None]) -> None:
        """Call `then`, at once or on any thread, once all calls that were made are answered."""
        with self._lock:
            if self._pending:
                self._settled.append(then)
                return
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
        """From now on nothing is recorded."""
        with self._lock:
            self.is_open = False

    def run(self, function: Callable[[], T]) -> T:
        """Run `function` with the context open in this thread, for what calls by plain torch."""
        with in_autograd_context(self.id):
            return function()


class Recorded:
    """One call in a context, on the caller's side."""

    __slots__ = ("_among", "_carries", "_recording", "_what")

    def __init__(self, recording: Recording, what: str, among: "set[Recorded]") -> None:
        self._recording = recording
        self._what = what
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
        sent = leave(tensors)
        self._carries = len(sent) > len(tensors)
        return sent

    def answered(self, answer: Answer) -> Answer:
        """Its message was answered: the answer, without what is added for gradients."""
        end = None
        if isinstance(answer, tuple):
            data, tensors, lost = answer
            tensors, end = arrive(tensors)
            answer = data, tensors
            self._recording.lost += lost
        if self._carries and end is None:
            self.failed("was answered without having been served")
        else:
            self._end(end)
        return answer

    def failed(self, why: object) -> None:
        """No answer came, or none ever will."""
        if self._carries and self in self._among:
            self._recording.lost.append(f"{self._what}: {why}")
        self._end(None)

    def _end(self, end: Tensor | None) -> None:
        self._among.discard(self)
        self._recording.ended(self, end)


class Reply:
    """Stands for the future of a message in a context, and completes it when all is settled.

    What the call has called in turn is answered by then, even if nobody waited for it: or its
    gradients would be waited for by torch, for ever, and the context be made anew by its answer.
    """

    def __init__(self, future: Any, recording: Recording) -> None:
        self.recording = recording
        self._future = future

    def set_result(self, answer: Any) -> None:
        """Answer with bytes, or with bytes and tensors."""
        self.recording.when_settled(lambda: self._complete(answer))

    def _complete(self, answer: Any) -> None:
        recording = self.recording
        recording.close()
        data, tensors = (answer, []) if isinstance(answer, bytes) else answer
        lost = recording.lost[:]
        # On the loop's thread, in which a coroutine that waits may have left its no_grad().
        with torch.enable_grad():
            try:
                tensors = leave(tensors if recording.keeps_graph else cut(tensors), recording.ends)
            except Exception as exc:  # nobody must wait for an answer without end
                tensors = cut(tensors)
                lost.append(f"a result that autograd does not take: {exc!r}")
            try:
                self._future.set_result((data, tensors, lost) if tensors or lost else data)
            except Exception as exc:  # torch has stopped: nobody is there to be answered
                log.debug("no answer in context %d: %s", recording.id, exc)


def recorded(context: int, future: Any, tensors: Sequence[Tensor]) -> tuple[Any, Sequence[Tensor]]:
    """A message of that context, -1 of none, has come in: what answers it, and its tensors."""
    if context < 0:
        return future, tensors
    tensors, end = arrive(tensors)
    return Reply(future, Recording(context, end)), tensors


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
