"""The shared-memory segments of one event loop, and the copies of tensors into them.

Small copies are made on the loop, large ones in threads. (tests/loopback/test_shared_memory.py)
"""

import asyncio
import weakref
from collections import deque
from collections.abc import Callable, Hashable
from functools import partial
from typing import Any

from .._aio.loops import call_soon
from .._aio.segments import Probe, Segment
from .._aio.threads import memory_threads
from .._wire.blocks import Block, Source
from .._wire.buffers import COPY_ON_LOOP
from .memory import LoopMemory
from .memory_pool import Piece

MAX_COPIES = 2  # at a time; more threads copy no faster


class SegmentCopy:
    """The bytes of equal blocks, in a segment that the sender holds until this is garbage."""

    __slots__ = (
        *("content", "error", "is_current", "is_shared", "is_written", "segment", "waiters"),
        *("_memory", "_sources"),
    )

    def __init__(
        self,
        memory: LoopMemory[Segment],
        segment: Piece[Segment],
        block: Block,
        is_current: Callable[[], bool],
    ) -> None:
        self.content: Hashable = (*block.contents,)  # equal for equal blocks
        self.segment: Piece[Segment] | None = segment  # None once it is the receiver's alone
        self.is_current = is_current  # returns whether nobody may change the tensors yet
        self.is_shared = block.is_shared  # True if many receivers map the segment
        self.is_written = False  # True if the bytes are there, or `error` has prevented it
        self.error: Exception | None = None
        self.waiters: list[Callable[[], object]] = []  # are called once it is written
        self._memory = memory
        self._sources: list[Source] = block.sources

    def write(self) -> None:
        """Copy the bytes. In any thread."""
        assert self.segment is not None
        write = self.segment.memory.write
        try:
            for (start, skip, size), storage in self._sources:
                if storage.nbytes() < skip + size:
                    raise ValueError("a storage was freed or made smaller before it was copied")
                write(start, storage.data_ptr() + skip, size)
        except Exception as exc:
            self.error = exc

    def end(self) -> None:
        """Let the tensors go, and tell who waits."""
        self._sources.clear()
        self.is_written = True
        waiters, self.waiters = self.waiters, []
        for waiter in waiters:
            waiter()

    def __del__(self) -> None:
        if self.segment is not None:
            self._memory.returned.put(self.segment)


class SegmentStore:
    """The segments of one event loop, for all its connections. Use `store_of`.

    Raises:
        OSError: if this process cannot make segments.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.probe = Probe()
        self.memory = LoopMemory(loop, Segment, self._on_closed)
        self._loop = weakref.ref(loop)
        # `SharedMemory`s: weakly, as they keep their loop alive, and the loop its store.
        self._users: weakref.WeakSet[Any] = weakref.WeakSet()
        self._copying: dict[Hashable, SegmentCopy] = {}  # those in threads, by content
        self._waiting: deque[SegmentCopy] = deque()  # for a thread
        self._running = 0

    def attach(self, user: Any) -> None:
        """Keep the store open for a carrier; its `forget` is told which segments are closed."""
        self._users.add(user)

    def detach(self, user: Any) -> None:
        """Forget a carrier; close the store with the last one."""
        self._users.discard(user)
        if not self._users:
            if (loop := self._loop()) is not None and _stores.get(loop) is self:
                del _stores[loop]
            del self.probe
            self.memory.pool.close()

    def _on_closed(self, segment: Piece[Segment]) -> None:
        for user in self._users:
            user.forget(segment.number)

    def copy(self, block: Block, is_current: Callable[[], bool]) -> SegmentCopy | None:
        """Return the copy of a block, which is made now or in a thread; None without memory.

        It is that of an earlier block if the same tensors are being copied, and may not be changed
        yet. The copy of a call that was cancelled, or has failed, serves no other: its caller may
        change the tensors while they are copied.
        """
        if block.copy is not None:  # for another receiver
            return None if block.copy.error else block.copy
        found = self._copying.get((*block.contents,)) if self._copying else None
        if found is not None and found.is_current():
            found.is_shared, found.is_current = True, is_current
            block.sources.clear()
        else:
            try:
                segment = self.memory.pool.acquire(block.size)
            except OSError:  # no memory, or no descriptor
                segment = None
            if segment is None:
                return None
            found = SegmentCopy(self.memory, segment, block, is_current)
            if block.size <= COPY_ON_LOOP:
                found.write()
                found.end()
            else:
                self._copying[found.content] = found
                self._waiting.append(found)
                self._start()
        block.copy = found
        return None if found.error else found

    def _start(self) -> None:
        while self._waiting and self._running < MAX_COPIES:
            copy = self._waiting.popleft()
            self._running += 1
            try:
                memory_threads(partial(self._run, copy))
            except RuntimeError:  # no thread could be started
                self._run(copy)

    def _run(self, copy: SegmentCopy) -> None:
        copy.write()
        if (loop := self._loop()) is not None:
            call_soon(loop, self._on_written, copy)

    def _on_written(self, copy: SegmentCopy) -> None:
        self._running -= 1
        if self._copying.get(copy.content) is copy:
            del self._copying[copy.content]
        if self._waiting:
            self._start()
        copy.end()


_stores: "weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, SegmentStore]" = (
    weakref.WeakKeyDictionary()
)


def store_of(loop: asyncio.AbstractEventLoop) -> SegmentStore:
    """Return the store of a loop, a new one if it has none.

    Raises:
        OSError: if this process cannot make segments.
    """
    if (found := _stores.get(loop)) is None:
        found = _stores[loop] = SegmentStore(loop)
    return found


def segment_counts() -> tuple[int, int]:
    """Return the number of segments of this process, and their bytes. In any thread."""
    pools = [store.memory.pool for store in [*_stores.values()]]
    return sum(map(len, pools)), sum(pool.total for pool in pools)
