"""Tensors in shared memory: the segments of an event loop, and those that a connection's ends use.

Copies into segments are made on the loop if they are small, large ones in threads.

Each end shows the other a probe segment. An end that gets its secret back may send tensors in
segments. Released segments are told on the connection. (tests/loopback/test_shared_memory.py)
"""

import asyncio
import hmac
import weakref
from collections import Counter, deque
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from itertools import starmap
from typing import Any, NamedTuple

from torch import Tensor

from .._aio.entry_queue import EntryQueue
from .._aio.loops import call_soon
from .._aio.segments import (
    Mapping,
    Probe,
    Segment,
    SegmentName,
    is_supported,
    map_segment,
    read_probe,
)
from .._aio.threads import memory_threads
from .._wire.blocks import Block, Place, ReadyMessage, Source, Then, place, tensors_at
from .._wire.buffers import COPY_ON_LOOP
from .._wire.frames import MAX_FRAME, SEGMENTS, SHARED, ProtocolError, header
from .._wire.payloads import ATTACHED, attach_data, detach_data
from .._wire.plain import dump, reader
from .carrier import Carrier, Handle, Wire
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
        # Weakly, as they keep their loop alive, and the loop its store.
        self._users: weakref.WeakSet[SharedMemory] = weakref.WeakSet()
        self._copying: dict[Hashable, SegmentCopy] = {}  # those in threads, by content
        self._waiting: deque[SegmentCopy] = deque()  # for a thread
        self._running = 0

    def attach(self, user: "SharedMemory") -> None:
        """Keep the store open for a carrier."""
        self._users.add(user)

    def detach(self, user: "SharedMemory") -> None:
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


# ── one end of a connection ─────────────────────────────────────────────────────────────────────


class _News(NamedTuple):
    """A SEGMENTS frame."""

    offer: SegmentName | None = None  # the probe of this process
    proof: bytes | None = None  # the secret in the probe of the peer, b"" if it cannot be read
    released: Sequence[int] = ()  # of the peer, tensors freed: once for each message
    closed: Sequence[int] = ()  # of this process, and no more
    opened: Sequence[int] = ()  # of the peer, mapped here


_read_news = reader(_News)
_read_shared = reader(tuple[list[tuple[int, int, int, int, bool]], list[Place], bytes])


class SharedMemory(Carrier):
    """The shared memory of one end of a connection."""

    NEWS, FIELDS = SEGMENTS, _News

    def __init__(
        self, wire: Wire, loop: asyncio.AbstractEventLoop, changed: Callable[[], object]
    ) -> None:
        super().__init__(wire, loop, changed)
        self.is_refused = False  # True if one end cannot map the segments of the other
        self._store: SegmentStore | None = None
        self._held: dict[int, list[Piece[Segment]]] = {}  # by the peer, once for each message
        # Those that it has not mapped yet, and could not map after the end of this process.
        self._unopened: Counter[int] = Counter()
        self._opened: set[int] = set()  # those whose mapping it keeps, or will
        self._copying = 0  # messages whose tensors are being written
        self._peer = 0  # its process id
        self._mappings: dict[int, Mapping] = {}  # of the peer's segments, by number
        self._buffers: dict[int, weakref.ref[Any]] = {}  # that tensors here lie in
        self._last_buffer = 0
        self._freed: EntryQueue[tuple[int, int]] = EntryQueue(loop, self._on_freed)

    def has_work(self) -> bool:
        return bool(self._copying or self._unopened)

    # ── negotiation ─────────────────────────────────────────────────────────────────────────────

    def offer(self) -> None:
        """Show the peer the probe, if it is a process of this host."""
        if self._wire.is_local and is_supported() and (name := self._open()) is not None:
            self._tell_now(offer=name)
        else:
            self.is_refused = True

    def _open(self) -> SegmentName | None:
        if self._store is None:
            try:
                self._store = store_of(self._loop)
            except OSError:  # memfd_create is forbidden here, for one
                return None
            self._store.attach(self)
            return self._store.probe.name
        return None

    def on_news(self, data: bytes) -> None:
        offer, proof, released, closed, opened = _read_news(data)
        if offer is not None and self._wire.is_local:
            self._peer = offer.pid
            mine = self._open() if is_supported() else None
            secret = b"" if self._store is None else read_probe(offer)
            self.is_refused |= not secret
            self._tell_now(offer=mine, proof=secret)
        if proof is not None and self._store is not None:
            self.can_send = hmac.compare_digest(proof, self._store.probe.secret)
            self.is_refused |= not self.can_send
        if offer is not None or proof is not None:
            self._changed()
        for number in opened:
            if not (left := self._unopened.pop(number, 0)):
                raise ProtocolError(f"segment {number!r} is not to be mapped by the peer")
            if left > 1:
                self._unopened[number] = left - 1
        for number in released:
            if not (held := self._held.get(number)):
                raise ProtocolError(f"segment {number!r} is not held by the peer")
            segment = held.pop()
            if not held:
                del self._held[number]
            if self._store is not None:
                self._store.memory.release(segment)
        for number in closed:
            self._mappings.pop(number, None)

    # ── sending ─────────────────────────────────────────────────────────────────────────────────

    def send(
        self, data: bytes, tensors: Sequence[Tensor], then: Then, is_current: Callable[[], bool]
    ) -> bool:
        if not self.can_send or self._store is None:
            return False
        if len(data) > ATTACHED:
            data, tensors = attach_data(data, tensors)
        if (found := place(tensors)) is None:
            return False
        blocks, places = found
        copies: list[SegmentCopy] = []
        for block in blocks:
            if (copy := self._store.copy(block, is_current)) is None:
                return False
            copies.append(copy)
        self._copying += 1
        self._finish(copies, places, data, then)
        return True

    def _finish(
        self, copies: Sequence[SegmentCopy], places: Sequence[Place], data: bytes, then: Then
    ) -> None:
        """Pass the message on once all its blocks are written."""
        can_send, names = self._wire.is_open, []
        for copy in copies:
            if not copy.is_written:
                copy.waiters.append(partial(self._finish, copies, places, data, then))
                return
            segment = copy.segment
            can_send &= copy.error is None
            assert segment is not None
            names.append((segment.number, *segment.memory.name[1:], copy.is_shared))
        self._copying -= 1
        message = None
        if can_send:
            body = dump((names, places, data))
            if len(body) <= MAX_FRAME:  # else too many tensors
                body = header(len(body), SHARED) + body
                message = ReadyMessage(partial(self._send, copies, body), len(body))
        then(message)

    def _send(self, copies: Sequence[SegmentCopy], data: bytes) -> None:
        """Write the frame of a message; the peer holds its segments from then on."""
        if self._store is None:  # the connection has ended
            return
        self._wire.write(data)
        self.sent += 1
        for copy in copies:
            segment = copy.segment
            assert segment is not None
            if copy.is_shared:  # for others, too
                segment.holders += 1
            else:
                copy.segment = None
            if copy.is_shared or segment.number not in self._opened:
                self._unopened[segment.number] += 1
                if not copy.is_shared:
                    self._opened.add(segment.number)
            self._held.setdefault(segment.number, []).append(segment)

    def forget(self, number: int) -> None:
        """Tell the peer that a segment of this process is closed, if it has it mapped."""
        if number in self._opened:
            self._opened.discard(number)
            self.tell("closed", number)

    # ── receiving ───────────────────────────────────────────────────────────────────────────────

    def on_message(self, handle: Handle, data: bytes) -> int:
        names, places, rest = _read_shared(data)
        tensors = tensors_at(places, [*starmap(self._map, names)])
        return handle(rest, tensors) if rest else handle(*detach_data(rest, tensors))

    def _map(self, number: int, descriptor: int, inode: int, size: int, private: bool) -> Any:
        """Return a segment of the peer and its bytes; its release is told when it is freed."""
        if not self._peer:
            raise ProtocolError("a segment before any offer")
        # A single receiver maps a segment shared, and keeps the mapping: later uses bring no page
        # faults. Many receivers map it privately. Reading 16 MB took 0.6 ms in a kept shared
        # mapping and 1.4 ms in a new private one; writing took 0.7 and 12.7 ms, as each page is
        # copied. A copy for each receiver takes 1.3 ms of the sender, 16 ms in a new segment.
        mapping = None if private else self._mappings.get(number)
        if mapping is None:
            name = SegmentName(self._peer, descriptor, inode, size)
            mapping = map_segment(name, private=private)
            self.tell("opened", number)
            if not private:
                self._mappings[number] = mapping
        if mapping.size != size:
            raise ProtocolError(f"segment {number} has {mapping.size} bytes, not {size}")
        buffer = mapping.buffer()
        key = self._last_buffer = self._last_buffer + 1
        freed = self._freed
        # `torch.frombuffer` keeps the buffer until its last storage is freed, in any thread.
        self._buffers[key] = weakref.ref(buffer, lambda _: freed.put((key, number)))
        return buffer, size

    def _on_freed(self, freed: tuple[int, int]) -> None:
        key, number = freed
        if self._buffers.pop(key, None) is not None:
            self.tell("released", number)

    # ── end ─────────────────────────────────────────────────────────────────────────────────────

    def close(self) -> None:
        """Give up what the peer holds: it may still read it, so it is not used again."""
        self.can_send = False
        store, self._store = self._store, None
        if store is not None:
            for held in self._held.values():
                for segment in held:
                    segment.is_reusable = False
                    store.memory.release(segment)
            store.detach(self)
        self._held.clear()
        self._unopened.clear()
        self._mappings.clear()
        self._buffers.clear()
