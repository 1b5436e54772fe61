"""Batch functions that wait for their own batch, through any chain of calls."""

import asyncio
import threading
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

import aiorpc_torch as aiorpc
from aiorpc_torch import RRef, remote
from tests.support import actors
from tests.support.actors import Knot
from tests.support.gated_batches import arrived, outcome, settled

# ── along any route ─────────────────────────────────────────────────────────────────────────────

ASKS = ["ask", "typed", "local"]
QUEUES = {"ask": "ask", "typed": "ask", "local": "ask", "ask_in_thread": "ask_in_thread"}
OTHERS = ["relay", "relay_in_thread", "stream", "stream_in_thread", "create"]
HOPS = st.sampled_from([*QUEUES, *OTHERS])


def is_knotted(route: list[Any]) -> bool:
    """Return whether a call goes to a queue whose batch function it came from."""
    queues = [(QUEUES[name], id(rref)) for name, rref in route if name in QUEUES]
    return len({*queues}) < len(queues)


def check_knotted(told: Any) -> None:
    assert type(told) is RuntimeError
    assert "awaits itself" in str(told)


async def walk(*routes: list[Any]) -> list[Any]:
    """What each comes to, in bounded time."""
    return await settled(*map(actors.follow, routes))


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("back", ASKS)
@pytest.mark.parametrize("first", QUEUES)
async def test_back_through_any_kind_of_call(first: str, name: str, back: str) -> None:
    """Every caller of the batch is told, and the queue serves the next."""
    rref = RRef(Knot())
    again = first if first == "ask_in_thread" else back
    for told in await walk(*([(first, rref), (name, rref), (again, rref)] for _ in range(2))):
        check_knotted(told)
        assert f"Knot.{QUEUES[first]} " in str(told)
    assert await walk([(first, rref)], [(first, rref), (name, rref)]) == ["end", "end"]


@pytest.mark.promise("batching.reentry")
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(HOPS, st.integers(0, 2)), max_size=6))
async def test_any_route(world: aiorpc.types.Worker, route: list[tuple[str, int]]) -> None:
    """It comes to an end, or is told so if it meets a queue that it came from; nothing hangs."""
    rrefs = [RRef(Knot()) for _ in range(3)]
    hops = [(name, rrefs[index]) for name, index in route]
    (found,) = await walk(hops)
    if is_knotted(hops):
        check_knotted(found)
    else:
        assert found == "end"
    assert await walk(*([(name, rref)] for name in QUEUES for rref in rrefs)) == ["end"] * 12


# ── what is left behind ─────────────────────────────────────────────────────────────────────────


@pytest.mark.usefixtures("world")
async def test_a_task_that_a_callee_leaves_behind() -> None:
    """The batch that made the call does not wait for it: it may join the queue, even at once."""
    knot = Knot()
    rref = RRef(knot)
    far = remote(rref)
    knot.gate.clear()
    batch = asyncio.create_task(outcome(far.ask([("leave", rref), ("ask", rref)])))
    await arrived(far)
    assert len(knot.left) == 1
    assert not batch.done(), "the batch runs still"
    knot.gate.set()
    assert await settled(batch, far.what_was_left()) == ["left", ["end"]]


@pytest.mark.usefixtures("world")
async def test_a_call_that_its_batch_function_cancelled() -> None:
    """The batch no longer waits for the call, so its thread may join the queue."""
    entered, release, done = (threading.Event() for _ in range(3))
    found: list[Any] = []

    class Late(Knot):
        def late(self, route: Any) -> None:
            entered.set()
            assert release.wait(30.0)
            found.append(asyncio.run(outcome(actors.follow(route))))
            done.set()

        @aiorpc.batched(max_size=8)
        async def give_up(self, routes: list[Any]) -> list[Any]:
            if routes == [[]]:
                return ["end"]
            late = asyncio.create_task(actors.follow([("late", rref), ("give_up", rref)]))
            await asyncio.to_thread(entered.wait, 10.0)
            late.cancel()
            await arrived(remote(rref))
            release.set()
            while not (found or waits()):
                await remote(rref).here()
            return ["first"]

    def waits() -> int:
        (name,) = (name for name in aiorpc.observe.stats().batches if name.endswith("Late.give_up"))
        return aiorpc.observe.stats().batches[name].waiting

    rref = RRef(Late())
    assert await settled(remote(rref).give_up([1])) == ["first"]
    await asyncio.to_thread(done.wait, 10.0)
    assert found == ["end"]
