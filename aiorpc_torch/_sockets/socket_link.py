"""Tensors of one connection on sockets of their own, where its ends share no memory.

A message's tensors are sent first, from their own memory into memory of the receiver. When the
receiver has told that they have arrived, the message follows on the connection, so it keeps its
order there. Sockets and threads begin with the first transfer of a direction.
(tests/loopback/test_tensor_sockets.py)
"""

import asyncio
import contextvars
import logging
import os
import socket
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from torch import Tensor

from .._aio.entry_queue import EntryQueue
from .._aio.loops import call_soon
from .._wire.frames import MAX_FRAME, TRANSFERRED, TRANSFERS, ProtocolError, frame
from .._wire.handshake import ARGUMENTS, RESULTS
from .._wire.payloads import attach_data, detach_data
from .._wire.plain import dump, reader
from .._wire.shared_tensors import Place, ReadyMessage, Then, check_places, place, tensors_at
from .receive_memory import ReceiveMemory, memory_of
from .socket_threads import SOCKETS, SocketReceiver, SocketSender
from .transfers import IncomingTransfers, OutgoingTransfer

log = logging.getLogger("aiorpc_torch")

SWITCH = "AIORPC_TORCH_TENSOR_SOCKETS"
"""Name of an environment variable; with the value "0" no tensor sockets are used."""

END_SECONDS = 0.5
"""Seconds between the failure of a tensor socket and the end of its connection, which is about to
tell the reason if the peer has left."""

OPEN_TIMEOUT = 10.0
"""Seconds for a socket to open; torch RPC carries the tensors after that. A peer that leaves takes
no connections, and waits until its results are sent."""

Dial = Callable[[int], Coroutine[Any, Any, socket.socket]]
"""Opens a proven socket to the peer for ARGUMENTS or RESULTS."""

_read_news = reader(tuple[int | None, bool, list[tuple[int, bool]], list[tuple[int, int]]])
_read_message = reader(tuple[int, list[Place], bytes])


def is_enabled() -> bool:
    """Return whether this process may use tensor sockets."""
    return os.environ.get(SWITCH) != "0"


def incoming_limit() -> int:
    """Return the maximum bytes that one peer may have under way: an eighth of the memory."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 8


class Wire(Protocol):
    """The connection of a link."""

    @property
    def is_open(self) -> bool:
        """Return whether frames may be sent."""
        ...

    def write(self, data: bytes) -> None:
        """Write frames."""

    def close(self, reason: str, detail: str = "") -> None:
        """End the connection, and tell the peer why."""

    def abort(self) -> None:
        """End the connection at once."""


@dataclass(eq=False)
class _Job:
    """A message whose tensors are being sent."""

    transfer: OutgoingTransfer
    frame: bytes
    then: Then
    is_current: Callable[[], bool]


class _Arrival:
    """Memory of the receiver with the tensors of a message, given up unless `is_used`."""

    def __init__(self, number: int, size: int, give_up: Callable[[tuple[int, int]], None]) -> None:
        self.number = number
        self.size = size
        self.is_used = False
        self._give_up = give_up

    def __del__(self) -> None:
        if not self.is_used:
            self._give_up((self.number, self.size))


class SocketLink:
    """The tensor sockets of one end of a connection. Confined to the event loop `loop`.

    Args:
        wire: the connection.
        loop: its event loop.
        dial: opens sockets; None at the callee, for which the caller opens them.

    Attributes:
        can_send: True if the peer takes transfers.
        sent: number of messages sent.
    """

    def __init__(
        self, wire: Wire, loop: asyncio.AbstractEventLoop, dial: Dial | None = None
    ) -> None:
        self.can_send = False
        self.sent = 0
        self._wire = wire
        self._loop = loop
        self._dial = dial
        self._limit = incoming_limit()
        self._is_offered = False
        # Of what this end sends.
        self._peer_limit = 0
        self._reserved = 0  # bytes of memory at the peer
        self._last = 0
        self._is_dropping = False
        self._waiting: deque[_Job] = deque()  # for memory at the peer
        self._jobs: dict[int, _Job] = {}  # all that the peer has not confirmed
        self._sender: SocketSender | None = None
        self._given_up: EntryQueue[tuple[int, int]] = EntryQueue(loop, self._on_given_up)
        # Of what it receives.
        self._receiver: SocketReceiver | None = None
        self._memory: ReceiveMemory | None = None
        self._incoming = IncomingTransfers(self._limit, self._allocate)
        self._arrived: EntryQueue[tuple[int, bool]] = EntryQueue(loop, self._on_arrived)
        self._dialing: set[asyncio.Task[None]] = set()
        self._confirmed: list[tuple[int, bool]] = []
        self._dropped: list[tuple[int, int]] = []

    def __repr__(self) -> str:
        return f"<SocketLink {len(self._jobs)} transfers out, {self._incoming!r}>"

    def has_work(self) -> bool:
        """Return whether a transfer to the peer is under way."""
        return bool(self._jobs)

    # ── negotiation ─────────────────────────────────────────────────────────────────────────────

    def offer(self) -> None:
        """Tell the peer how many bytes may be under way to this end."""
        if not self._is_offered and is_enabled():
            self._is_offered = True
            self._write(limit=self._limit)

    def on_frame(self, data: bytes) -> None:
        """Handle a TRANSFERS frame.

        Raises an exception of any class if the frame is malformed.
        """
        limit, wants_sockets, confirmed, dropped = _read_news(data)
        if limit is not None:
            self.offer()
            self._set_limit(limit if is_enabled() else 0)
        if wants_sockets and self._dial is None:
            raise ProtocolError("a caller must not ask for sockets")
        if wants_sockets:
            self._open(RESULTS)
        for number, has_memory in confirmed:
            self._on_confirmed(number, has_memory)
        for number, sent in dropped:
            self._incoming.drop(number, sent)

    def _set_limit(self, limit: int) -> None:
        """Send up to `limit` bytes at a time; 0 ends all transfers."""
        self._peer_limit = limit
        self.can_send = limit > 0
        for job in [] if limit else [*self._jobs.values()]:
            self._cancel(job)

    def _write(
        self, limit: int | None = None, wants_sockets: bool = False, news: Any = ((), ())
    ) -> None:
        if self._wire.is_open:
            self._wire.write(frame(TRANSFERS, dump((limit, wants_sockets, *news))))

    def _tell(self, news: list[Any], item: tuple[int, Any]) -> None:
        """Tell the peer, at the end of this iteration."""
        if not (self._confirmed or self._dropped):
            self._loop.call_soon(self._send_news)
        news.append(item)

    def _send_news(self) -> None:
        news = self._confirmed, self._dropped
        self._confirmed, self._dropped = [], []
        self._write(news=news)

    # ── sockets ─────────────────────────────────────────────────────────────────────────────────

    def _open(self, purpose: int) -> None:
        """Open the sockets of one direction, or let the caller open them."""
        if self._dial is None:
            self._write(wants_sockets=True)
            return
        dialing, context = self._dial_all(self._dial, purpose), contextvars.Context()
        # Without the deadline of the call whose tensors are sent.
        task = self._loop.create_task(dialing, name="aiorpc-connect", context=context)
        self._dialing.add(task)
        task.add_done_callback(self._dialing.discard)

    async def _dial_all(self, dial: Dial, purpose: int) -> None:
        try:
            for _ in range(SOCKETS):
                async with asyncio.timeout(OPEN_TIMEOUT):
                    sock = await dial(purpose)
                self.add_socket(purpose, sock)
        except Exception as exc:
            if not self._wire.is_open:
                return
            log.warning("no tensor sockets on %r, tensors travel by torch RPC: %r", self._wire, exc)
            if purpose == ARGUMENTS:
                self._set_limit(0)
            else:
                self._write(limit=0)

    def add_socket(self, purpose: int, sock: socket.socket) -> None:
        """Use a proven socket, if the connection is open."""
        if not self._wire.is_open:
            sock.close()
        else:
            is_own = self._dial is not None
            is_outgoing = (purpose == ARGUMENTS) == is_own
            threads = self._open_sender() if is_outgoing else self._open_receiver()
            threads.add(sock, is_own=is_own)

    def _open_receiver(self) -> SocketReceiver:
        if self._receiver is None:
            failed = partial(call_soon, self._loop, self._on_failure)
            self._memory = memory_of(self._loop)
            self._receiver = SocketReceiver(self._incoming, self._arrived.put, failed)
        return self._receiver

    def _open_sender(self) -> SocketSender:
        if self._sender is None:
            ended = partial(call_soon, self._loop, self._on_ended)
            failed = partial(call_soon, self._loop, self._on_failure)
            self._sender = SocketSender(ended, failed)
        return self._sender

    def _on_failure(self, error: Exception) -> None:
        """End the connection, whose calls may wait for tensors."""
        if not self._wire.is_open:
            return
        log.warning("a tensor socket of %r has failed: %r", self._wire, error)
        if isinstance(error, ProtocolError):
            self._wire.close("broken", str(error))
        else:
            self._loop.call_later(END_SECONDS, self._wire.abort)

    # ── sending ─────────────────────────────────────────────────────────────────────────────────

    def send(
        self,
        data: bytes,
        tensors: Sequence[Tensor],
        then: Then,
        is_current: Callable[[], bool] = lambda: True,
    ) -> bool:
        """Send the tensors of a message, if they can be.

        Args:
            data: The rest of the message.
            tensors: Its tensors.
            then: Is called once: with the message to send when its tensors have arrived, with None
                if they have not.
            is_current: Returns whether the message is still wanted.

        Returns:
            False if the message has to be sent otherwise; `then` is not called.
        """
        if not self.can_send:
            return False
        data, tensors = attach_data(data, tensors)
        found = place(tensors, in_one_block=True)
        if found is None or not found[0] or found[0][0].size > self._peer_limit:
            return False
        body = dump((self._last + 1, found[1], data))
        if len(body) > MAX_FRAME:  # too many tensors
            return False
        self._last += 1
        transfer = OutgoingTransfer(self._last, found[0][0])
        job = self._jobs[self._last] = _Job(transfer, frame(TRANSFERRED, body), then, is_current)
        self._waiting.append(job)
        self._start_waiting()
        return True

    def _start_waiting(self) -> None:
        """Start the transfers for which the peer has memory."""
        while self._waiting:
            transfer = self._waiting[0].transfer
            if self._reserved + transfer.size > self._peer_limit:
                break
            self._waiting.popleft()
            self._reserved += transfer.size
            if self._sender is None:
                self._open(ARGUMENTS if self._dial is not None else RESULTS)
            self._open_sender().send(transfer)

    def _free(self, size: int) -> None:
        self._reserved -= size
        self._start_waiting()

    def _on_ended(self, transfer: OutgoingTransfer) -> None:
        """Release the tensors of a transfer that no thread needs any more."""
        transfer.release()
        if transfer.is_cancelled and (job := self._jobs.get(transfer.number)) is not None:
            self._drop(job)

    def _on_confirmed(self, number: int, has_memory: bool) -> None:
        """Send the message of a transfer that has arrived."""
        if not 0 < number <= self._last:
            raise ProtocolError(f"there was no transfer {number}")
        if (job := self._jobs.get(number)) is None:  # it was cancelled meanwhile
            return
        transfer = job.transfer
        if not (transfer.is_complete or transfer.is_cancelled):
            raise ProtocolError(f"transfer {number} cannot have arrived")
        del self._jobs[number]
        if not has_memory:
            self._free(transfer.size)
            job.then(None)
            return
        arrival = _Arrival(number, transfer.size, self._given_up.put)
        job.then(ReadyMessage(partial(self._send_message, arrival, job.frame), len(job.frame)))

    def _send_message(self, arrival: _Arrival, data: bytes) -> None:
        arrival.is_used = True
        self._wire.write(data)
        self.sent += 1
        self._free(arrival.size)

    def _on_given_up(self, fields: tuple[int, int]) -> None:
        """Let the peer free a transfer whose message is not sent."""
        self._tell(self._dropped, fields)
        self._free(fields[1])

    def drop_cancelled(self) -> None:
        """End, in the next iteration, the transfers of messages that are not wanted any more."""
        if self._jobs and not self._is_dropping:
            self._is_dropping = True
            self._loop.call_soon(self._drop_cancelled)

    def _drop_cancelled(self) -> None:
        self._is_dropping = False
        for job in [*self._jobs.values()]:
            if not job.is_current():
                self._cancel(job)

    def _cancel(self, job: _Job) -> None:
        if job in self._waiting:
            self._waiting.remove(job)
            del self._jobs[job.transfer.number]
            job.then(None)
            self._start_waiting()
        elif job.transfer.cancel():  # otherwise `_on_ended` follows
            self._drop(job)

    def _drop(self, job: _Job) -> None:
        """Give up a transfer, of which the peer may have a part."""
        transfer = job.transfer
        transfer.release()
        del self._jobs[transfer.number]
        self._tell(self._dropped, (transfer.number, transfer.started))
        self._free(transfer.size)
        job.then(None)

    # ── receiving ───────────────────────────────────────────────────────────────────────────────

    def read(self, data: bytes) -> tuple[bytes, Sequence[Tensor]]:
        """Return data and tensors of a TRANSFERRED frame.

        Raises an exception of any class if the frame is malformed.
        """
        number, places, rest = _read_message(data)
        memory, size = self._incoming.take(number)
        check_places(places, [size])
        return detach_data(rest, tensors_at(places, [memory]))

    def _allocate(self, size: int) -> Any:
        """Return memory, in a thread of the receiver."""
        assert self._memory is not None
        return self._memory.take(size)

    def _on_arrived(self, arrived: tuple[int, bool]) -> None:
        self._tell(self._confirmed, arrived)

    # ── end ─────────────────────────────────────────────────────────────────────────────────────

    def close(self) -> None:
        """End all transfers, and their threads."""
        self.can_send = False
        for task in self._dialing:
            task.cancel()
        for threads in (self._sender, self._receiver):
            if threads is not None:
                threads.close()
        self._incoming.close()
        self._waiting.clear()
        for job in [*self._jobs.values()]:
            if job.transfer.cancel():
                job.transfer.release()
        self._jobs.clear()
