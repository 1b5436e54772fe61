"""When the calls and the results of one connection leave, and how many together.

Pure state machines without a loop, a clock or torch. `SendState` is the caller's, `ReplyState` the
callee's. Their drivers are `_client.connection` and `_server.session`.

A lone call and a lone result leave at once: a loop iteration more would be a tenth of a lone call.
What others join leaves at the end of the iteration, as one frame: callers that were woken together
call again together, and a straggler that left before the others would split their batch.
(tests/test_connection_state.py)
"""

from collections import deque
from collections.abc import Callable, Container, Iterator, Sequence
from typing import Any, Generic, Protocol, TypeVar

from .window import Window

MAX_CALLS = 256
"""Calls or results in one frame, and in one callback of the loop."""

FRAME_BYTES = 512 * 1024
"""Bytes of calls or results that are put into one frame, if it has more than one."""


class Sendable(Protocol):
    """What the queue has to know of a call."""

    @property
    def number(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def by_torch(self) -> bool: ...


C = TypeVar("C", bound=Sendable)


class SendState(Generic[C]):
    """The calls of a connection that have not left, and the window of those that have.

    Args:
        pending: numbers of the calls that somebody waits for; a call that is not among them any
            more when its turn comes is dropped.
        window: bounds what was sent and is not answered.
        drop: called for each dropped call.
    """

    def __init__(self, pending: Container[int], window: Window, drop: Callable[[C], None]) -> None:
        self.window = window
        self.woken = 0  # callers that the last read has woken
        self.is_paused = True  # until the connection is open, and while its socket is full
        self.cancels: list[int] = []
        self.credits: list[tuple[int, int]] = []
        self._pending = pending
        self._queue: deque[C] = deque()
        self._drop = drop

    def __repr__(self) -> str:
        state = "paused" if self.is_paused else "open"
        return f"<SendState {state}, {len(self._queue)} unsent, {self.window!r}>"

    def __len__(self) -> int:
        return len(self._queue)

    def submit(self, call: C, *, is_idle: bool) -> bool:
        """Queue a call; return whether to send now, and not at the end of the loop iteration.

        Args:
            call: the call.
            is_idle: whether no other call of this connection is pending.
        """
        self._queue.append(call)
        return (is_idle and self.woken == 1) or len(self._queue) >= MAX_CALLS

    def may_send_alone(self) -> bool:
        """Return whether a call on an idle connection may leave at once, without the queue."""
        is_free = self.woken == 1 and not self.is_paused and not self._queue
        return is_free and not self.cancels and not self.credits and not len(self.window)

    def cancel(self, number: int) -> bool:
        """Return whether the peer has to be told that nobody waits for that call."""
        if number not in self.window:  # it has not left and will not
            return False
        self.cancels.append(number)
        return True

    def take(self) -> list[C]:
        """Return the calls of the next frame that may leave; one that goes by torch is alone."""
        if not self._queue or self.is_paused:
            return []
        return self._next_batch()

    def controls(self) -> tuple[list[int], list[tuple[int, int]]] | None:
        """Return cancellations and credit to be sent, None if there are none."""
        if not self.cancels and not self.credits:
            return None
        found = self.cancels, self.credits
        self.cancels, self.credits = [], []
        return found

    def force(self) -> list[C]:
        """Return the next call whatever the window says, or nothing if none is left."""
        while self._queue:
            call = self._queue.popleft()
            if call.number in self._pending:
                self.window.sent(call.number, call.size)
                return [call]
            self._drop(call)
        return []

    def clear(self) -> list[int]:
        """Drop what has not left; return the numbers of calls that were sent and not answered."""
        for call in self._queue:
            self._drop(call)
        self._queue.clear()
        return self.window.clear()

    def _next_batch(self) -> list[C]:
        taken: list[C] = []
        size = 0
        while self._queue and len(taken) < MAX_CALLS:
            call = self._queue[0]
            if call.number not in self._pending:
                self._drop(self._queue.popleft())
                continue
            size += call.size
            if taken and (call.by_torch or size > FRAME_BYTES):
                break
            if not self.window.admits(call.size):
                break
            self.window.sent(call.number, call.size)
            taken.append(self._queue.popleft())
            if call.by_torch:
                break
        return taken


class ReplyState:
    """The results of a connection that have not left."""

    def __init__(self) -> None:
        self._results: list[tuple[Any, Any, Any]] = []
        self._sizes: list[int] = []

    def __repr__(self) -> str:
        return f"<ReplyState {len(self._results)} unsent>"

    def add(self, result: tuple[Any, Any, Any], size: int, *, is_last: bool) -> bool:
        """Queue a result of `size` bytes; return whether to send now.

        Args:
            result: what is sent.
            size: its bytes, roughly.
            is_last: whether no other call of this connection is running.
        """
        self._results.append(result)
        self._sizes.append(size)
        return is_last and len(self._results) == 1

    def batches(self) -> Iterator[Sequence[tuple[Any, Any, Any]]]:
        """Yield the results of each frame, all that there are."""
        results, sizes = self._results, self._sizes
        self._results, self._sizes = [], []
        if len(results) == 1:
            yield results
            return
        start = size = 0
        for index, each in enumerate(sizes):
            size += each
            if index > start and (size > FRAME_BYTES or index - start >= MAX_CALLS):
                yield results[start:index]
                start, size = index, each
        if start < len(results):
            yield results[start:]
