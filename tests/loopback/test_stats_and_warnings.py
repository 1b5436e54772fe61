"""What a user can see: numbers of calls and messages, who holds the loop, and reprs."""

import asyncio
import logging
import re
import threading
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import aiorpc_torch as aiorpc
from aiorpc_torch import CallTimeout, RRef, batched, call, remote
from aiorpc_torch.observe import Stats, stats
from aiorpc_torch.testing import Gate, limits
from tests.support import actors
from tests.support.actors import Counter
from tests.support.slack import BEGUN

pytestmark = pytest.mark.usefixtures("world")


def calls_of(found: Stats) -> Stats:
    """Without the batches, which no world is needed for."""
    return replace(found, batches={})


# ── numbers ─────────────────────────────────────────────────────────────────────────────────────


async def test_a_fresh_world_has_done_nothing() -> None:
    """Every number is zero."""
    assert calls_of(stats()) == Stats()


@pytest.mark.promise("worlds.stats")
async def test_calls_and_messages() -> None:
    """Calls made here and served here; those of one loop iteration share messages."""
    rref = RRef(Counter())
    await remote(rref).aadd()
    one = stats()
    assert (one.calls, one.served) == (1, 1)
    assert one.messages >= 1
    assert one.bytes_sent > 0
    await asyncio.gather(*(remote(rref).aadd() for _ in range(100)))
    many = stats()
    assert (many.calls, many.served) == (101, 101)
    assert 1 <= many.messages - one.messages <= 20
    assert (many.in_flight, many.unsent, many.late, many.running) == (0, 0, 0, 0)
    assert [item async for item in call("main", actors.count, 3)] == [0, 1, 2]
    assert (stats().calls, stats().served, stats().in_flight) == (102, 102, 0)


@pytest.mark.promise("worlds.stats")
@pytest.mark.parametrize("size", [100, 1_000_000])
async def test_bytes(size: int) -> None:
    """Small tensors and large ones count with all that they weigh."""
    rref = RRef(Counter(2))
    before = stats().bytes_sent
    await remote(rref).scale(torch.ones(size))
    assert 4 * size < stats().bytes_sent - before < 4 * size + 5000


@pytest.mark.promise("worlds.stats")
async def test_what_is_under_way() -> None:
    """Calls that are awaited, here and there; none when all are answered."""
    gate = RRef(Gate())
    waiting = [asyncio.create_task(remote(gate).passed()) for _ in range(5)]
    stream = aiter(call("main", actors.wait_for_ever))
    assert await anext(stream) == 0
    await remote(gate).entered()
    now = stats()
    assert (now.in_flight, now.running, now.unsent) == (6, 6, 0)
    await remote(gate).open()
    await asyncio.gather(*waiting)
    assert (stats().in_flight, stats().running) == (1, 1)
    await stream.aclose()
    assert stats().in_flight == 0
    await until(lambda: stats().running == 0)


async def until(condition: Any) -> None:
    """Let calls go back and forth until it is so."""
    async with asyncio.timeout(30.0):
        while not condition():
            await call("main", actors.pid)


async def test_unsent_in_a_turn() -> None:
    """Calls that the loop iteration has made and not yet sent."""
    gate = RRef(Gate())
    waiting = [asyncio.create_task(remote(gate).passed()) for _ in range(5)]
    await asyncio.sleep(0)
    now = stats()
    assert now.in_flight == 5
    assert now.unsent >= 4, "only the first leaves at once, the rest at the end of the iteration"
    await remote(gate).open()
    await asyncio.gather(*waiting)
    assert stats().unsent == 0


async def test_late_answers() -> None:
    """A def cannot be stopped: a result without a waiting caller is counted."""
    blocker = Blocker()
    rref = RRef(blocker)
    cancelled = asyncio.create_task(remote(rref).block())
    await remote(rref).entered()
    cancelled.cancel()
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    with pytest.raises(CallTimeout):
        await remote(rref, timeout=BEGUN).block()
    assert stats().late == 0
    blocker.release.set()
    await until(lambda: stats().late == 2)
    assert stats().running == 0


class Blocker:
    def __init__(self) -> None:
        self.release = threading.Event()
        self._entered = threading.Event()

    def block(self) -> None:
        self._entered.set()
        assert self.release.wait(30.0)

    def entered(self) -> None:
        assert self._entered.wait(30.0)


class TestOutside:
    """No world."""

    @pytest.fixture
    def world(self) -> None:
        """None."""

    async def test_all_zero(self) -> None:
        """Before a world, after one, and between two nothing is carried over."""
        assert calls_of(stats()) == Stats()
        for _ in range(2):
            async with aiorpc.local_world(0):
                assert calls_of(stats()) == Stats()
                await call("main", actors.pid)
                assert stats().calls == 1
            assert calls_of(stats()) == Stats()


# ── who holds the loop ──────────────────────────────────────────────────────────────────────────


TRIES = 5  # a busy machine may hold the loop itself, but not each time


class Holder:
    """Holds the loop, in every way there is."""

    async def hold(self) -> None:
        await asyncio.sleep(0)
        time.sleep(0.15)  # noqa: ASYNC251

    async def hold_and_fail(self) -> None:
        time.sleep(0.15)  # noqa: ASYNC251
        raise LookupError

    async def items(self) -> AsyncIterator[int]:
        yield 1
        time.sleep(0.15)  # noqa: ASYNC251
        yield 2

    @batched(max_size=8)
    async def together(self, xs: list[int]) -> list[int]:
        time.sleep(0.15)  # noqa: ASYNC251
        return xs

    async def quick(self) -> None:
        await asyncio.sleep(0)

    async def wait_long(self) -> None:
        for _ in range(3):
            await asyncio.sleep(0.06)

    def hold_a_thread(self) -> None:
        time.sleep(0.15)

    async def wait_between_items(self) -> AsyncIterator[int]:
        yield 1
        await asyncio.sleep(0.15)
        yield 2

    @batched(max_size=8)
    def in_thread(self, xs: list[int]) -> list[int]:
        time.sleep(0.15)
        return xs


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What the package has warned of."""
    found = [r for r in caplog.records if r.name == "aiorpc_torch"]
    return [record.getMessage() for record in found if record.levelno == logging.WARNING]


@pytest.mark.promise("worlds.slow_loop")
async def test_calls_that_block_the_loop_are_named(
    caplog: pytest.LogCaptureFixture, warn_of_slow_steps: Callable[[], None]
) -> None:
    """Methods, generators and batches: each once, with how long, and what to do."""
    warn_of_slow_steps()
    assert limits.SLOW_STEP == 0.1
    rref = RRef(Holder())
    await remote(rref).hold()
    with pytest.raises(LookupError):
        await remote(rref).hold_and_fail()
    assert [item async for item in remote(rref).items()] == [1, 2]
    assert await remote(rref).together(1) == 1
    told = warnings(caplog)
    assert [text.split()[0] for text in told] == [
        "Holder.hold",
        "Holder.hold_and_fail",
        "Holder.items",
        "Holder.together",
    ]
    for text in told:
        assert re.search(r"held the event loop for \d+\.\d\d s", text)
        assert "plain `def`" in text


async def test_calls_that_only_wait_are_not_named(
    caplog: pytest.LogCaptureFixture, warn_of_slow_steps: Callable[[], None]
) -> None:
    """However long; nor is who holds a thread."""
    rref = RRef(Holder())
    for _ in range(TRIES):
        warn_of_slow_steps()
        caplog.clear()
        await asyncio.gather(
            remote(rref).wait_long(),
            remote(rref).hold_a_thread(),
            remote(rref).in_thread(1),
            *(remote(rref).quick() for _ in range(10)),
        )
        assert [item async for item in remote(rref).wait_between_items()] == [1, 2]
        if not warnings(caplog):
            return
    pytest.fail(f"each time: {warnings(caplog)}")


# ── reprs ───────────────────────────────────────────────────────────────────────────────────────
