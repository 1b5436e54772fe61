"""Shared memory of one connection: which segments each end has mapped, and which it has freed.

Each end shows the other a probe segment. An end that gets its secret back may send tensors in
segments. Released segments are told on the connection. (tests/loopback/test_shared_memory.py)
"""

import asyncio
import hmac
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import starmap
from operator import itemgetter
from typing import Any, Protocol

from torch import Tensor

from .._aio.entry_queue import EntryQueue
from .._aio.segments import Mapping, SegmentName, is_supported, map_segment, read_probe
from .._wire.frames import SEGMENTS, SHARED, ProtocolError, frame
from .._wire.payloads import attach_data, detach_data
from .._wire.plain import dump, reader
from .._wire.shared_tensors import (
    Block,
    Place,
    ReadyMessage,
    Then,
    check_places,
    place,
    tensors_at,
)
from .segment_store import Lease, SegmentStore, store_of

_read_news = reader(tuple[SegmentName | None, bytes | None, list[int], list[int], list[int]])
_read_shared = reader(tuple[list[tuple[int, int, int, int, bool]], list[Place], bytes])


class SegmentWire(Protocol):
    """The connection of a link."""

    @property
    def is_open(self) -> bool:
        """Return whether frames may be sent."""
        ...

    @property
    def is_local(self) -> bool:
        """Return whether the peer is a process of this host."""
        ...

    def write(self, data: bytes) -> None:
        """Write frames."""


class SegmentLink:
    """The shared memory of one end of a connection. Confined to the event loop `loop`.

    Attributes:
        can_send: True if the peer has shown that it can map segments of this process.
        is_refused: True if one end cannot map the segments of the other.
        sent: number of messages sent in segments.
    """

    def __init__(self, wire: SegmentWire, loop: asyncio.AbstractEventLoop) -> None:
        self.can_send = self.is_refused = False
        self.sent = 0
        self._wire = wire
        self._loop = loop
        self._store: SegmentStore | None = None
        self._leased: Counter[int] = Counter()  # segments that the peer holds
        # Those that it has not mapped yet, and could not map after the end of this process.
        self._unopened: Counter[int] = Counter()
        self._copying = 0  # messages whose tensors are being written
        self._peer = 0  # its process id
        self._mappings: dict[int, Mapping] = {}  # of the peer's segments, by number
        self._buffers: dict[int, weakref.ref[Any]] = {}  # that tensors here lie in
        self._last_buffer = 0
        self._freed: EntryQueue[tuple[int, int]] = EntryQueue(loop, self._on_freed)
        self._news: tuple[list[int], list[int], list[int]] = [], [], []

    def __repr__(self) -> str:
        held = self._leased.total()
        return f"<SegmentLink {held} segments held by the peer, {len(self._buffers)} of it>"

    def has_work(self) -> bool:
        """Return whether the peer still needs this process to get a message."""
        return bool(self._copying or self._unopened)

    # ── negotiation ─────────────────────────────────────────────────────────────────────────────

    def offer(self) -> None:
        """Show the peer the probe, if it is a process of this host."""
        if self._wire.is_local and is_supported() and (name := self._open()) is not None:
            self._write(offer=name)
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

    def on_frame(self, data: bytes) -> None:
        """Handle a SEGMENTS frame.

        Raises an exception of any class if the frame is malformed.
        """
        offer, proof, released, forgotten, opened = _read_news(data)
        if offer is not None:
            self._on_offer(offer)
        if proof is not None and self._store is not None:
            self.can_send = hmac.compare_digest(proof, self._store.probe.secret)
            self.is_refused |= not self.can_send
        for number in opened:
            self._count_down(self._unopened, number)
        for number in released:
            self._count_down(self._leased, number)
            if self._store is not None:
                self._store.release(number)
        for number in forgotten:
            self._mappings.pop(number, None)

    def _on_offer(self, name: SegmentName) -> None:
        if self._wire.is_local:
            self._peer = name.pid
            mine = self._open() if is_supported() else None
            proof = read_probe(name)
            self.is_refused |= not proof
            self._write(offer=mine, proof=proof)

    def _count_down(self, counts: Counter[int], number: int) -> None:
        if not counts[number]:
            raise ProtocolError(f"segment {number!r} is not held by the peer")
        counts[number] -= 1
        if not counts[number]:
            del counts[number]

    def _write(self, offer: Any = None, proof: bytes | None = None, news: Any = ((),) * 3) -> None:
        if self._wire.is_open:
            self._wire.write(frame(SEGMENTS, dump((offer, proof, *news))))

    # ── sending ─────────────────────────────────────────────────────────────────────────────────

    def send(
        self,
        data: bytes,
        tensors: Sequence[Tensor],
        then: Then,
        is_current: Callable[[], bool] = lambda: True,
    ) -> bool:
        """Send a message with its tensors in segments, if they can be.

        Args:
            data: The rest of the message.
            tensors: Its tensors.
            then: Is called once, now or when large tensors are copied: with the message to send,
                with None if the copy has failed.
            is_current: Returns whether nobody may change the tensors yet. Meanwhile, messages
                with the same tensors share a copy that is being made.

        Returns:
            False if the message has to be sent otherwise; `then` is not called.
        """
        if not self.can_send or self._store is None:
            return False
        data, tensors = attach_data(data, tensors)
        found = place(tensors)
        if found is None:
            return False
        for block in found[0]:
            block.is_current = is_current
            if not self._store.write(block):
                return False
        self._copying += 1
        body = found[1], data
        self._finish(found[0], body, then)
        return True

    def _finish(
        self,
        blocks: Sequence[Block],
        body: tuple[Any, ...],
        then: Then,
    ) -> None:
        """Pass the message on when all blocks are written."""
        is_written = self._wire.is_open
        for block in blocks:
            lease: Lease = block.lease
            if not lease.is_written:
                lease.waiters.append(partial(self._finish, blocks, body, then))
                return
            is_written &= lease.error is None
        self._copying -= 1
        data = self._encode(blocks, body) if is_written else None
        then(None if data is None else ReadyMessage(partial(self.write, blocks, data), len(data)))

    def _encode(self, blocks: Iterable[Block], body: tuple[Any, ...]) -> bytes | None:
        """Return the frame of a message, None if a frame cannot hold it."""
        names = [
            (each.lease.number, *each.lease.segment.name[1:], each.is_shared) for each in blocks
        ]
        try:
            return frame(SHARED, dump((names, *body)))
        except Exception:  # too many tensors, for one
            return None

    def write(self, blocks: Iterable[Block], data: bytes) -> None:
        """Write the frame of a message; the peer holds its segments from then on."""
        if self._store is None:  # the connection has ended
            return
        self._wire.write(data)
        self.sent += 1
        for block in blocks:
            number = block.lease.number
            if not self._store.hold(number, None if block.is_shared else self):
                self._unopened[number] += 1
            self._leased[number] += 1
            if not block.is_shared:
                block.lease.close()

    def forget(self, number: int) -> None:
        """Tell the peer that a segment of this process is closed."""
        self._tell(1, number)

    # ── receiving ───────────────────────────────────────────────────────────────────────────────

    def read(self, data: bytes) -> tuple[bytes, Sequence[Tensor]]:
        """Return data and tensors of a SHARED frame. The tensors lie in the peer's segments.

        Raises an exception of any class if the frame is malformed.
        """
        names, places, rest = _read_shared(data)
        check_places(places, [*map(itemgetter(3), names)])
        buffers = [*starmap(self._map, names)]
        return detach_data(rest, tensors_at(places, buffers))

    def _map(self, number: int, descriptor: int, inode: int, size: int, private: bool) -> Any:
        """Return the memory of a segment of the peer; its release is told when it is freed."""
        name = SegmentName(self._peer, descriptor, inode, size)
        if not self._peer:
            raise ProtocolError("a segment before any offer")
        # A single receiver maps a segment shared, and keeps the mapping: later uses bring no page
        # faults. Many receivers map it privately. Reading 16 MB took 0.6 ms in a kept shared
        # mapping and 1.4 ms in a new private one; writing took 0.7 and 12.7 ms, as each page is
        # copied. A copy for each receiver takes 1.3 ms of the sender, 16 ms in a new segment.
        mapping = None if private else self._mappings.get(number)
        if mapping is None:
            mapping = map_segment(name, private=private)
            self._tell(2, number)
            if not private:
                self._mappings[number] = mapping
        if mapping.size != size:
            raise ProtocolError(f"segment {number} has {mapping.size} bytes, not {size}")
        buffer = mapping.buffer()
        key = self._last_buffer = self._last_buffer + 1
        freed = self._freed
        # `torch.frombuffer` keeps the buffer until its last storage is freed, in any thread.
        self._buffers[key] = weakref.ref(buffer, lambda _: freed.put((key, number)))
        return buffer

    def _on_freed(self, freed: tuple[int, int]) -> None:
        key, number = freed
        if self._buffers.pop(key, None) is not None:
            self._tell(0, number)

    def _tell(self, kind: int, number: int) -> None:
        """Tell the peer, at the end of this iteration, that a segment is released, closed, open."""
        if not any(self._news):
            self._loop.call_soon(self._send_news)
        self._news[kind].append(number)

    def _send_news(self) -> None:
        news, self._news = self._news, ([], [], [])
        self._write(news=news)

    # ── end ─────────────────────────────────────────────────────────────────────────────────────

    def close(self) -> None:
        """Give up what the peer holds: it may still read it, so it is not used again."""
        self.can_send = False
        store, self._store = self._store, None
        if store is not None:
            for number in self._leased.elements():
                store.abandon(number)
            store.detach(self)
        self._leased.clear()
        self._unopened.clear()
        self._mappings.clear()
        self._buffers.clear()
