"""What torch makes of futures that `async_execution` functions return."""

from typing import Any

import pytest
import torch
from torch.distributed import rpc

from aiorpc_torch import wrap_future

pytestmark = pytest.mark.usefixtures("world")


async def test_set_exception_returns_a_value_in_torch() -> None:
    """Torch returns the exception as a result, so `TorchCall` never uses it."""
    result = await wrap_future(rpc.rpc_async("main", set_exception))
    assert isinstance(result, LookupError)


@rpc.functions.async_execution
def set_exception() -> Any:
    future: Any = torch.futures.Future()
    future.set_exception(LookupError("raised"))
    return future
