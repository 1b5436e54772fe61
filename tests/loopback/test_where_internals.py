"""Frames that are sent to learn where calls stand, and what odd peers do with them."""

import asyncio
from typing import Any

import pytest

import aiorpc_torch as aiorpc
from aiorpc_torch import RRef, observe, remote
from aiorpc_torch._client import questions
from aiorpc_torch._client.pool import current
from aiorpc_torch._wire.frames import WHERE
from aiorpc_torch.testing import Gate
from tests.support.raw_connections import Tap


@pytest.mark.promise("standing.free")
@pytest.mark.usefixtures("world")
async def test_nothing_is_asked_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call with a deadline that is answered in time sends what one without a deadline sends."""
    gate = Gate()
    rref = RRef(gate)
    await gate.open()
    tap = Tap(monkeypatch)
    for seconds in None, 60.0:
        async with aiorpc.timeout(seconds):
            await remote(rref).passed()
        await remote(rref, timeout=seconds).passed()
    assert tap.count("where") == 0
    await gate.shut()
    with pytest.raises(aiorpc.CallTimeout):
        await remote(rref, timeout=0.5).passed()
    assert tap.count("where") == 2  # a question and an answer
    with pytest.raises(aiorpc.CallTimeout):
        await remote(rref, timeout=0.01).passed()  # too short
    assert tap.count("where") == 2


@pytest.mark.promise("standing.late")
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
async def test_an_answer_that_cannot_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Frames of threads change while they are read: the worker is silent then, and serves on."""
    gate = Gate()
    calling = asyncio.ensure_future(remote(RRef(gate)).passed())
    await gate.entered()

    def fail(*_: Any) -> None:
        raise RuntimeError

    monkeypatch.setattr("aiorpc_torch._server.standing.View.of_number", fail)
    (call,) = await observe.where()
    assert call.state.startswith("unknown: ")
    await gate.open()
    await calling
