"""The order of the calls of one object: those that wait for a turn, or for the end of a pause."""

from collections.abc import Hashable
from typing import Any, Generic, TypeVar

T = TypeVar("T", bound=Hashable)
P = TypeVar("P", bound=Hashable)


class TurnQueue(Generic[T]):
    """At most `limit` holders, and the calls that wait for one to leave, in order of their entry.

    A `nested` call is made by a holder: it takes the next free turn, before calls that have come
    earlier, since a turn may be held until it returns.
    """

    def __init__(self, limit: int = 1) -> None:
        self.holders: dict[T, None] = {}
        self._limit = limit
        self._waiting: dict[T, None] = {}
        self._nested: dict[T, None] = {}

    def waiting(self) -> list[T]:
        """Return the calls that wait."""
        return [*self._nested, *self._waiting]

    @property
    def is_full(self) -> bool:
        """Return whether no turn is free."""
        return len(self.holders) >= self._limit

    def enter(self, call: T, *, nested: bool = False) -> bool:
        """Add a call; return whether it holds a turn at once."""
        if self.is_full:
            (self._nested if nested else self._waiting)[call] = None
            return False
        self.holders[call] = None
        return True

    def leave(self, call: T) -> T | None:
        """Remove a call; return the one that holds a turn in its place. Ignore unknown calls."""
        if call not in self.holders:
            self._waiting.pop(call, None)
            self._nested.pop(call, None)
            return None
        del self.holders[call]
        following = next(iter(self._nested or self._waiting), None)
        if following is not None:
            del (self._nested or self._waiting)[following]
            self.holders[following] = None
        return following


class PauseQueue(Generic[P, T]):
    """At most one pause at a time, and what waits for its end: calls and pauses, in order.

    Attributes:
        pause: the pause that has begun, None if calls may run.
        is_entered: whether the calls from before it have ended.
    """

    def __init__(self) -> None:
        self.pause: P | None = None
        self.is_entered = False
        self._waiting: dict[P | T, bool] = {}  # whether it is a pause

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, waiting: object) -> bool:
        return waiting in self._waiting

    def add_pause(self, pause: P) -> bool:
        """Add a pause; return whether it begins at once. Its calls are to end then."""
        if self.pause is None:
            self.pause = pause
            return True
        self._waiting[pause] = True
        return False

    def add_call(self, call: T) -> None:
        """Let a call wait."""
        self._waiting[call] = False

    def remove_call(self, call: T) -> None:
        """Remove a call that waits no more. Ignore unknown calls."""
        self._waiting.pop(call, None)

    def pass_all(self) -> list[T]:
        """Remove and return the calls that wait."""
        calls: list[Any] = [each for each, is_pause in self._waiting.items() if not is_pause]
        for each in calls:
            del self._waiting[each]
        return calls

    def end_pause(self, pause: P) -> list[T]:
        """End a pause; return the calls that may run, in order. `pause` is the next one, if any."""
        if self.pause != pause:
            self._waiting.pop(pause, None)
            return []
        self.pause, self.is_entered = None, False
        released: list[T] = []
        while self._waiting and self.pause is None:
            each = next(iter(self._waiting))
            if self._waiting.pop(each):
                self.pause = each  # type: ignore[assignment]
            else:
                released.append(each)  # type: ignore[arg-type]
        return released
