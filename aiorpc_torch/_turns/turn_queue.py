"""The order of the calls of one object: some hold a turn, the others wait in order of arrival."""

from collections.abc import Hashable
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)


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

    def __len__(self) -> int:
        return len(self._waiting) + len(self._nested)

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
