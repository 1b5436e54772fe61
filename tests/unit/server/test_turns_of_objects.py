"""Turns on exclusive objects, seen from inside."""

import asyncio
import threading

import hypothesis.strategies as st
from hypothesis import given

from aiorpc_torch._turns.turns import Turn, Turns, turns_of
from tests.unit.server.test_exclusive import Inherits


def test_turns_go_on_after_a_loop_has_ended() -> None:
    """A waiting coroutine whose loop is closed does not keep its place."""
    busy, held = Inherits(), threading.Event()
    ended = threading.Event()

    async def hold() -> None:
        async def inner() -> None:
            held.set()
            await asyncio.to_thread(ended.wait)

        turns = turns_of(busy)
        turn = await turns.wait("hold")
        await inner()
        turn.leave()

    holder = threading.Thread(target=asyncio.run, args=(hold(),))
    holder.start()
    held.wait()
    loop = asyncio.new_event_loop()
    waiting = busy.work("lost")
    step = loop.create_task(waiting)
    loop.call_soon(loop.stop)
    loop.run_forever()
    loop.close()
    ended.set()
    holder.join()
    assert turns_of(busy).holders == {}
    assert asyncio.run(busy.work("next")) == "next"
    step._log_destroy_pending = False  # type: ignore[attr-defined]
    del step
    waiting.close()


@given(st.lists(st.lists(st.booleans(), max_size=6), min_size=1, max_size=4))
def test_threads_take_turns(plans: list[list[bool]]) -> None:
    """Any number of threads: one at a time, and every turn is given on. True: leave before it."""
    turns, inside, most = Turns(), 0, 0
    lock = threading.Lock()

    def run(plan: list[bool]) -> None:
        nonlocal inside, most
        for gives_up in plan:
            begun = threading.Event()
            turn = Turn(turns, begun.set)
            if turns.enter(turn, "run", ()):
                begun.set()
            if not gives_up:
                begun.wait()
                with lock:
                    inside += 1
                    most = max(most, inside)
                with lock:
                    inside -= 1
            turn.leave()

    threads = [threading.Thread(target=run, args=(plan,)) for plan in plans]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10.0)
    assert not any(thread.is_alive() for thread in threads)
    assert most <= 1
    assert turns.holders == {}
