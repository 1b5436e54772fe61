"""What tensors pass where a call, or its answer, leaves one worker and arrives at another.

torch's distributed backward waits at each worker until a gradient has come back for everything
that the worker has sent (2.13 and 2.15): for ever, if the other side made no use of one. So where
tensors arrive they have an end, a scalar: whoever lets a backward start at the ends of all that it
received, or sends them on with its own answer, leaves nothing out. What has only ends to send on,
and nothing that requires a gradient, sends a token for them; else it would be 100 µs in vain.

torch puts zeros for gradients that there are not, and zeros times infinity would spoil gradients of
what was not used. So such a gradient is sent as one of a kind that no other is of, and read as none
where it comes back. Knows autograd graphs, and nothing of calls. (tests/test_autograd.py)
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from .thread_state import keep_state


def leave(
    tensors: Sequence[Tensor], ends: Sequence[Tensor] = ()
) -> tuple[list[Tensor], Tensor | None]:
    """What to send for `tensors`, and the token to go with them, if one has to.

    Of the `ends` the next backward that comes this way will start as well.
    """
    found = [*tensors]
    carrying = [index for index, tensor in enumerate(found) if tensor.requires_grad]
    if not carrying and not ends:
        return found, None
    passed = _Leave.apply(len(ends), *ends, *(found[index] for index in carrying))
    if not carrying:
        return found, passed[0]
    for index, tensor in zip(carrying, passed, strict=True):
        found[index] = tensor
    return found, None


def arrive(tensors: Sequence[Tensor], token: Tensor | None = None) -> Tensor | None:
    """The end of what `leave` made, at the other side, if it has one. Changes the tensors."""
    carrying = [tensor for tensor in tensors if tensor.requires_grad]
    first = carrying[0] if carrying else token
    if first is None or first.is_leaf:  # it was not recorded here, under no_grad()
        return None
    if not carrying:
        return token
    with torch.enable_grad():  # on the loop's thread a coroutine may wait in its no_grad()
        end: Tensor = _Arrive.apply(*carrying)[0]
    return end


def cut(tensors: Iterable[Tensor]) -> list[Tensor]:
    """The same tensors, without a graph."""
    return [tensor.detach() if tensor.requires_grad else tensor for tensor in tensors]


class _Leave(Function):
    """From ends and tensors to the tensors, or to a token."""

    @staticmethod
    def forward(ctx: Any, ends: int, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.ends = ends
        ctx.set_materialize_grads(False)
        return tuple([tensor.detach() for tensor in inputs[ends:]]) or (_scalar(),)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        keep_state()
        before = [None] * (1 + ctx.ends)
        if len(ctx.needs_input_grad) == len(before):  # it made a token
            return (*before,)
        return (*before, *(None if _is_absent(each) else each for each in gradients))


class _Arrive(Function):
    """From tensors to an end and the tensors: in place, since others hold them."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.mark_dirty(*tensors)
        ctx.set_materialize_grads(False)
        ctx.kinds = [(tensor.shape, tensor.dtype, tensor.device) for tensor in tensors]
        return (_scalar(), *tensors)

    @staticmethod
    def backward(ctx: Any, _: Tensor, *gradients: Tensor | None) -> Any:
        keep_state()
        pairs = zip(gradients, ctx.kinds, strict=True)
        return tuple([_absent(*kind) if each is None else each for each, kind in pairs])


def _scalar() -> Tensor:
    return torch.zeros((), dtype=torch.float32, device="cpu")  # whatever the defaults are


# ── the gradient that there is not ──────────────────────────────────────────────────────────────


def _absent(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A sparse tensor without elements and, unlike any gradient, without sparse dimensions."""
    return torch.sparse_coo_tensor(
        torch.empty((0, 0), dtype=torch.int64, device=device),
        torch.empty((0, *shape), dtype=dtype, device=device),
        shape,
        check_invariants=False,
    )


def _is_absent(gradient: Tensor | None) -> bool:
    return gradient is None or (gradient.layout is torch.sparse_coo and gradient.sparse_dim() == 0)
