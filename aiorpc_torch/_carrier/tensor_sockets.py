"""Tensors of one connection on sockets of their own, where its ends share no memory.

A message's tensors are sent first, from their own memory into memory of the receiver. When the
receiver has told that they have arrived, the message follows on the connection, so it keeps its
order there. Sockets and threads begin with the first transfer of a direction.

Messages with equal tensors for several processes of one host share one transfer (`HostCopy`): one
of these processes receives it, and the others map its memory.
(tests/loopback/test_tensor_sockets_internals.py, tests/loopback/test_host_copies.py)
"""

import asyncio
import contextlib
import contextvars
import logging
import os
import socket
import weakref
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from .._aio.entry_queue import EntryQueue
from .._aio.host import memory_size
from .._aio.loops import call_soon
from .._aio.segments import Segment, SegmentError, SegmentName, map_segment, sharing_group
from .._wire.blocks import Block, Place, ReadyMessage, Then, place, tensors_at
from .._wire.frames import MAX_FRAME, TRANSFERRED, TRANSFERS, ProtocolError, frame
from .._wire.handshake import ARGUMENTS, RESULTS
from .._wire.payloads import attach_data, detach_data
from .._wire.plain import dump, reader
from .carrier import Carrier, Handle, Wire
from .host_copies import HostCopies, HostCopy, join
from .memory import ReceiveMemory, receive_memory_of
from .socket_threads import SOCKETS, SocketReceiver, SocketSender
from .transfers import IncomingTransfers, OutgoingTransfer

log = logging.getLogger("aiorpc_torch")

SWITCH = "AIORPC_TORCH_TENSOR_SOCKETS"
"""Name of an environment variable; with the value "0" no tensor sockets are used."""

END_SECONDS = 0.5
"""Seconds between the failure of a tensor socket and the end of its connection, which is about to
tell the reason if the peer has left."""

IDLE_SECONDS = 60.0
"""Seconds after the last transfer of a direction at which its sockets and threads end. The next
transfer opens others."""

OPEN_TIMEOUT = 10.0
"""Seconds for a socket to open; torch RPC carries the tensors after that, until there is one.

A peer that was frozen opens it later. One that leaves takes none, and waits until its results are
sent."""

OPEN_PAUSE = 2.0
"""Seconds between an attempt that has failed and the next one."""

Dial = Callable[[int], Coroutine[Any, Any, socket.socket]]
"""Opens a proven socket to the peer for ARGUMENTS or RESULTS."""


Offer = tuple[int, str]
"""The bytes that may be under way to a process, and the id of processes that can map each other's
segments."""


class _News(NamedTuple):
    """A TRANSFERS frame."""

    limit: int | None = None  # bytes that may be under way to this end, None for no change
    host: str = ""  # id of processes that can map each other's segments; comes with a limit
    wants_sockets: bool = False  # whether the callee wants sockets for its results
    # Transfers that have come to this end: whether there is memory, its name for siblings.
    confirmed: Sequence[tuple[int, bool, SegmentName | None]] = ()
    dropped: Sequence[tuple[int, int]] = ()  # whose messages will not come; bytes that were sent
    adopted: Sequence[tuple[int, SegmentName]] = ()  # which a sibling of the peer has received
    released: Sequence[int] = ()  # which no other sibling will adopt


_read_news = reader(_News)
_read_message = reader(tuple[int, list[Place], bytes])


def incoming_limit() -> int:
    """Return the maximum bytes that one peer may have under way: an eighth of the memory."""
    return 0 if os.environ.get(SWITCH) == "0" else memory_size() // 8


class _Job(OutgoingTransfer):
    """A message whose tensors are being sent; the part of a `HostCopy` while it has one."""

    def __init__(
        self,
        link: "TensorSockets",
        block: Block,
        data: bytes,
        then: Then,
        is_wanted: Callable[[], bool],
    ) -> None:
        super().__init__(link.last, block)
        self.link = link
        self.content = (*block.contents,)
        self.frame = data
        self.then: Then | None = then  # takes the message to send, or None, once
        self.is_wanted = is_wanted
        self.copy: HostCopy | None = None  # which it waits for, or leads
        self.is_adopting = False  # True while the peer maps memory of a sibling

    def send(self, *, is_shared: bool) -> None:
        self.is_shared = is_shared
        if not is_shared:
            self.copy = None
        self.link.send_transfer(self)

    def adopt(self, name: SegmentName) -> None:
        self.is_adopting = True
        self.link.tell("adopted", (self.number, name))

    def free(self) -> None:
        self.link.tell("released", self.number)
        self.link.free(self.number, self.size)

    def end(self, message: ReadyMessage | None) -> None:
        """Pass the message on. Threads may keep this object, but not what waits for it."""
        then, self.then = self.then, None
        if then is not None:
            then(message)

    def leave_copy(self) -> None:
        """Let the others of its host go on without it."""
        copy, self.copy = self.copy, None
        if copy is not None:
            copy.remove(self)


class _Arrival:
    """Memory of the receiver with the tensors of a message, given up unless that is sent."""

    def __init__(self, job: _Job) -> None:
        self.number, self.size, self.started = job.number, job.size, job.started
        self.given_up: EntryQueue[_Arrival] | None = job.link.given_up

    def __del__(self) -> None:
        if self.given_up is not None:
            self.given_up.put(self)


_copies: "weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, HostCopies]" = (
    weakref.WeakKeyDictionary()
)


class TensorSockets(Carrier):
    """The tensor sockets of one end of a connection.

    `dial` opens sockets; it is None at the callee, for which the caller opens them.
    """

    NEWS, FIELDS = TRANSFERS, _News

    def __init__(
        self,
        wire: Wire,
        loop: asyncio.AbstractEventLoop,
        changed: Callable[[], object],
        dial: Dial | None,
    ) -> None:
        super().__init__(wire, loop, changed)
        self._dial = dial
        self._limit = incoming_limit()
        self._is_offered = False
        # Of what this end sends.
        self.taken: Offer | None = None  # the last one of the peer
        self._peer_limit = 0
        self._peer_host = ""  # of processes that can map each other's segments, "" for none
        self._exported: set[int] = set()  # unreleased transfers whose messages were not sent either
        self._reserved = 0  # bytes of memory at the peer
        self.last = 0  # number of the last transfer
        self._is_dropping = False
        self._waiting: deque[_Job] = deque()  # for memory at the peer
        self._jobs: dict[int, _Job] = {}  # all that the peer has not confirmed
        self._sender: SocketSender | None = None
        self._idle_timer: asyncio.TimerHandle | None = None
        # Of arrivals whose messages are not sent.
        self.given_up: EntryQueue[_Arrival] = EntryQueue(loop, self._on_given_up)
        # Of what it receives.
        self._receiver: SocketReceiver | None = None
        self._memory: ReceiveMemory | None = None
        self._incoming = IncomingTransfers(self._limit, self._allocate)
        self._arrived: EntryQueue[tuple[int, bool]] = EntryQueue(loop, self._on_arrived)
        self._dialing: set[asyncio.Task[None]] = set()

    def has_work(self) -> bool:
        return bool(self._jobs)

    # ── negotiation ─────────────────────────────────────────────────────────────────────────────

    def offer(self) -> None:
        """Tell the peer how many bytes may be under way to this end."""
        if not self._is_offered and self._limit:
            self._is_offered = True
            self._tell_now(limit=self._limit, host=sharing_group())

    def expect(self, known: Offer) -> None:
        """Take an offer of the same process from an earlier connection, before it is repeated."""
        if self._limit:
            self.offer()
            self._take(known)

    def on_news(self, data: bytes) -> None:
        news: _News = _read_news(data)
        if news.limit is not None:
            self.offer()
            self._take((news.limit if self._limit else 0, news.host))
        if news.wants_sockets and self._dial is None:
            raise ProtocolError("a caller must not ask for sockets")
        if news.wants_sockets:
            self._open(RESULTS)
        for each in news.confirmed:
            self._on_confirmed(*each)
        for number, name in news.adopted:  # map what a sibling has received: no transfer comes
            try:
                memory = map_segment(name, private=True).buffer()
            except (OSError, SegmentError, ValueError, OverflowError):  # the sibling may have ended
                has_memory = False
            else:
                has_memory = self._incoming.adopt(number, memory, name.size)
            self.tell("confirmed", (number, has_memory, None))
        for number, sent in news.dropped:  # also what was to be adopted
            self._incoming.drop(number, sent)
        for number in news.released:
            self._incoming.release(number)

    def _take(self, offer: Offer) -> None:
        limit, self._peer_host = self.taken = offer
        self._set_limit(limit)

    def _set_limit(self, limit: int) -> None:
        """Send up to `limit` bytes at a time; 0 ends all transfers."""
        self._peer_limit = limit
        self.can_send = limit > 0
        self._changed()
        for job in [] if limit else [*self._jobs.values()]:
            self._cancel(job)

    def _soon(self, step: Callable[[], object]) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon(step)

    # ── sockets ─────────────────────────────────────────────────────────────────────────────────

    def _open(self, purpose: int) -> None:
        """Open the sockets of one direction, or let the caller open them."""
        if self._dial is None:
            self._tell_now(wants_sockets=True)
            return
        dialing, context = self._dial_all(self._dial, purpose), contextvars.Context()
        # Without the deadline of the call whose tensors are sent.
        task = self._loop.create_task(dialing, name="aiorpc-connect", context=context)
        self._dialing.add(task)
        task.add_done_callback(self._dialing.discard)

    async def _dial_all(self, dial: Dial, purpose: int) -> None:
        """Open the sockets of a direction. After a failure torch carries tensors until they are."""
        number, has_failed = 0, False
        while number < SOCKETS:
            try:
                async with asyncio.timeout(OPEN_TIMEOUT):
                    sock = await dial(purpose)
            except Exception as exc:
                # A loop that was closed meanwhile: it is the garbage collector that ends this.
                if not self._wire.is_open or self._loop.is_closed():
                    return
                level = logging.DEBUG if has_failed else logging.WARNING
                text = "no tensor sockets on %r, tensors travel by torch RPC until there are: %r"
                log.log(level, text, self._wire, exc)
                self._let_send(purpose, is_ready=False)
                has_failed = True
                await asyncio.sleep(OPEN_PAUSE)
            else:
                number += 1
                self.add_socket(purpose, sock)
        if has_failed:
            self._let_send(purpose, is_ready=True)

    def _let_send(self, purpose: int, *, is_ready: bool) -> None:
        """Let the sender of a direction use its sockets, or send by torch what waits for them."""
        if not self._wire.is_open:
            return
        if purpose != ARGUMENTS:
            self._tell_now(limit=self._limit if is_ready else 0, host=sharing_group())
        elif self.taken is not None:
            self._set_limit(self.taken[0] if is_ready else 0)

    def add_socket(self, purpose: int, sock: socket.socket) -> None:
        """Use a proven socket, if the connection is open."""
        is_own = self._dial is not None
        if not self._wire.is_open:
            sock.close()
        elif (purpose == ARGUMENTS) == is_own:
            self._open_sender().add(sock, is_own=is_own)
        else:
            if self._receiver is None:
                failed = partial(call_soon, self._loop, self._on_failure)
                self._memory = receive_memory_of(self._loop)
                self._receiver = SocketReceiver(self._incoming, self._arrived.put, failed)
            self._receiver.add(sock, is_own=is_own)

    def _open_sender(self) -> SocketSender:
        if self._sender is None:
            ended = partial(call_soon, self._loop, self._on_ended)
            failed = partial(call_soon, self._loop, self._on_failure)
            self._sender = SocketSender(ended, failed)
            self._end_idle(None)
        return self._sender

    def _end_idle(self, last: int | None) -> None:
        """Close the sockets if there was no transfer since number `last`; else look again later.

        A thread that has sent its last chunk does not notice that its socket has failed.
        """
        is_idle = last == self.last and not self._jobs
        if self._jobs and self._sender is not None and self._sender.has_failed():
            self._on_failure(ConnectionResetError("a tensor socket has ended"))
        if is_idle and self._sender is not None and len(self._sender) == SOCKETS:  # all are open
            self._close_sender()
        else:
            self._idle_timer = self._loop.call_later(IDLE_SECONDS, self._end_idle, self.last)

    def check_path(self, timeout: float) -> None:
        """End the connection if what was sent has not arrived for `timeout` seconds.

        A thread that has sent its last chunk does not notice it.
        """
        if self._sender is None or (silence := self._sender.silence()) < timeout:
            return
        text = f"nothing that was sent on a tensor socket has arrived for {silence:.3g} s"
        log.warning("%r ends: %s", self._wire, text)
        self._wire.abort(TimeoutError(text))

    def _close_sender(self) -> None:
        """Close the sockets; the next transfer opens others."""
        if self._idle_timer is not None:
            self._idle_timer.cancel()
        if self._sender is not None:
            self._sender.close()
            self._sender = None

    def _on_failure(self, error: Exception) -> None:
        """End the connection, whose calls may wait for tensors."""
        if not self._wire.is_open:
            return
        log.warning("a tensor socket of %r has failed: %r", self._wire, error)
        if isinstance(error, ProtocolError):
            self._wire.close("broken", str(error))
        else:
            self._loop.call_later(END_SECONDS, self._wire.abort, error)

    # ── sending ─────────────────────────────────────────────────────────────────────────────────

    def send(
        self, data: bytes, tensors: Sequence[Tensor], then: Then, is_current: Callable[[], bool]
    ) -> bool:
        if not self.can_send:
            return False
        data, tensors = attach_data(data, tensors)
        found = place(tensors, in_one_block=True)
        if found is None or not found[0] or found[0][0].size > self._peer_limit:
            return False
        body = dump((self.last + 1, found[1], data))
        if len(body) > MAX_FRAME:  # too many tensors
            return False
        self.last += 1
        job = _Job(self, found[0][0], frame(TRANSFERRED, body), then, is_current)
        self._jobs[self.last] = job
        self._waiting.append(job)
        self._start_waiting()
        return True

    def _start_waiting(self) -> None:
        """Start the transfers for which the peer has memory."""
        while self._waiting and self._reserved + self._waiting[0].size <= self._peer_limit:
            job = self._waiting.popleft()
            self._reserved += job.size
            if not self._peer_host:
                self.send_transfer(job)
                continue
            # Together with others for the host of the peer. The storages in the content must not be
            # freed: others would get their addresses.
            copies, key = _copies.setdefault(self._loop, {}), (self._peer_host, job.content)
            job.copy = join(copies, key, job.sources, self._soon)
            job.copy.add(job)

    def send_transfer(self, job: _Job) -> None:
        """Send a transfer over the network, on new sockets if the idle ones have failed."""
        is_idle = len(self._jobs) == 1 and self._wire.is_open and self._sender is not None
        if is_idle and self._sender is not None and self._sender.has_failed():
            self._close_sender()
        if self._sender is None:
            self._open(ARGUMENTS if self._dial is not None else RESULTS)
        self._open_sender().send(job)

    def free(self, number: int, size: int) -> None:
        """Note that the peer has freed a transfer, or one of the two uses of its segment."""
        if number in self._exported:
            self._exported.remove(number)
        else:
            self._reserved -= size
            self._start_waiting()

    def _on_ended(self, job: OutgoingTransfer) -> None:
        """Release the tensors of a transfer that no thread needs any more."""
        job.release()
        if job.is_cancelled and (found := self._jobs.get(job.number)) is not None:
            self._drop(found)

    def _on_confirmed(self, number: int, has_memory: bool, name: SegmentName | None) -> None:
        """Send the message of a transfer that has arrived."""
        if not 0 < number <= self.last:
            raise ProtocolError(f"there was no transfer {number}")
        if (job := self._jobs.get(number)) is None:  # it was cancelled meanwhile
            return
        if not (job.is_adopting or job.is_complete or job.is_cancelled):
            raise ProtocolError(f"transfer {number} cannot have arrived")
        if job.is_adopting and not has_memory:
            # The peer could not map the memory of its sibling: send over the network.
            lead = None if job.copy is None else job.copy.lead
            if isinstance(lead, _Job) and lead.link._wire.is_open:  # it will not map any memory
                self._peer_host = ""
            job.is_adopting = False
            job.leave_copy()
            self.send_transfer(job)
            return
        del self._jobs[number]
        arrival = _Arrival(job)  # given up at once without memory
        message = ReadyMessage(partial(self._send_message, arrival, job.frame), len(job.frame))
        if has_memory:
            self._share(job, name)
        else:
            job.leave_copy()
        job.end(message if has_memory else None)

    def _share(self, job: _Job, name: SegmentName | None) -> None:
        """Let the siblings of the peer have what has arrived; or note that the peer has theirs."""
        copy, job.copy = job.copy, None
        if job.is_adopting:
            job.release()
            if copy is not None:
                copy.remove(job)
            return
        if not job.is_shared:
            return
        if name is not None:
            self._exported.add(job.number)
        if copy is not None:
            copy.on_arrived(name)
        elif name is not None:  # it was cancelled meanwhile: the others have another lead
            job.free()

    def _send_message(self, arrival: _Arrival, data: bytes) -> None:
        arrival.given_up = None
        self._wire.write(data)
        self.sent += 1
        self.free(arrival.number, arrival.size)

    def _on_given_up(self, arrival: _Arrival) -> None:
        """Let the peer forget a transfer whose message is not sent."""
        self.tell("dropped", (arrival.number, arrival.started))
        self.free(arrival.number, arrival.size)

    def drop_cancelled(self) -> None:
        """End, in the next iteration, what is sent for messages that are not wanted any more."""
        if self._jobs and not self._is_dropping:
            self._is_dropping = True
            self._loop.call_soon(self._drop_cancelled)

    def _drop_cancelled(self) -> None:
        self._is_dropping = False
        for job in [*self._jobs.values()]:
            if not job.is_wanted():
                self._cancel(job)

    def _cancel(self, job: _Job) -> None:
        job.leave_copy()  # its thread may take a while
        if job in self._waiting:
            self._waiting.remove(job)
            del self._jobs[job.number]
            job.end(None)
            self._start_waiting()
        elif job.cancel():  # otherwise `_on_ended` follows
            self._drop(job)

    def _drop(self, job: _Job) -> None:
        """Give up a transfer, of which the peer may have a part."""
        job.leave_copy()
        job.release()
        del self._jobs[job.number]
        self.tell("dropped", (job.number, job.started))
        if job.is_shared:
            self.tell("released", job.number)
        self.free(job.number, job.size)
        job.end(None)

    # ── receiving ───────────────────────────────────────────────────────────────────────────────

    def on_message(self, handle: Handle, data: bytes) -> int:
        number, places, rest = _read_message(data)
        memory, size = self._incoming.take(number)
        if isinstance(memory, Segment):  # what is written is not seen by the siblings
            memory = memory.private_buffer()
        return handle(*detach_data(rest, tensors_at(places, [(memory, size)])))

    def _allocate(self, size: int, is_shared: bool) -> tuple[Any, Segment | None]:
        """Return memory, and its segment if there is one, in a thread of the receiver.

        A shared segment is used once: private mappings of it outlive its close.
        """
        if is_shared:
            with contextlib.suppress(OSError):  # no descriptor, for one
                segment = Segment(size)
                return segment.buffer(), segment
        assert self._memory is not None
        return self._memory.take(size), None

    def _on_arrived(self, arrived: tuple[int, bool]) -> None:
        number, has_memory = arrived
        segment = self._incoming.segment(number)
        self.tell("confirmed", (number, has_memory, segment and segment.name))

    # ── end ─────────────────────────────────────────────────────────────────────────────────────

    def close(self) -> None:
        self.can_send = False
        if self._idle_timer is not None:
            self._idle_timer.cancel()
        if self._loop.is_closed():
            _copies.pop(self._loop, None)  # none is started any more, and each refers to the loop
        else:
            for task in self._dialing:
                task.cancel()
        for threads in (self._sender, self._receiver):
            if threads is not None:
                threads.close()
        self._incoming.close()
        self._waiting.clear()
        jobs, self._jobs = self._jobs, {}
        for job in jobs.values():
            job.leave_copy()
            job.then = None
            if job.cancel():
                job.release()
