"""What one worker sent, back in the order in which it was sent: a pure reordering buffer.

torch reads a connection in order but hands each message to whichever of its threads is free, so
two calls may arrive the wrong way round.
"""

from typing import Generic, TypeVar

T = TypeVar("T")

FAR = 1 << 20  # a number so far ahead of its turn is nobody's: nothing would ever come before it


class Lane(Generic[T]):
    """Numbers start at 0 and have no gaps: a sender takes a number only for what it did send."""

    __slots__ = ("_early", "_next")

    def __init__(self) -> None:
        self._next = 0
        self._early: dict[int, T] = {}

    def __repr__(self) -> str:
        return f"<Lane at {self._next}, {len(self._early)} early>"

    def expects(self, seq: int) -> bool:
        """Whether a number may come: it has not come yet, and is not absurd."""
        return 0 <= seq - self._next < FAR and seq not in self._early

    def arrived(self, seq: int, item: T) -> list[T]:
        """What is due now that `item`, number `seq`, is here: nothing, itself, or more.

        Raises:
            ValueError: for a number that was not expected; nothing has changed then.
        """
        if seq == self._next and not self._early:  # nearly always
            self._next += 1
            return [item]
        if not self.expects(seq):
            raise ValueError(f"number {seq} has come already, or cannot be: {self._next} is next")
        self._early[seq] = item
        due = []
        while self._next in self._early:
            due.append(self._early.pop(self._next))
            self._next += 1
        return due
