"""All orders of what can happen in small worlds, until nothing goes on.

A world of two or three workers runs, and one or two processes want to enter. Messages, connections,
claims of the place and timers come in any order, and one or two events between them.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import pytest

from tests.support.directories import registration
from tests.support.small_worlds import SmallWorld
from tests.support.state_search import Action, search

EVENTS = ("kill", "freeze", "cut", "retire", "usurp", "hurry", "slow")


def joining(name: str = "a") -> Any:
    return registration(-1, -1, name=name, joined=True)


def replacing(rank: int, size: int) -> Any:
    return registration(rank, size, pid=99)


def explore(
    size: int,
    entrants: Sequence[Any],
    events: Iterable[str] = EVENTS,
    budget: int = 1,
    *,
    is_fixed: bool = False,
) -> None:
    result = search(SmallWorld(size, entrants, events, budget, is_fixed=is_fixed))
    print(result)
    assert not result.finding, result
    assert result.rests


@pytest.mark.promise("succession.never_two", "succession.numbers", "succession.takeover")
@pytest.mark.parametrize("is_fixed", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_process_joins_two_workers(is_fixed: bool) -> None:
    explore(2, [joining()], is_fixed=is_fixed)


@pytest.mark.promise("succession.never_two", "succession.replacement")
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_a_replacement_process_enters(size: int, rank: int) -> None:
    explore(size, [replacing(rank, size)])


@pytest.mark.slow
@pytest.mark.promise("succession.replacement")
def test_a_replacement_process_enters_at_a_fixed_address() -> None:
    explore(2, [replacing(0, 2)], is_fixed=True)


@pytest.mark.slow
@pytest.mark.parametrize("events", [("retire",), ("kill", "retire")])
def test_a_world_ends_while_a_replacement_process_enters(events: tuple[str, ...]) -> None:
    """Its last member leaves: the process belongs to the next world."""
    explore(2, [replacing(0, 2)], events, budget=2)


def test_two_processes_enter_without_an_event() -> None:
    explore(2, [joining("a"), joining("b")], budget=0)


# ── more workers, or more events ────────────────────────────────────────────────────────────────


@pytest.mark.slow
def test_two_events_while_a_replacement_process_enters() -> None:
    explore(2, [replacing(1, 2)], budget=2)


@pytest.mark.exhaustive
def test_two_processes_enter_at_a_fixed_address() -> None:
    """Rank 0's replacement process takes the directory up while the other one enters."""
    explore(2, [joining(), replacing(0, 2)], is_fixed=True)


# ── the search itself ───────────────────────────────────────────────────────────────────────────


class Counter:
    """A model that counts up to a number, or from there in a circle."""

    def __init__(self, worst: int, *, is_endless: bool = False) -> None:
        self.value, self.worst, self.is_endless = 0, worst, is_endless

    def steps(self) -> list[Action]:
        return [("add", 1), ("add", 2)] if self.value < 6 or self.is_endless else []

    def pauses(self) -> list[Action]:
        return []

    releases = events = pauses

    def take(self, action: Action) -> None:
        self.value = (self.value + action[1]) % 8

    def check(self) -> None:
        assert self.value != self.worst, "the worst number"

    def check_rest(self) -> None:
        assert self.value == 6 or self.worst > 0, "it rests elsewhere"

    def fingerprint(self) -> int:
        return self.value

    def describe(self, action: Action) -> str:
        return f"{self.value} + {action[1]}"


def test_the_search_finds_the_shortest_way() -> None:
    result = search(Counter(worst=5))
    assert "the worst number" in result.finding
    assert (result.depth, result.trace[0][:2]) == (3, "0 ")


def test_the_search_checks_the_states_at_rest() -> None:
    assert "it rests elsewhere" in search(Counter(worst=-1)).finding
    result = search(Counter(worst=9))
    assert (result.finding, result.states, result.rests) == ("", 8, 2)


def test_the_search_finds_what_goes_on_without_end() -> None:
    assert "without end" in search(Counter(worst=9, is_endless=True)).finding
