"""Tests as a user writes them: checked by mypy and pyright, never run."""

from typing import Any, assert_type

from torch.futures import Future

from aiorpc_torch import RRef, call, create, testing
from aiorpc_torch.testing import Gate, Workers
from aiorpc_torch.types import LocalWorker


async def test_of_workers(workers: Workers) -> None:
    """The fixture takes what `local_world` takes, and nothing else."""
    assert_type(await workers(["a", "b"], heartbeat=2.0, transports=["uv"]), LocalWorker)
    assert_type(await workers(2), LocalWorker)
    await workers(2, heartbeat="2")  # type: ignore[arg-type]  # pyright: ignore
    await workers(2, stop=1.0)  # type: ignore[call-arg]  # pyright: ignore


async def worlds() -> None:
    """As a block."""
    async with testing.world() as me:
        assert_type(me, LocalWorker)
    async with testing.world(["a"], name="test", stop_timeout=1.0):
        gate = await create("a", Gate)
        assert_type(gate, RRef[Gate])
        assert_type(await call(gate, Gate.entered, 2), int)
    async with testing.no_leaks():
        pass


def futures() -> None:
    """They keep the type of their value."""
    assert_type(testing.done_future(1), Future[int])
    assert_type(testing.failed_future(ValueError()), Future[Any])
