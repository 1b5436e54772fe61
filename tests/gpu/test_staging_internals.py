"""The way of a tensor: through the host or by torch; captures of graphs."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from aiorpc_torch._client.torch_transfers import TorchTransfers
from aiorpc_torch._torch.staging import STAGED_BYTES
from aiorpc_torch._wire.pickling import pack
from aiorpc_torch._wire.staged import stage
from tests.support.cuda_actors import (
    GPU,
    HERE,
    gpu_world,
    late,
    needs_device,
    on_a_loop,
    settle,
)

from .test_staging import SMALL, ready_actor

pytestmark = GPU


class Messages:
    """Counts the messages of torch RPC with values of calls of this process."""

    def __init__(self, patches: pytest.MonkeyPatch) -> None:
        self.count = 0
        for name in ("send_payload", "collect"):
            patches.setattr(TorchTransfers, name, self._counted(getattr(TorchTransfers, name)))

    def _counted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def count(*args: Any) -> Any:
            self.count += 1
            return function(*args)

        return count

    def taken(self) -> int:
        """Those since the last time."""
        found, self.count = self.count, 0
        return found


@pytest.fixture
def messages(monkeypatch: pytest.MonkeyPatch) -> Messages:
    return Messages(monkeypatch)


@needs_device
@pytest.mark.promise("devices.small")
@on_a_loop
async def test_small_tensors_that_are_ready_go_through_the_host(messages: Messages) -> None:
    """Most of them: another process may use the device."""
    async with gpu_world(["a"]):
        actor, _ = await ready_actor()
        x = torch.arange(float(SMALL), device=HERE)
        await actor.give_back_twice(x)  # allocates pinned memory
        torch.cuda.synchronize(HERE)
        messages.taken()
        for n in range(50):
            was_there, found = await actor.give_back_twice(x + n)
            assert was_there
            assert found.device == HERE
            assert torch.equal(found, x + n + 1)
            settle()
        assert messages.taken() <= 10


@needs_device
@on_a_loop
async def test_others_go_by_torch(messages: Messages) -> None:
    async with gpu_world(["a"]):
        actor, _ = await ready_actor()
        messages.taken()
        assert float(await actor.atotal(late(2.0, SMALL))) == 2.0 * SMALL  # not ready
        assert messages.taken() == 1
        large = torch.ones(STAGED_BYTES // 4 + 1, device=HERE)
        settle()
        assert float(await actor.atotal(large)) == large.numel()
        assert messages.taken() == 1
        x = torch.ones(2, 3, device=HERE)
        settle()
        found = await actor.describe([x, x.T])  # of one storage
        assert [shape for _, shape, _ in found] == [(2, 3), (3, 2)]
        assert messages.taken() == 1


@needs_device
@on_a_loop
async def test_a_capture_of_a_graph_goes_on() -> None:
    """What is packed meanwhile is not looked at, which would end the capture."""
    x, y = torch.ones(3, device=HERE), torch.zeros(3, device=HERE)
    torch.cuda.synchronize(HERE)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y.copy_(x * 2)
        packed = pack([y])
        assert stage(packed, {HERE: HERE}) is packed
    graph.replay()
    assert y.tolist() == [2.0] * 3
