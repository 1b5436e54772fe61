"""Frames of a connection: four bytes of length, one byte of kind, and the data.

No I/O. The length is checked before memory is allocated for the data.
"""

import struct

from ..errors import RpcError

MAX_FRAME = 1 << 20
"""Maximum bytes of data in one frame. Large tensors are no part of it."""

CALLS, SLOT, CONTROL, RESULTS, CLOSE, PING, RETIRE = range(1, 8)
SEGMENTS, SHARED, TRANSFERS, TRANSFERRED = range(8, 12)
"""Kinds of frames: groups of calls; a call whose payload follows by torch RPC; cancellations and
credit for streams; columns of results; the end of the connection; a sign of life, or a request for
one; from a callee, a request for no further calls, and from its caller the answer that none
follows; offers and releases of shared memory; a call or a result whose tensors are in shared
memory; the state of transfers on tensor sockets; a call or a result whose transfer has arrived."""

HEADER = struct.Struct("<IB")

_INITIAL = 1 << 16  # bytes of the buffer; a larger frame enlarges it


class ProtocolError(RpcError):
    """The peer sent bytes that are not a frame of this protocol."""


def frame(kind: int, data: bytes) -> bytes:
    """Return the bytes of one frame.

    Raises:
        ValueError: if data is longer than MAX_FRAME bytes.
    """
    if len(data) > MAX_FRAME:
        raise ValueError(f"a frame must have at most {MAX_FRAME} bytes, got {len(data)}")
    return HEADER.pack(len(data), kind) + data


class FrameReader:
    """Splits received bytes into frames.

    Write the next bytes into `buffer()`, count them with `received()`, take frames with `next()`.

    Attributes:
        unread: number of received bytes that were not taken.
    """

    __slots__ = ("_end", "_start", "_view", "unread")

    def __init__(self) -> None:
        self._view = memoryview(bytearray(_INITIAL))
        self._start = self._end = self.unread = 0  # of the unread bytes

    def __repr__(self) -> str:
        return f"<FrameReader {self.unread} bytes unread>"

    def buffer(self, sizehint: int = -1) -> memoryview:
        """Return memory for the next bytes: at least one byte, at most what one frame needs."""
        if not self.unread:
            self._start = self._end = 0
            if len(self._view) > _INITIAL:
                self._view = memoryview(bytearray(_INITIAL))
        elif self._end == len(self._view) or self._needed() > len(self._view) - self._start:
            self._reserve(self._needed())
        return self._view[self._end :] if self._end else self._view

    def received(self, count: int) -> None:
        """Count `count` bytes that were written into the buffer."""
        self._end += count
        self.unread += count

    def next(self) -> tuple[int, bytes] | None:
        """Return the kind and the data of the next frame, None if it is incomplete.

        Raises:
            ProtocolError: if the frame is longer than MAX_FRAME or of an unknown kind.
        """
        start, unread = self._start, self.unread - HEADER.size
        if unread < 0:
            return None
        length, kind = HEADER.unpack_from(self._view, start)
        if length > MAX_FRAME or not CALLS <= kind <= TRANSFERRED:
            raise ProtocolError(f"invalid frame header: kind {kind}, {length} bytes")
        if unread < length:
            return None
        begin = start + HEADER.size
        self._start = end = begin + length
        self.unread = unread - length
        return kind, bytes(self._view[begin:end])

    def _needed(self) -> int:
        """Return the bytes of the incomplete frame, as far as its length is known."""
        if self.unread < HEADER.size:
            return HEADER.size
        length: int = HEADER.unpack_from(self._view, self._start)[0]
        return HEADER.size + min(length, MAX_FRAME)  # `next` rejects longer frames

    def _reserve(self, needed: int) -> None:
        size = self.unread
        unread = self._view[self._start : self._end]
        target = self._view
        if max(needed, size + 1) > len(target):
            target = memoryview(bytearray(max(needed, size + 1)))
        target[:size] = unread
        self._view, self._start, self._end = target, 0, size
