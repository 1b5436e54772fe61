"""Waiting in line: the order of arrival, cancellations at each moment, deadlines."""

import asyncio

import pytest
from hypothesis import given, strategies as st

import aiorpc_torch as aiorpc
from aiorpc_torch import CallTimeout
from aiorpc_torch.training.waiting import Changes, Line


async def steps(count: int = 5) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_turns_come_in_the_order_of_arrival() -> None:
    line, free, served = Line(), [0], list[int]()

    async def take(name: int, need: int) -> None:
        await line.turn(lambda: free[0] >= need, "it")
        free[0] -= need
        served.append(name)

    tasks = [asyncio.create_task(take(name, need)) for name, need in enumerate((3, 1, 1))]
    await steps()
    free[0] = 2  # enough for the second and the third, which wait behind the first
    line.notify()
    await steps()
    assert served == []
    assert len(line) == 3
    free[0] = 5
    line.notify()
    await asyncio.gather(*tasks)
    assert served == [0, 1, 2]
    assert len(line) == 0


async def test_a_newcomer_does_not_pass_those_that_wait() -> None:
    line, is_open = Line(), [False]
    first = asyncio.create_task(line.turn(lambda: is_open[0], "it"))
    await steps()
    is_open[0] = True
    second = asyncio.create_task(line.turn(lambda: is_open[0], "it"))
    await steps()
    assert not second.done()  # nobody was told yet
    line.notify()
    await asyncio.gather(first, second)


async def test_deadlines() -> None:
    line, changes = Line(), Changes()
    with aiorpc.timeout(0.01):
        with pytest.raises(CallTimeout, match="insert timed out") as raised:
            await line.turn(lambda: False, "insert")
        with pytest.raises(CallTimeout, match=r"it timed out; nothing was changed: \[1\]"):
            await changes.until(lambda: False, "it", lambda: "[1]")
    assert not raised.value.may_have_run
    assert len(line) == 0


@given(st.data())
def test_whoever_is_cancelled_serves_the_next(data: st.DataObject) -> None:
    """Tokens are handed out until none is left, whoever leaves and whenever."""
    asyncio.run(_cancelled(data))


async def _cancelled(data: st.DataObject) -> None:
    line, free, served = Line(), [0], list[int]()

    async def take(name: int) -> None:
        await line.turn(lambda: free[0] > 0, "it")
        free[0] -= 1
        served.append(name)

    tasks = [asyncio.create_task(take(name)) for name in range(5)]
    given_out = 0
    for _ in range(data.draw(st.integers(0, 20))):
        kind = data.draw(st.sampled_from(["step", "cancel", "free"]))
        if kind == "step":
            await asyncio.sleep(0)
        elif kind == "cancel":
            tasks[data.draw(st.integers(0, 4))].cancel()
        else:
            free[0] += 1
            given_out += 1
            line.notify()
    await steps(20)
    waiting = [task for task in tasks if not task.done()]
    assert served == sorted(served)
    assert len(served) + free[0] == given_out
    assert len(line) == len(waiting)
    assert not (waiting and free[0])
    for task in waiting:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert len(line) == 0
