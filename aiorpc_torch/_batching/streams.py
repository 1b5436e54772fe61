"""Batches of generators: each step has an item for every caller that still iterates.

A caller that ends, leaves or fails concerns no other. A slow one neither: the next step is made
when one caller waits for an item, unless another is too far behind.
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from typing import TYPE_CHECKING, Any

from .._aio.loops import Wakeup
from .._handles.mistakes import OnlyIterated
from .._torch.tree import tensors_in
from .._wire.columns import SharedValue
from .._wire.connection_state import INITIAL_CREDIT, credit_cost
from .results import ENDED

if TYPE_CHECKING:
    from .queue import QueuedCall

MAX_BEHIND = 1024  # credit that a caller may owe while others go on, 64 MiB at most


class StreamedBatch:
    """The iteration of a batch of a generator, in the task that is running."""

    def __init__(self, members: "Sequence[QueuedCall]", *, can_interrupt: bool) -> None:
        self._members = members
        self._task = asyncio.current_task() if can_interrupt else None
        self._is_stepping = False
        self._credit_added: asyncio.Future[None] | None = None
        for member in members:
            member.on_leave = self._on_leave

    async def run(self, steps: AsyncGenerator[Sequence[Any], None]) -> list[None]:
        """Send the entries of each step to their callers until the end of `steps` or of all."""
        try:
            async with contextlib.aclosing(steps):
                while self._remaining():
                    self._is_stepping = True
                    try:
                        entries = await anext(steps, None)
                    finally:
                        self._is_stepping = False
                    if entries is None:
                        break
                    for member, entry in zip(self._members, entries, strict=True):
                        await _deliver(member, entry)
                    await self._wait_for_credit()
        finally:
            for member in self._members:  # they and this are a cycle
                member.on_leave = None
        return [None] * len(self._members)

    def _remaining(self) -> "list[QueuedCall]":
        return [each for each in self._members if not each.has_left]

    async def _wait_for_credit(self) -> None:
        """Wait until a caller has credit, and none is too far behind, or all have left."""
        while receivers := [each.receiver for each in self._remaining()]:
            credit = [each.credit for each in receivers]
            if max(credit) > 0 and min(credit) > -MAX_BEHIND:
                return
            self._credit_added = asyncio.get_running_loop().create_future()
            for receiver in receivers:
                receiver.call_when_credit(self._wake)
            await self._credit_added

    def _wake(self) -> None:
        if self._credit_added is not None and not self._credit_added.done():
            self._credit_added.set_result(None)

    def _on_leave(self) -> None:
        """Close the generator if this was the last caller."""
        if self._is_stepping and self._task is not None and not self._remaining():
            self._task.cancel()
            self._task = None  # once: another one would interrupt its cleanup
        self._wake()


async def _deliver(member: "QueuedCall", entry: Any) -> None:
    if member.has_left:
        return
    if entry is ENDED or isinstance(entry, BaseException):
        member.resolve(None if entry is ENDED else entry)
        return
    try:
        await member.receiver.send_from_loop(entry)
    except Exception as exc:  # it cannot be pickled
        member.resolve(exc)


class LocalItems:
    """The items of a batched generator that a caller of this process has not taken.

    `_server` has the same for a caller of another process, `StreamCall`.

    Attributes:
        credit: how many small items the caller may be sent.
        wakeup: wakes the task that waits for the next item.
    """

    def __init__(self) -> None:
        self.credit = INITIAL_CREDIT
        self.is_over = False
        self._items: deque[tuple[Any, int]] = deque()  # with their costs in credit
        self._failure: BaseException | None = None
        self.wakeup = Wakeup()
        self._resume: Callable[[], None] | None = None

    async def send_from_loop(self, item: Any) -> None:
        """Add an item: the very object, also without credit."""
        value = item.value if type(item) is SharedValue else item
        cost = credit_cost(_bytes_of(value))
        self._items.append((value, cost))
        self.credit -= cost
        self.wakeup.set()

    def call_when_credit(self, resume: Callable[[], None]) -> bool:
        """Call `resume` once the consumer has taken an item; return False if there is credit."""
        if self.credit > 0:
            return False
        self._resume = resume
        return True

    def settle(self, answer: Any) -> None:
        """End, with an exception or without."""
        if not self.is_over:
            self.is_over = True
            self._failure = answer if isinstance(answer, BaseException) else None
            self.wakeup.set()

    def close(self) -> None:
        """Drop what has not been taken: the consumer has left."""
        self._items.clear()
        self.is_over, self._failure = True, None
        self.wakeup.set()

    async def next(self) -> Any:
        """Return the next item. A failure is raised once, after the items before it."""
        while not self._items:
            if self.is_over:
                failure, self._failure = self._failure, None
                raise StopAsyncIteration if failure is None else failure
            await self.wakeup.wait()
        item, cost = self._items.popleft()
        self.credit += cost
        resume, self._resume = self._resume, None
        if resume is not None:
            resume()
        return item


def _bytes_of(item: Any) -> int:
    """Return about how many bytes an item holds: those of its tensors, its array or its text."""
    if isinstance(item, str | bytes | bytearray):
        return len(item)
    size = getattr(item, "nbytes", None)  # of a tensor, an array or a memoryview
    return size if type(size) is int else sum(each.nbytes for each in tensors_in(item))


class LocalStream(OnlyIterated, AsyncIterator[Any]):
    """The iterator of a caller of this process over a batched generator.

    It joins the queue at the first `anext`: `join` returns how to leave it. A cancelled wait loses
    nothing.
    """

    def __init__(self, join: Callable[[LocalItems], Callable[[], object]], name: str) -> None:
        self._items = LocalItems()
        self._join: Callable[[LocalItems], Callable[[], object]] | None = join
        self._name = name
        self._leave: Callable[[], object] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def __repr__(self) -> str:
        return f"<stream of {self._name}>"

    async def __anext__(self) -> Any:
        if self._items.wakeup.is_awaited():
            raise RuntimeError("another task waits for the next item of this stream")
        join, self._join = self._join, None
        if join is not None:
            self._loop = asyncio.get_running_loop()
            try:
                self._leave = join(self._items)
            except BaseException:
                self._items.close()  # nothing comes
                raise
        return await self._items.next()

    async def aclose(self) -> None:
        """Leave the batch. When all callers have left, the generator is closed. `break` does so."""
        self._join = None
        self._items.close()
        leave, self._leave = self._leave, None
        if leave is not None:
            leave()

    def __del__(self) -> None:
        # Garbage may be collected in any thread, and after the loop's end.
        if self._leave is not None and self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._leave)
