"""The order of the calls of one exclusive object: one holds the turn, the others wait in order."""

from collections.abc import Hashable
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)


class TurnQueue(Generic[T]):
    """At most one holder, and the calls that wait for it to leave, in the order of their entry."""

    def __init__(self) -> None:
        self.holder: T | None = None
        self._waiting: dict[T, None] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def enter(self, call: T) -> bool:
        """Add a call; return whether it holds the turn at once."""
        if self.holder is not None:
            self._waiting[call] = None
            return False
        self.holder = call
        return True

    def leave(self, call: T) -> T | None:
        """Remove a call; return the one that holds the turn in its place. Ignore unknown calls."""
        if self.holder != call:
            self._waiting.pop(call, None)
            return None
        self.holder = next(iter(self._waiting), None)
        if self.holder is not None:
            del self._waiting[self.holder]
        return self.holder
