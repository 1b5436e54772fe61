"""Memory that snapshots use again once nothing refers to it.

The first write into new memory costs more than the copy. (tests/unit/training/test_memory.py)
"""

import ctypes
import mmap
import weakref

import torch
from torch import Tensor

SMALL = 1 << 20
"""Bytes below which torch's own memory is as good."""


class Memory:
    """The memory of one publisher's snapshots. At most one free block is kept."""

    def __init__(self) -> None:
        self._free: mmap.mmap | None = None

    def take(self, size: int) -> Tensor:
        """Return a tensor of so many bytes, in memory that is free."""
        if size < SMALL:
            return torch.empty(size, dtype=torch.uint8)
        block, self._free = self._free, None
        if block is None or len(block) != size:
            # Private: a forked child keeps what it has seen.
            block = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        buffer = (ctypes.c_char * size).from_buffer(block)
        # `torch.frombuffer` keeps the buffer until its last storage is freed, in any thread.
        weakref.finalize(buffer, self._give_back, block).atexit = False
        return torch.frombuffer(buffer, dtype=torch.uint8)

    def _give_back(self, block: mmap.mmap) -> None:
        self._free = block
