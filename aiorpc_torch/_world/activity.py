"""Activities of the workers of a world, and waits for them: a table without clock or loop.

A wait with the goal SERVING is reached at an instant at which every other live worker serves or has
left. The table of one process decides for all waits, so there is one order of all reports. That
excludes this race: a worker reads that `b` serves, then `b` stops serving and calls, then `c`
begins to serve; read one after another, both serve, though at no instant both did.

What such an instant means: no worker is in its block any more. So every wait with this goal is
reached at it, and all these workers go on together. Work that a serving worker still does (a task
of its own, a call of `serve` that timed out in that moment) is served on: the end of a block waits
until every live peer has left. (tests/unit/world/test_activity.py)
"""

import enum
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Activity(enum.IntEnum):
    """The last that a worker has reported. A later one implies those before it."""

    ACTIVE = 0
    """It is inside its block."""
    SERVING = 1
    """It waits in `serve()` for all peers."""
    LEFT = 2
    """Its block has ended in order; it serves until every live peer has left."""


class Report(NamedTuple):
    """A report of one process. Each change of the activity has the next sequence number."""

    process: int
    """torch's worker id: new for a replacement process, whose activity is ACTIVE."""
    sequence: int
    activity: Activity


@dataclass(eq=False, frozen=True, slots=True)
class Wait:
    """A wait of worker `asker` until the workers `among` (default: all others) reach `goal`."""

    asker: str
    process: int
    token: int
    """Number of the wait in its process: a repeated one replaces the first."""
    goal: Activity
    among: Sequence[str]
    answer: Callable[[bool], None]
    """Called once, unless the asker is gone: with whether the goal is reached."""


class ActivityTable:
    """The activities of the members of a world, by name, and the waits for them.

    Args:
        number_of: returns the number of a member's current process, None for no member.
        names: returns the members.
        gone: returns the members that are lost, or are known otherwise to have left.
    """

    def __init__(
        self,
        number_of: Callable[[str], int | None],
        names: Callable[[], Collection[str]],
        gone: Callable[[], Collection[str]] = tuple,
    ) -> None:
        self._number_of = number_of
        self._names = names
        self._gone = gone
        self._reports: dict[str, Report] = {}
        self._waits: list[Wait] = []

    def record(self, name: str, report: Report) -> None:
        """Record a report, unless it is late or of a process that is no member."""
        is_member = self._number_of(name) == report.process
        if is_member and report.sequence > self.report_of(name).sequence:
            self._reports[name] = report
            for gone in self._reports.keys() - {*self._names()}:
                del self._reports[gone]

    def report_of(self, name: str) -> Report:
        """Return the last report of a member's current process."""
        process, report = self._number_of(name), self._reports.get(name)
        if report is None or report.process != process:
            return Report(-1 if process is None else process, -1, Activity.ACTIVE)
        return report

    def left(self) -> set[str]:
        """Return the members that have reported LEFT."""
        return {name for name in self._names() if self._activity(name) is Activity.LEFT}

    def missing(self, asker: str, goal: Activity, among: Sequence[str] = ()) -> list[str]:
        """Return the live members of whom a wait is not reached."""
        return self._missing(asker, goal, among or self._names(), self._gone())

    def _missing(
        self, asker: str, goal: Activity, among: Iterable[str], gone: Collection[str]
    ) -> list[str]:
        return [
            name
            for name in among
            if name != asker
            and name not in gone
            and self._number_of(name) is not None
            and self._activity(name) < goal
        ]

    def awaited(self) -> set[str]:
        """Return the members of whom any wait is not reached."""
        return {name for missing in self._missing_of_all().values() for name in missing}

    def add(self, wait: Wait) -> None:
        """Add a wait, in place of an earlier one with its token."""
        self.end(wait.asker, wait.process, wait.token)
        self._waits.append(wait)

    def end(self, asker: str, process: int, token: int) -> None:
        """End a wait that is not reached, if there is one."""
        for each in [*self._waits]:
            if (each.asker, each.process, each.token) == (asker, process, token):
                self.expire(each)

    def expire(self, wait: Wait) -> None:
        """End this wait, unless it was answered or replaced."""
        if wait in self._waits:
            self._waits.remove(wait)
            wait.answer(False)

    def end_all(self) -> None:
        """End all waits."""
        for each in [*self._waits]:
            self.expire(each)

    def settle(self) -> None:
        """Answer the waits that are reached. Those that served are active from then on."""
        if not self._waits:
            return
        gone = self._gone()
        self._waits = [
            each
            for each in self._waits
            if each.asker not in gone and self._number_of(each.asker) == each.process
        ]
        reached = [each for each, missing in self._missing_of_all().items() if not missing]
        for each in reached:
            self._waits.remove(each)
            report = self.report_of(each.asker)
            if each.goal is Activity.SERVING and report.activity is Activity.SERVING:
                self._reports[each.asker] = report._replace(activity=Activity.ACTIVE)
        for each in reached:
            each.answer(True)

    def _missing_of_all(self) -> dict[Wait, list[str]]:
        gone, names = self._gone(), self._names()
        return {
            each: self._missing(each.asker, each.goal, each.among or names, gone)
            for each in self._waits
        }

    def _activity(self, name: str) -> Activity:
        return self.report_of(name).activity
