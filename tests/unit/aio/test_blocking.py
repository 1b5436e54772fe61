"""Functions that block: the time limit, what does not answer, and results that come too late."""

import asyncio
import threading
from collections.abc import Iterator

import pytest

from aiorpc_torch._aio.awaited import blocking_on
from aiorpc_torch._aio.blocking import Blocked, BlockingCall

SOON = 30.0


class Place:
    """A place that does not answer until it is opened."""

    def __init__(self) -> None:
        self.is_open = threading.Event()
        self.undone: list[str] = []

    def ask(self) -> str:
        with blocking_on("the file x does not answer"):
            assert self.is_open.wait(SOON)
        return "answer"

    def call(self) -> BlockingCall[str]:
        return BlockingCall(self.ask, "nothing", self.undone.append)


@pytest.fixture
def place() -> Iterator[Place]:
    found = Place()
    yield found
    found.is_open.set()


async def test_results_and_errors(place: Place) -> None:
    place.is_open.set()
    assert await place.call().result(None) == "answer"
    with pytest.raises(ZeroDivisionError):
        await BlockingCall(lambda: 1 // 0, "").result(SOON)
    assert not place.undone


async def test_a_late_result_is_undone(place: Place) -> None:
    """The error names what does not answer."""
    call = place.call()
    with pytest.raises(Blocked, match="the file x does not answer"):
        await call.result(0.5)
    assert not call.ended.done()
    place.is_open.set()
    await asyncio.wait_for(call.ended, SOON)
    assert place.undone == ["answer"]


async def test_a_cancelled_wait(place: Place) -> None:
    """It ends at once, and the result is undone."""
    call = place.call()
    waiting = asyncio.create_task(call.result(None))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(waiting, SOON)
    place.is_open.set()
    await asyncio.wait_for(call.ended, SOON)
    call.give_up()
    assert place.undone == ["answer"]


async def test_a_result_that_nobody_takes(place: Place) -> None:
    """It is undone once, also if it was there before the call was given up."""
    place.is_open.set()
    call = place.call()
    await asyncio.wait_for(call.ended, SOON)
    call.give_up()
    await asyncio.wait_for(call.ended, SOON)
    call.give_up()
    assert place.undone == ["answer"]


async def test_a_thread_that_cannot_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", fail)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        await BlockingCall(lambda: None, "").result(SOON)


def test_without_a_call() -> None:
    """Code that names what it waits for may run in any thread."""
    with blocking_on("x"):
        pass


async def test_names_are_nested() -> None:
    """Behind the inner block the outer text holds again."""
    texts: list[str] = []

    def ask() -> None:
        with blocking_on("outer"):
            with blocking_on("inner"):
                texts.append(call.text)
            texts.append(call.text)
        texts.append(call.text)

    call = BlockingCall(ask, "none")
    await call.result(SOON)
    assert texts == ["inner", "outer", "none"]
