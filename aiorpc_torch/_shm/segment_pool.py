"""Decide which shared-memory segment a message is written to, and which segments are closed.

A state machine without system calls, a clock or torch. A segment is free, or it has holders: the
sender while it writes, and each receiver until it has freed its tensors. Only a free segment is
used again. (tests/unit/shm/test_segment_pool.py)
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

MIN_SEGMENT = 256 * 1024
"""Bytes of the smallest segment."""

MAX_SEGMENTS = 256
"""Segments of one pool; each has a descriptor of the process."""

_STEPS = 4  # classes between a power of two and the next: at most a fifth of a segment is unused


class Grant(NamedTuple):
    """A segment with its first holder.

    Attributes:
        id: Number of the segment; numbers are never used again.
        size: Bytes of the segment.
        is_new: True if the segment has to be made.
        closed: Numbers of free segments that have to be closed for it.
    """

    id: int
    size: int
    is_new: bool
    closed: list[int]


@dataclass(slots=True)
class _Segment:
    size: int
    holders: int = 1
    is_reusable: bool = True
    free_since: float = 0.0


def segment_size(size: int) -> int:
    """Return the bytes of the segments that messages of `size` bytes are written to."""
    if size <= MIN_SEGMENT:
        return MIN_SEGMENT
    step = (1 << (size - 1).bit_length()) // (2 * _STEPS)
    return -(-size // step) * step


class SegmentPool:
    """The segments of one sender.

    Args:
        limit: Maximum bytes of all segments together.
        count: Maximum number of segments.

    Attributes:
        total: Bytes of all segments, free ones included.
    """

    def __init__(self, limit: int, count: int = MAX_SEGMENTS) -> None:
        self.total = 0
        self._limit = limit
        self._count = count
        self._last = 0
        self._segments: dict[int, _Segment] = {}
        self._free: dict[int, list[int]] = {}  # by size; the last one was used last

    def __repr__(self) -> str:
        return f"<SegmentPool {len(self)} segments, {self.total:,} of {self._limit:,} bytes>"

    def __len__(self) -> int:
        """Return the number of segments, free ones included."""
        return len(self._segments)

    @property
    def has_free(self) -> bool:
        """True if a segment is free."""
        return bool(self._free)

    def acquire(self, size: int) -> Grant | None:
        """Return a segment for `size` bytes, None if the limit excludes it."""
        size = segment_size(size)
        if free := self._free.get(size):
            found = free.pop()
            if not free:
                del self._free[size]
            self._segments[found].holders = 1
            return Grant(found, size, False, [])
        if self._held_bytes() + size > self._limit or self._held_count() >= self._count:
            return None
        closed = self._make_space(size)
        self._last += 1
        self._segments[self._last] = _Segment(size)
        self.total += size
        return Grant(self._last, size, True, closed)

    def hold(self, number: int) -> None:
        """Add a holder to a segment that has one."""
        self._segments[number].holders += 1

    def release(self, number: int, now: float) -> bool:
        """Remove a holder; return whether the segment has to be closed.

        Args:
            number: Segment to release.
            now: Current time in seconds.
        """
        segment = self._segments[number]
        segment.holders -= 1
        if segment.holders:
            return False
        if not segment.is_reusable:
            self._forget(number)
            return True
        segment.free_since = now
        self._free.setdefault(segment.size, []).append(number)
        return False

    def abandon(self, number: int, now: float) -> bool:
        """Remove a holder that may still read the segment; it is never used again.

        Return whether the segment has to be closed.
        """
        self._segments[number].is_reusable = False
        return self.release(number, now)

    def trim(self, before: float) -> list[int]:
        """Return and forget the segments that are free since `before` or longer."""
        return self._forget_free(
            number for number in self._all_free() if self._segments[number].free_since <= before
        )

    def oldest(self) -> float | None:
        """Return the time since when a segment is free, None if none is."""
        return min((self._segments[number].free_since for number in self._all_free()), default=None)

    def _held_bytes(self) -> int:
        return self.total - sum(size * len(free) for size, free in self._free.items())

    def _held_count(self) -> int:
        return len(self._segments) - sum(map(len, self._free.values()))

    def _make_space(self, size: int) -> list[int]:
        """Forget free segments, the longest unused first, until `size` bytes fit."""
        closed: list[int] = []
        excess = self.total + size - self._limit
        for number in sorted(self._all_free(), key=lambda each: self._segments[each].free_since):
            if excess <= 0 and len(self._segments) - len(closed) < self._count:
                break
            excess -= self._segments[number].size
            closed.append(number)
        return self._forget_free(closed)

    def _all_free(self) -> list[int]:
        return [number for free in self._free.values() for number in free]

    def _forget_free(self, numbers: Iterable[int]) -> list[int]:
        found = [*numbers]
        for number in found:
            free = self._free[self._segments[number].size]
            free.remove(number)
            if not free:
                del self._free[self._segments[number].size]
            self._forget(number)
        return found

    def _forget(self, number: int) -> None:
        self.total -= self._segments.pop(number).size
