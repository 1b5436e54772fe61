"""Frames that are sent to learn where calls stand, and what odd peers do with them."""

import asyncio
import time
from typing import Any

import pytest
import torch

from aiorpc_torch import RRef, observe, register, remote
from aiorpc_torch._client import questions
from aiorpc_torch._client.pool import current
from aiorpc_torch._endpoint import entry_points
from aiorpc_torch._inspection.long_waits import LongWaits
from aiorpc_torch._node.where import Tracing
from aiorpc_torch._wire.frames import WHERE
from aiorpc_torch.testing import Gate
from aiorpc_torch.training import Weights, follow
from tests.support.logs import logged
from tests.support.raw_connections import Tap
from tests.support.where import Guard, until_stands


class SixGates:
    """Six methods, each of which waits at a gate of its own."""

    def __init__(self) -> None:
        self.gates = [Gate() for _ in range(6)]


def _waits(number: int) -> Any:
    async def wait(self: SixGates) -> None:
        await self.gates[number].passed()

    wait.__qualname__ = f"SixGates.wait{number}"
    return wait


for _number in range(6):
    setattr(SixGates, f"wait{_number}", _waits(_number))


class GatedGuard(Guard):
    def __init__(self) -> None:
        super().__init__()
        self.gate = Gate()

    async def hold_by_block(self, of: Any) -> None:
        async with remote(of).hold():
            await self.gate.passed()


@pytest.mark.promise("where.deadlock")
@pytest.mark.usefixtures("world")
async def test_a_block_whose_worker_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is known without it is told."""
    asked = asyncio.Event()

    async def fail(*_: Any) -> None:
        asked.set()
        raise RuntimeError("no answer")

    monkeypatch.setattr(Tracing, "of_block", fail)
    guard = GatedGuard()
    rref = RRef(guard)
    calls = [asyncio.ensure_future(remote(rref).hold_by_block(rref))]
    await guard.gate.entered()
    calls.append(asyncio.ensure_future(remote(rref).hold_by_block(rref)))
    found = await until_stands("waits for a lock", "is held by an `async with` of worker 'main'")
    assert asked.is_set()
    assert "the `async with` is in" not in str(found)
    for each in calls:
        each.cancel()
    await asyncio.gather(*calls, return_exceptions=True)


@pytest.mark.promise("where.late")
@pytest.mark.usefixtures("world")
async def test_few_questions_wait_for_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls to a worker that does not answer are told of without a question."""
    gate = Gate()
    calling = asyncio.ensure_future(remote(RRef(gate)).passed())
    await gate.entered()
    tap = Tap(monkeypatch)
    connection = current().connection(current().worker)
    ours = connection.questions
    monkeypatch.setitem(connection.handlers, WHERE, lambda _: None)
    found = await asyncio.gather(*(observe.where() for _ in range(2 * questions.MAX_ASKED)))
    assert tap.count("where") <= 2 * questions.MAX_ASKED
    assert all(each[0].state.startswith("unknown: ") for each in found)
    assert not ours._asked
    await gate.open()
    await calling


@pytest.mark.usefixtures("world")
async def test_a_question_that_is_answered_leaves_no_timer() -> None:
    """Else each of thousands of late calls would have two, for as long as its deadline is away."""
    gate = Gate()
    calling = asyncio.ensure_future(remote(RRef(gate)).passed())
    await gate.entered()
    loop: Any = asyncio.get_running_loop()
    await observe.where()
    names = [each._callback.__qualname__ for each in loop._scheduled if not each.cancelled()]
    assert not [name for name in names if name.startswith("Questions.")]
    await gate.open()
    await calling


@pytest.mark.usefixtures("world")
async def test_all_long_waits_are_told_but_of_followers(caplog: pytest.LogCaptureFixture) -> None:
    """Four at a look, those left out at the next one; a follower's wait for a version is none."""
    register("net", Weights({"a": torch.ones(1)}))
    node: Any = entry_points.here
    waits, later = LongWaits(node), time.monotonic() + 60.0
    async with await follow("net"):
        async with asyncio.timeout(60.0):
            while not any("after" in each.method for each in observe.pending()):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        waits.look(later)
        await observe.where()
        assert not logged(caplog)
        far, gates = remote(RRef(six := SixGates())), six.gates
        calls = [asyncio.ensure_future(getattr(far, f"wait{n}")()) for n in range(6)]
        for each in gates:
            await each.entered()
        for expected in (4, 6, 6):
            waits.look(later)
            await observe.where()  # its answer is behind that of the question
            text = "".join(record.getMessage() for record in caplog.records)
            assert text.count("SixGates.wait") == expected
        for each in gates:
            await each.open()
        await asyncio.gather(*calls)


@pytest.mark.usefixtures("world")
async def test_an_answer_that_cannot_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Frames of threads change while they are read: the worker is silent then, and serves on."""
    gate = Gate()
    calling = asyncio.ensure_future(remote(RRef(gate)).passed())
    await gate.entered()

    def fail(*_: Any) -> None:
        raise RuntimeError

    monkeypatch.setattr("aiorpc_torch._server.where.View.of_number", fail)
    (call,) = await observe.where()
    assert call.state.startswith("unknown: ")
    await gate.open()
    await calling
