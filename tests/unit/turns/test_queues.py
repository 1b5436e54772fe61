"""The queues of an object: in order, never too many at once, and no turn or pause is lost."""

import hypothesis.strategies as st
from hypothesis import given

from aiorpc_torch._turns.queues import PauseQueue, TurnQueue

TURN_KINDS = ["enter", "enter", "enter nested", "leave", "leave"]
TURN_STEPS = st.lists(st.tuples(st.sampled_from(TURN_KINDS), st.integers(0, 9)), max_size=80)


@given(TURN_STEPS, st.integers(1, 4))
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


PAUSE_KINDS = ["pause", "call", "call", "leave", "leave", "end", "pass", "enter"]
PAUSE_STEPS = st.lists(st.tuples(st.sampled_from(PAUSE_KINDS), st.integers(0, 9)), max_size=80)


@given(PAUSE_STEPS)
def test_pauses_and_calls_in_order(steps: list[tuple[str, int]]) -> None:
    """Against one list: the pause that has begun, and what waits for it."""
    queue: PauseQueue[str, int] = PauseQueue()
    begun: str | None = None
    waiting: list[str | int] = []
    for kind, number in steps:
        pause = f"pause {number}"
        if kind == "pause" and pause not in [begun, *waiting]:
            assert queue.add_pause(pause) == (begun is None)
            if begun is None:
                begun = pause
            else:
                waiting.append(pause)
        elif kind == "call" and begun is not None and number not in waiting:
            queue.add_call(number)
            waiting.append(number)
        elif kind == "leave":
            queue.remove_call(number)
            waiting = [each for each in waiting if each != number]
        elif kind == "pass":
            calls = [each for each in waiting if isinstance(each, int)]
            assert queue.pass_all() == calls
            waiting = [each for each in waiting if each not in calls]
        elif kind == "enter" and begun is not None:
            queue.is_entered = True
        elif kind == "end":
            released = []
            if pause == begun:
                begun = None
                while waiting and begun is None:
                    first = waiting.pop(0)
                    if isinstance(first, str):
                        begun = first
                    else:
                        released.append(first)
            elif pause in waiting:
                waiting.remove(pause)
            assert queue.end_pause(pause) == released
        assert queue.pause == begun
        assert len(queue) == len(waiting)
        assert not (queue.is_entered and begun is None)
