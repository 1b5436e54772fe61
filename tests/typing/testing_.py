"""Tests as a user writes them: checked by mypy and pyright, never run."""

from typing import Any, assert_type

from torch.futures import Future

from aiorpc_torch import RRef, WorkerLost, call, create, testing
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


async def connections() -> None:
    """They are read, dropped and held back by the name of a worker."""
    assert_type(testing.connection("a"), testing.ConnectionInfo)
    assert_type(testing.connections(), list[testing.ConnectionInfo])
    assert_type(testing.limits.INLINE_BYTES, int)
    testing.drop_connection("a")
    testing.drop_connection("a", WorkerLost("a", "for this test"))
    testing.drop_connection(0)  # type: ignore[arg-type]  # pyright: ignore
    testing.set_flow_limits("a", calls=1, size=1000, interval=0.5)
    with testing.stalled("a"):
        await testing.settled()


def futures() -> None:
    """They keep the type of their value."""
    assert_type(testing.done_future(1), Future[int])
    assert_type(testing.failed_future(ValueError()), Future[Any])
