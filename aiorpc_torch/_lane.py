"""What one worker sent, back in the order in which it was sent: a pure reordering buffer.

torch reads a connection in order but hands each message to whichever of its threads is free, so
two calls may arrive the wrong way round.
"""

from typing import Generic, TypeVar

T = TypeVar("T")


class Lane(Generic[T]):
    """Numbers start at 0 and have no gaps: a sender takes a number only for what it did send."""

    __slots__ = ("_early", "_next")

    def __init__(self) -> None:
        self._next = 0
        self._early: dict[int, T] = {}

    def __repr__(self) -> str:
        return f"<Lane at {self._next}, {len(self._early)} early>"

    def arrived(self, seq: int, item: T) -> list[T]:
        """What is due now that `item`, number `seq`, is here: nothing, itself, or more."""
        if seq == self._next and not self._early:  # nearly always
            self._next += 1
            return [item]
        self._early[seq] = item
        due = []
        while self._next in self._early:
            due.append(self._early.pop(self._next))
            self._next += 1
        return due
