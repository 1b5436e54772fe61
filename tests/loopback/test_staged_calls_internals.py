"""Staged calls: sizes, pauses, encoders."""

import contextvars
import functools

from aiorpc_torch._client.call_encoder import CallEncoder
from aiorpc_torch._context.recording import ContextRecord, enter_record
from aiorpc_torch._wire.targets import FunctionTarget
from tests.support.device_stand_ins import StandIns

from .test_staged_calls import double, ends, found, here

__all__ = ["ends", "found"]


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
