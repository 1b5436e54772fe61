"""Decide which rollouts may start, and which versions may be announced, by how stale they get.

A state machine without a clock, an event loop or torch. A ticket is out from the start of a rollout
to its end. While a rollout runs, at most `max_staleness` newer versions are announced. A rollout is
parked while it waits for the learner: a version that waited for it would wait for itself.
(tests/unit/training/test_admission.py)
"""

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from .numbers import is_count


class Ticket(NamedTuple):
    """The admission of one rollout.

    Attributes:
        version: the version that was the newest when the rollout began.
        number: number of the ticket, which no other of its limit has.
        limit: name of the limit.
    """

    version: int
    number: int
    limit: str = ""


class Admission:
    """The tickets of one limit. `version` is the newest that was announced."""

    def __init__(self, max_staleness: int | None, max_in_flight: int, version: int = 0) -> None:
        if max_staleness is not None and not is_count(max_staleness):
            raise ValueError(
                f"max_staleness must be a number of versions from 0 on, or None; "
                f"got {max_staleness!r}"
            )
        if not is_count(max_in_flight, 1):
            raise ValueError(f"max_in_flight must be a positive number, got {max_in_flight!r}")
        self.version = _checked(version)
        self._max_staleness = max_staleness
        self._max_in_flight = max_in_flight
        self._out: dict[int, int] = {}  # version of each ticket
        self._parked: Counter[int] = Counter()  # how often each ticket is parked
        self._proposed: list[int] = []  # versions that wait to be announced
        self._last = 0

    @property
    def in_flight(self) -> int:
        """Return the number of tickets that are out."""
        return len(self._out)

    @property
    def staleness(self) -> int:
        """Return how many versions the oldest rollout that is not parked is behind."""
        return self.version - min(self._running(), default=self.version)

    def may_start(self) -> bool:
        """Return whether a rollout may start: not if it would keep back a version that waits."""
        is_fresh = all(self._allows(self.version, each) for each in self._proposed)
        return is_fresh and self.in_flight < self._max_in_flight

    def start(self) -> Ticket:
        """Return a ticket, if `may_start`."""
        self._last += 1
        self._out[self._last] = self.version
        return Ticket(self.version, self._last)

    def end(self, ticket: Ticket) -> None:
        """Take a ticket back, once."""
        del self._out[ticket.number]

    def park(self, ticket: Ticket) -> None:
        """Note that a rollout waits for the learner, once for each wait."""
        self._parked[ticket.number] += 1

    def unpark(self, ticket: Ticket) -> None:
        """Note that a wait of a rollout has ended."""
        self._parked[ticket.number] -= 1
        if not self._parked[ticket.number]:
            del self._parked[ticket.number]

    def propose(self, version: int) -> None:
        """Note a version that waits to be announced; ValueError if it is no number of one."""
        self._proposed.append(_checked(version))

    def withdraw(self, version: int) -> None:
        """Note that a version no longer waits."""
        self._proposed.remove(version)

    def may_announce(self, version: int) -> bool:
        """Return whether no rollout that is not parked would be too old at this version."""
        return all(self._allows(each, version) for each in self._running())

    def announce(self, version: int) -> None:
        """Make a version the newest, if `may_announce`."""
        self.version = max(self.version, version)

    def _running(self) -> Iterator[int]:
        """Return the versions of the tickets that are not parked."""
        return (each for number, each in self._out.items() if number not in self._parked)

    def _allows(self, old: int, new: int) -> bool:
        return self._max_staleness is None or new - old <= self._max_staleness


def _checked(version: int) -> int:
    if not is_count(version):
        raise ValueError(f"version must be a number from 0 on, got {version!r}")
    return version
