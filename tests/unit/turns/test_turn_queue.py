"""The queue of an object with a limit: never too many at once, in order, and no turn is lost."""

from typing import Any

import hypothesis.strategies as st
from hypothesis import given

from aiorpc_torch._turns.turn_queue import UNLIMITED, TurnQueue

KINDS = ["enter", "enter", "enter alone", "enter nested", "leave", "leave", "hurry"]
STEPS = st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 9)), max_size=80)


@given(STEPS, st.sampled_from([1, 2, 3, UNLIMITED]))
def test_the_order_of_turns(steps: list[tuple[str, int]], limit: float) -> None:
    """Against plain lists, admitted anew from the front after each step."""
    queue: TurnQueue[int] = TurnQueue(limit)
    holders: list[int] = []
    nested: list[int] = []
    waiting: list[int] = []
    alone: set[int] = set()

    def admit() -> list[int]:
        begun: list[int] = []
        while nested or waiting:
            first = (nested or waiting)[0]
            if len(holders) >= limit or alone & {*holders} or (first in alone and holders):
                return begun
            holders.append((nested or waiting).pop(0))
            begun.append(first)
        return begun

    for kind, call in steps:
        known = call in [*holders, *nested, *waiting]
        if kind == "leave":
            for each in (holders, nested, waiting):
                if call in each:
                    each.remove(call)
            alone.discard(call)
            assert queue.leave(call) == admit()
        elif kind == "hurry":
            passes = [each for each in waiting if each not in alone][:1]
            for each in passes:
                waiting.remove(each)
            nested.extend(passes)
            assert queue.hurry() == admit()
        elif not known:
            (nested if kind == "enter nested" else waiting).append(call)
            options: dict[str, Any] = {}
            if kind != "enter":
                options[kind.removeprefix("enter ")] = True
            if kind == "enter alone":
                alone.add(call)
            assert queue.enter(call, **options) == (call in admit())
        assert [*queue.holders] == holders
        assert queue.all_waiting() == [*nested, *waiting]
        assert len(holders) <= limit
        assert not alone & {*holders} or len(holders) == 1
