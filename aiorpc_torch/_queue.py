"""The queue of one `@batched` function and instance: runs its batches on the loop that awaits.

A thin driver: a timer, the places of those who wait, and `take` after every event. Whether a batch
leaves is decided in `_batcher`; who gets what in `_answers`.
"""

import asyncio
import contextvars
import functools
import inspect
import logging
import weakref
from collections.abc import Callable
from typing import Any

from ._answers import failures, outcomes
from ._batcher import Batch, Batcher, Fill, Round
from ._doors import in_thread
from ._steps import timed
from .errors import NotServing

Row = tuple[Any, ...]

log = logging.getLogger("aiorpc_torch")

PATIENCE = 0.5  # seconds that a cancelled body has to end, when its worker stops

# The batches that cannot end before this task does: in whose body it runs, and their callers'.
_inside: contextvars.ContextVar[frozenset[Batch[Any]]] = contextvars.ContextVar(
    "aiorpc_inside", default=frozenset()
)

_queues: "weakref.WeakSet[Queue]" = weakref.WeakSet()


class Body:
    """The user's function: from rows of arguments, one a caller, to columns, one a parameter."""

    def __init__(self, function: Callable[..., Any], *, is_method: bool) -> None:
        self.name = getattr(function, "__qualname__", repr(function))
        self._function = function
        self._is_async = inspect.iscoroutinefunction(function)
        self._is_method = is_method
        parameters = list(inspect.signature(function).parameters.values())[is_method:]
        self._signature = inspect.Signature(parameters)
        self._keywords = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
        self._plain = len(parameters) if not self._keywords else -1

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Row:
        """One caller's arguments in the order of the parameters, defaults filled in."""
        if not kwargs and len(args) == self._plain:
            return args
        try:
            bound = self._signature.bind(*args, **kwargs)
        except TypeError as exc:
            raise TypeError(f"{self.name}() {exc}") from None
        bound.apply_defaults()
        return tuple(bound.arguments.values())

    async def run(self, instance: Any, rows: list[Row]) -> Any:
        """Call the function once for all rows."""
        columns = [list(column) for column in zip(*rows, strict=True)]
        split = len(columns) - len(self._keywords)
        head = (instance,) if self._is_method else ()
        keywords = dict(zip(self._keywords, columns[split:], strict=True))
        call = functools.partial(self._function, *head, *columns[:split], **keywords)
        return await (call() if self._is_async else in_thread(call))


Settle = Callable[[Any], None]
"""Gives a caller its answer: a value, or an exception to raise."""


class Place:
    """One caller's place in a queue."""

    __slots__ = ("_queue", "inside", "instance", "row", "settle")

    def __init__(self, queue: "Queue", instance: Any, row: Row, settle: Settle) -> None:
        self._queue = queue
        self.instance = instance
        self.row = row
        self.settle = settle
        self.inside = _inside.get()

    def leave(self) -> None:
        """The caller gives up: at once, unless its batch has left already."""
        self._queue.discard(self)


class Ask(asyncio.Future[Any]):
    """What a local caller awaits. Cancelling it gives the place up at once."""

    place: Place | None = None

    def cancel(self, msg: Any = None) -> bool:
        cancelled = super().cancel(msg)
        if cancelled and self.place is not None:
            self.place.leave()
        return cancelled

    def settle(self, answer: Any) -> None:
        """Give the caller its answer, unless it has left."""
        if self.done():
            return
        if isinstance(answer, BaseException):
            self.set_exception(answer)
        else:
            self.set_result(answer)


class Queue:
    """Those who wait for one body, on one instance, and the batch that runs."""

    def __init__(self, body: Body, policy: Fill | Round) -> None:
        self.loop: asyncio.AbstractEventLoop | None = None
        self._body = body
        self._policy = policy
        self._batcher: Batcher[Place] = Batcher(policy)
        self._running: dict[Batch[Place], asyncio.Task[None]] = {}
        self._next_look: asyncio.Handle | None = None  # at the end of this turn of the loop
        self._timer: asyncio.TimerHandle | None = None  # at the batcher's deadline
        _queues.add(self)

    def __repr__(self) -> str:
        return f"<Queue {self._body.name}: {self._batcher}>"

    def ask(self, instance: Any, row: Row) -> Ask:
        """Join the queue, and await the result for `row`."""
        ask = Ask(loop=asyncio.get_running_loop())
        ask.place = self.join(instance, row, ask.settle)
        return ask

    def join(self, instance: Any, row: Row, settle: Settle) -> Place:
        """Join the queue; `settle` is called once, with the answer for `row`, unless one leaves."""
        self._refuse_reentry()
        loop = asyncio.get_running_loop()
        self._settle_on(loop)
        place = Place(self, instance, row, settle)
        self._batcher.add(place, loop.time())
        self._pump_soon()
        return place

    def discard(self, place: Place) -> None:
        """The caller gave up."""
        if self._batcher.discard(place):
            self._pump_soon()

    async def close(self) -> None:
        """Answer everybody who waits, and cancel the batch that runs."""
        waiting, tasks = self._batcher.close(), list(self._running.values())
        running = (place for batch in self._running for place in batch.items)
        for place in (*waiting, *running):
            place.settle(NotServing(f"the worker stopped before {self._body.name} answered"))
        for task in tasks:
            task.cancel()
        if tasks and (await asyncio.wait(tasks, timeout=PATIENCE))[1]:
            log.warning("%s did not end when its worker stopped", self._body.name)

    def _refuse_reentry(self) -> None:
        if not _inside.get().isdisjoint(self._running):
            raise RuntimeError(
                f"{self._body.name} awaits itself: the call would wait for the very batch that "
                "makes it, for ever. Call the undecorated function, or another instance"
            )

    def _settle_on(self, loop: asyncio.AbstractEventLoop) -> None:
        if self.loop is loop:
            return
        if self.loop is not None and self._is_over():
            self._batcher = Batcher(self._policy)  # whoever waited there is gone with it
            self._running.clear()
        elif not self._batcher.idle:
            raise RuntimeError(f"{self._body.name} is busy on another event loop")
        self.loop, self._next_look, self._timer = loop, None, None

    def _is_over(self) -> bool:
        return self.loop is None or self.loop.is_closed()

    # What one turn of the loop brings leaves together: look only at its end.
    def _pump_soon(self) -> None:
        assert self.loop is not None
        if self._next_look is None:
            # In nobody's context: the body runs for all its callers, so for none's deadline.
            self._next_look = self.loop.call_soon(self._pump, context=contextvars.Context())

    def _pump(self) -> None:
        assert self.loop is not None
        self._next_look = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while (batch := self._batcher.take(self.loop.time())) is not None:
            self._running[batch] = self.loop.create_task(self._run(batch))
        deadline = self._batcher.deadline()
        if deadline is not None:
            self._timer = self.loop.call_at(deadline, self._pump)

    async def _run(self, batch: Batch[Place]) -> None:
        _inside.set(frozenset((batch,)).union(*(place.inside for place in batch.items)))
        size, name = len(batch.items), self._body.name
        rows = [place.row for place in batch.items]
        try:
            result = await timed(self._body.run(batch.items[0].instance, rows), name)
            answers = outcomes(result, size, name)
        except BaseException as exc:  # SystemExit too: every caller is answered, whatever it is
            answers = failures(exc, size, name)
        if self._running.pop(batch, None) is None or self._is_over():
            return  # its loop was closed, and whoever waited there is gone with it
        self._batcher.finished()
        self._pump_soon()
        for place, answer in zip(batch.items, answers, strict=True):
            place.settle(answer)


async def close_queues() -> None:
    """Close every queue of the running loop."""
    loop = asyncio.get_running_loop()
    await asyncio.gather(*(queue.close() for queue in list(_queues) if queue.loop is loop))
