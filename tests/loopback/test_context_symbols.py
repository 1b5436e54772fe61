"""Calls where torch does not export the symbols of its autograd contexts."""

import pytest
import torch
from torch.distributed import autograd

import aiorpc_torch as aiorpc
from aiorpc_torch._torch import compat, transport


@pytest.mark.promise("autograd.unsupported")
@pytest.mark.usefixtures("world")
def test_torch_without_context_symbols() -> None:
    """A warning; the context id comes from torch's Python interface, and cannot be set."""
    with pytest.warns(RuntimeWarning, match="does not export its autograd contexts"):
        get, put = compat.find_context_functions("/no/such/library.so")
    assert put is None
    assert get() == compat.current_context_id() == -1
    with autograd.context() as context_id:
        assert get() == compat.current_context_id() == context_id
    assert get() == -1


@pytest.mark.promise("autograd.unsupported")
@pytest.mark.usefixtures("world")
async def test_calls_in_a_context_that_cannot_be_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """They raise: to leave them unrecorded would give wrong gradients. Others are made."""
    monkeypatch.setattr(transport, "force_context", None)
    assert await aiorpc.call("main", torch.neg, torch.ones(1)) == -1
    with autograd.context():
        with pytest.raises(aiorpc.RpcError, match="cannot set the autograd context"):
            await aiorpc.call("main", torch.neg, torch.ones(1, requires_grad=True))
