"""Memory that transfers are received into, used again once all its tensors are freed.

New pages cost a receiver more CPU than the bytes. (tests/unit/sockets/test_receive_memory.py)
"""

import asyncio
import ctypes
import threading
import time
import weakref
from typing import Any

import torch

from .._aio.entry_queue import EntryQueue
from .._aio.segments import Mapping
from .._shm.segment_pool import SegmentPool
from .._shm.segment_store import IDLE_SECONDS, memory_limit


class ReceiveMemory:
    """The memory of one event loop's connections. Use `memory_of`.

    It is as large as all shared memory that the loop may send. What exceeds that, for a receiver
    that keeps its tensors, is memory of torch.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = weakref.ref(loop)
        self._pool = SegmentPool(memory_limit())
        self._mappings: dict[int, Mapping] = {}
        self._used: dict[int, weakref.ref[Any]] = {}
        self._freed: EntryQueue[int] = EntryQueue(loop, self._on_freed)
        self._is_trimming = False
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"<ReceiveMemory {self._pool}>"

    def take(self, size: int) -> Any:
        """Return at least `size` bytes, held until the returned object is garbage. In any thread.

        Raises:
            OSError: if there is no address space.
            RuntimeError: if torch has no memory.
        """
        with self._lock:
            grant = self._pool.acquire(size)
            if grant is None:
                return _memory_of_torch(size)
            for number in grant.closed:
                del self._mappings[number]
            if grant.is_new:
                try:
                    self._mappings[grant.id] = Mapping.anonymous(grant.size)
                except OSError:
                    self._pool.abandon(grant.id, 0.0)
                    raise
            number, freed = grant.id, self._freed
            buffer = self._mappings[number].buffer()
            self._used[number] = weakref.ref(buffer, lambda _: freed.put(number))
            return buffer

    def _on_freed(self, number: int) -> None:
        """Note that all tensors in a piece of memory were freed."""
        with self._lock:
            del self._used[number]
            self._pool.release(number, time.monotonic())
        if not self._is_trimming:
            self._trim_in(IDLE_SECONDS)

    def _trim_in(self, seconds: float) -> None:
        if (loop := self._loop()) is not None and not loop.is_closed():
            self._is_trimming = True
            # A timer refers to its loop, and the loop to this memory.
            loop.call_later(seconds, _trim, weakref.ref(self))

    def trim(self) -> None:
        """Free what was not used for `IDLE_SECONDS`."""
        self._is_trimming = False
        now = time.monotonic()
        with self._lock:
            for number in self._pool.trim(now - IDLE_SECONDS):
                del self._mappings[number]
            oldest = self._pool.oldest()
        if oldest is not None:
            self._trim_in(oldest + IDLE_SECONDS - now + 0.01)


def _trim(memory: "weakref.ref[ReceiveMemory]") -> None:
    if (found := memory()) is not None:
        found.trim()


def _memory_of_torch(size: int) -> Any:
    tensor = torch.empty(size, dtype=torch.uint8)
    buffer = (ctypes.c_ubyte * size).from_address(tensor.data_ptr())
    buffer.tensor = tensor  # type: ignore[attr-defined]
    return buffer


_memories: "weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, ReceiveMemory]" = (
    weakref.WeakKeyDictionary()
)


def memory_of(loop: asyncio.AbstractEventLoop) -> ReceiveMemory:
    """Return the memory of a loop, a new one if it has none."""
    if (found := _memories.get(loop)) is None:
        found = _memories[loop] = ReceiveMemory(loop)
    return found
