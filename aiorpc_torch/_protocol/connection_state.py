"""Decide when the calls and results of one connection are sent, and how many together.

State machines without an event loop, a clock or torch. The caller has a `SendState`, driven by
`_client.connection`. The callee has a `ReplyState`, driven by `_server.session`.

A lone call or result is sent at once: another loop iteration would be a tenth of a lone call. Calls
of one iteration are sent at its end, in one frame. Callers that were woken together call together
again; sending the first call early would split their batch.
(tests/unit/protocol/test_connection_state.py)
"""

from collections import deque
from collections.abc import Callable, Container, Iterator, Sequence
from typing import Any, Generic, Protocol, TypeVar

from .window import FlowWindow

MAX_CALLS = 256
"""Calls or results in one frame, and in one callback of the loop."""

FRAME_BYTES = 512 * 1024
"""Bytes of calls or results in one frame, unless it has only one."""


class Sendable(Protocol):
    """A call as the queue sees it."""

    @property
    def number(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def by_torch(self) -> bool: ...


C = TypeVar("C", bound=Sendable)


class SendState(Generic[C]):
    """Unsent calls of a connection, and the window of unanswered ones.

    Args:
        pending: Numbers of the calls that have a waiting caller; other calls are dropped, not sent.
        window: Bound of sent and unanswered calls.
        drop: Callback for each dropped call.

    Attributes:
        queue: the unsent calls.
        must_admit: whether the next frame has a call even if the window is full.
    """

    def __init__(
        self, pending: Container[int], window: FlowWindow, drop: Callable[[C], None]
    ) -> None:
        self.window = window
        self.woken = 0  # callers that the last read woke
        self.must_admit = False
        self.is_paused = True  # before the connection opens, and while its socket is full
        self.cancels: list[int] = []
        self.credits: list[tuple[int, int]] = []
        self.queue: deque[C] = deque()
        self._pending = pending
        self._drop = drop

    def __repr__(self) -> str:
        state = "paused" if self.is_paused else "open"
        return f"<SendState {state}, {len(self.queue)} unsent, {self.window!r}>"

    def __len__(self) -> int:
        return len(self.queue)

    def submit(self, call: C, *, is_idle: bool) -> bool:
        """Queue a call; return whether to send now instead of at the end of the iteration.

        The connection is idle if no other call of it is pending.
        """
        self.queue.append(call)
        return (is_idle and self.woken == 1) or len(self.queue) >= MAX_CALLS

    def may_send_alone(self) -> bool:
        """Return whether a call on an idle connection may skip the queue."""
        is_free = self.woken == 1 and not self.is_paused
        return is_free and not (self.queue or self.cancels or self.credits or self.window)

    def cancel(self, number: int) -> bool:
        """Return whether the peer must be told that this call was cancelled."""
        if number not in self.window:  # unsent: the call will be dropped
            return False
        self.cancels.append(number)
        return True

    def take(self) -> list[C]:
        """Return the calls of the next frame; a call whose payload goes by torch is alone."""
        taken: list[C] = []
        must_admit, self.must_admit = self.must_admit, False
        if self.is_paused:
            return taken
        size = 0
        while self.queue and len(taken) < MAX_CALLS:
            call = self.queue[0]
            if call.number not in self._pending:
                self._drop(self.queue.popleft())
                continue
            size += call.size
            if taken and (call.by_torch or size > FRAME_BYTES):
                break
            if not (self.window.admits(call.size) or (must_admit and not taken)):
                break
            self.window.sent(call.number, call.size)
            taken.append(self.queue.popleft())
            if call.by_torch:
                break
        return taken

    def controls(self) -> tuple[list[int], list[tuple[int, int]]] | None:
        """Return and forget the cancellations and credit to send, None if there are none."""
        if not self.cancels and not self.credits:
            return None
        found = self.cancels, self.credits
        self.cancels, self.credits = [], []
        return found

    def clear(self) -> list[int]:
        """Drop the unsent calls; return the numbers of the sent and unanswered ones."""
        for call in self.queue:
            self._drop(call)
        self.queue.clear()
        return self.window.release_all()


class ReplyState:
    """Unsent results of a connection."""

    def __init__(self) -> None:
        self.results: list[tuple[Any, Any, Any]] = []
        self._sizes: list[int] = []

    def __repr__(self) -> str:
        return f"<ReplyState {len(self.results)} unsent>"

    def add(self, result: tuple[Any, Any, Any], size: int, *, is_last: bool) -> bool:
        """Queue a result of some `size` bytes; return whether to send now.

        The last result is one while no other call of this connection is running.
        """
        self.results.append(result)
        self._sizes.append(size)
        return is_last and len(self.results) == 1

    def batches(self) -> Iterator[Sequence[tuple[Any, Any, Any]]]:
        """Yield the results of each frame until none is left."""
        results, sizes = self.results, self._sizes
        self.results, self._sizes = [], []
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
