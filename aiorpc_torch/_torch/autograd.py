"""Autograd edges of tensors that a call, or its result, sends from one worker to another.

torch's distributed backward waits at each worker for a gradient of everything that the worker has
sent (2.13, 2.15): for ever, if the other side does not use a tensor. So tensors that arrive get a
receive edge, a scalar. A backward starts at every receive edge of its worker, or a worker sends the
edges on with its own result; so no tensor is omitted. A result without tensors that require
gradients sends a token for its receive edges. The token costs 100 µs, so others send none.

torch fills absent gradients with zeros, and zero times infinity would spoil gradients of unused
tensors. So an absent gradient travels as a view of a form that no other gradient has.
(tests/integration/test_autograd.py, tests/unit/torch/test_autograd.py)
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from .cuda import sendable
from .sendable import check_tensors
from .thread_state import pin_thread_state


def attach_send_edges(
    tensors: Sequence[Tensor], edges: Sequence[Tensor] = ()
) -> tuple[list[Tensor], Tensor | None]:
    """Return the tensors to send for `tensors`, and a token if only the token carries `edges`.

    At these receive edges a backward through this message is to start as well.
    """
    found = [*tensors]
    carrying = [index for index, tensor in enumerate(found) if tensor.requires_grad]
    if not carrying and not edges:
        return found, None
    sent = _SendEdges.apply(len(edges), *edges, *(found[index] for index in carrying))
    if not carrying:
        return found, sent[0]
    for index, tensor in zip(carrying, sent, strict=True):
        found[index] = tensor
    return found, None


def attach_recv_edge(tensors: Sequence[Tensor], token: Tensor | None = None) -> Tensor | None:
    """Return the receive edge of a message, None if it has none. Changes the tensors in place."""
    carrying = [tensor for tensor in tensors if tensor.requires_grad]
    first = carrying[0] if carrying else token
    if first is None or first.is_leaf:  # not recorded here, under no_grad()
        return None
    if not carrying:
        return token
    with torch.enable_grad():  # on the loop's thread a coroutine may wait in its no_grad()
        edge: Tensor = _RecvEdge.apply(*carrying)[0]
    return edge


def detach_all(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return the tensors without a graph."""
    return [tensor.detach() if tensor.requires_grad else tensor for tensor in tensors]


class _SendEdges(Function):
    """From receive edges and tensors to the tensors, or to a token."""

    @staticmethod
    def forward(ctx: Any, edges: int, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.edges = edges
        ctx.set_materialize_grads(False)
        return tuple([tensor.detach() for tensor in inputs[edges:]]) or (_scalar(),)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        pin_thread_state()
        before = [None] * (1 + ctx.edges)
        if len(ctx.needs_input_grad) == len(before):  # forward made a token
            return (*before,)
        return (*before, *(None if _is_absent(each) else each for each in gradients))


class _RecvEdge(Function):
    """From tensors to a receive edge and the same tensors, which others hold already."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.mark_dirty(*tensors)
        ctx.set_materialize_grads(False)
        ctx.kinds = [(tensor.shape, tensor.dtype, tensor.device) for tensor in tensors]
        return (_scalar(), *tensors)

    @staticmethod
    def backward(ctx: Any, _: Tensor, *gradients: Tensor | None) -> Any:
        pin_thread_state()
        sent = []
        for each, kind in zip(gradients, ctx.kinds, strict=True):
            if each is None:
                each = _absent(*kind)
            elif _is_absent(each):  # a row of a stack, for example, may have this form
                each = each.clone()
            sent.append(each)
        if all(each.device.type == "cpu" for each in sent):
            check_tensors(sent)  # torch would end the process for some
            return (*sent,)
        are_strided = (each if each.layout is torch.strided else each.to_dense() for each in sent)
        return (*sendable([*are_strided]),)


def _scalar() -> Tensor:
    return torch.zeros((), dtype=torch.float32, device="cpu")  # whatever the defaults are


# ── absent gradients ────────────────────────────────────────────────────────────────────────────


def _absent(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a tensor whose elements are all the second of the two in its storage.

    Not a sparse tensor: torch cannot send these from CUDA devices.
    """
    return torch.zeros(2, dtype=dtype, device=device).as_strided(shape, [0] * len(shape), 1)


def _is_absent(gradient: Tensor | None) -> bool:
    return gradient is None or bool(
        gradient.layout is torch.strided
        and gradient.storage_offset() == 1
        and not any(gradient.stride())
        and gradient.untyped_storage().nbytes() == 2 * gradient.itemsize
    )
