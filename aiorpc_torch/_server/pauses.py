"""Pauses of objects: later calls wait until a pause ends, but those that its holder makes.

Calls know nothing of pauses. While an object is paused the executor asks about each call before its
start. The calls that run are looked at until they have ended.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Collection, Iterator
from functools import partial
from time import monotonic
from types import MethodType
from typing import Any

from .._torch.rrefs import find_object
from .._turns.queues import PauseQueue
from .._turns.turns import is_limited
from .._wire.ancestry import BATCH, BatchId, CallKey, ancestor_batches, awaited, new_batch
from .calls import RpcCall, ServerCall
from .executor import Executor

# In seconds.
POLLS = 0.001, 0.02  # shortest and longest time between two looks at the calls that run
PATIENCE = 2.0  # without an end, after which calls pass: those that run may wait for one


class _PausedObject:
    """An object, its pauses, and what runs of it while one begins."""

    def __init__(self, instance: Any) -> None:
        self.instance = instance  # lives meanwhile
        self.queue: PauseQueue[BatchId, ServerCall] = PauseQueue()
        self.running: dict[Any, CallKey] = {}  # calls and batches
        self.passed = 0  # calls that have passed since the holder has asked last
        self.mark: BatchId = ("", -1)

    def add(self, running: Any, key: CallKey) -> None:
        """Let the pause wait for a call or batch; what that calls has the mark of the pause."""
        self.running[running] = key
        awaited.setdefault(key, set()).add(self.mark)

    def remove(self, running: Any) -> None:
        """Note the end of a call or batch."""
        marks = awaited[key := self.running.pop(running)]
        marks.discard(self.mark)
        if not marks:
            del awaited[key]


class Pauses:
    """The paused objects of one worker. On its loop."""

    def __init__(self, executor: Executor, open_calls: Callable[[], Collection[RpcCall]]) -> None:
        self._executor = executor
        self._open_calls = open_calls
        self._paused: dict[int, _PausedObject] = {}  # by id
        self._changed = asyncio.Event()

    @contextlib.asynccontextmanager
    async def pause(
        self, instance: Any, mark: BatchId, own: CallKey | None, *, enters: bool
    ) -> AsyncIterator[BatchId]:
        """Pause an object in this block; give the id that the calls of the holder carry.

        Args:
            instance: the object.
            mark: ancestor of what is called by the calls that the holder waits for, here and by
                its pauses of other objects. Such calls pass until the block is entered.
            own: the call that is the holder.
            enters: whether the block is entered once what runs has ended, and not by `settle`.
        """
        found = self._paused.get(id(instance))
        if found is not None and found.queue.pause in ancestor_batches():  # of the same holder
            yield found.queue.pause
            return
        pause = new_batch()
        found = self._paused.setdefault(id(instance), _PausedObject(instance))
        self._executor.holds = self._holds
        try:
            if not found.queue.add_pause(pause):
                while found.queue.pause != pause:
                    await self._changed.wait()
            found.mark, found.passed = mark, 0
            for running, key in self._running(found):
                if key != own:
                    found.add(running, key)
                elif is_limited(instance):
                    raise RuntimeError(
                        "a method of an object with a limit cannot pause it: the pause would wait "
                        "for calls that wait for the turn of the method"
                    )
            await self._wait_for_calls(found)
            if enters:
                found.queue.is_entered = True
            yield pause
        finally:
            if found.queue.pause == pause:
                for each in [*found.running]:
                    found.remove(each)
            released = found.queue.end_pause(pause)
            self._changed.set()
            self._changed = asyncio.Event()
            if found.queue.pause is None and not len(found.queue):
                del self._paused[id(found.instance)]
                if not self._paused:
                    self._executor.holds = None
            self._start(released)

    async def settle(self, instance: Any, *, enters: bool) -> int:
        """Wait for the calls that have passed since the last time; return how many there were.

        With `enters` the block is entered then: no call but the holder's passes any more.
        """
        found = self._paused.get(id(instance))
        if found is None or found.queue.is_entered:
            return 0
        await self._wait_for_calls(found)
        passed, found.passed = found.passed, 0
        if enters:
            found.queue.is_entered = True
        return passed

    def _start(self, calls: Collection[ServerCall]) -> None:
        for call in calls:
            call.leave_queue = None
        self._executor.start(calls, were_held=True)

    async def _wait_for_calls(self, found: _PausedObject) -> None:
        """Wait until what runs has ended, and the calls that pass meanwhile.

        One that runs may wait for a call of the same object that has come since. It has the mark of
        the pause if it was made since, and passes at once. Otherwise all that wait pass if no call
        has ended for a while, and for twice as long the next time.
        """
        since, patience, poll = monotonic(), PATIENCE, POLLS[0]
        while found.running:
            ended = []
            for each in found.running:
                if isinstance(each, RpcCall):
                    is_open = each.session.calls.get(each.number) is each
                    runs = is_open or each in self._executor.in_threads
                else:
                    runs = not each.is_finished
                if not runs:
                    ended.append(each)
            for each in ended:
                found.remove(each)
            if ended:
                since = monotonic()
            elif monotonic() - since >= patience:
                passing = found.queue.pass_all()
                for each in passing:
                    self._let_pass(found, each)
                self._start(passing)
                since, patience = monotonic(), 2 * patience
            if found.running:
                await asyncio.sleep(poll)
                poll = min(2 * poll, POLLS[1])

    def _let_pass(self, found: _PausedObject, call: ServerCall) -> None:
        found.passed += 1
        if isinstance(call, RpcCall):
            found.add(call, (call.session.key, call.number))

    def _running(self, found: _PausedObject) -> Iterator[tuple[Any, CallKey]]:
        """Yield the calls and batches that run of an object, with their keys."""
        for call in {*self._open_calls(), *self._executor.in_threads}:
            if not isinstance(call, RpcCall) or call in found.queue:
                continue
            if object_of(call) is found.instance:
                yield call, (call.session.key, call.number)
        for cls in type(found.instance).__mro__:
            for each in vars(cls).values():
                if hasattr(type(each), "__aiorpc_running__"):  # a batched method
                    for batch in each.__aiorpc_running__(found.instance):
                        yield batch, (BATCH, batch.id[1])

    def _holds(self, call: ServerCall) -> bool:
        """Let a call wait if its object is paused; return whether it does."""
        found = self._paused.get(id(object_of(call)))
        if found is None or found.queue.pause is None or call.is_cancelled:
            return False
        batches = () if call.scope is None else call.scope.batches
        if found.queue.pause in batches:
            return False
        if not found.queue.is_entered and found.mark in batches:
            self._let_pass(found, call)
            return False
        found.queue.add_call(call)
        call.leave_queue = partial(found.queue.remove_call, call)
        return True


def object_of(call: ServerCall) -> Any:
    """Return the object of a call, None if it has none."""
    key = getattr(call, "order_key", None)
    if isinstance(key, tuple):
        with contextlib.suppress(ReferenceError):
            return find_object(key)
    function = call.function
    return function.__self__ if type(function) is MethodType else None
