"""Versions of several publishers are merged into one."""

import gc
import weakref

import torch

from aiorpc_torch.training.joining import merge
from aiorpc_torch.training.snapshots import Taking


def test_what_was_merged_is_freed_without_the_collector() -> None:
    """It is as large as the version: it must not wait for a collection, which may come late."""
    snapshots = [Taking({name: torch.ones(3)}).take() for name in "ab"]
    loaded = [each.loaded() for each in snapshots]
    received = [weakref.ref(part.tensor) for _, parts in loaded for part in parts.values()]
    gc.disable()
    try:
        tree = merge(loaded, {})
        assert [*tree] == ["a", "b"]
        del tree, loaded
        assert [each() for each in received] == [None, None]
    finally:
        gc.enable()
