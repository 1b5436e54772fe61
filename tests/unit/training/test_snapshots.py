"""Snapshots of trees: equal values, memory of their own, shared memory that stays shared."""

import asyncio
import dataclasses
from collections import OrderedDict
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor, nn

from aiorpc_torch.training.snapshots import COPY_ON_LOOP, Taking
from tests.support.tensor_kinds import Pair

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int8, torch.bool, torch.complex64]


@dataclasses.dataclass
class Parts:
    actor: dict[str, Tensor]
    step: int


def test_any_tree() -> None:
    tree = Parts({"w": torch.arange(6.0).reshape(2, 3), "none": torch.empty(0, 3)}, 7)
    found = Taking([tree, (torch.tensor(3), None)]).take().load()
    assert found[0].step == 7
    assert torch.equal(found[0].actor["w"], tree.actor["w"])
    assert found[0].actor["none"].shape == (0, 3)
    assert int(found[1][0]) == 3
    assert found[1][1] is None


def test_it_is_a_copy() -> None:
    model = nn.Linear(3, 3)
    taken = Taking(model.state_dict()).take()
    with torch.no_grad():
        before = model.weight.clone()
        model.weight.zero_()
    state = taken.load()
    assert isinstance(state, OrderedDict)
    assert torch.equal(state["weight"], before)
    assert not state["weight"].requires_grad


def test_tensors_that_share_their_memory_share_it_in_the_snapshot() -> None:
    shared = torch.ones(1000)
    taken = Taking({"a": shared, "b": shared}).take()
    assert taken.size < 2 * shared.nbytes
    found = taken.load()
    found["a"][0] = 5
    assert found["b"][0] == 5


def test_a_conjugate_beside_its_tensor() -> None:
    """They share their memory, and not their values."""
    x = torch.tensor([1 + 2j, 3 - 4j])
    tree = {"x": x, "conj": x.conj(), "imag": x.imag, "negated": x.conj().imag}
    found = Taking(tree).take().load()
    assert all(torch.equal(found[name], value) for name, value in tree.items())


@pytest.mark.parametrize(
    "value",
    [
        torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.arange(12.0).reshape(3, 4).t(),
        torch.arange(12.0).reshape(3, 4)[:, ::2],
        torch.ones(1).expand(4),
        torch.tensor([[0.0, 1.0]]).to_sparse(),
    ],
    ids=["channels_last", "transposed", "with gaps", "expanded", "sparse"],
)
def test_tensors_of_other_kinds(value: Tensor) -> None:
    found = Taking([value]).take().load()[0]
    assert found.dtype == value.dtype
    assert torch.equal(found.to_dense(), value.to_dense())
    if value.layout is torch.strided and value.is_contiguous(memory_format=torch.preserve_format):
        assert found.stride() == value.stride()


@given(st.lists(st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 3), max_size=3))))
def test_any_tensors(kinds: list[tuple[torch.dtype, list[int]]]) -> None:
    tensors = [torch.randint(0, 2, shape).to(dtype) for dtype, shape in kinds]
    found = Taking(tensors).take().load()
    assert all(torch.equal(one, other) for one, other in zip(found, tensors, strict=True))
    assert [each.dtype for each in found] == [each.dtype for each in tensors]


async def test_large_ones_are_copied_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[Any] = []

    async def to_thread(function: Any) -> Any:
        used.append(function)
        return function()

    monkeypatch.setattr(asyncio, "to_thread", to_thread)
    await Taking(torch.ones(COPY_ON_LOOP // 4)).take_in_thread()
    assert not used
    taken = await Taking(torch.ones(COPY_ON_LOOP // 4 + 1)).take_in_thread()
    assert len(used) == 1
    assert taken.load().sum() == COPY_ON_LOOP // 4 + 1


def test_tensors_around_tensors_are_pickled() -> None:
    """They have no memory of their own: two of one shape are not taken for the same."""
    pairs = [Pair(torch.full((3,), float(i)), torch.ones(2)) for i in range(2)]
    one, other = Taking(pairs).take().load()
    assert (one.first.tolist(), other.first.tolist()) == ([0.0] * 3, [1.0] * 3)


@pytest.mark.promise("training.recover")
@pytest.mark.parametrize("size", [1, 100, 600, 2000])
@pytest.mark.parametrize("end", [0, -1])
def test_a_sample_tells_of_both_ends_of_each_tensor(size: int, end: int) -> None:
    tensors = [torch.ones(3), torch.ones(size), torch.empty(0), torch.ones(5)]
    for index in (0, 1, 3):
        taken = Taking(tensors).take()
        assert taken.is_intact
        taken.load()[index][end] = 7.0
        assert not taken.is_intact
