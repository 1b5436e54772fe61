"""The pauses of one object: one at a time, calls and pauses in the order of their arrival."""

import hypothesis.strategies as st
from hypothesis import given

from aiorpc_torch._turns.pause_queue import PauseQueue

KINDS = ["pause", "call", "call", "leave", "leave", "end", "pass", "enter"]
STEPS = st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 9)), max_size=80)


@given(STEPS)
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
            queue.enter()
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
