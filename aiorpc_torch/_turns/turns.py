"""Turns on objects with a limit, for calls of peers, batches and local coroutines alike.

Calls enter and leave in any thread. A turn has an id like a batch's: the calls that its holder
makes carry it, so a call that would wait for itself is found (`ancestry`).
"""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Collection
from typing import Any

from .._aio.identity import WeakIdentityDict
from .._wire.ancestry import BatchId, BatchScope, add_scope, ancestor_batches, new_batch
from .queues import TurnQueue

LIMIT = "__aiorpc_limit__"
"""Attribute of classes: how many calls run at once in one object. Subclasses inherit it."""

METHOD_TURNS = "__aiorpc_turns__"
"""Attribute of a method with a limit: itself, and what returns its turns, given the object."""


class Turn:
    """A place in the queue of one object. `begin` is called when a waiting one may run.

    It is called at most once, in the thread of the call that has left.
    """

    __slots__ = ("_turns", "batches", "begin", "id")

    def __init__(self, turns: "Turns", begin: Callable[[], None]) -> None:
        self.id = new_batch()
        self.begin = begin
        self.batches: Collection[BatchId] = ()  # its ancestors
        self._turns = turns

    def is_held(self) -> bool:
        """Return whether this turn's call may run."""
        return self in self._turns.holders

    def scope(self) -> BatchScope:
        """Return the scope of the calls that the holder makes."""
        return BatchScope(frozenset((self.id,)), self.is_held)

    def leave(self) -> None:
        """Leave the queue, or end the turn. Ignored the second time."""
        self.begin = lambda: None
        self._turns.leave(self)


class Turns:
    """The turns on one object, or on one method of it: `limit` calls at once. Thread-safe."""

    def __init__(self, limit: int = 1) -> None:
        self._lock = threading.RLock()
        self._queue: TurnQueue[Turn] = TurnQueue(limit)

    @property
    def holders(self) -> Collection[Turn]:
        """Return the turns that are held."""
        return self._queue.holders

    def is_held_by(self, batches: Collection[BatchId]) -> bool:
        """Return whether one of these ancestors holds a turn."""
        return bool(batches) and any(each.id in batches for each in [*self._queue.holders])

    def enter(self, turn: Turn, name: str, batches: Collection[BatchId]) -> bool:
        """Add a call of method `name` with those ancestors; return whether it holds a turn.

        Raises:
            RuntimeError: if all turns would be held by calls that wait for such a call.
        """
        with self._lock:
            self.refuse_own_call(name, batches)
            turn.batches = batches
            return self._queue.enter(turn, nested=self.is_held_by(batches))

    def refuse_own_call(self, name: str, batches: Collection[BatchId]) -> None:
        """Raise RuntimeError as `enter` does."""
        with self._lock:
            queue = self._queue
            if not (queue.is_full and self.is_held_by(batches)):
                return
            awaited = {*batches}.union(*(turn.batches for turn in queue.waiting()))
            count = len(queue.holders)
            if any(holder.id not in awaited for holder in queue.holders):
                return
            what = "an exclusive object calls itself"
            if count > 1:
                what = f"an object calls itself, from all {count} calls that may run at once"
            raise RuntimeError(
                f"{name}: {what}, so this call would wait for the call that makes it. Call the "
                "method directly: `self.method()`"
            )

    def leave(self, turn: Turn) -> None:
        """Remove a call, and begin those that may run now."""
        with self._lock:
            following = self._queue.leave(turn)
        if following is not None:
            following.begin()

    async def wait(self, name: str) -> Turn:
        """Wait for a turn of the current task. Raises the same as `enter`."""
        loop = asyncio.get_running_loop()
        granted = loop.create_future()

        def grant() -> None:
            if not granted.done():
                granted.set_result(None)

        def begin() -> None:
            try:
                loop.call_soon_threadsafe(grant)
            except RuntimeError:  # its loop was closed while it waited
                turn.leave()

        turn = Turn(self, begin)
        if not self.enter(turn, name, ancestor_batches()):
            try:
                await granted
            except BaseException:
                turn.leave()
                raise
        return turn

    @contextlib.asynccontextmanager
    async def hold(self, name: str) -> AsyncIterator[None]:
        """Hold a turn in this block of a task. Raises the same as `enter`."""
        turn = await self.wait(name)
        try:
            with add_scope(turn.scope()):
                yield
        finally:
            turn.leave()


def is_limited(instance: object) -> bool:
    """Return whether an object is of a class with a limit."""
    return getattr(type(instance), LIMIT, None) is not None


_turns: WeakIdentityDict[Any, dict[str, Turns]] = WeakIdentityDict()
_lock = threading.Lock()


def turns_of(instance: Any, method: str = "", limit: int | None = None) -> Turns:
    """Return the turns on an object of a class with a limit, or on one method of any object.

    Raises:
        TypeError: if the object cannot be weakly referenced.
    """
    with _lock:
        if (by_name := _turns.get(instance)) is None:
            _turns.set(instance, by_name := {})
        if (turns := by_name.get(method)) is None:
            limit = getattr(type(instance), LIMIT) if limit is None else limit
            turns = by_name[method] = Turns(limit)
        return turns
