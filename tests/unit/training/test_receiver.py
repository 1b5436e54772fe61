"""The receiver of versions: closed, it receives nothing and ends every wait."""

import asyncio

import pytest

from aiorpc_torch import NotInWorld
from aiorpc_torch.training.receiver import Receiver


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
