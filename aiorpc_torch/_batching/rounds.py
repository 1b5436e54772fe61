"""When contributions become a round: all of them, or a quorum of them when the time is over.

As `_batcher`: no clock, no event loop, no torch. A round is formed of the first contribution of
each member that waits; what a member sends beyond that waits for the next round.
"""

from collections.abc import Hashable
from itertools import islice
from typing import TypeVar

from .policies import Round
from .scheduler import PLAIN, Batch, Batcher, Reason, Refusal, Traits

T = TypeVar("T")


class RoundBatcher(Batcher[T]):
    """Exactly so many callers, together; one round at a time."""

    def __init__(self, policy: Round) -> None:
        super().__init__(policy, slots=1)
        self._policy = policy
        self._waiting: dict[T, tuple[float, Traits]] = {}  # since when; in order of arrival
        self._opened = float("-inf")  # when the round before had ended
        self._seen: dict[Hashable, None] = {}  # who has contributed, the last one last

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, item: T, now: float, traits: Traits = PLAIN) -> None:
        """Raises ValueError for one of another key than those that wait: no round has both."""
        if any(traits.key != other.key for _, other in islice(self._waiting.values(), 1)):
            raise ValueError(
                "this contribution differs in structure, dtypes or shapes from those that wait"
            )
        self._seen.pop(traits.member, None)
        self._seen[traits.member] = None
        self._waiting[item] = now, traits
        if len(self._seen) > 4 * self._policy.size:  # of members that come and go
            del self._seen[next(iter(self._seen))]

    def discard(self, item: T) -> bool:
        return self._waiting.pop(item, None) is not None

    def deadline(self) -> float | None:
        if self._running or not self._waiting:
            return None
        return self._due()

    def finished(self, now: float) -> None:
        super().finished(now)
        self._opened = now

    def close(self) -> tuple[T, ...]:
        items = tuple(self._waiting)
        self._waiting.clear()
        return items

    def _due(self) -> float | None:
        if self._policy.timeout is None:
            return None
        since, _ = next(iter(self._waiting.values()))
        return max(since, self._opened) + self._policy.timeout

    def _leave(self, now: float) -> Batch[T] | Refusal[T] | None:
        members = self._forming()
        if len(members) == self._policy.size:
            return Batch(self._remove(members), Reason.ROUND)
        due = self._due() if members else None
        if due is None or now < due:
            return None
        if self._policy.quorum is not None and len(members) >= self._policy.quorum:
            return Batch(self._remove(members), Reason.QUORUM)
        self._opened = now
        return self._refuse(members)

    def _forming(self) -> dict[T, Hashable]:
        """The contributions to the next round, and whose they are."""
        members: dict[T, Hashable] = {}
        there = set()
        for item, (_, traits) in self._waiting.items():
            if len(members) == self._policy.size:
                break
            if self._policy.member is None or traits.member not in there:
                members[item] = traits.member
                there.add(traits.member)
        return members

    def _remove(self, members: dict[T, Hashable]) -> tuple[T, ...]:
        for item in members:
            del self._waiting[item]
        return tuple(members)

    def _refuse(self, members: dict[T, Hashable]) -> Refusal[T]:
        present = tuple(members.values())
        there = {*present}
        absent = [member for member in reversed(self._seen) if member not in there]
        missing = tuple(absent[: self._policy.size - len(present)])
        return Refusal(self._remove(members), present, missing)
