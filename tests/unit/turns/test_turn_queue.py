"""The queue of an object with a limit: never too many at once, in order, and no turn is lost."""

import hypothesis.strategies as st
from hypothesis import given

from aiorpc_torch._turns.turn_queue import TurnQueue

KINDS = ["enter", "enter", "enter nested", "leave", "leave"]
STEPS = st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 9)), max_size=80)


@given(STEPS, st.integers(1, 4))
def test_the_order_of_turns(steps: list[tuple[str, int]], limit: int) -> None:
    """Against plain lists: whoever leaves gives the turn to a nested call, else to the first."""
    queue: TurnQueue[int] = TurnQueue(limit)
    holders: list[int] = []
    nested: list[int] = []
    waiting: list[int] = []
    for kind, call in steps:
        if kind == "leave":
            following = None
            if call in holders and (nested or waiting):
                following = (nested or waiting).pop(0)
                holders.append(following)
            for each in (holders, nested, waiting):
                if call in each and call != following:
                    each.remove(call)
            assert queue.leave(call) == following
        elif call not in [*holders, *nested, *waiting]:
            is_nested, is_free = kind == "enter nested", len(holders) < limit
            (holders if is_free else nested if is_nested else waiting).append(call)
            assert queue.enter(call, nested=is_nested) == is_free
        assert sorted(queue.holders) == sorted(holders)
        assert queue.waiting() == [*nested, *waiting]
        assert queue.is_full == (len(holders) == limit)
