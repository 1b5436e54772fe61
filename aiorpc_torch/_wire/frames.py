"""Frames of a connection: four bytes of length, one byte of kind, and the data.

No I/O. The length is checked before memory is allocated for the data.
"""

import struct
from typing import Literal

from ..errors import RpcError

MAX_FRAME = 1 << 20
"""Maximum bytes of data in one frame. Large tensors are no part of it."""

CALLS, SLOT, CONTROL, RESULTS, CLOSE, PING, RETIRE = range(1, 8)
SEGMENTS, SHARED, TRANSFERS, TRANSFERRED, WHERE = range(8, 13)
"""Kinds of frames: groups of calls; a call whose payload follows by torch RPC; cancellations and
credit for streams; columns of results; the end of the connection; a sign of life, or a request for
one; from a callee, a request for no further calls, and from its caller the answer that none
follows; offers and releases of shared memory; a call or a result whose tensors are in shared
memory; the state of transfers on tensor sockets; a call or a result whose transfer has arrived; a
question where calls stand, or its answer."""

_KINDS = frozenset(range(CALLS, WHERE + 1))

CloseReason = Literal["left", "detached", "failed", "ended", "replaced", "broken"]
"""Reasons of a CLOSE frame, from the worker that sends it: it leaves its world, or `attach`; its
block has failed; the event loop of the connection ends; the peer was replaced, or has left; a frame
of the peer cannot be read."""

HEADER = struct.Struct("<IB")
HEADER_BYTES = HEADER.size

read_header = HEADER.unpack_from
"""Return the length and the kind of the frame that begins in a buffer, at an offset."""

header = HEADER.pack
"""Return the header of a frame, given the length of its data, and its kind."""

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
    return header(len(data), kind) + data


class FrameReader:
    """Splits received bytes into frames.

    Write the next bytes into `free`, add their number to `end`, take frames with `next()`.

    Attributes:
        end: where the next bytes are written; 0 once all received bytes were taken.
        free: memory for the next bytes, once `next` or `buffer` has made some.
    """

    __slots__ = ("_initial", "_start", "_view", "end", "free")

    def __init__(self) -> None:
        self._initial = self._view = self.free = memoryview(bytearray(_INITIAL))
        self._start = self.end = 0

    def buffer(self) -> memoryview:
        """Return memory for the next bytes: at least one byte, at most what one frame needs."""
        if self.end:
            unread = self._view[self._start : self.end]
            needed = HEADER_BYTES  # of the incomplete frame, as far as its length is known
            if len(unread) >= HEADER_BYTES:
                length: int = read_header(unread)[0]
                needed += min(length, MAX_FRAME)  # `next` rejects longer frames
            if self.end == len(self._view) or needed > len(self._view) - self._start:
                size, target = len(unread), self._view
                needed = max(needed, size + 1)
                if needed > len(target):
                    target = memoryview(bytearray(needed))
                target[:size] = unread
                self._view, self._start, self.end = target, 0, size
            self.free = self._view[self.end :]
        return self.free

    def next(self) -> tuple[int, bytes] | None:
        """Return the kind and the data of the next frame, None if it is incomplete.

        Raises:
            ProtocolError: if it is incomplete, and longer than MAX_FRAME or of an unknown kind.
        """
        start, end = self._start, self.end
        begin = start + HEADER_BYTES
        if begin <= end:
            length, kind = read_header(self._view, start)
            stop = begin + length
            if stop <= end:
                data = bytes(self._view[begin:stop])
                if stop == end:
                    self._start = self.end = 0
                    self.free = self._view = self._initial
                else:
                    self._start = stop
                return kind, data
            if length > MAX_FRAME or kind not in _KINDS:
                raise ProtocolError(f"invalid frame header: kind {kind}, {length} bytes")
        self.buffer()
        return None
