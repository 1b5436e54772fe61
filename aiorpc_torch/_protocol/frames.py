"""Frames of a connection: four bytes of length, one of kind, and the data.

Pure: bytes in, frames out. The length is checked before memory is reserved for the data.
"""

import struct

from ..errors import RpcError

MAX_FRAME = 1 << 20
"""Bytes of data in one frame at most. What is larger travels by torch RPC."""

CALLS, SLOT, CONTROL, RESULTS, CLOSE = range(1, 6)
"""Kinds of frames: calls; a call whose payload travels by torch; cancellations and credit for
streams; results; the last frame of a connection."""

HEADER = struct.Struct("<IB")

_INITIAL = 1 << 16  # bytes of the buffer while no frame is larger


class ProtocolError(RpcError):
    """The peer sent bytes that are no frame of this protocol."""


def frame(kind: int, data: bytes) -> bytes:
    """Return the bytes of one frame.

    Raises:
        ValueError: if there are more than MAX_FRAME bytes of data.
    """
    if len(data) > MAX_FRAME:
        raise ValueError(f"a frame holds up to {MAX_FRAME} bytes, got {len(data)}")
    return HEADER.pack(len(data), kind) + data


class FrameReader:
    """Cuts the bytes that are received into frames.

    `buffer` is where the next bytes go, `received` says how many came, `next` returns frames.
    """

    __slots__ = ("_end", "_start", "_view")

    def __init__(self) -> None:
        self._view = memoryview(bytearray(_INITIAL))
        self._start = self._end = 0  # of the bytes that are not read yet

    def __repr__(self) -> str:
        return f"<FrameReader {self._end - self._start} bytes unread>"

    def buffer(self, sizehint: int = -1) -> memoryview:
        """Return memory for the next bytes: at least one, and no more than one frame needs."""
        if self._start == self._end:
            self._start = self._end = 0
            if len(self._view) > _INITIAL:
                self._view = memoryview(bytearray(_INITIAL))
        elif self._end == len(self._view) or self._needed() > len(self._view) - self._start:
            self._make_room(self._needed())
        return self._view[self._end :]

    def received(self, count: int) -> None:
        """Count `count` bytes that were written into `buffer`."""
        self._end += count

    def next(self) -> tuple[int, bytes] | None:
        """Return the kind and the data of the next frame, or None if it is not complete.

        Raises:
            ProtocolError: if the next frame is longer than MAX_FRAME or of an unknown kind.
        """
        start = self._start
        if self._end - start < HEADER.size:
            return None
        length, kind = HEADER.unpack_from(self._view, start)
        if length > MAX_FRAME or not CALLS <= kind <= CLOSE:
            raise ProtocolError(f"no frame: kind {kind}, {length} bytes")
        begin = start + HEADER.size
        end = begin + length
        if end > self._end:
            return None
        self._start = end
        return kind, bytes(self._view[begin:end])

    def _needed(self) -> int:
        """Return the bytes of the frame that is being received, as far as its length is known."""
        if self._end - self._start < HEADER.size:
            return HEADER.size
        length: int = HEADER.unpack_from(self._view, self._start)[0]
        return HEADER.size + min(length, MAX_FRAME)  # `next` refuses a longer one

    def _make_room(self, needed: int) -> None:
        size = self._end - self._start
        unread = self._view[self._start : self._end]
        target = self._view
        if max(needed, size + 1) > len(target):
            target = memoryview(bytearray(max(needed, size + 1)))
        target[:size] = unread
        self._view, self._start, self._end = target, 0, size
