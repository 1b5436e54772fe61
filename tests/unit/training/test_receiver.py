"""The receiver of versions: closed, it receives nothing and ends every wait."""

import asyncio

import pytest

from aiorpc_torch import NotInWorld
from aiorpc_torch.training.receiver import Receiver
from tests.support.slack import SLACK


def receiver() -> Receiver:
    return Receiver("policy", "learner")


async def test_a_closed_one_ends_its_waits() -> None:
    closed = receiver()
    waiting = asyncio.create_task(closed.until(3))
    await asyncio.sleep(0)
    closed.close()
    with pytest.raises(RuntimeError, match="is closed: follow the weights again"):
        await waiting
    with pytest.raises(RuntimeError, match="is closed"):
        closed.check_open()
    assert closed.version == -1


async def test_what_ends_the_task_is_raised_from_each_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next wait tries again."""
    found, tries = receiver(), 0

    async def fail(_: int) -> None:
        nonlocal tries
        tries += 1
        raise NotInWorld("left")

    monkeypatch.setattr(found, "_receive_next", fail)
    for count in (1, 2):
        with pytest.raises(NotInWorld, match="left"):
            await found.until(0)
        assert tries == count


@pytest.mark.parametrize("pause", [0.0, 0.01])
async def test_a_task_that_is_cancelled_ends_the_waits(
    monkeypatch: pytest.MonkeyPatch, pause: float
) -> None:
    """By other code, before its first step or after it. The next wait receives again."""
    found, never = receiver(), asyncio.Event()

    async def receive(_: int) -> None:
        await never.wait()

    monkeypatch.setattr(found, "_receive_next", receive)
    for _ in range(2):
        waiting = asyncio.create_task(found.until(0))
        await asyncio.sleep(0)
        await asyncio.sleep(pause)
        assert found._task is not None
        found._task.cancel()
        async with asyncio.timeout(SLACK):
            with pytest.raises(RuntimeError, match="task that receives 'policy' was cancelled"):
                await waiting


async def test_a_task_that_is_ended_by_no_exception_of_ours(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A BaseException of the user's function, say."""
    found = receiver()

    class Ended(BaseException):
        pass

    async def receive(_: int) -> None:
        raise Ended

    monkeypatch.setattr(found, "_receive_next", receive)
    async with asyncio.timeout(SLACK):
        with pytest.raises(RuntimeError, match="was ended by Ended") as raised:
            await found.until(0)
    assert isinstance(raised.value.__cause__, Ended)
