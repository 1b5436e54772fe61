"""Generators being streamed to a caller: an item goes out when there is credit for it.

An async generator runs in a task on the loop; a plain one in a thread, as long as it has credit,
and gives the thread back when it has none. Items are numbered: they may overtake each other.
"""

import asyncio
import contextvars
import functools
import inspect
import threading
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from typing import Any

from .._aio.tasks import timed
from .._protocol.columns import ENDED, bulk, copied, without_graph
from .._protocol.window import CREDIT, price
from .calls import RpcJob


class StreamJob(RpcJob):
    """A call whose caller iterates. It ends when its generator does."""

    __slots__ = ("_credit", "_items", "_lock", "_more", "resume")

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._items = 0
        self._credit = CREDIT
        self._lock = threading.Lock()
        self._more = asyncio.Event()
        self.resume: Callable[[], None] | None = None  # what waits for credit, or for its end

    def grant(self, credit: int) -> None:
        """The consumer has taken items worth `credit`. On the loop's thread."""
        with self._lock:
            self._credit += credit
            resume, self.resume = self.resume, None
        self._more.set()
        if resume is not None:
            resume()

    def send(self, item: Any) -> bool:
        """Send an item; whether there is credit for another."""
        kind, content = self._cell(item)
        # It goes on to the next item before this one has left: into the same buffer, perhaps.
        content = copied(kind, content if self.recording is None else without_graph(kind, content))
        number = self._items
        self._items += 1
        cost = price(bulk(kind, content))
        with self._lock:
            self._credit -= cost
            has_credit = self._credit > 0
        self.session.done(((self.number, number, cost), kind, content))
        return has_credit

    def wait(self, resume: Callable[[], None]) -> bool:
        """Have `resume` called when there is credit; False if there is some now."""
        with self._lock:
            if self._credit > 0 or self.abandoned:
                return False
            self.resume = resume
            return True

    async def credit(self) -> None:
        """Wait until there is some."""
        while self._credit <= 0:
            self._more.clear()
            await self._more.wait()

    def succeed(self, value: Any) -> None:
        """The generator has ended."""
        self._end(ENDED, None)

    def abandon(self) -> None:
        super().abandon()
        with self._lock:  # a thread may be about to wait
            resume, self.resume = self.resume, None
        if resume is not None:  # it rests in no thread: all that is left to do is to close it
            self.fail(asyncio.CancelledError())
            resume()

    def _end(self, kind: Any, content: Any) -> None:
        # Numbered as an item, so that it is read after all of them.
        if self.session.jobs.pop(self.number, None) is not None:
            self.session.done(((self.number, self._items, 0), kind, content))
            if self.reply is not None:  # torch waits for an answer to the message that brought it
                self.session.done((self.number, ENDED, None), self.reply)


async def stream(job: StreamJob, source: AsyncIterator[Any]) -> None:
    """Send what an async generator yields. Whatever happens, the generator is closed."""
    try:
        while True:
            try:
                item = await timed(_next(source), job.name)
            except StopAsyncIteration:
                return
            if not job.send(item):
                await job.credit()
    finally:
        close = getattr(source, "aclose", None)
        if close is not None:
            await close()


async def _next(source: AsyncIterator[Any]) -> Any:
    return await anext(source)


def run_in_thread(
    job: StreamJob, source: Iterator[Any], again: Callable[[Callable[[], None]], None]
) -> None:
    """Send what a plain generator yields, in this thread while there is credit.

    `again` runs the rest in a thread when there is credit again.
    """
    try:
        while not job.abandoned:
            try:
                item = next(source)
            except StopIteration:
                job.succeed(None)
                return
            if not job.send(item):
                rest = functools.partial(
                    contextvars.copy_context().run, run_in_thread, job, source, again
                )
                if job.wait(functools.partial(again, rest)):
                    return
        _close(source)
        job.fail(asyncio.CancelledError())
    except BaseException as exc:
        _close(source)
        job.fail(exc)


def _close(source: Iterator[Any]) -> None:
    if isinstance(source, Generator):
        source.close()


def check_streamable(value: Any, name: str) -> None:
    """Raise TypeError for what cannot be iterated by a remote `async for`."""
    if not (hasattr(value, "__anext__") or hasattr(value, "__next__")):
        kind = "a coroutine" if inspect.iscoroutine(value) else f"a {type(value).__name__}"
        raise TypeError(f"{name} returned {kind}, which is no generator: `await` it")
