"""Staged calls: sizes, pauses, encoders."""

import asyncio
import contextvars
import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from aiorpc_torch import call
from aiorpc_torch._client.call_encoder import CallEncoder
from aiorpc_torch._context.recording import ContextRecord, enter_record
from aiorpc_torch._torch.staging import PAUSE
from aiorpc_torch._wire.targets import FunctionTarget
from aiorpc_torch._wire.tensors import INLINE_BYTES
from tests.support.device_stand_ins import DTYPE, StandIns

from .test_staged_calls import double, ends, found, here

__all__ = ["ends", "found"]


def form(x: Tensor) -> tuple[Any, ...]:
    return type(x), x.shape, x.stride(), x.requires_grad, x


WHOLE = torch.arange(24, dtype=DTYPE).view(4, 6)


@pytest.mark.parametrize(
    "x",
    [
        WHOLE.T,
        WHOLE[:, 2:4],
        WHOLE[1],
        WHOLE[:0],
        here(3.0).expand(2, 5),
        here(1.0).requires_grad_(),
        nn.Parameter(here(1.0)),
        here(*range(INLINE_BYTES // 10)),
    ],
    ids=["transposed", "part", "row", "empty", "expanded", "leaf", "parameter", "long"],
)
@pytest.mark.usefixtures("ends")
async def test_forms(found: StandIns, x: Tensor) -> None:
    """Both ways; a view arrives without the rest of its storage."""
    kind, shape, strides, needs_grad, back = await call("far", form, x)
    assert (kind, shape, needs_grad) == (type(x), x.shape, x.requires_grad)
    assert torch.equal(back, x)
    assert (back.shape, back.requires_grad, type(back)) == (x.shape, x.requires_grad, type(x))
    if x.numel() and x.untyped_storage().nbytes() <= x.nbytes:
        assert strides == back.stride() == x.stride()
    assert found.ways == ["host", "host"]


@pytest.mark.usefixtures("ends")
async def test_tensors_that_are_still_computed(found: StandIns) -> None:
    """They stay outside of the bytes. What is done later goes through the host again."""
    await call("far", double, torch.ones(1))
    found.is_busy = True
    assert (await call("far", here, 1.0)).tolist() == [1.0]
    assert found.ways == ["torch"]
    found.is_busy = False
    await asyncio.sleep(2 * PAUSE)
    assert (await call("far", here, 1.0)).tolist() == [1.0]
    assert found.ways == ["torch", "host"]


def test_calls_of_autograd_contexts(found: StandIns) -> None:
    """torch sends their graph."""
    encoder, target = CallEncoder("me", "peer"), FunctionTarget(double)
    arguments = (here(1.0),), {}
    assert encoder.call(0, target, False, arguments, None).cells[0].tensors == []
    context = contextvars.copy_context()
    context.run(enter_record, ContextRecord(1))
    recorded = context.run(encoder.call, 1, target, False, arguments, None)
    assert len(recorded.cells[0].tensors) == 1
    assert found.ways == ["host"]


def test_arguments_of_a_pickled_target(found: StandIns) -> None:
    """Its own tensors may be on a device, too: all of the call goes one way."""
    encoder, target = CallEncoder("me", "peer"), FunctionTarget(functools.partial(double))
    call = encoder.call(0, target, False, ((here(1.0),), {}), None)
    assert len(call.cells[0].tensors) == 1
