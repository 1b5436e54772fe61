"""Turns on exclusive objects, for calls of peers, batches and local coroutines alike.

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
from .turn_queue import TurnQueue

EXCLUSIVE = "__aiorpc_exclusive__"
"""Attribute of exclusive classes; subclasses inherit it."""


class Turn:
    """A place in the queue of one object. `begin` is called when a waiting one may run.

    It is called at most once, in the thread of the call that has left.
    """

    __slots__ = ("_turns", "begin", "id")

    def __init__(self, turns: "Turns", begin: Callable[[], None]) -> None:
        self.id = new_batch()
        self.begin = begin
        self._turns = turns

    def is_held(self) -> bool:
        """Return whether this turn's call may run."""
        return self._turns.holder is self

    def scope(self) -> BatchScope:
        """Return the scope of the calls that the holder makes."""
        return BatchScope(frozenset((self.id,)), self.is_held)

    def leave(self) -> None:
        """Leave the queue, or end the turn. Ignored the second time."""
        self.begin = _nothing
        self._turns.leave(self)


def _nothing() -> None:
    """Do nothing: the call has left."""


class Turns:
    """The turns on one exclusive object. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._queue: TurnQueue[Turn] = TurnQueue()

    @property
    def holder(self) -> Turn | None:
        """Return the turn that is held, None if the object is idle."""
        return self._queue.holder

    def is_held_by(self, batches: Collection[BatchId]) -> bool:
        """Return whether one of these ancestors holds the turn."""
        holder = self._queue.holder
        return holder is not None and holder.id in batches

    def enter(self, turn: Turn, name: str, batches: Collection[BatchId]) -> bool:
        """Add a call of method `name` with those ancestors; return whether it holds the turn.

        Raises:
            RuntimeError: if an ancestor holds the turn, so that the call would wait for itself.
        """
        with self._lock:
            if self.is_held_by(batches):
                raise own_call_error(name)
            return self._queue.enter(turn)

    def leave(self, turn: Turn) -> None:
        """Remove a call, and begin the next one if it held the turn."""
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


def own_call_error(name: str) -> RuntimeError:
    """Return the error of a call that its object makes of itself."""
    return RuntimeError(
        f"{name}: an exclusive object calls itself, so this call would wait for the call that "
        "makes it. Call the method directly: `self.method()`"
    )


def is_exclusive(instance: object) -> bool:
    """Return whether an object is of an exclusive class."""
    return getattr(type(instance), EXCLUSIVE, False) is True


_turns: WeakIdentityDict[Any, Turns] = WeakIdentityDict()
_lock = threading.Lock()


def turns_of(instance: Any) -> Turns:
    """Return the turns on an exclusive object."""
    with _lock:
        if (turns := _turns.get(instance)) is None:
            _turns.set(instance, turns := Turns())
        return turns


@contextlib.asynccontextmanager
async def own_turn(instance: Any, name: str) -> AsyncIterator[None]:
    """Hold a turn on an exclusive object in this block of a task.

    Raises:
        RuntimeError: if the task is a part of a call that holds the turn.
    """
    turn = await turns_of(instance).wait(name)
    try:
        with add_scope(turn.scope()):
            yield
    finally:
        turn.leave()
