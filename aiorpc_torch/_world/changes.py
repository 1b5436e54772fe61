"""The changes of a world's membership: which ones there are, and a log that any reader follows.

A peer is told of by many sources, some of them twice and some late: leave messages, pings, ends of
connections, replacement processes. A change is logged only if it follows from the last one of that
peer. So a reader that applies the changes one by one has the true membership.

The log is a linked list. A reader holds the entry that it has read last, and no entry is kept for
readers that have gone. This module knows neither clocks nor loops.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Kind = Literal["joined", "left", "lost", "returned"]


@dataclass(frozen=True, slots=True)
class Change:
    """A change of a world's membership, as one worker learns of it.

    Attributes:
        kind: "joined": the worker is new in the world, or in it again after it had left. "left":
            its block has ended in order, and it serves no more. "lost": it is dead, frozen or
            unreachable, or its block has failed. "returned": a lost worker answers again, or has a
            replacement process.
        name: Name of the worker.
        rank: Its rank.
        reason: The reason of a loss in one line, else "".
    """

    kind: Kind
    name: str
    rank: int
    reason: str = ""


_FOLLOWS: dict[Kind, tuple[Kind | None, ...]] = {
    "joined": (None, "left", "lost"),
    "left": ("joined", "returned", "lost"),
    "lost": ("joined", "returned"),
    "returned": ("lost",),
}


class Entry:
    """An entry of the log: the place of a reader that has read it. The first one is never read."""

    __slots__ = ("change", "next")

    def __init__(self, change: Change) -> None:
        self.change = change
        self.next: Entry | None = None


class ChangeLog:
    """The log of one worker's world. One thread records; any may read `end` and the entries.

    Attributes:
        end: The last entry: readers that begin now read what follows.
        is_closed: Whether no further change is recorded.
    """

    def __init__(self) -> None:
        self.end = Entry(Change("joined", "", -1))
        self.is_closed = False
        self._last: dict[str, Kind] = {}

    def admit(self, names: Iterable[str]) -> None:
        """Note the workers that are in the world from the start: no change tells of them."""
        self._last.update(dict.fromkeys(names, "joined"))

    def has(self, name: str) -> bool:
        """Return whether a worker is in the world: it has joined and not left; it may be lost."""
        return self._last.get(name, "left") != "left"

    def forget(self, name: str) -> None:
        """Forget a worker that is gone: if it comes again, it joins."""
        self._last.pop(name, None)

    def record(self, change: Change) -> bool:
        """Append a change if it follows from that worker's last one; return whether it does."""
        if self.is_closed or self._last.get(change.name) not in _FOLLOWS[change.kind]:
            return False
        self._last[change.name] = change.kind
        self.end.next = self.end = Entry(change)
        return True

    def close(self) -> None:
        """Record no further change: this worker leaves."""
        self.is_closed = True
