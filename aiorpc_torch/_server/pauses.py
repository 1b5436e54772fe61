"""Pauses of objects: later calls wait until a pause ends, but those that its holder makes.

Calls know nothing of pauses. While an object is paused the executor asks about each call before its
start. The calls that run are looked at until they have ended.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Collection
from functools import partial
from time import monotonic
from types import MethodType
from typing import Any

from .._torch.rrefs import find_object
from .._turns.pause_queue import PauseQueue
from .._wire.ancestry import BatchId, CallKey, ancestor_batches, awaited, new_batch
from .calls import ServerCall
from .executor import Executor

POLL = 0.005  # seconds between two looks at the calls that run
PATIENCE = 2.0  # seconds without an end after which calls pass: those that run may wait for one

_Queue = PauseQueue[BatchId, ServerCall]


class Pauses:
    """The paused objects of one worker. On its loop.

    Args:
        executor: starts the calls.
        open_calls: returns the unanswered calls.
    """

    def __init__(
        self, executor: Executor, open_calls: Callable[[], Collection[ServerCall]]
    ) -> None:
        self._executor = executor
        self._open_calls = open_calls
        self._queues: dict[int, tuple[Any, _Queue]] = {}  # by id; the object lives meanwhile
        self._changed = asyncio.Event()

    @contextlib.asynccontextmanager
    async def pause(self, instance: Any) -> AsyncIterator[BatchId]:
        """Pause an object in this block; give the id that the calls of the holder carry."""
        ancestors = ancestor_batches()
        _, queue = self._queues.get(id(instance), (None, None))
        if queue is not None and queue.pause in ancestors:  # inside a pause of the same holder
            yield queue.pause
            return
        pause = new_batch()
        _, queue = self._queues.setdefault(id(instance), (instance, PauseQueue()))
        self._executor.holds = self._holds
        try:
            if not queue.add_pause(pause):
                while queue.pause != pause:
                    await self._changed.wait()
            await self._wait_for_calls(instance, queue)
            queue.enter()
            yield pause
        finally:
            self._end(instance, queue, pause)

    def _end(self, instance: Any, queue: _Queue, pause: BatchId) -> None:
        released = queue.end_pause(pause)
        self._changed.set()
        self._changed = asyncio.Event()
        if queue.pause is None and not len(queue):
            del self._queues[id(instance)]
            if not self._queues:
                self._executor.holds = None
                awaited.clear()
        self._start(released)

    def _start(self, calls: Collection[ServerCall]) -> None:
        for call in calls:
            call.leave_batch = None
            self._executor.restart(call)

    async def _wait_for_calls(self, instance: Any, queue: _Queue) -> None:
        """Wait until the calls that run have ended, and those that pass meanwhile.

        One of them may wait for a call of the same object that has come since. If that has
        ancestors, it passes at once. Otherwise, as another worker's call may have been made before
        the pause, all that wait pass if no call has ended for a while.
        """
        since = monotonic()
        running = self._running(instance, queue)
        while running:
            await asyncio.sleep(POLL)
            left = self._running(instance, queue)
            if running.keys() - left:
                since = monotonic()
            elif monotonic() - since >= PATIENCE:
                self._start(queue.pass_all())
                since = monotonic()
            running = left

    def _running(self, instance: Any, queue: _Queue) -> dict[ServerCall, CallKey]:
        calls = {*self._open_calls(), *self._executor.in_threads}
        running: dict[ServerCall, CallKey] = {
            each: (each.session and each.session.key, each.number)
            for each in calls
            if each not in queue and _object_of(each) is instance
        }
        # What they call from now on has an ancestor.
        for key in running.values():
            awaited.setdefault(key, new_batch())
        return running

    def _holds(self, call: ServerCall) -> bool:
        """Let a call wait if its object is paused; return whether it does."""
        _, queue = self._queues.get(id(_object_of(call)), (None, None))
        if queue is None or queue.pause is None or call.is_cancelled:
            return False
        batches = () if call.scope is None else call.scope.batches
        if queue.pause in batches or (batches and not queue.is_entered):
            return False
        queue.add_call(call)
        call.leave_batch = partial(queue.remove_call, call)
        return True


def _object_of(call: ServerCall) -> Any:
    """Return the object of a call, None if it has none."""
    key = getattr(call, "order_key", None)
    if isinstance(key, tuple):
        with contextlib.suppress(ReferenceError):
            return find_object(key)
    function = call.function
    return function.__self__ if type(function) is MethodType else None
