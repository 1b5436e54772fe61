"""The scheduler of rounds: all members of a round together, or a quorum of them at its timeout.

A round takes the first waiting contribution of each member; further ones wait for the next round.
"""

from collections.abc import Hashable
from itertools import islice
from typing import Any, TypeVar

from .policies import Round
from .scheduler import DEFAULT_TRAITS, Batch, CallTraits, Reason, Scheduler, TimedOutRound

T = TypeVar("T")


class RoundScheduler(Scheduler[T]):
    """A scheduler for `Round`: one round at a time."""

    def __init__(self, policy: Round) -> None:
        super().__init__(slots=1)
        self._policy: Any = policy  # its numbers are known once `use` was called, if not before
        self.waiting: dict[T, tuple[float, CallTraits]] = {}  # with the times of arrival
        self._last_end = float("-inf")  # of the previous round
        # The latest contributor last. Members are not declared: workers may join and leave.
        self._known_members: dict[Hashable, None] = {}

    def use(self, policy: Round) -> None:
        self._policy = policy

    def add(self, item: T, now: float, traits: CallTraits = DEFAULT_TRAITS) -> None:
        """Add a contribution.

        Raises:
            ValueError: if its key differs from the waiting ones: a round cannot contain both.
        """
        if any(traits.key != other.key for _, other in islice(self.waiting.values(), 1)):
            raise ValueError(
                "a contribution differs in structure, dtypes or shapes from those that wait"
            )
        self._known_members.pop(traits.member, None)
        self._known_members[traits.member] = None
        self.waiting[item] = now, traits
        if len(self._known_members) > 4 * self._policy.size:  # members come and go
            del self._known_members[next(iter(self._known_members))]

    def discard(self, item: T) -> bool:
        return self.waiting.pop(item, None) is not None

    def deadline(self) -> float | None:
        if self._running or not self.waiting:
            return None
        return self._timeout_at()

    def finish_batch(self, now: float) -> None:
        super().finish_batch(now)
        self._last_end = now

    def _timeout_at(self) -> float | None:
        if self._policy.timeout is None:
            return None
        # Not before the previous round ends: a missing member may wait for that one's result.
        since, _ = next(iter(self.waiting.values()))
        return max(since, self._last_end) + self._policy.timeout  # type: ignore[no-any-return]

    def _select_batch(self, now: float) -> Batch[T] | TimedOutRound[T] | None:
        members = self._next_members()
        if len(members) == self._policy.size:
            return Batch(self._remove(members), Reason.ROUND)
        due = self._timeout_at() if members else None
        if due is None or now < due:
            return None
        if self._policy.quorum is not None and len(members) >= self._policy.quorum:
            return Batch(self._remove(members), Reason.QUORUM)
        self._last_end = now
        return self._time_out(members)

    def _next_members(self) -> dict[T, Hashable]:
        """Return the contributions to the next round, each with its member."""
        members: dict[T, Hashable] = {}
        present = set()
        for item, (_, traits) in self.waiting.items():
            if len(members) == self._policy.size:
                break
            if self._policy.member is None or traits.member not in present:
                members[item] = traits.member
                present.add(traits.member)
        return members

    def _remove(self, members: dict[T, Hashable]) -> tuple[T, ...]:
        for item in members:
            del self.waiting[item]
        return tuple(members)

    def next_round(self) -> tuple[int, tuple[Hashable, ...], tuple[Hashable, ...]]:
        """Return the size of the next round, who has contributed, and who is missing."""
        present = tuple(self._next_members().values())
        return self._policy.size, present, self._missing(present)

    def _time_out(self, members: dict[T, Hashable]) -> TimedOutRound[T]:
        """Remove the round."""
        present = tuple(members.values())
        return TimedOutRound(self._remove(members), present, self._missing(present))

    def _missing(self, present: tuple[Hashable, ...]) -> tuple[Hashable, ...]:
        """Return the most recent past contributors that a round of these needs."""
        contributed = {*present}
        absent = [member for member in reversed(self._known_members) if member not in contributed]
        return tuple(absent[: self._policy.size - len(present)])
