"""The queue of one `@batched` function and instance: runs its batches on the loop that awaits.

A thin driver: a timer, the places of those who wait, and `take` after every event. Whether a batch
leaves is decided in `_batcher`; who gets what in `_answers`.
"""

import asyncio
import contextvars
from collections.abc import Callable, Iterable
from typing import Any

from .._aio.tasks import disown, timed
from .._protocol.ancestry import Errand, errands, new_batch, set_out, waiting
from .._protocol.columns import Shared
from .._protocol.recording import Recording, enter, entered
from .._protocol.runtime import start
from ..errors import NotServing, QueueFull, RoundTimeout
from .function import Body
from .policies import Fill, Policy, Round
from .registry import Living
from .results import failures
from .rounds import RoundBatcher
from .scheduler import Batch, Batcher, FillBatcher, Refusal
from .stats import Tally
from .traits import Admission, Row

PATIENCE = 0.5  # seconds that a cancelled body has to end, when its worker stops


class _Run:
    """A batch that runs. It does not know its members: whoever is inside it outlives them."""

    __slots__ = ("id", "is_over", "recording", "task")

    def __init__(self, recording: Recording | None, name: str) -> None:
        self.id = new_batch()
        self.is_over = False
        self.recording = recording  # all its members are of one context, or count for none
        self.task: asyncio.Task[None] | None = None
        if recording is not None:  # what the body calls is recorded there, whoever leaves
            recording.hold(self, name)

    def end(self, _: object = None) -> None:
        """Its members may be answered."""
        self.is_over = True
        if self.recording is not None:
            self.recording.ended(self)

    def errand(self) -> Errand:
        """What the body does."""
        return Errand(frozenset((self.id,)), lambda: not self.is_over)


_queues: "Living[Queue]" = Living()


Settle = Callable[[Any], None]
"""Gives a caller its answer: a value, or an exception to raise."""


class Place:
    """One caller's place in a queue."""

    __slots__ = ("_queue", "errands", "instance", "recording", "row", "settle", "since")

    def __init__(
        self, queue: "Queue", instance: Any, row: Row, settle: Settle, since: float
    ) -> None:
        self._queue = queue
        self.instance = instance
        self.row = row
        self.settle = settle
        self.since = since
        self.errands = errands()  # its caller's
        self.recording = entered()

    def answer(self, answer: Any) -> None:
        """Give the caller its answer, and let go of it and its arguments."""
        # The caller knows its place, so that it may leave, and the place its caller.
        settle, self.settle, self.row = self.settle, _nobody, ()
        settle(answer)

    def leave(self) -> None:
        """The caller gives up: at once, unless its batch has left already."""
        self.settle = _nobody
        if self._queue.discard(self):
            self.row = ()


def _nobody(_: Any) -> None:
    """Who has left, or has been answered."""


class Ask(asyncio.Future[Any]):
    """What a local caller awaits. Cancelling it gives the place up at once."""

    place: Place | None = None

    def cancel(self, msg: Any = None) -> bool:
        cancelled = super().cancel(msg)
        place, self.place = self.place, None
        if cancelled and place is not None:
            place.leave()
        return cancelled

    def settle(self, answer: Any) -> None:
        """Give the caller its answer, unless it has left."""
        if self.done():
            return
        if isinstance(answer, BaseException):
            self.set_exception(answer)
        else:
            self.set_result(answer.value if type(answer) is Shared else answer)


class Queue:
    """Those who wait for one body, on one instance, and the batch that runs."""

    def __init__(self, body: Body, policy: Policy, admission: Admission, tally: Tally) -> None:
        self.loop: asyncio.AbstractEventLoop | None = None
        self._body = body
        self._policy = policy
        self._admission = admission
        self._tally = tally
        self._batcher = _new_batcher(policy)
        self._running: dict[Batch[Place], _Run] = {}
        self._next_look: asyncio.Handle | None = None  # at the end of this turn of the loop
        self._timer: asyncio.TimerHandle | None = None  # at the batcher's deadline
        tally.queues.add(self)
        _queues.add(self)

    def __repr__(self) -> str:
        return f"<Queue {self._body.name}: {self._batcher}>"

    def __len__(self) -> int:
        return len(self._batcher)

    def ask(self, instance: Any, row: Row, caller: str) -> Ask:
        """Join the queue, and await the result for `row`."""
        ask = Ask(loop=asyncio.get_running_loop())
        ask.place = self._add(instance, row, ask.settle, caller)
        return ask

    def join(self, instance: Any, row: Row, settle: Settle, caller: str) -> Place:
        """Join the queue; `settle` is called once, with the answer for `row`, unless one leaves.

        Raises:
            QueueFull: if `max_pending` wait already.
            TypeError: for a contribution to a round that carries gradients.
        """
        if isinstance(self._policy, Round) and (recording := entered()) is not None:
            recording.leave_graph(self._body.name)  # a round is of many contexts
        return self._add(instance, row, settle, caller)

    def _add(self, instance: Any, row: Row, settle: Settle, caller: str) -> Place:
        self._refuse_reentry()
        loop = asyncio.get_running_loop()
        self._settle_on(loop)
        if not self._batcher.has_room():
            raise QueueFull(f"{len(self)} calls of {self._body.name} wait already")
        now = loop.time()
        place = Place(self, instance, row, settle, now)
        traits = self._admission(row, caller)
        if place.recording is not None and isinstance(self._policy, Fill):
            # Calls of two contexts never share a batch.
            traits = traits._replace(key=(place.recording.id, traits.key))
        self._batcher.add(place, now, traits)
        self._pump_soon()
        return place

    def discard(self, place: Place) -> bool:
        """The caller gave up; False if its batch has left already."""
        waited = self._batcher.discard(place)
        if waited and not self._is_over():
            self._pump_soon()
        return waited

    async def close(self) -> None:
        """Answer everybody who waits, and cancel the batch that runs."""
        waiting = self._batcher.close()
        tasks = [run.task for run in self._running.values() if run.task is not None]
        if waiting:
            self._tally.dismissed("closed")
        running = (place for batch in self._running for place in batch.items)
        for place in (*waiting, *running):
            place.answer(NotServing(f"the worker stopped before {self._body.name} answered"))
        for task in tasks:
            task.cancel()
        for task in tasks and (await asyncio.wait(tasks, timeout=PATIENCE))[1]:
            disown(task, self._body.name)

    def _refuse_reentry(self) -> None:
        batches = waiting()
        if batches and any(run.id in batches for run in self._running.values()):
            raise RuntimeError(
                f"{self._body.name} awaits itself: the call would wait for the very batch that "
                "makes it, for ever. Call the undecorated function, or another instance"
            )

    def _settle_on(self, loop: asyncio.AbstractEventLoop) -> None:
        if self.loop is loop:
            return
        if self.loop is not None and self._is_over():
            self._batcher = _new_batcher(self._policy)  # whoever waited there is gone with it
            self._running.clear()
        elif not self._batcher.idle:
            raise RuntimeError(f"{self._body.name} is busy on another event loop")
        for handle in (self._next_look, self._timer):
            if handle is not None:
                handle.cancel()
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
        now = self.loop.time()
        while (left := self._batcher.take(now)) is not None:
            if isinstance(left, Refusal):
                self._refuse(left)
                continue
            self._tally.left(left.reason.value, [now - place.since for place in left.items])
            recording = left.items[0].recording if isinstance(self._policy, Fill) else None
            # Before it starts, which it may do at once.
            run = self._running[left] = _Run(recording, self._body.name)
            run.task = start(self._run(left, run), self._body.name)
            if run.task.done():  # it started at once; whoever waits has a look of its own, soon
                return
            run.task.add_done_callback(run.end)  # even if it is cancelled before its first step
        deadline = self._batcher.deadline()
        if deadline is not None:
            self._timer = self.loop.call_at(deadline, self._pump)

    def _refuse(self, left: Refusal[Place]) -> None:
        self._tally.dismissed("timeout")
        for place in left.items:
            place.answer(_round_timeout(left, self._body.name))

    async def _run(self, batch: Batch[Place], run: _Run) -> None:
        enter(run.recording)
        others = [place.errands for place in batch.items if place.errands]
        set_out({run.errand()}.union(*others))
        size, name = len(batch.items), self._body.name
        rows = [place.row for place in batch.items]
        try:
            answers = await timed(self._body.run(batch.items[0].instance, rows), name)
        except BaseException as exc:  # SystemExit too: every caller is answered, whatever it is
            answers = failures(exc, size, name)
        rows.clear()  # an exception keeps this frame
        run.end()
        if self._running.pop(batch, None) is None or self._is_over():
            return  # its loop was closed, and whoever waited there is gone with it
        assert self.loop is not None
        self._batcher.finished(self.loop.time())
        if len(self._batcher):
            self._pump_soon()
        for place, answer in zip(batch.items, answers, strict=True):
            place.answer(answer)


def _new_batcher(policy: Policy) -> Batcher[Place]:
    return FillBatcher(policy) if isinstance(policy, Fill) else RoundBatcher(policy)


def _names(members: Iterable[Any]) -> str:
    try:
        return ", ".join(map(str, members))
    except Exception as exc:  # of the user's own class
        return f"members that cannot be named ({exc!r})"


def _round_timeout(left: Refusal[Place], name: str) -> RoundTimeout:
    present = _names(left.present)
    missing = _names(left.missing) or "nobody who has contributed before"
    return RoundTimeout(
        f"the time of a round of {name} is over: {present} contributed; missing: {missing}",
        left.present,
        left.missing,
    )


async def close_queues() -> None:
    """Close every queue of the running loop."""
    loop = asyncio.get_running_loop()
    await asyncio.gather(*(queue.close() for queue in _queues.all() if queue.loop is loop))
