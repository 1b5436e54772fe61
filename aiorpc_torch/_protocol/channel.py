"""The driver of one connection: frames in and out over one transport of an event loop.

What the frames mean is the subclass's: a caller's `Connection`, a callee's `Session`.
"""

import asyncio
import contextlib
import logging
import pickle
from typing import Any

from .._aio.fork import keep_from_children
from .connection_state import MAX_CALLS
from .frames import CLOSE, FrameReader, frame
from .targets import plain

log = logging.getLogger("aiorpc_torch")

LINGER = 0.5  # seconds that a closed connection waits for the peer's last frame


class Channel(asyncio.BufferedProtocol):
    """One end of a connection. Confined to the loop that it was made on.

    Attributes:
        is_open: whether frames may be sent.
        ended: set when the transport is gone.
    """

    HIGH_WATER = 256 * 1024  # bytes unsent in the transport at which `pause_writing` is called

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._reader = FrameReader()
        self.get_buffer = self._reader.buffer  # type: ignore[method-assign]
        self._transport: asyncio.Transport | None = None
        self._paused: set[str] = set()  # why nothing is read
        self._is_closing = False  # whether our last frame has left
        self._heard_close = False  # whether theirs has come
        self._is_deaf = False  # whether what comes is only taken off the socket
        self._flushing = False
        self.is_open = False
        self.ended = asyncio.Event()

    # ── what a subclass says ────────────────────────────────────────────────────────────────────

    def on_frame(self, kind: int, data: bytes) -> int:
        """Handle a frame; return how many calls or results were in it."""
        raise NotImplementedError

    def on_read(self) -> None:
        """Handle the end of one read, after its frames."""

    def on_close(self, what: str, text: str) -> None:
        """Handle the peer's last frame."""
        raise NotImplementedError

    def on_broken(self, exc: Exception) -> None:
        """Handle a frame that cannot be read: the connection is closed."""

    def on_end(self, error: Exception | None) -> None:
        """Handle the end of the connection, `error` unless the peer has closed it in order."""
        raise NotImplementedError

    def flush(self) -> None:
        """Send what is to be sent."""
        raise NotImplementedError

    # ── sending ─────────────────────────────────────────────────────────────────────────────────

    def start(self, transport: asyncio.Transport) -> None:
        """Begin with a transport whose handshake is over."""
        self._transport = transport
        transport.set_write_buffer_limits(high=self.HIGH_WATER)
        keep_from_children(transport)
        transport.set_protocol(self)
        self.is_open = True

    def flush_soon(self) -> None:
        """Send what is to be sent at the end of this loop iteration."""
        if not self._flushing:
            self._flushing = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._flushing = False
        self.flush()

    def write(self, data: bytes) -> None:
        """Write frames."""
        assert self._transport is not None
        self._transport.write(data)

    # ── reading ─────────────────────────────────────────────────────────────────────────────────

    def buffer_updated(self, nbytes: int) -> None:
        if self._is_deaf:
            return
        self._reader.received(nbytes)
        self._read()

    def _read(self) -> None:
        handled = 0
        try:
            while not self._is_deaf and (found := self._reader.next()) is not None:
                kind, data = found
                if kind == CLOSE:
                    self._closed(data)
                else:
                    handled += self.on_frame(kind, data)
                if handled >= MAX_CALLS:
                    self._defer()
                    break
        except Exception as exc:
            log.warning("%r cannot read what its peer sent: %r", self, exc)
            self._is_deaf = True
            self.close("broken", f"cannot read a frame: {exc}")
            self.on_broken(exc)
        self.on_read()

    def _defer(self) -> None:
        """Leave the rest to the next iteration: other callbacks of this loop get their turn."""
        self.pause_reading("deferred")
        self._loop.call_soon(self._go_on)

    def _go_on(self) -> None:
        if self._transport is not None:
            self._paused.discard("deferred")
            self._read()
            if "deferred" not in self._paused:
                self.resume_reading("deferred")

    def pause_reading(self, why: str) -> None:
        """Read no more until `resume_reading` was called for each reason."""
        self._paused.add(why)
        if self._transport is not None:
            self._transport.pause_reading()

    def resume_reading(self, why: str) -> None:
        """Read on, unless there is another reason not to."""
        self._paused.discard(why)
        if not self._paused and self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    def eof_received(self) -> bool:
        return False  # the transport sends what is left, and closes

    # ── ending ──────────────────────────────────────────────────────────────────────────────────

    def close(self, what: str, text: str = "") -> None:
        """Send the last frame, once; the transport goes when the peer has sent its own.

        Args:
            what: "left", "failed", "ended", "replaced" or "broken".
            text: why, for the peer's errors.
        """
        if self._is_closing or self._transport is None:
            return
        self._is_closing = True
        with contextlib.suppress(Exception):
            self.flush()
        self.is_open = False
        self.write(frame(CLOSE, pickle.dumps((what, text[:100_000]))))
        self._loop.call_later(LINGER, self._transport.abort)
        if self._heard_close or not self._transport.can_write_eof():
            self._transport.close()
            return
        # Closing with unread input resets the connection, and what is in flight would be lost.
        with contextlib.suppress(OSError):
            self._transport.write_eof()

    def _closed(self, data: bytes) -> None:
        what, text = plain(data)
        self._heard_close = self._is_deaf = True
        self.on_close(str(what), str(text))
        self.close("ended")
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """End the connection at once."""
        if self._transport is not None:
            self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self.is_open = False
        self.ended.set()
        is_orderly = self._heard_close or self._is_closing
        error = exc if exc is not None else ConnectionResetError("end of file")
        self.on_end(None if is_orderly else error)


def describe(channel: Channel, peer: str, *counts: Any) -> str:
    """Return what a channel's `repr` says."""
    state = "open" if channel.is_open else "closed" if channel.ended.is_set() else "opening"
    return f"<{type(channel).__name__} {peer}, {state}: {', '.join(map(str, counts))}>"
