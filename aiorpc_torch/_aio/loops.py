"""Event loops: the fastest one there is, one in a thread, and what acts on one from elsewhere."""

import asyncio
import contextlib
import importlib
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

from ..errors import NotInWorld
from .fork import check_not_forked

T = TypeVar("T")

CLOSED_POLL = 1.0  # seconds between two looks whether a loop, on which something runs, is closed

LoopFactory = Callable[[], asyncio.AbstractEventLoop]
"""A function or class that makes an event loop."""


def new_event_loop() -> asyncio.AbstractEventLoop:
    """Return an event loop of uvloop where it is installed, else asyncio's."""
    try:
        uvloop: Any = importlib.import_module("uvloop")
    except ImportError:
        return asyncio.new_event_loop()
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop


def call_soon(loop: asyncio.AbstractEventLoop, step: Callable[..., object], *args: Any) -> None:
    """Schedule `step(*args)` on its loop, unless the loop is closed. In any thread."""
    with contextlib.suppress(RuntimeError):  # the loop is closed
        loop.call_soon_threadsafe(step, *args)


def run_on_loop(loop: asyncio.AbstractEventLoop, step: Callable[..., object], *args: Any) -> None:
    """Run `step(*args)` now if this is its loop's thread, otherwise schedule it."""
    if asyncio._get_running_loop() is loop:
        step(*args)
    else:
        call_soon(loop, step, *args)


async def await_on(loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, T]) -> T:
    """Return `await coroutine`, run on `loop`, whichever loop runs here.

    Raises:
        NotInWorld: if this process is a fork of a worker's, where no loop of the worker runs; or if
            that loop is closed before the coroutine has ended.
        RuntimeError: if that loop is closed.
    """
    if asyncio.get_running_loop() is loop:
        return await coroutine
    try:
        check_not_forked()
        running = asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, loop))
    except RuntimeError:  # that loop is closed
        coroutine.close()
        raise
    try:
        while not running.done():
            was_closed = loop.is_closed()
            await asyncio.wait((running,), timeout=CLOSED_POLL)
            if was_closed and not running.done():  # it has ended before the first step
                coroutine.close()
                raise NotInWorld("the event loop of this worker has ended")
        return running.result()
    finally:
        running.cancel()


class LoopThread:
    """A thread whose event loop runs `serve()`, which returns once `closing` is set."""

    def __init__(self, name: str, serve: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self.loop = asyncio.new_event_loop()  # closed when the thread has ended
        self.closing = asyncio.Event()

        def run() -> None:
            with asyncio.Runner(loop_factory=lambda: self.loop) as runner:
                runner.run(serve())

        self._thread = threading.Thread(target=run, name=name, daemon=True)

    def start(self) -> None:
        """Start the thread: what `serve` uses is there."""
        self._thread.start()

    def close(self, timeout: float) -> None:
        """Set `closing`, and wait until the thread has ended. In any other thread."""
        call_soon(self.loop, self.closing.set)
        self._thread.join(timeout)


class Wakeup:
    """A flag that one task waits for. Confined to one event loop."""

    __slots__ = ("_is_set", "waiter")

    def __init__(self) -> None:
        self._is_set = False
        self.waiter: asyncio.Future[None] | None = None  # of the task that waits

    def is_awaited(self) -> bool:
        """Return whether a task waits."""
        return self.waiter is not None

    def set(self) -> None:
        """Wake the waiting task, or the next that waits."""
        self._is_set = True
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)

    async def wait(self) -> None:
        """Wait until `set` is called, unless it was since the last wait.

        Raises:
            NotInWorld: in a fork of a worker's process, where nothing arrives.
        """
        if not self._is_set:
            check_not_forked()
            self.waiter = asyncio.get_running_loop().create_future()
            try:
                await self.waiter
            finally:
                self.waiter = None
        self._is_set = False


Interrupt = Callable[[BaseException], None]
"""Ends a block with an exception, if it still runs; the first exception counts. On its loop."""


@contextlib.asynccontextmanager
async def interruptible() -> AsyncIterator[Interrupt]:
    """Yield a function that ends the block early: the block then raises what it was given.

    Inside, the interruption is one cancellation. (A scope of anyio would cancel each further await
    too, also those with which a user's block cleans up.)
    """
    failure: BaseException | None = None

    def interrupt(exc: BaseException) -> None:
        nonlocal failure
        if failure is None:
            failure = exc
            with contextlib.suppress(RuntimeError):  # the block has ended
                block.reschedule(0.0)

    # Never used for time: `asyncio.timeout` is the standard library's way to end a block.
    block = asyncio.timeout(None)
    try:
        async with block:
            yield interrupt
    except TimeoutError:
        if failure is None or not block.expired():
            raise
        raise failure from failure.__cause__  # this timeout is not shown
