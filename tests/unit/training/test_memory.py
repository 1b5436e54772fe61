"""Memory of snapshots: used again when it is free, and not before."""

import gc

import torch

from aiorpc_torch.training.snapshots import SMALL, Memory


def test_it_is_used_again_once_nothing_refers_to_it() -> None:
    memory = Memory()
    first = memory.take(SMALL)
    view, place = first[10:20].view(torch.uint8), first.data_ptr()
    second = memory.take(SMALL)
    assert second.data_ptr() != place
    del first
    gc.collect()
    third = memory.take(SMALL)
    assert third.data_ptr() != place, "a view refers to it"
    del view
    gc.collect()
    assert memory.take(SMALL).data_ptr() == place


def test_other_sizes_and_small_ones() -> None:
    memory = Memory()
    memory.take(SMALL)
    assert len(memory.take(SMALL + 1)) == SMALL + 1
    assert len(memory.take(0)) == 0
    assert memory.take(10).dtype == torch.uint8
