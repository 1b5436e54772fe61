"""Waits for what the workers of a world do: a table without clock or loop.

A wait with the goal SERVING is reached at an instant at which every other live worker serves or has
left. The table of one process decides for all waits, so there is one order of all reports. That
excludes this race: a worker reads that `b` serves, then `b` stops serving and calls, then `c`
begins to serve; read one after another, both serve, though at no instant both did.

What such an instant means: no worker is in its block any more. So every wait with this goal is
reached at it, and all these workers go on together. Work that a serving worker still does (a task
of its own, a call of `serve` that timed out in that moment) is served on: the end of a block waits
until every live peer has left. (tests/unit/node/test_waits.py)
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .._peers.peers import Activity, Peers


@dataclass(eq=False, frozen=True, slots=True)
class Wait:
    """A wait of worker `asker` until the workers `among` (default: all others) reach `goal`."""

    asker: str
    worker_id: int
    token: int  # number of the wait in its process: a repeated one replaces the first
    goal: Activity
    among: Sequence[str]
    answer: Callable[[bool], None]  # called once, unless the asker is gone: is the goal reached?


class Waits:
    """The waits for the members of a world, whose records have their activities."""

    def __init__(self, members: Peers) -> None:
        self._members = members
        self._waits: list[Wait] = []

    def missing(self, asker: str, goal: Activity, among: Sequence[str] = ()) -> list[str]:
        """Return the live members of whom a wait is not reached."""
        found = map(self._members.workers.get, among or self._members.names())
        return [
            each.name
            for each in found
            if each is not None and each.name != asker and each.is_awaited and each.activity < goal
        ]

    def awaited(self) -> set[str]:
        """Return the members of whom any wait is not reached."""
        return {name for missing in self._missing_of_all().values() for name in missing}

    def add(self, wait: Wait) -> None:
        """Add a wait, in place of an earlier one with its token."""
        self.end(wait.asker, wait.worker_id, wait.token)
        self._waits.append(wait)

    def end(self, asker: str, worker_id: int, token: int) -> None:
        """End a wait that is not reached, if there is one."""
        for each in [*self._waits]:
            if (each.asker, each.worker_id, each.token) == (asker, worker_id, token):
                self.expire(each)

    def expire(self, wait: Wait) -> None:
        """End this wait, unless it was answered or replaced."""
        if wait in self._waits:
            self._waits.remove(wait)
            wait.answer(False)

    def end_all(self) -> None:
        for each in [*self._waits]:
            self.expire(each)

    def settle(self) -> None:
        """Answer the waits that are reached. Those that served are active from then on."""
        if not self._waits:
            return
        askers = {each: self._members.get(each.asker, each.worker_id) for each in self._waits}
        self._waits = [each for each, found in askers.items() if found and found.is_awaited]
        reached = [each for each, missing in self._missing_of_all().items() if not missing]
        for each in reached:
            self._waits.remove(each)
            if each.goal is Activity.SERVING:
                asker = self._members.workers[each.asker]
                if asker.activity is Activity.SERVING:
                    asker.activity = Activity.ACTIVE
        for each in reached:
            each.answer(True)

    def _missing_of_all(self) -> dict[Wait, list[str]]:
        return {each: self.missing(each.asker, each.goal, each.among) for each in self._waits}
