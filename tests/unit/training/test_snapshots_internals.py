"""Tensors that the next version of a snapshot takes over."""

import pytest
import torch
from hypothesis import given, strategies as st

from aiorpc_torch.training.snapshots import (
    MAX_BLOCKS,
    MIN_KEPT,
    Memory,
    Snapshot,
    Taking,
)


@pytest.mark.promise("training.unchanged")
@given(st.lists(st.sets(st.integers(0, 5)), max_size=12))
def test_versions_after_each_other(steps: list[set[int]]) -> None:
    """Whatever changes in each: they are as they were published, and keep few blocks."""
    memory = Memory()
    tensors = [torch.zeros(MIN_KEPT // 4 * (1 + number)) for number in range(5)]
    tensors.append(torch.zeros(MIN_KEPT // 4, 6)[:, ::2])  # compared once it is copied
    last = Taking(tensors, memory).take()
    for number, changed in enumerate(steps, 1):
        for index in changed:
            tensors[index][-1 - number] = float("nan") if number % 3 else number
        taken = Taking(tensors, memory, last).take()
        found = taken.load()
        for one, other in zip(found, tensors, strict=True):  # also of NaN
            assert torch.equal(one.view(torch.int32), other.contiguous().view(torch.int32))
        new = sum(len(data) for name, data in taken.blocks.items() if name not in last.blocks)
        size = sum(each.nbytes for each in tensors)
        assert new in (size, sum(tensors[index].nbytes for index in changed))
        assert len(taken.blocks) <= 1 + MAX_BLOCKS
        assert taken.size <= 3 * size
        assert not taken.changed()
        last = taken


def test_what_was_changed_here() -> None:
    """A checksum differs for one word, and for two that have changed places."""
    first = Taking({"a": torch.arange(500_000.0), "b": torch.ones(3)}).take()
    second = Taking({"a": torch.arange(500_000.0), "b": torch.ones(3)}, Memory(), first).take()
    received = Snapshot.received(*second.sent(1, first.blocks)[1:], first.blocks)
    assert received.kept == {*first.blocks}
    assert not received.changed()
    tensor = received.load()["a"]
    for one, other in ((0, 7), (3, 499_999), (7, 8 + 2048), (499_998, 499_999)):
        tensor[[one, other]] = tensor[[other, one]]
        assert received.changed() == received.kept
        tensor[[one, other]] = tensor[[other, one]]
        assert not received.changed()
