"""Schedules of groups: which member gets the next call.

State machines without an event loop, a clock or torch. `_client.routes` drives `LeastBusy` for
`any()`; `_client.group_map` drives `MapSchedule`.
"""

from collections import deque
from collections.abc import Sequence
from operator import itemgetter
from typing import Any, NamedTuple

MAX_REST = 32  # rounds of choices, each of as many as there are members


class LeastBusy:
    """Choice of the least busy member; of several, the one whose turn is next.

    One that fails at once is the least busy always, and would get nearly every call. So it is
    passed over after a failure: for as many choices as there are members, and for twice as many
    after each further failure in a row. It is not if no other is there.
    """

    def __init__(self) -> None:
        self._next = 0
        self._failures: dict[int, int] = {}  # in a row, by position
        self._rests: dict[int, int] = {}  # choices for which a member is passed over

    def choose(self, loads: Sequence[int | None]) -> int | None:
        """Return the position of a member with the smallest load, None if all are lost.

        The load of a lost member is None.
        """
        if self._rests:
            rested = [None if at in self._rests else load for at, load in enumerate(loads)]
            # Other threads may use the group.
            self._rests = {at: rest - 1 for at, rest in [*self._rests.items()] if rest > 1}
            if (found := self._least(rested)) is not None:
                return found
        return self._least(loads)

    def _least(self, loads: Sequence[int | None]) -> int | None:
        count = len(loads)
        turns = [(self._next + step) % count for step in range(count)]
        alive = [(load, at) for at in turns if (load := loads[at]) is not None]
        if not alive:
            return None
        _, best = min(alive, key=itemgetter(0))  # the first one of several
        self._next = best + 1
        return best

    def succeed(self, position: int) -> None:
        """Note that a call of that member has returned."""
        if self._failures:
            self._failures.pop(position, None)
            self._rests.pop(position, None)

    def fail(self, position: int, count: int) -> None:
        """Note that a call of that member, one of `count`, has failed."""
        failures = self._failures[position] = self._failures.get(position, 0) + 1
        self._rests[position] = count * min(1 << (failures - 1), MAX_REST)


class Outcome(NamedTuple):
    """The end of one item: its result, or its exception. `ends_map` if it is that of the map."""

    value: Any
    failure: BaseException | None = None
    ends_map: bool = False


class MapSchedule:
    """The items of one `map`: which may be taken, which member gets each, which result is next.

    The index of an item says how many were taken before it. Each member has at most `in_flight`
    unanswered ones. After losses an item is given to another member at most `retries` times.

    Members are numbered as they come: the first ones from 0, then those of `admit`. If the group
    `changes`, items wait while it has no member.

    Outcomes come in the order of the items if they are `ordered`, otherwise as they complete. What
    ends the map comes last.
    """

    def __init__(
        self,
        members: int,
        in_flight: int,
        retries: int,
        *,
        changes: bool = False,
        ordered: bool = True,
    ) -> None:
        self._in_flight = in_flight
        self._retries = retries
        self._changes = changes
        self._admitted = members
        self._loads: dict[int, int | None] = dict.fromkeys(range(members), 0)  # None: lost
        self._returning: set[int] = set()  # lost members that are made again
        self._least_busy = LeastBusy()
        self._taken = self._yielded = 0
        self._unassigned: deque[int] = deque()
        self._attempts: dict[int, int] = {}  # of items that were given to another member
        self._is_ordered = ordered
        self._outcomes: dict[int, Outcome] = {}  # in the order in which they have come
        self._is_exhausted = False
        self._end: Outcome | None = None  # that of the map, after all others

    @property
    def is_over(self) -> bool:
        """Return whether every item has been yielded, and there are no more."""
        return self._is_exhausted and self._yielded == self._taken and self._end is None

    def may_take(self) -> bool:
        """Return whether the next item may be taken: a slot is free, and its place is near."""
        if self._is_exhausted or self._unassigned:
            return False
        is_near = self._taken - self._yielded < 4 * self._in_flight * len(self._loads)
        return is_near and any(load is not None for load in self._free_loads())

    def take(self) -> int:
        """Return the index of an item that was taken."""
        index = self._taken
        self._taken += 1
        self._unassigned.append(index)
        return index

    def exhaust(self, failure: BaseException | None = None) -> None:
        """End the items, in order or with a failure in place of the next item."""
        if self._is_exhausted:
            return
        self._is_exhausted = True
        if failure is not None:
            self._end = Outcome(None, failure, ends_map=True)

    def assign(self) -> tuple[int, int] | None:
        """Return the next item to send and its member, None if there is none or no slot."""
        if not self._unassigned:
            return None
        chosen = self._least_busy.choose(self._free_loads())
        if chosen is None:
            return None
        member = [*self._loads][chosen]
        self._add_load(member, 1)
        return self._unassigned.popleft(), member

    def answer(self, index: int, member: int, outcome: Outcome) -> None:
        """Note the outcome of an item that `member` had."""
        self._add_load(member, -1)
        self._outcomes[index] = outcome

    def withdraw(self, index: int, member: int, failure: BaseException) -> None:
        """Take back an item that was not sent, because `member` is lost: another gets it."""
        self._unassigned.appendleft(index)
        self._remove(member, failure)

    def lose(self, index: int, member: int, failure: BaseException) -> None:
        """Note that `member` was lost with an item: another gets it, or it has failed."""
        self._retry(index, failure)
        self._remove(member, failure)

    def interrupt(self, index: int, member: int, failure: BaseException) -> None:
        """Note that the connection to `member`, which lives, has ended with an item: as `lose`.

        The member gets further items.
        """
        self._add_load(member, -1)
        self._retry(index, failure)
        self._check_members(failure)  # all were lost meanwhile

    def _retry(self, index: int, failure: BaseException) -> None:
        attempts = self._attempts.pop(index, 0)
        if attempts < self._retries:
            self._attempts[index] = attempts + 1
            self._unassigned.appendleft(index)
        else:
            self._outcomes[index] = Outcome(None, failure)

    def expect(self, member: int) -> None:
        """Note that a lost member is made again: items wait until `restore` or `give_up`."""
        self._loads[member] = None
        self._returning.add(member)

    def restore(self, member: int) -> None:
        """Note that `member` was made again: it gets items."""
        self._returning.discard(member)
        self._loads[member] = 0

    def give_up(self, member: int, failure: BaseException) -> None:
        """Note that an expected member was not made again."""
        self._returning.discard(member)
        self._remove(member, failure)

    def admit(self) -> int:
        """Return the number of a member that is new: it gets items."""
        member = self._admitted
        self._admitted += 1
        self._loads[member] = 0
        return member

    def dismiss(self, member: int) -> None:
        """Note that `member` is none any more: it gets no further items, and may answer those."""
        self._loads.pop(member, None)

    def _remove(self, member: int, failure: BaseException) -> None:
        if member in self._loads:
            self._loads[member] = None
        self._check_members(failure)

    def _check_members(self, failure: BaseException) -> None:
        """End the map if no member is left, and none is awaited."""
        is_awaited = self._changes or bool(self._returning)
        if not is_awaited and all(load is None for load in self._loads.values()):
            self.fail_unassigned(failure)
            self.exhaust(failure)

    def fail_unassigned(self, failure: BaseException) -> None:
        """Fail the items that no member has: none is left, or the time is over."""
        while self._unassigned:
            self._outcomes[self._unassigned.popleft()] = Outcome(None, failure, ends_map=True)

    def next_outcome(self) -> tuple[int, Outcome] | None:
        """Return an item and its outcome, once; None if no outcome is due."""
        index = self._yielded if self._is_ordered else next(iter(self._outcomes), -1)
        if (outcome := self._outcomes.pop(index, None)) is not None:
            self._attempts.pop(index, None)
            self._yielded += 1
            return index, outcome
        if self._end is not None and self._yielded == self._taken:
            end, self._end = self._end, None
            return self._taken, end
        return None

    def _free_loads(self) -> list[int | None]:
        """Return the loads of the members, None where no slot is free."""
        loads = self._loads.values()
        return [load if load is not None and load < self._in_flight else None for load in loads]

    def _add_load(self, member: int, change: int) -> None:
        load = self._loads.get(member)
        if load is not None:  # else it was lost or dismissed meanwhile
            self._loads[member] = max(0, load + change)  # a call from before it was made again
