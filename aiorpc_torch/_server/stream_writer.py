"""Stream the items of generators to callers, as far as their credit goes.

An async generator runs in a task on the loop. A plain generator runs in a thread, which it returns
while it has no credit. Items are numbered, since they may arrive out of order.
"""

import asyncio
import contextvars
import functools
import threading
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from typing import Any

from .._aio.fork import run_in_method
from .._aio.tasks import Steps, take_step
from .._aio.threads import memory_threads, run_in_thread
from .._wire.buffers import COPY_ON_LOOP
from .._wire.columns import ENDED, cell_bytes, copy_cell, detach_cell
from .._wire.connection_state import INITIAL_CREDIT, credit_cost
from .._wire.exceptions import try_add_note
from .._wire.targets import Entered
from .calls import RpcCall


class StreamCall(RpcCall):
    """A call of a generator. It ends when the generator ends."""

    kind = "stream"

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._items = 0
        self.credit = INITIAL_CREDIT  # below zero after items that were sent without
        self._lock = threading.Lock()
        self._credit_added = asyncio.Event()
        self._resume: Callable[[], None] | None = None  # called on credit or on cancellation

    @property
    def receiver(self) -> Any:
        """Return this, which takes the items of a batch."""
        return self

    def grant(self, credit: int) -> None:
        """Add credit for items that the consumer has taken. On the loop's thread."""
        with self._lock:
            self.credit += credit
            resume, self._resume = self._resume, None
        self._credit_added.set()
        if resume is not None:
            resume()

    def send(self, item: Any) -> bool:
        """Send an item; return whether there is credit for another."""
        kind, content = self._encode_item(item)
        return self._send(kind, copy_cell(kind, content))

    async def send_from_loop(self, item: Any) -> bool:
        """Send an item as `send` does; a large one is copied in a thread."""
        kind, content = self._encode_item(item)
        if cell_bytes(kind, content) <= COPY_ON_LOOP:
            return self._send(kind, copy_cell(kind, content))
        copy = functools.partial(copy_cell, kind, content)
        return self._send(kind, await run_in_thread(copy, "", memory_threads))

    def _encode_item(self, item: Any) -> tuple[Any, Any]:
        try:
            kind, content = self._encode(item)
        except Exception as exc:  # pickling a user's object may raise anything
            try_add_note(exc, f"(while pickling an item of {self.name})")
            raise
        return kind, content if self.recording is None else detach_cell(kind, content)

    def _send(self, kind: Any, content: Any) -> bool:
        """Send a copy: the generator runs on before it is sent, and may reuse its buffer."""
        number = self._items
        self._items += 1
        self.has_sent = True
        cost = credit_cost(cell_bytes(kind, content))
        with self._lock:
            self.credit -= cost
            has_credit = self.credit > 0
        self.session.send_result(((self.number, number, cost), kind, content))
        return has_credit

    def call_when_credit(self, resume: Callable[[], None]) -> bool:
        """Call `resume` on credit or on cancellation; return False if it need not wait."""
        with self._lock:
            if self.credit > 0 or self.is_cancelled:
                return False
            self._resume = resume
            return True

    async def pump(self, value: Any) -> None:
        """Send the items of an async generator, then close it."""
        source = entered(value) if is_manager(value) else value
        check_streamable(source, self.name)
        try:
            while True:
                step = _next(source)
                try:
                    has_ended, item = take_step(step.send, None, self.name)
                    if not has_ended:  # as in `ServerCall.run`
                        steps, item = Steps(step, self.name, item), None
                        item = await steps
                except StopAsyncIteration:
                    return
                if not await self.send_from_loop(item):
                    while self.credit <= 0:
                        self._credit_added.clear()
                        await self._credit_added.wait()
        finally:
            close = getattr(source, "aclose", None)
            if close is not None:
                await close()

    def succeed(self, value: Any) -> None:
        """End the stream."""
        self._finish(ENDED, None)

    def cancel(self) -> None:
        super().cancel()
        with self._lock:  # a thread may be about to wait
            resume, self._resume = self._resume, None
        if resume is not None:  # its generator is in no thread and is closed by `resume`
            self.abandon(asyncio.CancelledError())
            resume()

    def fail(self, exc: BaseException) -> None:
        stops = StopIteration, StopAsyncIteration
        if isinstance(exc, stops) or isinstance(exc.__cause__, stops):
            name = type(exc.__cause__ or exc).__name__
            text = f"{self.name} has raised {name}: a generator ends with `return`"
            failure = RuntimeError(text).with_traceback(exc.__traceback__)
            failure.__cause__, exc = exc.__cause__, failure
        super().fail(exc)

    def _finish(self, kind: Any, content: Any, failure: BaseException | None = None) -> None:
        # Numbered as an item, so that the caller reads it after all items.
        if self.session.calls.pop(self.number, None) is not None:
            self.leave_queue = None
            if self.on_end is not None:
                self.on_end(failure)
            self.session.send_result(((self.number, self._items, 0), kind, content))
            if self.reply is not None:  # torch RPC awaits a reply to its message
                self.session.send_result((self.number, ENDED, None), self.reply)


async def _next(source: AsyncIterator[Any]) -> Any:
    return await anext(source)


def is_manager(value: Any) -> bool:
    """Return whether a value is an asynchronous context manager, and no generator."""
    return hasattr(type(value), "__aenter__") and not hasattr(type(value), "__anext__")


async def entered(manager: Any) -> AsyncIterator[Entered]:
    """Yield what a context manager returns; leave it when the stream is closed."""
    async with manager as value:
        yield Entered(value)
        await asyncio.get_running_loop().create_future()  # until the call is cancelled


def pump_in_thread(
    call: StreamCall, source: Iterator[Any], submit: Callable[[Callable[[], None]], None]
) -> None:
    """Send the items of a plain generator in this thread, while there is credit.

    Without credit it returns. `submit` runs the rest in a thread when there is credit again.
    """
    try:
        while not call.is_cancelled:
            try:
                item = run_in_method(next, source)
            except StopIteration:
                call.succeed(None)
                return
            if not call.send(item):
                rest = functools.partial(
                    contextvars.copy_context().run, pump_in_thread, call, source, submit
                )
                if call.call_when_credit(functools.partial(submit, rest)):
                    return
        _close(source)
        call.fail(asyncio.CancelledError())
    except BaseException as exc:
        call.fail(_closed_after(source, exc))


def _close(source: Iterator[Any]) -> None:
    if isinstance(source, Generator):
        source.close()


def _closed_after(source: Iterator[Any], exc: BaseException) -> BaseException:
    """Close a generator, for `exc`; return what it raises then, as a `finally` does, else `exc`."""
    try:
        _close(source)
    except BaseException as failure:
        return failure
    return exc


def check_streamable(value: Any, name: str) -> None:
    """Raise TypeError unless a remote `async for` can iterate `value`."""
    if not (hasattr(value, "__anext__") or hasattr(value, "__next__")):
        kind = type(value).__name__
        raise TypeError(
            f"{name} is not a generator, it returned {kind}: use `await`, not `async for` or "
            "`async with`"
        )
