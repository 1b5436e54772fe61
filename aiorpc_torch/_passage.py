"""What tensors pass where a call, or its answer, leaves one worker and arrives at another.

torch's distributed backward waits at each worker until a gradient has come back for everything that
the worker has sent (2.13 and 2.15): for ever, if the other side made no use of one. So what is sent
together takes a token along, and where it arrives it has an end, a scalar: whoever lets a backward
start at the ends of all that it received, or sends them on with its own answer, leaves nothing out.

The token's gradient says which of the others' gradients there are: torch puts zeros for those that
are not, and zeros times infinity would spoil gradients of what was not used. Knows autograd graphs,
and nothing of calls. (tests/test_autograd.py)
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from ._states import keep_state


def leave(tensors: Sequence[Tensor], ends: Sequence[Tensor] = ()) -> list[Tensor]:
    """What to send for `tensors`: if a gradient can come back, the last is the token.

    Of the `ends` the next backward that comes this way will start as well.
    """
    carrying = [index for index, tensor in enumerate(tensors) if tensor.requires_grad]
    if not carrying and not ends:
        return [*tensors]
    token, *passed = _Leave.apply(len(ends), *ends, *(tensors[index] for index in carrying))
    found = [*tensors, token]
    for index, tensor in zip(carrying, passed, strict=True):
        found[index] = tensor
    return found


def arrive(tensors: Sequence[Tensor]) -> tuple[Sequence[Tensor], Tensor | None]:
    """What `leave` made, at the other side: the tensors, and their end, if they have one."""
    carrying = [tensor for tensor in tensors if tensor.requires_grad]
    if not carrying:
        return tensors, None
    *others, token = carrying
    if token.is_leaf:  # it was not recorded here, under no_grad()
        return tensors[:-1], None
    with torch.enable_grad():  # on the loop's thread a coroutine may wait in its no_grad()
        end, *_ = _Arrive.apply(token, *others)
    return tensors[:-1], end


def cut(tensors: Iterable[Tensor]) -> list[Tensor]:
    """The same tensors, without a graph."""
    return [tensor.detach() if tensor.requires_grad else tensor for tensor in tensors]


class _Leave(Function):
    """From ends and tensors to a token and the tensors."""

    @staticmethod
    def forward(ctx: Any, ends: int, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.ends = ends
        ctx.set_materialize_grads(False)
        passed = [tensor.detach() for tensor in inputs[ends:]]
        return (torch.zeros(1 + len(passed)), *passed)

    @staticmethod
    def backward(ctx: Any, used: Tensor, *gradients: Tensor) -> Any:
        keep_state()
        flags = used.tolist()[1:]
        found = (each if flag else None for each, flag in zip(gradients, flags, strict=True))
        return (None, *[None] * ctx.ends, *found)


class _Arrive(Function):
    """From a token and tensors to an end and the tensors: in place, since others hold them."""

    @staticmethod
    def forward(ctx: Any, token: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.mark_dirty(*tensors)
        ctx.set_materialize_grads(False)
        return (token.new_zeros(()), *tensors)

    @staticmethod
    def backward(ctx: Any, _: Tensor, *gradients: Tensor | None) -> Any:
        keep_state()
        used = torch.tensor([0.0, *(float(each is not None) for each in gradients)])
        return (used, *gradients)
