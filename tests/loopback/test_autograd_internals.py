"""Autograd contexts where torch does not export their symbols."""

from typing import Any

import pytest

from aiorpc_torch._torch import transport
from aiorpc_torch.autograd import context


@pytest.mark.promise("autograd.unsupported")
async def test_torch_without_context_symbols(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the C++ symbol, to open a context raises."""
    monkeypatch.setattr(transport, "force_context", None)
    with pytest.raises(RuntimeError, match="cannot set the autograd context"):
        async with context():
            pass
