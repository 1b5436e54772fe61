"""Decide the numbers of published versions, and which of them are kept.

A state machine without a clock, an event loop or torch. Numbers only grow, also after the publisher
was replaced: a follower tells the highest number that it has seen.
(tests/unit/training/test_versions.py)
"""

from typing import Generic, TypeVar

from .numbers import is_count

T = TypeVar("T")


class Versions(Generic[T]):
    """The versions of one publisher; it keeps at most `keep`. The first one is `number`."""

    def __init__(self, first: T, number: int = 0, keep: int = 2) -> None:
        if not is_count(keep, 1):
            raise ValueError(f"keep must be a positive number of versions, got {keep!r}")
        if not is_count(number):
            raise ValueError(f"version must be a number from 0 on, got {number!r}")
        self._keep = keep
        self._kept = {number: first}  # the oldest first
        self._published = False
        self._floor = number  # the highest number that was ever seen

    @property
    def newest(self) -> int:
        """Return the number of the newest version."""
        return next(reversed(self._kept))

    @property
    def oldest(self) -> int:
        """Return the number of the oldest version that is kept."""
        return next(iter(self._kept))

    def all(self) -> list[T]:
        """Return the versions that are kept."""
        return [*self._kept.values()]

    def add(self, content: T) -> int:
        """Add a version; return its number, which is higher than every number seen."""
        self._published = True
        self._floor += 1
        self._kept[self._floor] = content
        while len(self._kept) > self._keep:
            del self._kept[self.oldest]
        return self._floor

    def see(self, number: int) -> bool:
        """Note a number that a follower has from an earlier publisher.

        Return whether the newest version got a higher number: it was published before this one was
        known. The first version keeps its number, as followers shall not go back to it.
        """
        if number <= self._floor:
            return False
        self._floor = number
        if self._published:
            _, content = self._kept.popitem()
            self.add(content)
        return self._published

    def get(self, number: int) -> T:
        """Return a version that is kept; LookupError if it is not, or was never published."""
        if number not in self._kept:
            kept = ", ".join(map(str, self._kept))
            raise LookupError(f"version {number} is not kept; kept are {kept}: raise keep=")
        return self._kept[number]
