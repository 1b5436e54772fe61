"""The order of the calls of one object: some hold a turn, the others wait in order of arrival."""

import math
from collections.abc import Hashable
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)


class TurnQueue(Generic[T]):
    """At most `limit` holders, and the calls that wait for one to leave, in order of their entry.

    A call that is to be `alone` waits until no turn is held, and nothing behind it starts until it
    has left. A `nested` call is made by a holder: it takes the next free turn, before calls that
    have come earlier, since a turn may be held until it returns.
    """

    def __init__(self, limit: float = 1) -> None:
        self.holders: dict[T, None] = {}
        self._waiting: dict[T, None] = {}
        self._limit = limit
        self._nested: dict[T, None] = {}
        self._alone: set[T] = set()  # of those that wait, and the holder that is

    def __len__(self) -> int:
        return len(self._waiting) + len(self._nested)

    def all_waiting(self) -> list[T]:
        """Return the calls that wait."""
        return [*self._nested, *self._waiting]

    @property
    def is_full(self) -> bool:
        """Return whether a nested call has to wait."""
        return len(self.holders) >= self._limit or bool(self._alone & self.holders.keys())

    def enter(self, call: T, *, alone: bool = False, nested: bool = False) -> bool:
        """Add a call; return whether it holds a turn at once."""
        (self._nested if nested else self._waiting)[call] = None
        if alone:
            self._alone.add(call)
        return call in self._admit()

    def leave(self, call: T) -> list[T]:
        """Remove a call; return those that hold a turn from now on. Ignore unknown calls."""
        for calls in (self.holders, self._waiting, self._nested):
            calls.pop(call, None)
        self._alone.discard(call)
        return self._admit()

    def hurry(self) -> list[T]:
        """Let the first that waits, and is not to be alone, pass as if it were nested.

        Return those that hold a turn from now on.
        """
        for call in self._waiting:
            if call not in self._alone:
                del self._waiting[call]
                self._nested[call] = None
                break
        return self._admit()

    def _admit(self) -> list[T]:
        begun: list[T] = []
        while not self.is_full and (calls := self._nested or self._waiting):
            call = next(iter(calls))
            if call in self._alone and self.holders:
                break
            del calls[call]
            self.holders[call] = None
            begun.append(call)
        return begun


UNLIMITED = math.inf
