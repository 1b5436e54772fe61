"""Answers where calls stand: trees, circles, text, and what a peer may send."""

import contextlib
import math
import pickle
from typing import Any

import pytest
from hypothesis import given, strategies as st

from aiorpc_torch._aio.places import MOST_LINES, Line
from aiorpc_torch._wire.plain import dump
from aiorpc_torch._wire.where import (
    CALL,
    LOCK,
    MOST_CALLS,
    CallNode,
    Key,
    Limits,
    Question,
    Standings,
    dump_answer,
    dump_lines,
    read_answer,
    read_lines,
    read_question,
    standings_of,
)

plain_values = st.recursive(
    st.none() | st.integers(-(2**63), 2**63) | st.floats() | st.text(st.characters(codec="utf-8")),
    lambda inner: st.lists(inner, max_size=13),
)


def key(number: int) -> Key:
    return "main", 0, 0, number


def node(depth: int, number: int, reason: str = "", **parts: Any) -> CallNode:
    return CallNode(depth, key(number), f"C.m{number}", "w", "main", 1.0, reason=reason, **parts)


DEADLOCK = (
    node(0, 1),
    node(1, 2, CALL),
    node(2, 3, LOCK),
    node(3, 4, CALL),
    node(4, 3, LOCK, is_again=True),
)


def test_a_tree() -> None:
    """The order and the depths say what is below what."""
    one, two = standings_of([node(0, 1), node(1, 2), node(2, 3), node(1, 4), node(0, 5)])
    assert [each.method for each in one.waits_for] == ["C.m2", "C.m4"]
    assert one.waits_for[0].waits_for[0].method == "C.m3"
    assert two.waits_for == ()
    assert pickle.loads(pickle.dumps(one)) == one


def test_the_part_of_another_answer() -> None:
    """Its depths begin below; the reason is that of the calls at its top."""
    placed = [each.below(3, LOCK, is_certain=False) for each in DEADLOCK[:3]]
    assert [(each.depth, each.reason) for each in placed] == [(3, LOCK), (4, CALL), (5, LOCK)]
    assert [each.is_certain for each in placed] == [False, True, True]


def test_a_circle_is_told_once() -> None:
    """It begins where it was entered, and not at the call that only waits for it."""
    other = node(0, 4), node(1, 3, LOCK), node(2, 4, CALL, is_again=True)
    found = Standings(standings_of((*DEADLOCK, *other)))
    (circle,) = found.deadlocks()
    assert [each.method for each in circle] == ["C.m3", "C.m4", "C.m3"]
    assert str(found).splitlines()[-1] == (
        "deadlock, these calls wait for each other: "
        "C.m3 on worker 'w' -> C.m4 on worker 'w' -> C.m3 on worker 'w'"
    )


@pytest.mark.parametrize("guess", [3, 4])
def test_a_circle_with_a_guess(guess: int) -> None:
    """It may end by itself. What lies before the circle does not matter."""
    nodes = [each._replace(is_certain=at != guess and at != 1) for at, each in enumerate(DEADLOCK)]
    (call,) = standings_of(nodes)
    assert "\nperhaps a deadlock, these calls" in str(call)


def test_text() -> None:
    """A call is shown once; of its lines the first and the last."""
    lines = [Line(f"f{at}", "a.py", at) for at in range(3)]
    first = node(0, 1, state="waits", lines=lines, inside="sleep")
    (call,) = standings_of([first, node(1, 1, CALL)])
    assert str(call).splitlines() == [
        "C.m1 on worker 'w', 1.0 s: waits at a.py:0 in f0 -> ... -> a.py:2 in f2, in sleep()",
        "  waits for C.m1 on worker 'w': see above",
    ]


@given(st.lists(st.integers(0, 5), max_size=100))
def test_round_trip(depths: list[int]) -> None:
    """Whatever the depths are, each call is in the tree once."""
    nodes = [node(depth, at) for at, depth in enumerate(depths)]
    question, found = read_answer(dump_answer(7, nodes))
    assert question == 7
    assert found == [each._replace(lines=[]) for each in nodes[:MOST_CALLS]]
    todo, seen = standings_of(found), []
    while todo:
        each = todo.pop(0)
        seen.append(each.id)
        todo += each.waits_for
    assert sorted(seen) == sorted(each.key for each in found)


def test_what_a_peer_may_send() -> None:
    """Its text is escaped and cut, and so is the number of its calls and lines."""
    evil = "\x1b[31m\n" + "x" * 1000
    lines = [Line(evil, evil, 1)] * 50
    nodes = [
        CallNode(0, key(1), evil, evil, evil, 0.0, evil, lines, evil, evil)._replace(depth=-5)
    ] * 200
    _, found = read_answer(dump((1, nodes)))
    assert len(found) == MOST_CALLS
    text = str(Standings(standings_of(found)))
    assert "\x1b" not in text
    assert len(text) < MOST_CALLS * 5000
    assert len(found[0].lines) == MOST_LINES
    assert found[0].depth == 0
    (line, *rest) = read_lines(dump(lines))
    assert line.file.isprintable()
    assert len(rest) == MOST_LINES - 1
    assert read_lines(dump_lines([Line("f", "\udc80", 1)]))[0].file == "\\udc80"


def test_a_question_is_cut() -> None:
    question = Question(1, [*range(1000)], [key(1)], Limits(10**6, 10**6))
    found = read_question(dump(question))
    assert (found.numbers, found.limits) == ([*range(MOST_CALLS)], Limits(MOST_CALLS, 10.0))
    assert read_question(dump(question._replace(limits=Limits(-1, -1.0)))).limits == (0, 0.0)
    assert read_question(dump(question._replace(limits=Limits(1, math.nan)))).limits == (1, 10.0)


@given(st.binary() | plain_values.map(dump))
def test_bytes_of_a_peer(data: bytes) -> None:
    """They are read or refused with a ValueError."""
    for read in read_question, read_answer, read_lines:
        with contextlib.suppress(ValueError):
            read(data)


def test_limits_are_shared() -> None:
    """All parts of an answer have no more calls than it may have."""
    limits = Limits(64, 1.0)
    assert limits.part(3) == Limits(21, 0.8)
    assert limits.part(1000).most == 1
