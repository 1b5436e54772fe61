"""The changes of a world's membership: which ones there are, and a log that any reader follows.

A peer is reported by many, some of them twice and some late. A change is told only if it follows
from the last one of that peer. So a reader that applies the changes one by one has the true
membership.

The log is a linked list. A reader holds the entry that it has read last, and no entry is kept for
readers that have gone. This module knows neither clocks nor loops.
"""

from dataclasses import dataclass
from typing import Literal

Kind = Literal["joined", "left", "lost", "returned"]


@dataclass(frozen=True, slots=True)
class Change:
    """A change of a world's membership, as one worker learns of it.

    Attributes:
        kind: "joined": the worker is new in the world, or in it again after it had left. "left":
            it leaves in order, and takes no new calls. "lost": it is dead, frozen or
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


FOLLOWS: dict[Kind, tuple[Kind | None, ...]] = {
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
    """The log of one worker's world. One thread records; any may read `end` and the entries."""

    def __init__(self) -> None:
        self.end = Entry(Change("joined", "", -1))  # readers that begin now read what follows
        self.is_closed = False  # this worker leaves: no further change is recorded

    def record(self, change: Change) -> None:
        if not self.is_closed:
            self.end.next = self.end = Entry(change)
