"""The driver of one connection: frames in and out over one transport of an event loop.

Subclasses handle the frames: `Connection` at the caller, `Session` at the callee.

No timer of its own ends an open connection. The membership judges the silence of a peer, and lets
each connection look whether its path carries anything (`check_path`).
"""

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable
from enum import Enum, auto
from functools import partial
from time import monotonic
from typing import Any

from ._aio.flows import Flow, read_flow
from ._aio.fork import close_on_fork
from ._aio.segments import SegmentLost
from ._carrier.choice import Carriers
from ._carrier.tensor_sockets import Dial
from ._peers.observer import PeerObserver
from ._peers.peers import Peer, State
from ._wire.connection_state import MAX_CALLS
from ._wire.frames import (
    CLOSE,
    HEADER_BYTES,
    PING,
    CloseReason,
    FrameReader,
    ProtocolError,
    frame,
    read_header,
)
from ._wire.plain import dump, reader, wire_text

log = logging.getLogger("aiorpc_torch")

LINGER = 0.5  # seconds that a closed connection waits for the peer's CLOSE frame


_ALIVE = State.ALIVE
_read_close = reader(tuple[str, str])

_ASK, _ANSWER, _NOTHING = frame(PING, b"?"), frame(PING, b"!"), frame(PING, b"")


class _Protocol(asyncio.BufferedProtocol):
    """Protocol of a transport, which passes everything to the channel."""

    def __init__(self, channel: "Channel") -> None:
        # As a method that returns it, without a frame of Python for each read.
        self.get_buffer = partial(getattr, channel._reader, "free")  # type: ignore[method-assign]
        self.buffer_updated = channel.buffer_updated  # type: ignore[method-assign]
        self.eof_received = channel.eof_received  # type: ignore[method-assign]
        self.connection_lost = channel.connection_lost  # type: ignore[method-assign]
        self.pause_writing = channel.pause_writing  # type: ignore[method-assign]
        self.resume_writing = channel.resume_writing  # type: ignore[method-assign]


class Handlers(dict[int, Callable[[bytes], int | None]]):
    """The handlers of frames by their kind. Each returns the number of calls or results, if any.

    A handler raises an exception of any class if its frame is malformed.
    """

    def __missing__(self, kind: int) -> Any:
        raise ProtocolError(f"this end must not get frames of kind {kind}")


class Input(Enum):
    """State of the received direction of a channel. It leaves `OPEN` once."""

    OPEN = auto()
    """Frames are handled."""
    CLOSED = auto()
    """The peer has sent CLOSE: no frame follows."""
    BROKEN = auto()
    """A frame could not be handled: the bytes that follow cannot be trusted, and are dropped."""


_OPEN = Input.OPEN


class Channel:
    """One end of a connection. Confined to the event loop that created it.

    Each direction has a state of its own. Frames are sent while `is_open`: from `start` to the
    CLOSE frame of this end. Frames are received while `input` is `Input.OPEN`. The end that gets
    CLOSE answers with its own. The connection is over, and `ended` is set, when the transport is.

    Args:
        peer: the process at the other end, whose signs of life are noted.
        observer: is told of the messages of a peer that is not alive.
        on_carrier: is called when a carrier was chosen.
        dial: opens tensor sockets; None at the callee.

    Attributes:
        handlers: handle the frames.
        carriers: carry large CPU tensors.
        loop: the event loop.
        transport: an `asyncio.Transport` while it is connected, else None.
        is_open: True while frames may be sent.
        input: state of the received direction.
        is_local: True if the peer is on this host: connected by a Unix socket.
        ended: Event that is set when the transport is closed.
    """

    HIGH_WATER = 256 * 1024
    """Unsent bytes at which the transport calls `pause_writing`. The rest stays in the caller's
    queue, from which cancelled and late calls are dropped."""

    def __init__(
        self,
        peer: Peer,
        observer: PeerObserver,
        on_carrier: Callable[[], object] = lambda: None,
        dial: Dial | None = None,
    ) -> None:
        self.handlers = Handlers({CLOSE: self._on_close_frame, PING: self._on_ping})
        self._peer = peer
        self._observer = observer
        self.loop = asyncio.get_running_loop()
        self._reader = FrameReader()
        self.transport: Any = None
        self._paused: set[str] = set()  # reasons for not reading
        self._will_flush = False  # at the end of this iteration
        self._flow = Flow()
        self._why_aborted: Exception | None = None
        self.is_open = self.is_local = False
        self.input = Input.OPEN
        self.ended = asyncio.Event()
        self.carriers = Carriers(self, self.loop, on_carrier, dial)

    # ── for subclasses ────────────────────────────────────────────────────────────────────────

    def on_read(self) -> None:
        """Handle the end of one read, after its frames."""

    def on_close(self, reason: str, detail: str) -> None:
        """Handle the peer's CLOSE frame."""
        raise NotImplementedError

    def on_broken(self, exc: Exception) -> None:
        """Handle an unreadable frame; the connection is closing."""

    def on_end(self, error: Exception | None) -> None:
        """Handle the end of the connection; `error` is None after an orderly close."""
        raise NotImplementedError

    flush: Callable[[], None]
    """Sends what is queued, if frames may be sent."""

    def pause_writing(self) -> None:
        """Note that the transport has `HIGH_WATER` bytes to write."""
        raise NotImplementedError

    def resume_writing(self) -> None:
        """Note that the transport has little to write."""
        raise NotImplementedError

    # ── sending ─────────────────────────────────────────────────────────────────────────────────

    def start(self, transport: asyncio.Transport) -> None:
        """Begin with a transport whose handshake is done."""
        self.transport = transport
        sock = transport.get_extra_info("socket")
        self.is_local = sock.family == socket.AF_UNIX
        if not self.is_local:  # asyncio leaves it out for sockets that were accepted
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        transport.set_write_buffer_limits(high=self.HIGH_WATER)
        close_on_fork(transport)
        transport.set_protocol(_Protocol(self))
        self.is_open = True

    def flush_soon(self) -> None:
        """Send what is queued at the end of this loop iteration."""
        if not self._will_flush:
            self._will_flush = True
            self.loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._will_flush = False
        self.flush()

    def send(self, kind: int, data: bytes) -> None:
        """Write one frame."""
        self.write(frame(kind, data))

    def write(self, data: bytes) -> None:
        """Write frames. If memory is short, end the connection: a frame may be cut off."""
        try:
            self.transport.write(data)
        except Exception as exc:
            # Its frames refer to tensors, and a log may keep its records.
            log.warning("%r cannot write a frame: %r", self, exc.with_traceback(None))
            self.abort()

    def ping(self) -> None:
        """Ask the peer's event loop for a sign of life."""
        if self.is_open:
            self.write(_ASK)

    def _on_ping(self, data: bytes) -> None:
        if data == _ASK[-1:] and self.is_open:
            self.write(_ANSWER)

    def check_path(self, timeout: float) -> None:
        """End the connection if what was sent has not arrived for `timeout` seconds.

        While something waits, a frame that says nothing is sent if nothing else is.
        """
        self.carriers.sockets.check_path(timeout)
        if self.is_local or self.transport is None:
            return
        # asyncio's TLS has no socket from the end of its transport until `connection_lost`.
        sock = self.transport.get_extra_info("socket")
        if sock is None or (info := read_flow(sock)) is None:
            return
        if (silence := self._flow.silence(info, monotonic())) >= timeout:
            text = f"nothing that was sent has arrived for {silence:.3g} s"
            self.abort(TimeoutError(text))
        elif self.is_open and info.unheard >= timeout / 3 and self.has_work():
            self.write(_NOTHING)

    def has_work(self) -> bool:
        """Return whether something waits for the other end."""
        raise NotImplementedError

    # ── reading ─────────────────────────────────────────────────────────────────────────────────

    def feed(self, data: bytes) -> None:
        """Handle bytes that were received before this was the transport's protocol."""
        while data and self.input is _OPEN:
            buffer = self._reader.buffer()
            size = min(len(buffer), len(data))
            buffer[:size], data = data[:size], data[size:]
            self.buffer_updated(size)

    def buffer_updated(self, nbytes: int) -> None:
        if self.input is not _OPEN:
            return
        reader, handled = self._reader, 0
        try:
            head = None if reader.end else read_header(reader.free)
            if head is not None and head[0] + HEADER_BYTES == nbytes:  # one frame, nearly always
                self.handlers[head[1]](bytes(reader.free[HEADER_BYTES:nbytes]))
            else:
                reader.end += nbytes
                while (found := reader.next()) is not None:
                    kind, data = found
                    handled += self.handlers[kind](data) or 0
                    if not reader.end or self.input is not _OPEN:
                        break
                    if handled >= MAX_CALLS:
                        reader.buffer()
                        self._defer()
                        break
        except SegmentLost:  # the peer has ended since it sent this frame
            self.input = Input.BROKEN
            self.abort()
        except Exception as exc:
            log.warning("%r rejected an unreadable frame: %r", self, exc)
            self.input = Input.BROKEN
            self.close("broken", f"cannot read a frame: {exc}")
            self.on_broken(exc)
        peer = self._peer  # as `note_heard`
        peer.last_heard = monotonic()
        if peer.state is not _ALIVE:
            self._observer.on_message(peer)
        self.on_read()

    def note_heard(self) -> None:
        """Note a sign of life of the peer, which did not come in a frame."""
        peer = self._peer
        peer.last_heard = monotonic()
        if peer.state is not _ALIVE:
            self._observer.on_message(peer)

    def _defer(self) -> None:
        """Handle the rest in the next loop iteration, after other callbacks."""
        self.pause_reading("deferred")
        self.loop.call_soon(self._continue)

    def _continue(self) -> None:
        if self.transport is not None:
            self._paused.discard("deferred")
            self.buffer_updated(0)
            if "deferred" not in self._paused:
                self.resume_reading("deferred")

    def pause_reading(self, why: str) -> None:
        """Stop reading until `resume_reading` is called for each reason."""
        self._paused.add(why)
        if self.transport is not None:
            self.transport.pause_reading()

    def resume_reading(self, why: str) -> None:
        """Read again, unless another reason to pause is left."""
        self._paused.discard(why)
        if not self._paused and self.transport is not None and not self.transport.is_closing():
            self.transport.resume_reading()

    def eof_received(self) -> bool:
        return False  # the transport sends its buffer, then closes

    # ── ending ──────────────────────────────────────────────────────────────────────────────────

    def close(self, reason: CloseReason, detail: str = "") -> None:
        """Send a CLOSE frame, once; the transport closes when the peer has sent its own.

        Args:
            reason: Reason, for the peer.
            detail: Text for the peer's errors.
        """
        if not self.is_open:
            return
        with contextlib.suppress(Exception):
            self.flush()
        self.is_open = False
        self.send(CLOSE, dump((reason, wire_text(detail[:100_000]))))
        self.loop.call_later(LINGER, self.transport.abort)
        if self.input is Input.CLOSED or not self.transport.can_write_eof():
            self.transport.close()
            return
        # Closing a socket with unread input resets it, and frames in flight would be lost.
        with contextlib.suppress(OSError):
            self.transport.write_eof()

    def _on_close_frame(self, data: bytes) -> None:
        reason, detail = _read_close(data)
        self.input = Input.CLOSED
        self.on_close(reason, detail)
        self.close("ended")
        if self.transport is not None:
            self.transport.close()

    def abort(self, why: Exception | None = None) -> None:
        """End the connection at once."""
        if self.transport is not None:
            self._why_aborted = why
            self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        was_closed = not self.is_open  # by this end, on its own account or as an answer
        self.transport = None
        self.is_open = False
        self.ended.set()
        self.carriers.close()
        error = exc or self._why_aborted or ConnectionResetError("end of file")
        self.on_end(None if was_closed else error)


def channel_repr(channel: Channel, peer: str, *counts: Any) -> str:
    """Return the `repr` of a channel to `peer`."""
    state = "open" if channel.is_open else "closed" if channel.ended.is_set() else "opening"
    return f"<{type(channel).__name__} {peer}, {state}: {', '.join(map(str, counts))}>"
