"""The callee's end of one connection: calls in, results out.

Its `Dispatcher` starts the calls, its `ResultSender` sends what does not leave at once.
"""

import asyncio
import functools
import logging
from threading import get_ident
from typing import TYPE_CHECKING, Any

from .._channel import Channel, Input, channel_repr
from .._peers.peers import Peer
from .._torch import devices
from .._wire.columns import CellKind, plain_bytes, write_kind
from .._wire.frames import (
    CALLS,
    CONTROL,
    RESULTS,
    RETIRE,
    SLOT,
    WHERE,
    header,
)
from .._wire.messages import EncodedResult, SessionKey
from .._wire.plain import dump
from .dispatch import Dispatcher
from .reply import complete_reply
from .result_sender import ResultSender
from .timings import CallRecord

if TYPE_CHECKING:
    from .server import Server

log = logging.getLogger("aiorpc_torch")


class Session(Channel):
    """One connection from the worker `caller`. Results may come from any thread.

    Args:
        server: the server of this worker.
        peer: the process that calls.
        connection: the caller's number of the connection.
        mapped: those that tensors for the peer may be on, beside the CPU, and the peer's for each.

    Attributes:
        worker: name of this worker.
        key: key of this session among those of the worker.
        retired: is set when no further call comes.
        events: records of the calls that a profiler or `top` watches, by number.
        calls: those that are not answered, by number.
        on_created: notes an object that a call has created.
    """

    HIGH_WATER = 8 << 20
    """Bytes of unsent results at which reading pauses. Running calls never pause it: plain `def`s
    that hold all threads may wait for a call that is not read yet. A caller that cannot write still
    reads. So a paused callee waits for its caller's event loop only.
    (`test_a_peer_that_does_not_read_is_not_read_from`)"""

    def __init__(
        self,
        server: "Server",
        peer: Peer,
        connection: int,
        mapped: devices.DeviceMapping = devices.NO_DEVICES,
    ) -> None:
        super().__init__(peer, server.observer)
        self.worker = server.name
        self.caller = peer.name
        self.key: SessionKey = (peer.name, peer.worker_id, connection)
        self.retired = asyncio.Event()
        self.events: dict[int, CallRecord] = {}
        self.on_created = server.created.add
        self._server = server
        self._call_on_loop = server.executor.call_on_loop
        self.mapped = mapped
        self._loop_thread = get_ident()
        self.dispatcher = Dispatcher(self, server.executor, server.exports)
        self.calls = self.dispatcher.calls
        self._results = ResultSender(self)
        self.flush = self._results.flush
        self.handlers |= {
            CALLS: self.dispatcher.on_calls,
            CONTROL: self.dispatcher.on_control,
            SLOT: self.dispatcher.on_slot,
            RETIRE: self._on_retired,
            WHERE: functools.partial(server.on_question, self),
            **self.carriers.handlers(self.dispatcher.on_calls),
        }

    def __repr__(self) -> str:
        return channel_repr(
            self, f"from {self.caller}", f"{len(self.calls)} running", self._results
        )

    @property
    def held_bytes(self) -> int:
        """Return the size of the held results in bytes. In any thread."""
        return self._results.held_bytes

    def release(self, number: int) -> None:
        """Release the held results of a call, whose caller does not want them."""
        self._results.release(number)

    # ── results ─────────────────────────────────────────────────────────────────────────────────

    def send_result(self, result: EncodedResult, reply: Any = None) -> None:
        """Send the result of an ended call, by torch if `reply` is given. In any thread."""
        if reply is not None:
            if self.events:
                self._call_on_loop(functools.partial(self._end_event, result[0]))
            complete_reply(reply, (result,))
        elif get_ident() == self._loop_thread:
            self._queue_result(result)
        else:
            self._call_on_loop(functools.partial(self._queue_result, result))

    def send_small_result(self, number: int, kind: CellKind, cell: Any) -> None:
        """Send a result that has a place in a frame, at once if no call runs. In any thread."""
        if get_ident() != self._loop_thread:
            again = functools.partial(self.send_small_result, number, kind, cell)
            self._call_on_loop(again)
            return
        if self.events:
            self._end_event(number)
        if not (self.calls or self._results.replies.results) and self.is_open:
            try:
                # As `encode_reply` makes it of one result that is a small cell.
                if type(kind) is tuple:
                    data = dump(((write_kind(kind), (number,), cell),))
                else:
                    data = dump(((kind, (number,), (cell,)),))
            except Exception as exc:  # out of memory, for one: the queue answers with a failure
                log.debug("a result cannot be sent alone: %r", exc)
            else:
                self.write(header(len(data), RESULTS) + data)  # as `frame`, of small data
                return
        if self.is_open:
            size = len(cell) if type(kind) is tuple else plain_bytes(cell)
            self._results.queue_small((number, kind, cell), size)

    def _queue_result(self, result: EncodedResult) -> None:
        if self.events:
            self._end_event(result[0])
        if self.is_open:
            self._results.queue(result)

    def _end_event(self, key: Any) -> None:
        """End the event of an answered call. A profiler accepts that on the loop's thread only."""
        if type(key) is int:
            event = self.events.pop(key, None)
        else:  # at the end of a stream, which is free
            event = self.events.pop(key[0], None) if key[2] == 0 else None
        if event is not None:
            event.end()

    def collect(self, key: Any, reply: Any) -> None:
        """Complete `reply` with a held result, or with none if it was released."""
        result = self._results.collect(key)
        complete_reply(reply, () if result is None else (result,))

    # ── end ─────────────────────────────────────────────────────────────────────────────────

    def has_work(self) -> bool:
        """Return whether a call is running or on its way, or a result waits to be collected."""
        return bool(
            self.calls or self.dispatcher.slots or self._results.held or self.carriers.has_work()
        )

    def _on_retired(self, _: bytes) -> None:
        self.retired.set()

    def retire(self) -> None:
        """Ask the caller to send no further calls; `retired` is set when it has answered."""
        if self.is_open:
            self.send(RETIRE, b"")

    def pause_writing(self) -> None:
        self.pause_reading("full")

    def resume_writing(self) -> None:
        self.resume_reading("full")

    def on_close(self, what: str, text: str) -> None:
        self._server.on_session_end(self, what, text)

    def on_end(self, error: Exception | None) -> None:
        self.retired.set()
        self._results.close()
        self.events.clear()
        if self.input is not Input.CLOSED:
            self._server.on_session_end(self, "lost" if error is not None else "ended", "")
        self.dispatcher.close()
