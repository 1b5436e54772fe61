"""What is sent and not answered is bounded: the rest waits with the caller, and none for ever.

The bounds are of a test's size here; what decides is `_window`, whose limits are a world's own.
"""

import asyncio
from collections import deque
from typing import Any

import anyio
import pytest
import torch

import aiorpc_torch as aiorpc
from aiorpc_torch import CallTimeout, NotInWorld, RRef, call, remote
from aiorpc_torch.observe import stats
from aiorpc_torch.testing import set_flow_limits


def bounds(calls: int | None = None, size: int | None = None, trickle: float = 60.0) -> None:
    """Set the bounds of the connection to this worker itself."""
    set_flow_limits("main", calls=calls, size=size, interval=trickle)


pytestmark = pytest.mark.usefixtures("world")


class Turnstile:
    """Lets those who came pass when it is told to; it counts who is inside."""

    def __init__(self) -> None:
        self.came: list[int] = []
        self.inside = 0
        self.most = 0
        self.weight = 0
        self.heaviest = 0
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._passes = 0
        self._wanted = 0
        self._reached = asyncio.Event()

    async def enter(self, number: int, load: Any = None) -> int:
        weight = 0 if load is None else load.nbytes
        self.came.append(number)
        self.inside += 1
        self.weight += weight
        self.most = max(self.most, self.inside)
        self.heaviest = max(self.heaviest, self.weight)
        if self.inside == self._wanted:
            self._reached.set()
        try:
            await self._pass()
        finally:
            self.inside -= 1
            self.weight -= weight
        return number

    async def _pass(self) -> None:
        if self._passes:
            self._passes -= 1
        else:
            self._waiting.append(asyncio.get_running_loop().create_future())
            await self._waiting[-1]

    async def note(self, number: int) -> int:
        self.came.append(number)
        return number

    async def open(self) -> None:
        self.let(100)

    def let(self, number: int) -> None:
        """So many may pass, in order."""
        for _ in range(number):
            if self._waiting:
                self._waiting.popleft().set_result(None)
            else:
                self._passes += 1

    async def holds(self, number: int) -> None:
        """So many are inside."""
        self._wanted = number
        self._reached.clear()
        if self.inside != number:
            async with asyncio.timeout(120.0):
                await self._reached.wait()


def start(*calls: Any) -> list["asyncio.Task[Any]"]:
    return [asyncio.create_task(each) for each in calls]


@pytest.mark.promise("transport.window")
async def test_never_more_than_so_many_calls() -> None:
    """The rest follows in order as answers come, one for one."""
    bounds(calls=8)
    turnstile = Turnstile()
    rref = RRef(turnstile)
    tasks = start(*(remote(rref).enter(n) for n in range(100)))
    await turnstile.holds(8)
    now = stats()
    assert (now.in_flight, now.unsent, now.running) == (100, 92, 8)
    for n in range(5):
        turnstile.let(1)
        await tasks[n]
        await turnstile.holds(8)
    assert stats().unsent == 87
    turnstile.let(95)
    assert await asyncio.gather(*tasks) == list(range(100))
    assert turnstile.came == list(range(100))
    assert turnstile.most == 8
    assert (stats().in_flight, stats().unsent) == (0, 0)


@pytest.mark.promise("transport.window")
@pytest.mark.parametrize("weight", [10_000, 100_000])
async def test_never_more_than_so_many_bytes(weight: int) -> None:
    """Loads that share a message and loads that go alone count with what they weigh."""
    bounds(size=5 * weight + weight // 2)
    turnstile = Turnstile()
    rref = RRef(turnstile)
    load = torch.zeros(weight, dtype=torch.uint8)
    tasks = start(*(remote(rref).enter(n, load) for n in range(20)))
    await turnstile.holds(5)
    assert stats().unsent == 15
    turnstile.let(20)
    assert await asyncio.gather(*tasks) == list(range(20))
    assert turnstile.came == list(range(20))
    assert turnstile.heaviest == 5 * weight


async def test_a_call_larger_than_the_bound_passes_alone() -> None:
    """When all before it are answered; and those after it wait until it is."""
    bounds(size=2000)
    turnstile = Turnstile()
    rref = RRef(turnstile)
    load = torch.zeros(100_000, dtype=torch.uint8)
    tasks = start(
        remote(rref).enter(0), remote(rref).enter(1, load), remote(rref).enter(2, load),
        remote(rref).enter(3),
    )  # fmt: skip
    for n, left in ((0, 3), (1, 2), (2, 1), (3, 0)):
        await turnstile.holds(1)
        assert turnstile.came == list(range(n + 1))
        assert stats().unsent == left
        turnstile.let(1)
        assert await tasks[n] == n
    assert turnstile.most == 1


async def test_streams_count_too() -> None:
    """A stream holds its place until it has ended, or was left."""
    bounds(calls=3)
    turnstile = Turnstile()
    rref = RRef(turnstile)
    stream = aiter(call("main", endless))
    assert await anext(stream) == 0
    tasks = start(*(remote(rref).enter(n) for n in range(4)))
    await turnstile.holds(2)
    assert stats().unsent == 2
    await stream.aclose()
    await turnstile.holds(3)
    turnstile.let(4)
    assert await asyncio.gather(*tasks) == [0, 1, 2, 3]
    assert turnstile.most == 3


async def endless() -> Any:
    number = 0
    while True:
        yield number
        number += 1


# ── who leaves the queue ────────────────────────────────────────────────────────────────────────


@pytest.mark.promise("transport.unsent")
@pytest.mark.parametrize("trickle", [60.0, 0.02])
async def test_cancelled_before_it_was_sent(trickle: float) -> None:
    """It never is, whether room is made by answers or by waiting; whoever is behind it moves up."""
    bounds(calls=2, trickle=trickle)
    turnstile = Turnstile()
    rref = RRef(turnstile)
    inside = start(*(remote(rref).enter(n) for n in range(2)))
    cancelled, behind = start(remote(rref).note(2), remote(rref).note(3))
    await turnstile.holds(2)
    assert stats().unsent == 2
    cancelled.cancel()
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    if trickle < 60.0:
        assert await behind == 3, "nobody has passed"
    turnstile.let(2)
    assert await behind == 3
    assert await asyncio.gather(*inside) == [0, 1]
    assert await remote(rref).note(4) == 4
    assert turnstile.came == [0, 1, 3, 4]
    assert stats().served == 4
    assert stats().late == 0


@pytest.mark.promise("transport.unsent")
@pytest.mark.parametrize("trickle", [60.0, 1.0])
async def test_expired_before_it_was_sent(trickle: float) -> None:
    """The same, for those whose time was over in the queue: calls, streams and scopes."""
    bounds(calls=2, trickle=trickle)
    turnstile = Turnstile()
    rref = RRef(turnstile)
    inside = start(*(remote(rref).enter(n) for n in range(2)))
    await turnstile.holds(2)

    async def call_late() -> None:
        with pytest.raises(CallTimeout, match=r"^Turnstile.note on worker 'main' timed out"):
            await remote(rref, timeout=0.02).note(2)

    async def stream_late() -> None:
        with aiorpc.timeout(0.02), pytest.raises(CallTimeout):
            await anext(aiter(call("main", endless)))

    async def call_in_a_scope() -> None:
        with anyio.move_on_after(0.02) as scope:
            await remote(rref).note(3)
        assert scope.cancelled_caught

    await asyncio.gather(call_late(), stream_late(), call_in_a_scope())
    (behind,) = start(remote(rref).note(4))
    if trickle < 60.0:
        assert await behind == 4, "nobody has passed"
    turnstile.let(2)
    assert await behind == 4
    assert await asyncio.gather(*inside) == [0, 1]
    assert turnstile.came == [0, 1, 4]
    assert stats().served == 3


async def test_cancelled_after_it_was_sent_keeps_its_place() -> None:
    """Until the callee has answered: what runs there still counts."""
    bounds(calls=1)
    blocker = Stubborn()
    rref = RRef(blocker)
    cancelled, behind = start(remote(rref).insist(), remote(rref).insisted())
    await blocker.begun.wait()
    cancelled.cancel()
    await asyncio.wait((cancelled,))
    await blocker.told.wait()
    assert stats().unsent == 1
    blocker.release.set()
    assert await behind is True


class Stubborn:
    """Takes its time when it is cancelled."""

    def __init__(self) -> None:
        self.begun, self.told, self.release = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def insist(self) -> None:
        self.begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.told.set()
            await self.release.wait()

    async def insisted(self) -> bool:
        return self.release.is_set()


# ── nothing waits for ever ──────────────────────────────────────────────────────────────────────


@pytest.mark.promise("transport.trickle")
async def test_calls_that_wait_for_a_later_one() -> None:
    """A full window without answers lets one more pass, now and then: no deadlock."""
    bounds(calls=4, trickle=0.05)
    turnstile = Turnstile()
    rref = RRef(turnstile)
    tasks = start(*(remote(rref).enter(n) for n in range(8)), remote(rref).open())
    async with asyncio.timeout(30.0):
        assert await asyncio.gather(*tasks) == [*range(8), None]
    assert turnstile.came == list(range(8))
    assert turnstile.most <= 8


@pytest.mark.promise("transport.trickle")
async def test_the_same_for_bytes() -> None:
    """A window that is full of bytes is no deadlock either."""
    bounds(size=2000, trickle=0.05)
    turnstile = Turnstile()
    rref = RRef(turnstile)
    load = torch.zeros(100_000, dtype=torch.uint8)
    tasks = start(remote(rref).enter(0, load), remote(rref).enter(1, load), remote(rref).open())
    async with asyncio.timeout(30.0):
        assert await asyncio.gather(*tasks) == [0, 1, None]


async def test_twenty_thousand_at_once() -> None:
    """With the bounds as they are: all wait, all are answered, each with its own."""
    turnstile = Turnstile()
    rref = RRef(turnstile)
    for _ in range(2):  # from then on a number stands for the object
        await remote(rref).note(0)
    turnstile.came.clear()
    tasks = start(*(remote(rref).enter(n) for n in range(20_000)))
    await turnstile.holds(20_000)
    assert stats().in_flight == stats().running == 20_000
    turnstile.let(20_000)
    assert await asyncio.gather(*tasks) == list(range(20_000))
    assert turnstile.came == list(range(20_000))
    assert (stats().in_flight, stats().unsent, stats().running) == (0, 0, 0)


class TestLeaving:
    """A world of its own."""

    @pytest.fixture
    def world(self) -> None:
        """None."""

    async def test_with_a_full_window(self) -> None:
        """Who waits in the queue, or for an answer, learns that the world is over."""
        turnstile = Turnstile()
        async with aiorpc.local_world(0):
            bounds(calls=4, trickle=0.02)
            rref = RRef(turnstile)
            tasks = start(*(remote(rref).enter(n) for n in range(20)))
            await turnstile.holds(5)
            del rref
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(result, NotInWorld) for result in results), results
        assert turnstile.inside == 0, "what ran was cancelled"
