"""Memory of one event loop that is used again: segments to send in, and memory to receive into.

`MemoryPool` decides; this module has its loop, its clock and its queue.
(tests/unit/carrier/test_memory.py)
"""

import asyncio
import ctypes
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch

from .._aio.entry_queue import EntryQueue
from .._aio.host import memory_size
from .._aio.segments import Mapping
from .memory_pool import MemoryPool, Piece

IDLE_SECONDS = 5.0
"""Seconds after which a free piece is given back to the system."""

M = TypeVar("M")


def memory_limit() -> int:
    """Return the maximum bytes of an event loop's segments, and of what it receives into.

    1 GiB, or an eighth of the memory.
    """
    return min(1 << 30, memory_size() // 8)


class LoopMemory(Generic[M]):
    """A `MemoryPool` of one event loop, confined to it. The loop is not kept alive."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        make: Callable[[int], M],
        closed: Callable[[Piece[M]], object] = lambda _: None,
    ) -> None:
        self.pool = MemoryPool(memory_limit(), make, closed)
        # Of pieces that a holder has let go. For any thread.
        self.returned: EntryQueue[Piece[M]] = EntryQueue(loop, self.release)
        self._loop = weakref.ref(loop)
        self._is_trimming = False
        self._lock = threading.Lock()  # `ReceiveMemory.take` runs in any thread

    def release(self, piece: Piece[M]) -> None:
        """Remove a holder."""
        with self._lock:
            self.pool.release(piece, time.monotonic())
            if not (piece.holders or self._is_trimming):
                self._trim_in(IDLE_SECONDS)

    def _trim_in(self, seconds: float) -> None:
        if (loop := self._loop()) is not None and not loop.is_closed():
            self._is_trimming = True
            # A timer refers to its loop, and the loop to this memory.
            loop.call_later(seconds, _trim, weakref.ref(self))

    def trim(self) -> None:
        """Give back what was not used for `IDLE_SECONDS`."""
        with self._lock:
            self._is_trimming = False
            now = time.monotonic()
            oldest = self.pool.trim(now - IDLE_SECONDS)
            if oldest is not None:
                self._trim_in(oldest + IDLE_SECONDS - now + 0.01)


def _trim(memory: "weakref.ref[LoopMemory[Any]]") -> None:
    if (found := memory()) is not None:
        found.trim()


class ReceiveMemory(LoopMemory[Mapping]):
    """Memory that an event loop's connections receive into. Use `receive_memory_of`.

    It is as large as all shared memory that the loop may send. What exceeds that, for a receiver
    that keeps its tensors, is memory of torch.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop, Mapping.anonymous)
        self.used: dict[int, weakref.ref[Any]] = {}  # what tensors lie in, by number of its piece

    def take(self, size: int) -> Any:
        """Return at least `size` bytes, held until the returned object is garbage. In any thread.

        Raises:
            OSError: if there is no address space.
            RuntimeError: if torch has no memory.
        """
        with self._lock:
            piece = self.pool.acquire(size)
        if piece is None:
            tensor = torch.empty(size, dtype=torch.uint8)
            buffer = (ctypes.c_ubyte * size).from_address(tensor.data_ptr())
            buffer.tensor = tensor  # type: ignore[attr-defined]
            return buffer
        buffer, used, returned = piece.memory.buffer(), self.used, self.returned

        def let_go(_: object) -> None:
            del used[piece.number]
            returned.put(piece)

        used[piece.number] = weakref.ref(buffer, let_go)
        return buffer


_received: "weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, ReceiveMemory]" = (
    weakref.WeakKeyDictionary()
)


def receive_memory_of(loop: asyncio.AbstractEventLoop) -> ReceiveMemory:
    """Return the memory of a loop, a new one if it has none."""
    if (found := _received.get(loop)) is None:
        found = _received[loop] = ReceiveMemory(loop)
    return found
