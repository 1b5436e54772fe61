"""CUDA in forked children: each initializes it for itself, unless a preloaded module did."""

from pathlib import Path

import pytest
import torch

from aiorpc_torch import call, local_world
from tests.support.cuda_actors import GPU

pytestmark = GPU


def total(number: int) -> float:
    assert not torch.cuda.is_initialized()
    return float(torch.full((4,), float(number), device="cuda").sum())


@pytest.mark.parametrize("start", ["forkserver", "spawn"])
async def test_children_use_cuda(start: str) -> None:
    """Whether this process has used it or not."""
    torch.ones(1, device="cuda")
    async with local_world(2, start=start, start_timeout=300.0) as me:  # type: ignore[arg-type]
        assert [await call(peer, total, me.rank + 1) for peer in me.peers] == [4.0, 4.0]


async def test_a_preloaded_module_must_not_use_cuda(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The start says so."""
    (tmp_path / "uses_cuda.py").write_text("import torch\ntorch.ones(1, device='cuda')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(RuntimeError, match="preload= "):
        async with local_world(1, preload=("uses_cuda",)):
            pass
