"""The shared-memory segments of one event loop: made, written, used again and closed.

`SegmentPool` decides; this module makes the segments and copies tensors into them. Small copies are
made on the loop, large ones in threads. (tests/loopback/test_shared_memory.py)
"""

import asyncio
import time
import weakref
from collections import deque
from collections.abc import Callable, Hashable
from functools import partial
from typing import Protocol

from .._aio.entry_queue import EntryQueue
from .._aio.loops import call_soon
from .._aio.memory_size import memory_size
from .._aio.segments import Probe, Segment
from .._aio.threads import memory_threads
from .._wire.shared_tensors import Block
from .segment_pool import SegmentPool

COPY_ON_LOOP = 1 << 20
"""Maximum bytes that are copied on the event loop, in about 0.2 ms."""

IDLE_SECONDS = 5.0
"""Seconds after which a free segment is closed."""

MAX_COPIES = 2  # at a time; more threads copy no faster

Waiter = Callable[[], object]


def memory_limit() -> int:
    """Return the maximum bytes of an event loop's segments: 1 GiB, or an eighth of the memory."""
    return min(1 << 30, memory_size() // 8)


class Forgetful(Protocol):
    """A link to a peer that keeps mappings of segments."""

    def forget(self, number: int) -> None:
        """Tell the peer that a segment is closed."""


class Lease:
    """A segment that a block is written to, held until `close`.

    Attributes:
        number: Number of the segment.
        is_written: True if the block is written.
        error: The exception that a copy has raised, or None.
    """

    def __init__(self, store: "SegmentStore", number: int, segment: Segment) -> None:
        self.number = number
        self.segment = segment
        self.is_written = False
        self.error: BaseException | None = None
        self.waiters: list[Waiter] = []
        self._store: SegmentStore | None = store

    def close(self) -> None:
        """Stop holding the segment for the sender. In any thread, any number of times."""
        store, self._store = self._store, None
        if store is not None:
            store.returned.put(self.number)

    __del__ = close


class SegmentStore:
    """The segments of one event loop, for all its connections. Use `store_of`.

    Attributes:
        returned: Queue of segments that the sender no longer holds.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.probe = Probe()
        self.returned: EntryQueue[int] = EntryQueue(loop, self.release)
        self._loop = weakref.ref(loop)
        self._pool = SegmentPool(memory_limit())
        self._segments: dict[int, Segment] = {}
        # Weakly, as links keep their loop alive, and the loop its store.
        self._users: dict[int, weakref.WeakSet[Forgetful]] = {}  # links a segment was sent on
        self._links: weakref.WeakSet[Forgetful] = weakref.WeakSet()
        self._copies: deque[Block] = deque()
        self._copying = 0
        self._unwritten: dict[Hashable, Block] = {}  # large blocks, by content
        self._trimmer: weakref.ref[asyncio.TimerHandle] | None = None  # it refers to the loop

    def __repr__(self) -> str:
        return f"<SegmentStore {self._pool}, {len(self._links)} links>"

    @property
    def size(self) -> tuple[int, int]:
        """Return the number of segments and their bytes. In any thread."""
        return len(self._pool), self._pool.total

    # ── links ───────────────────────────────────────────────────────────────────────────────────

    def attach(self, link: Forgetful) -> None:
        """Keep the store open for a link."""
        self._links.add(link)

    def detach(self, link: Forgetful) -> None:
        """Forget a link; close the store with the last one."""
        self._links.discard(link)
        for users in self._users.values():
            users.discard(link)
        if not self._links:
            self._close()

    def _close(self) -> None:
        if (loop := self._loop()) is not None and _stores.get(loop) is self:
            del _stores[loop]
        if self._trimmer is not None and (timer := self._trimmer()) is not None:
            timer.cancel()
        del self.probe
        self._pool = SegmentPool(0)
        self._segments.clear()
        self._users.clear()

    # ── segments ────────────────────────────────────────────────────────────────────────────────

    def lease(self, size: int) -> Lease | None:
        """Return a segment of at least `size` bytes, None if no memory is left."""
        grant = self._pool.acquire(size)
        if grant is None:
            return None
        if grant.closed:
            self._discard(grant.closed)
        if grant.is_new:
            try:
                self._segments[grant.id] = Segment(grant.size)
            except OSError:  # no memory, or no descriptor
                self._pool.abandon(grant.id, 0.0)
                return None
        return Lease(self, grant.id, self._segments[grant.id])

    def hold(self, number: int, link: Forgetful | None) -> bool:
        """Note that a segment is sent; return whether it was sent on this link before.

        Args:
            number: The segment.
            link: The link if its peer keeps the mapping, else None.
        """
        self._pool.hold(number)
        if link is None:
            return False
        users = self._users.setdefault(number, weakref.WeakSet())
        is_known = link in users
        users.add(link)
        return is_known

    def release(self, number: int) -> None:
        """Note that a receiver, or the sender, no longer holds a segment."""
        if number in self._segments:  # else the store was closed
            self._after(number, self._pool.release(number, time.monotonic()))

    def abandon(self, number: int) -> None:
        """Note that a segment was sent on a link that has ended."""
        if number in self._segments:
            self._after(number, self._pool.abandon(number, time.monotonic()))

    def _after(self, number: int, is_closed: bool) -> None:
        if is_closed:
            self._discard((number,))
        elif self._trimmer is None and self._pool.has_free:
            self._trim_in(IDLE_SECONDS)

    def _discard(self, numbers: "list[int] | tuple[int, ...]") -> None:
        for number in numbers:
            del self._segments[number]
            for link in self._users.pop(number, ()):
                link.forget(number)

    def _trim_in(self, seconds: float) -> None:
        if (loop := self._loop()) is not None and not loop.is_closed():
            self._trimmer = weakref.ref(loop.call_later(seconds, self._trim))

    def _trim(self) -> None:
        self._trimmer = None
        now = time.monotonic()
        self._discard(self._pool.trim(now - IDLE_SECONDS))
        if (oldest := self._pool.oldest()) is not None:
            self._trim_in(oldest + IDLE_SECONDS - now + 0.01)

    # ── writing ─────────────────────────────────────────────────────────────────────────────────

    def write(self, block: Block) -> bool:
        """Write a block, unless it is or is being written; return False if no memory is left.

        The block has a lease then. `Lease.waiters` are called once it is written. It shares the
        lease of an earlier block if the same tensors are being copied, and may not be changed yet.
        """
        if block.lease is None:
            found = self._unwritten.get(block.content()) if self._unwritten else None
            # The copy of a call that was cancelled, or has failed, serves no other: its caller may
            # change the tensor while it is copied.
            if found is None or not found.is_current():
                self._start(block)
            else:
                block.lease = found.lease
                block.is_shared = found.is_shared = True
                found.is_current = block.is_current
                block.sources.clear()
        return block.lease is not None and block.lease.error is None

    def _start(self, block: Block) -> None:
        """Copy a block now, or in a thread, if there is memory."""
        lease = block.lease = self.lease(block.size)
        if lease is None:
            return
        if block.size <= COPY_ON_LOOP:
            _copy(block)
            _end(block)
        else:
            self._unwritten[block.content()] = block
            self._copies.append(block)
            self._start_copies()

    def _start_copies(self) -> None:
        while self._copies and self._copying < MAX_COPIES:
            block = self._copies.popleft()
            self._copying += 1
            try:
                memory_threads(partial(self._copy, block))
            except RuntimeError:  # no thread could be started
                self._copy(block)

    def _copy(self, block: Block) -> None:
        """Write a block, in a thread."""
        _copy(block)
        if (loop := self._loop()) is not None:
            call_soon(loop, self._on_copied, block)

    def _on_copied(self, block: Block) -> None:
        self._copying -= 1
        if self._unwritten.get(content := block.content()) is block:
            del self._unwritten[content]
        if self._copies:
            self._start_copies()
        _end(block)


def _copy(block: Block) -> None:
    """Write a block to its segment."""
    lease: Lease = block.lease
    try:
        block.write(lease.segment.write)
    except BaseException as exc:
        lease.error = exc


def _end(block: Block) -> None:
    """Note that a block is written."""
    block.sources.clear()
    lease: Lease = block.lease
    lease.is_written = True
    waiters, lease.waiters = lease.waiters, []
    for waiter in waiters:
        waiter()


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
    sizes = [store.size for store in [*_stores.values()]]
    return sum(count for count, _ in sizes), sum(size for _, size in sizes)
