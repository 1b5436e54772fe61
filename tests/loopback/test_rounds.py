"""Rounds in a world of one: members, quorum, timeout, and contributors that give up."""

import asyncio
import pickle
from collections.abc import Callable
from typing import Any

import pytest

from aiorpc_torch import (
    Broadcast,
    CallTimeout,
    Round,
    RoundTimeout,
    RRef,
    remote,
)
from tests.support.gated_batches import arrived, asks, by_name, cancel, outcome, raises, settled

# ── in a world of one ─────────────────────────────────────────────────────────────────────────────


@pytest.mark.promise("rounds.member")
async def test_a_members_second_contribution_waits_for_the_next_round(gated: Any) -> None:
    """And a round that raises raises for all of it, and for none of the next."""
    made, far = gated(Round(2, member=by_name))
    calls = asks(far, "a1", "a2")
    await arrived(far)
    assert made.batches == []
    calls += asks(far, "b1")
    assert await settled(calls[0], calls[2]) == ["a1", "b1"]
    made.answer = raises(LookupError("the step"))
    calls += asks(far, "b2")
    assert [type(each) for each in await settled(calls[1], calls[3])] == [LookupError] * 2
    made.answer = Broadcast
    assert await settled(*asks(far, "a3", "b3")) == [["a3", "b3"]] * 2
    assert made.batches == [["a1", "b1"], ["a2", "b2"], ["a3", "b3"]]


@pytest.mark.promise("rounds.leave")
async def test_a_contributor_that_gives_up_leaves_the_round(gated: Any) -> None:
    """By cancellation or because its time is over; the others wait for another."""
    made, far = gated(Round(2))
    calls = asks(far, "cancelled")
    await arrived(far)
    await cancel(far, *calls)
    late = await settled(remote(RRef(made), timeout=0.05).ask("late"))
    assert type(late[0]) is CallTimeout
    calls = asks(far, "a")
    await arrived(far)
    assert made.batches == []
    assert await settled(*calls, far.ask("b")) == ["a", "b"]


@pytest.mark.promise("rounds.timeout")
async def test_a_round_that_times_out_names_who_is_missing(
    gated: Any, skip: Callable[[float], None]
) -> None:
    """Its contributors are told who was there and who was not; nothing ran, and the next works."""
    made, far = gated(Round(3, timeout=1000.0, member=by_name))
    assert await settled(*asks(far, "a1", "b1", "c1")) == ["a1", "b1", "c1"]
    calls = asks(far, "a2", "b2", "a3")
    await arrived(far)
    skip(1001.0)
    got = await settled(*calls[:2])
    for told in got:
        assert type(told) is RoundTimeout
        assert (told.present, told.missing) == (("a", "b"), ("c",))
        assert "Made.ask timed out: a, b contributed; missing: c" in str(told)
    assert got[0] is not got[1]
    assert not calls[2].done()  # of the next round
    assert await settled(calls[2], *asks(far, "b3", "c3")) == ["a3", "b3", "c3"]
    assert made.batches == [["a1", "b1", "c1"], ["a3", "b3", "c3"]]


async def test_a_round_without_members_names_workers(
    gated: Any, skip: Callable[[float], None]
) -> None:
    """A round of fewer callers than it wants ends with its timeout, not never."""
    made, far = gated(Round(100, timeout=1000.0))
    calls = asks(far, 1, 2)
    await arrived(far)
    skip(1001.0)
    for told in await settled(*calls):
        assert (told.present, told.missing) == (("main", "main"), ())
        assert "missing: unknown (no other member" in str(told)
    assert made.batches == []


class Member:
    """Cannot be pickled, or not be read again, or cannot even be described."""

    def __init__(self, fault: str) -> None:
        self.fault = fault

    def __repr__(self) -> str:
        if self.fault == "no repr":
            raise ValueError(self.fault)
        return f"<Member with {self.fault}>"

    def __reduce__(self) -> Any:
        if self.fault == "no pickle":
            raise TypeError(self.fault)
        if self.fault == "exit":
            raise SystemExit(3)
        return _unreadable, ()


def _unreadable() -> None:
    raise LookupError("cannot be read")


@pytest.mark.parametrize("fault", ["no pickle", "exit", "no way back", "no repr"])
async def test_members_that_cannot_be_sent_arrive_as_text(
    gated: Any, skip: Callable[[float], None], fault: str
) -> None:
    """RoundTimeout arrives as itself, with the reprs of such members among the others."""
    members: dict[str, Any] = {"odd": Member(fault), "other": Member(fault), "fine": ("f", 1)}
    made, far = gated(Round(3, timeout=1000.0, member=lambda item, _: members[item]))
    assert await settled(*asks(far, *members)) == [*members]
    calls = asks(far, "odd", "fine")
    await arrived(far)
    calls.append(asyncio.create_task(outcome(made.ask("odd"))))
    await arrived(far)
    skip(1001.0)
    (told, same) = await settled(*calls[:2])
    texts = [
        object.__repr__(member) if fault == "no repr" else repr(member)
        for member in (members["odd"], members["other"])
    ]
    for each in (told, same):
        assert type(each) is RoundTimeout
        assert (each.present, each.missing) == ((texts[0], ("f", 1)), (texts[1],))
        assert "a round of " in str(each)
    skip(1001.0)
    (here,) = await settled(calls[2])
    assert (here.present, here.missing) == ((members["odd"],), (("f", 1), members["other"]))


def test_a_round_timeout_crosses_with_all_that_it_has() -> None:
    """Its notes and whatever a program put on it."""
    sent = RoundTimeout("over", ["a"], [Member("no pickle"), 3])
    sent.add_note("noted")
    sent.extra = 7  # type: ignore[attr-defined]
    read = pickle.loads(pickle.dumps(sent))
    assert (type(read), read.args, read.present) == (RoundTimeout, ("over",), ("a",))
    assert read.missing == ("<Member with no pickle>", 3)
    assert (read.__notes__, read.extra) == (["noted"], 7)


@pytest.mark.promise("rounds.quorum")
async def test_a_quorum_is_enough_once_the_time_is_over(
    gated: Any, skip: Callable[[float], None]
) -> None:
    """Not before; and the time of the next round begins when the one before has ended."""
    made, far = gated(Round(3, quorum=2, timeout=1000.0, member=by_name))
    calls = asks(far, "a1", "b1", "b2")
    await arrived(far)
    assert made.batches == []
    made.gate.clear()
    skip(1001.0)
    await arrived(far)
    assert made.batches == [["a1", "b1"]]
    calls += asks(far, "a2")
    await arrived(far)
    skip(1001.0)
    made.gate.set()
    assert await settled(*calls[:2]) == ["a1", "b1"]
    await arrived(far)
    assert made.batches == [["a1", "b1"]]  # c may wait for that answer still
    skip(1001.0)
    assert await settled(*calls[2:]) == ["b2", "a2"]
