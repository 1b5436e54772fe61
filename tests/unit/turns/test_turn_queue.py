"""The queue of an exclusive object: never two at once, in order, and no place is lost."""

import hypothesis.strategies as st
from hypothesis import given

from aiorpc_torch._turns.turn_queue import TurnQueue

steps = st.lists(st.tuples(st.sampled_from(["enter", "leave"]), st.integers(0, 7)), max_size=60)


@given(steps)
def test_one_at_a_time_in_order(steps: list[tuple[str, int]]) -> None:
    """Against a plain list: the first is the holder, and whoever leaves frees the place."""
    queue: TurnQueue[int] = TurnQueue()
    model: list[int] = []
    for step, call in steps:
        if step == "enter" and call not in model:
            model.append(call)
            assert queue.enter(call) == (len(model) == 1)
        elif step == "leave":
            held = model[:1] == [call]
            if call in model:
                model.remove(call)
            assert queue.leave(call) == (model[0] if held and model else None)
        assert queue.holder == (model[0] if model else None)
        assert len(queue) == max(0, len(model) - 1)
