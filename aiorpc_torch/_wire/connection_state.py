"""Decide when the calls and results of one connection are sent, and how many together.

State machines without an event loop, a clock or torch. The caller has a `SendState`, driven by
`_client.sender`. The callee has a `ReplyState`, driven by `_server.result_sender`.

A lone call or result is sent at once: another loop iteration would be a tenth of a lone call. Calls
of one iteration are sent at its end, in one frame. Callers that were woken together call together
again; sending the first call early would split their batch. While the tensors of a call are copied
to shared memory, later calls of its object wait here; their own tensors are copied meanwhile.

Unanswered calls are bounded in number and bytes; further calls wait at the caller. So a fast caller
exhausts no memory. But sent calls may wait for one that is not sent yet. To avoid that deadlock, a
full window without answers admits one more call at each `TRICKLE_INTERVAL`.
(tests/unit/wire/test_connection_state.py)
"""

from collections import deque
from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Sequence
from enum import IntEnum
from typing import Any, Generic, Protocol, TypeVar

from .slots import Slots

MAX_CALLS = 256
"""Calls or results in one frame, and in one callback of the loop."""

FRAME_BYTES = 512 * 1024
"""Bytes of calls or results in one frame, unless it has only one."""

MAX_OPEN_CALLS = 131_072  # calls without an answer
MAX_OPEN_BYTES = 1 << 30  # bytes of such calls
TRICKLE_INTERVAL = 1.0  # seconds without an answer after which a full window admits one call


class Phase(IntEnum):
    """A phase of a connection, which only goes forward, from each one to any later one.

    Up to `JUDGED` it takes calls. At `FINISHED` none is pending. `Connection` decides when it goes
    forward. Whether frames may be sent is another question: `Channel.is_open`.
    """

    OPENING = 0
    """Calls wait until the peer is reached; so long as it does not serve, for a time limit."""
    OPEN = 1
    """Calls are sent."""
    JUDGED = 2
    """Its path has ended, and perhaps not the peer: calls wait for the answer to a ping."""
    RETIRING = 3
    """The peer leaves, and takes no further call. It is told once the last one is sent."""
    RETIRED = 4
    """The peer was told so."""
    LOST = 5
    """It has ended without a leave message: its calls wait for the reason."""
    FINISHED = 6
    """Its calls were answered, or have an error."""


class FlowWindow(dict[int, int]):
    """The calls that were sent and not answered: the number of each, and its bytes.

    Attributes:
        max_calls: most calls in the window.
        max_bytes: most bytes of these calls.
        trickle_interval: seconds without an answer after which a full window admits one call.
        answers: number of answered calls.
        size: bytes of the calls in the window.
    """

    def __init__(self, calls: int = MAX_OPEN_CALLS, size: int = MAX_OPEN_BYTES) -> None:
        super().__init__()
        self.max_calls = calls
        self.max_bytes = size
        self.trickle_interval = TRICKLE_INTERVAL
        self.size = 0
        self.answers = 0

    def __repr__(self) -> str:
        return f"<Window {len(self)} calls, {self.size} bytes>"

    def admits(self, size: int) -> bool:
        """Return whether a call of `size` bytes may be sent. A single call always may."""
        return not self or (len(self) < self.max_calls and self.size + size <= self.max_bytes)

    def sent(self, number: int, size: int) -> None:
        """Count a sent call."""
        self[number] = size
        self.size += size

    def answered(self, numbers: Iterable[int]) -> None:
        """Release these calls; ignore unknown numbers."""
        for number in numbers:
            size = self.pop(number, None)
            if size is not None:
                self.size -= size
                self.answers += 1

    def release_all(self) -> list[int]:
        """Release every call; return their numbers."""
        numbers = [*self]
        self.clear()
        self.size = 0
        return numbers


# ── calls ───────────────────────────────────────────────────────────────────────────────────────


class Sendable(Protocol):
    """A call as the queue sees it."""

    @property
    def number(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def is_large(self) -> bool: ...
    @property
    def by_torch(self) -> bool: ...


C = TypeVar("C", bound=Sendable)


class SendState(Generic[C]):
    """Unsent calls of a connection, and the window of unanswered ones.

    Args:
        pending: Numbers of the calls that have a waiting caller; other calls are dropped, not sent.
        window: Bound of sent and unanswered calls.
        drop: Callback for each dropped call.
        object_of: Returns the key of a call's object; None if that is unknown.

    Attributes:
        woken: callers that the last read with a result woke; 0 before the first. After 1 the next
            call is expected to be alone, and is sent at once. After others it waits for more.
        must_admit: whether the next frame has a call even if the window is full.
        is_paused: True before the connection opens, and while its socket is full.
        cancels: numbers of calls whose cancellation is not sent yet.
        credits: numbers of streams, with the credit that is not sent yet.
        queue: the unsent calls that wait for no copy.
        ready: those that have waited for one; a copy that has begun since holds none of them back.
    """

    def __init__(
        self,
        pending: Container[int],
        window: FlowWindow,
        drop: Callable[[C], None],
        object_of: Callable[[C], Hashable],
    ) -> None:
        self.window = window
        self.woken = 0
        self.must_admit = False
        self.is_paused = True
        self.cancels: list[int] = []
        self.credits: list[tuple[int, int]] = []
        self.queue: deque[C] = deque()
        self.ready: deque[C] = deque()
        self._pending = pending
        self._drop = drop
        self._object_of = object_of
        self._copies: Slots[C] = Slots()
        # In the window and not sent, by number: calls that are copied, or wait for a copy.
        self._admitted: dict[int, C] = {}

    def __repr__(self) -> str:
        state = "paused" if self.is_paused else "open"
        return f"<SendState {state}, {len(self.queue)} unsent, {self.window!r}>"

    def __len__(self) -> int:
        """Return the number of calls that are not sent yet."""
        return len(self.queue) + len(self.ready) + len(self._copies)

    def may_send_alone(self) -> bool:
        """Return whether a call may skip the queue: all others are answered, none will follow."""
        is_free = self.woken == 1 and not self.is_paused
        return is_free and not (self.window or self.queue or self.cancels or self.credits)

    def submit(self, call: C, *, is_idle: bool) -> bool:
        """Queue a call; return whether to send now instead of at the end of the iteration.

        The connection is idle if no other call of it is pending.
        """
        self.queue.append(call)
        return (is_idle and self.woken == 1) or len(self.queue) >= MAX_CALLS

    def was_sent(self, number: int) -> bool:
        """Return whether a call is sent and not answered."""
        return number in self.window and number not in self._admitted

    def cancel(self, number: int) -> bool:
        """Return whether the peer must be told that this call was cancelled."""
        if number in self._admitted:
            call = self._admitted.pop(number)
            if number in self._copies.unfilled:  # it is copied, and is not queued again
                self._drop(call)
            self.ready += self._copies.drop(number)
            self.window.answered((number,))
        elif number in self.window:
            self.cancels.append(number)
            return True
        return False  # unsent: the call will be dropped

    def controls(self) -> tuple[list[int], list[tuple[int, int]]] | None:
        """Return and forget the cancellations and credit to send, None if there are none."""
        if not self.cancels and not self.credits:
            return None
        found = self.cancels, self.credits
        self.cancels, self.credits = [], []
        return found

    def take(self) -> list[C]:
        """Return the calls of the next frame. A large call is alone: copy it, or send it."""
        taken: list[C] = []
        must_admit, self.must_admit = self.must_admit, False
        if self.is_paused:
            return taken
        pending, window, size = self._pending, self.window, 0
        while len(taken) < MAX_CALLS and (queue := self.ready or self.queue):
            call = queue[0]
            number, more = call.number, call.size
            if number not in pending:
                self._admitted.pop(number, None)
                self._drop(queue.popleft())
                continue
            if taken and (call.is_large or size + more > FRAME_BYTES):
                break
            if queue is self.queue:  # those that have waited for a copy are in the window
                if window and not must_admit and not window.admits(more):
                    break
                must_admit = False
                window.sent(number, more)
                # A call whose own tensors are to be copied does not wait: that is done meanwhile.
                is_behind = self._copies.queues and (call.by_torch or not call.is_large)
                if is_behind and self.hold_back(call):
                    queue.popleft()
                    continue
            if self._admitted:
                self._admitted.pop(number, None)
            taken.append(queue.popleft())
            size += more
            if call.is_large:
                break
        return taken

    # ── while the tensors of a call are copied ──────────────────────────────────────────────────

    def begin_copy(self, call: C, key: Hashable) -> None:
        """Let later calls of the object `key` wait until the copy of a taken call has ended."""
        self._copies.open(call.number, key)
        self._admitted[call.number] = call

    def end_copy(self, call: C) -> bool:
        """Queue a copied call again, to be sent; return False if it was cancelled meanwhile."""
        if call.number not in self._copies.unfilled:
            return False
        self.ready += self._copies.fill(call.number, call) or ()
        return True

    def stop_copy(self, call: C) -> None:
        """Note that a call cannot be copied: calls behind it wait for it no more."""
        self.ready += self._copies.drop(call.number)

    def hold_back(self, call: C) -> bool:
        """Keep a call until the copies before it have ended; return False if it waits for none."""
        if self._copies.admit(self._object_of(call), call):
            self._admitted.pop(call.number, None)
            return False
        self._admitted[call.number] = call
        return True

    # ── calls that are given up ─────────────────────────────────────────────────────────────────

    def clear(self) -> list[int]:
        """Drop the unsent calls; return the numbers of the sent and unanswered ones."""
        for call in self.withdraw():
            self._drop(call)
        return self.window.release_all()

    def withdraw_pending(self) -> list[C]:
        """Return the unsent calls that have a waiting caller, in order; drop the others."""
        found = []
        for call in self.withdraw():
            if call.number in self._pending:
                found.append(call)
            else:
                self._drop(call)
        return found

    def withdraw(self) -> list[C]:
        """Return the unsent calls in the order in which they were made; forget them."""
        unsent = {call.number: call for call in (*self.ready, *self.queue)} | self._admitted
        self._copies.close()
        self.queue.clear()
        self.ready.clear()
        self.window.answered(self._admitted)
        self._admitted.clear()
        return [call for _, call in sorted(unsent.items())]


# ── results and items ───────────────────────────────────────────────────────────────────────────


class ReplyState:
    """Unsent results of a connection."""

    def __init__(self) -> None:
        self.results: list[tuple[Any, Any, Any]] = []
        self.sizes: list[int] = []

    def __repr__(self) -> str:
        return f"<ReplyState {len(self.results)} unsent>"

    def add(self, result: tuple[Any, Any, Any], size: int, *, is_last: bool) -> bool:
        """Queue a result of some `size` bytes; return whether to send now.

        `is_last` says that no other call of this connection is running.
        """
        self.results.append(result)
        self.sizes.append(size)
        return is_last and len(self.results) == 1

    def take(self) -> list[Sequence[tuple[Any, Any, Any]]]:
        """Return the unsent results, those of one frame together."""
        results, sizes = self.results, self.sizes
        if len(results) > 1:
            self.results, self.sizes = [], []
            return [results[start:end] for start, end in _frames(sizes)]
        if not results:
            return []
        self.results = []
        sizes.clear()
        return [results]


def _frames(sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield where each frame starts and ends."""
    start = total = 0
    for index, size in enumerate(sizes):
        total += size
        if index > start and (total > FRAME_BYTES or index - start >= MAX_CALLS):
            yield start, index
            start, total = index, size
    yield start, len(sizes)


INITIAL_CREDIT = 64  # small items of a stream that may be sent before the consumer takes one
BYTES_PER_CREDIT = 64 * 1024  # each of these blocks of bytes in an item costs one more credit


def credit_cost(size: int) -> int:
    """Return the credit that an item of `size` bytes takes."""
    return 1 + size // BYTES_PER_CREDIT
