"""Tensors as chunks on several sockets: what is sent next, and where received bytes go.

State machines for threads, without sockets. A transfer has the tensors of one message. Each chunk
names its transfer and its position, so it may travel on any socket. Transfers that are under way at
once share the sockets chunk by chunk. (tests/unit/carrier/test_transfers.py)
"""

import contextlib
import ctypes
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .._aio.segments import Segment
from .._wire.blocks import Block
from .._wire.buffers import ALIGNMENT
from .._wire.frames import ProtocolError

CHUNK = 1 << 20
"""Bytes of a chunk, without the padding behind its last tensor. Smaller ones cost more,
larger ones gain nothing."""

MAX_SEGMENTS = 256
"""Transfers for several processes that one peer may have under way: each takes a descriptor."""

MAX_PIECES = 256
"""Tensors in one chunk."""

HEADER = struct.Struct("<QQQQ?")
"""Number and bytes of the transfer, position and bytes of the chunk, and whether the memory of the
transfer is for other processes, too."""

_PADDING = bytes(ALIGNMENT)


class OutgoingTransfer:
    """The tensors of one message, which several threads send chunk by chunk. For any thread."""

    def __init__(self, number: int, block: Block) -> None:
        self.number = number  # on its connection
        self.size = block.size  # bytes
        self.started = 0  # bytes of the chunks that were taken
        self.is_shared = False  # True if processes of the receiver's host map its memory
        self.is_cancelled = False  # True if no further chunk is taken
        self.sources = block.sources  # its tensors, until no thread needs them
        self._next = 0  # index of the source that the next chunk begins with
        self._in_progress = 0  # chunks that were taken and are not sent
        self._lock = threading.Lock()

    @property
    def is_complete(self) -> bool:
        """True if all chunks were taken."""
        return self.started == self.size

    def take(self) -> list[Any] | None:
        """Return the buffers of the next chunk, its header first; None if there is none.

        Raises:
            ValueError: if a storage was freed or made smaller since its tensor was added.
        """
        with self._lock:
            if self.is_cancelled or self.is_complete:
                return None
            pieces = self._cut()
            length = sum(map(len, pieces))
            header = HEADER.pack(self.number, self.size, self.started, length, self.is_shared)
            self.started += length
            self._in_progress += 1
        return [header, *pieces]

    def _cut(self) -> list[Any]:
        pieces: list[Any] = []
        position, end = self.started, self.started + CHUNK
        while position < end and len(pieces) < MAX_PIECES and self._next < len(self.sources):
            (start, skip, size), storage = self.sources[self._next]
            if storage.nbytes() < skip + size:
                raise ValueError("a storage was freed or made smaller before it was sent")
            done = position - start
            part = min(size - done, end - position)
            memory = (ctypes.c_ubyte * part).from_address(storage.data_ptr() + skip + done)
            pieces.append(memoryview(memory).cast("B"))
            position += part
            if done + part == size:
                self._next += 1
                if padding := -size % ALIGNMENT:
                    pieces.append(_PADDING[:padding])
                    position += padding
        return pieces

    def sent(self) -> bool:
        """Note that a chunk was sent; return whether no thread needs the tensors any more."""
        with self._lock:
            self._in_progress -= 1
            return self._is_over()

    def cancel(self) -> bool:
        """Take no further chunk; return whether no thread needs the tensors any more."""
        with self._lock:
            self.is_cancelled = True
            return self._is_over()

    def release(self) -> None:
        """Let go of the tensors, once no thread needs them."""
        self.sources = []

    def _is_over(self) -> bool:
        return not self._in_progress and (self.is_cancelled or self.is_complete)


@dataclass(slots=True, eq=False)
class _Arriving:
    """A transfer that comes in."""

    size: int
    expected: int  # bytes
    received: int = 0
    is_dropped: bool = False
    is_released: bool = True
    memory: Any = None  # None if its bytes are discarded
    segment: Segment | None = None  # kept until it is read and released


class IncomingTransfers:
    """The transfers that one peer sends, until their messages are read. For any thread.

    Args:
        limit: Maximum bytes that the peer may have under way.
        allocate: Returns memory for a transfer, and its segment if it is shared. Its arguments are
            the bytes, and whether it is to be shared.
    """

    def __init__(
        self, limit: int, allocate: Callable[[int, bool], tuple[Any, Segment | None]]
    ) -> None:
        self._limit = limit
        self._allocate = allocate
        self._arriving: dict[int, _Arriving] = {}
        self._held = 0  # bytes
        self._lock = threading.Lock()
        self._freed = threading.Condition(self._lock)

    def __len__(self) -> int:
        """Return the number of transfers that were not read, or not released."""
        return len(self._arriving)

    def begin(
        self, number: int, size: int, offset: int, length: int, is_shared: bool = False
    ) -> memoryview | None:
        """Return the memory for a chunk, None if its bytes are to be discarded.

        Wait for space if what was not read or dropped takes twice the limit.

        Raises:
            ProtocolError: if the chunk is malformed, or its transfer exceeds the limit.
        """
        with self._lock:
            while (found := self._arriving.get(number)) is None and not self._has_space(size):
                self._freed.wait()
            if found is None:  # its first chunk has come
                found = self._reserve(number, size)
                segments = sum(each.segment is not None for each in self._arriving.values())
                is_shared = is_shared and segments < MAX_SEGMENTS
                # Without memory its bytes are discarded. (torch's error is a RuntimeError)
                with contextlib.suppress(OSError, RuntimeError, MemoryError):
                    found.memory, found.segment = self._allocate(size, is_shared)
                    found.is_released = found.segment is None
            if not (found.is_dropped or 0 < length <= size - offset <= size == found.size):
                raise ProtocolError(f"malformed chunk: {length} bytes at {offset} of {size}")
            memory = found.memory
        return None if memory is None else memoryview(memory).cast("B")[offset : offset + length]

    def _has_space(self, size: int) -> bool:
        """Return whether memory may be reserved for a transfer, beside what is held.

        The peer counts its transfers until their messages are sent or given up. While the event
        loop here is busy it reads of neither, and the peer may send its limit over and over.
        """
        if size > self._limit:
            raise ProtocolError(
                f"the peer sends tensors of {size:,} bytes; {self._limit:,} may be under way"
            )
        return self._held + size <= 2 * self._limit

    def _reserve(self, number: int, size: int) -> _Arriving:
        found = self._arriving[number] = _Arriving(size, size)
        self._held += size
        return found

    def adopt(self, number: int, memory: Any, size: int) -> bool:
        """Add a transfer that a sibling has received, in this process's mapping of its memory.

        Return False if there is no space for it.

        Raises:
            ProtocolError: if the transfer exceeds the limit, or exists.
        """
        with self._lock:
            if number in self._arriving:
                raise ProtocolError(f"transfer {number} has begun")
            if not self._has_space(size):
                return False
            found = self._reserve(number, size)
            found.expected, found.memory = 0, memory
            return True

    def segment(self, number: int) -> Segment | None:
        """Return the segment of a transfer, None if it has none."""
        with self._lock:
            found = self._arriving.get(number)
            return None if found is None else found.segment

    def end(self, number: int, length: int) -> bool | None:
        """Note that a chunk has come.

        Return True if its transfer has come whole, False if that had no memory, None otherwise.
        One without memory is kept until the peer drops it: the peer may do so at this moment.
        """
        with self._lock:
            found = self._arriving.get(number)
            if found is None:  # closed
                return None
            found.received += length
            if found.received < found.expected:
                return None
            if found.is_dropped:
                self._forget(number)
                return None
            return found.memory is not None

    def drop(self, number: int, sent: int) -> None:
        """Free a transfer that the peer has given up after `sent` bytes; discard what comes.

        Raises:
            ProtocolError: if more bytes have come.
        """
        with self._lock:
            found = self._arriving.get(number)
            if found is None:
                if sent <= 0:
                    return
                found = self._arriving[number] = _Arriving(0, 0)
                self._freed.notify_all()  # its first chunk may wait for space
            if found.received > sent:
                raise ProtocolError(f"transfer {number} has more than {sent} bytes")
            found.expected, found.is_dropped, found.memory = sent, True, None
            if found.received == sent:
                self._forget_read(number)
            else:  # its segment has no other user; its bytes may be behind what waits for space
                found.segment = None
                self._held -= found.size
                found.size = 0
                self._freed.notify_all()

    def take(self, number: int) -> tuple[Any, int]:
        """Return memory or segment, and bytes, of a transfer that has come whole; once.

        Raises:
            ProtocolError: if there is none.
        """
        with self._lock:
            found = self._arriving.get(number)
            if found is None or found.memory is None or found.received < found.expected:
                raise ProtocolError(f"transfer {number} has not come")
            memory, found.memory = found.segment or found.memory, None
            self._forget_read(number)
            return memory, found.size

    def release(self, number: int) -> None:
        """Note that no sibling is going to map the segment of a transfer."""
        with self._lock:
            found = self._arriving.get(number)
            if found is None:
                return
            found.is_released = True
            if found.memory is None and found.received == found.expected:
                self._forget(number)

    def close(self) -> None:
        """Free everything. What waits for space raises ProtocolError."""
        with self._lock:
            self._arriving.clear()
            self._limit = 0
            self._freed.notify_all()

    def _forget_read(self, number: int) -> None:
        """Forget a transfer that was read or dropped, once it is released."""
        if self._arriving[number].is_released:
            self._forget(number)

    def _forget(self, number: int) -> None:
        self._held -= self._arriving.pop(number).size
        self._freed.notify_all()
