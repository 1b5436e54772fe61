"""Send and receive edges of tensors, without workers: torch's two nodes are left out."""

from typing import Any

import pytest
import torch
from torch import Tensor

from aiorpc_torch._torch.autograd import attach_recv_edge, attach_send_edges, detach_all


def send(
    tensors: list[Tensor], ends: list[Tensor] | None = None
) -> tuple[list[Tensor], Tensor | None]:
    """Return tensors as received, and their receive edge; absent gradients become zeros."""
    sent, token = attach_send_edges(tensors, ends or [])
    found = [Between.apply(tensor) for tensor in sent]
    return found, attach_recv_edge(found, None if token is None else Between.apply(token))


class Between(torch.autograd.Function):
    """Between two workers there are no undefined gradients: torch puts zeros."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient


def leaf(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float32, requires_grad=True)


def test_without_gradients_there_is_no_receive_edge() -> None:
    plain = [torch.ones(2), torch.tensor([1, 2])]
    found, token = attach_send_edges(plain)
    assert token is None
    assert attach_recv_edge(found) is None
    assert all(one is other for one, other in zip(found, plain, strict=True))


def test_gradients_pass() -> None:
    """Through any number of messages, beside tensors that require none."""
    x, y = leaf(1, 2), leaf(3, 4)
    (a, one, b), _ = send([x * 2, torch.ones(2), y])
    (c,), _ = send([a * b * one])
    c.sum().backward()
    assert x.grad is not None
    assert y.grad is not None
    assert (x.grad.tolist(), y.grad.tolist()) == ([6, 8], [2, 4])


def test_a_receive_edge_leads_back_and_gives_no_gradient() -> None:
    """A backward from the edge alone reaches the sent tensors, and gives them no gradient."""
    x = leaf(0, 0)
    visited: list[object] = []
    y = x.sqrt()  # zeros for its gradient would be zero times infinity
    y.register_hook(visited.append)
    _, end = send([y])
    assert end is not None
    assert end.shape == ()
    end.backward()
    assert x.grad is None or not x.grad.isnan().any()
    assert x.grad is None


def test_receive_edges_are_sent_on() -> None:
    """A result without tensors leads back to the tensors that were received."""
    x = leaf(1)
    (arrived,), first = send([x])
    assert first is not None
    found, second = send([torch.tensor(3)], [first])
    assert second is not None
    assert len(found) == 1
    second.backward(retain_graph=True)
    assert x.grad is None
    (second + arrived.sum()).backward()
    assert x.grad is not None
    assert x.grad.tolist() == [1]


def test_what_arrives_may_be_changed_in_place() -> None:
    x = leaf(1, 2)
    (y,), _ = send([x])
    y.mul_(3)
    y.sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [3, 3]


def test_arrived_under_no_grad() -> None:
    """torch has not recorded it: the tensors are leaves."""
    with torch.no_grad():
        assert attach_recv_edge([leaf(1)]) is None
        assert attach_recv_edge([], leaf(1)) is None


def test_detach_all() -> None:
    assert not any(tensor.requires_grad for tensor in detach_all([leaf(1), torch.ones(1)]))


@pytest.mark.parametrize("count", [0, 1, 5])
def test_a_token_only_where_no_tensor_requires_gradients(count: int) -> None:
    sent, token = attach_send_edges([leaf(1) for _ in range(count)], [leaf(0).sum()])
    assert len(sent) == count
    assert (token is not None) == (count == 0)


@pytest.mark.parametrize("shape", [(), (0,), (2,), (2, 3)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.complex64])
def test_absent_is_not_zero(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Of two that are sent together one is used: the other has no gradient, the one may be zero."""
    x, y = (torch.ones(shape, dtype=dtype, requires_grad=True) for _ in range(2))
    (used, _), end = send([x * 1, y * 1])
    assert end is not None
    (end + (used * 0).abs().sum()).backward()
    assert x.grad is not None
    assert x.grad.count_nonzero() == 0
    assert y.grad is None


def test_sparse_gradients_pass() -> None:
    """Also one without elements: it is a gradient."""
    for indices in ([0, 2], []):
        table = torch.ones(3, 2, requires_grad=True)
        (arrived,), _ = send([table])
        rows = torch.tensor(indices, dtype=torch.int64)
        torch.nn.functional.embedding(rows, arrived, sparse=True).sum().backward()
        assert table.grad is not None
        assert table.grad.is_sparse
        assert table.grad.to_dense().sum() == 2 * len(indices)


@pytest.mark.parametrize("count", [2, 3])
def test_a_gradient_in_the_form_of_an_absent_one(count: int) -> None:
    """The second row of a stack of two scalars: one element, behind another."""
    x = [torch.tensor(1.0, requires_grad=True) for _ in range(count)]
    found, _ = send([each * 1 for each in x])
    (torch.stack(found) * torch.arange(1.0, count + 1)).sum().backward()
    assert [None if each.grad is None else each.grad.item() for each in x] == [1, 2, 3][:count]


class Noted(torch.autograd.Function):
    """Notes the gradients as they are sent."""

    @staticmethod
    def forward(ctx: Any, sent: list[Tensor], x: Tensor) -> Tensor:
        ctx.sent = sent
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        ctx.sent.append(gradient)
        return None, gradient


def test_gradients_on_a_device_are_sent_in_forms_that_torch_can_send() -> None:
    """Absent ones, empty ones, sparse ones, and one gradient of two tensors."""
    sent: list[Tensor] = []
    shapes = [(2,), (2,), (0,), (2,)]
    x = [torch.ones(shape, device="meta", requires_grad=True) for shape in shapes]
    x.append(torch.ones(3, 2, requires_grad=True))
    arrived = [Noted.apply(sent, each * 1) for each in x]
    attach_recv_edge(arrived)
    a, b, empty, _, table = arrived
    looked_up = torch.nn.functional.embedding(torch.tensor([1]), table, sparse=True)
    torch.autograd.backward([(a + b).sum() + empty.sum(), looked_up.sum()])
    assert len(sent) == len(x)
    assert all(each.layout is torch.strided for each in sent)
    assert all(each.untyped_storage().nbytes() for each in sent)
    assert len({each.untyped_storage()._cdata for each in sent}) == len(sent)
    assert x[4].grad is not None
    assert x[4].grad.tolist() == [[0, 0], [1, 1], [0, 0]]


def test_absent_gradients_on_a_device() -> None:
    x, y = (torch.ones(2, device="meta", requires_grad=True) for _ in range(2))
    (used, _), _ = send([x * 1, y * 1])
    used.sum().backward()
    assert x.grad is not None
    assert y.grad is None


def test_a_gradient_without_memory_fails_the_backward() -> None:
    """torch would end the process that sends it."""

    def free(gradient: Tensor) -> Tensor:
        gradient = gradient.clone()
        gradient.untyped_storage().resize_(0)
        return gradient

    (arrived,), _ = send([leaf(1, 2)])
    arrived.register_hook(free)
    with pytest.raises(ValueError, match="its storage was freed"):
        arrived.backward(torch.ones(2))
