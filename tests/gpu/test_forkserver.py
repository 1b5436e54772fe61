"""CUDA in forked children: each initializes it for itself, unless a preloaded module did."""

from pathlib import Path
from typing import Any

import pytest
import torch

from aiorpc_torch import call, create, local_world, remote
from tests.support.cuda_actors import GPU, HERE, gpu_world, needs_device, on_a_loop

pytestmark = GPU


def total(number: int) -> float:
    assert not torch.cuda.is_initialized()
    return float(torch.full((4,), float(number), device=HERE.type).sum())


@pytest.mark.parametrize("start", ["forkserver", "spawn"])
@on_a_loop
async def test_children_use_cuda(start: str) -> None:
    """Whether this process has used it or not."""
    torch.ones(1, device=HERE)
    async with local_world(2, start=start) as me:  # type: ignore[arg-type]
        assert [await call(peer, total, me.rank + 1) for peer in me.peers] == [4.0, 4.0]


@needs_device
@on_a_loop
async def test_a_preloaded_module_must_not_use_cuda(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The start says so."""
    (tmp_path / "uses_cuda.py").write_text("import torch\ntorch.ones(1, device='cuda')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(RuntimeError, match="preload= "):
        async with local_world(1, preload=("uses_cuda",)):
            pass


class Threads:
    """Notes the devices of the threads in which its methods run."""

    def device(self) -> int:
        return torch.cuda.current_device()

    async def device_of_loop(self) -> int:
        return torch.cuda.current_device()


def choose_last(name: str) -> None:
    assert not torch.cuda.is_initialized()
    torch.cuda.set_device(torch.cuda.device_count() - 1)


@needs_device
@on_a_loop
async def test_a_child_chooses_its_device() -> None:
    """In its initializer, for all its threads, and for what it then makes on "cuda"."""
    last = torch.cuda.device_count() - 1
    async with gpu_world(["a"], initializer=choose_last):
        threads: Any = remote(await create("a", Threads))
        assert [await threads.device(), await threads.device_of_loop()] == [last, last]
        assert (await call("a", torch.ones, 1, device="cuda")).device.index == last
