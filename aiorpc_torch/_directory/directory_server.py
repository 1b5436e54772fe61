"""The server of a directory, on an event loop of its own in a daemon thread of a worker's process.

So an event loop of a user that is blocked delays no other worker. Until a connection has registered
it has a small buffer and a time limit. From then on it speaks for its own worker only. The number
of connections that are no member's is limited, also of those that wait to enter: they try again.
"""

import asyncio
import contextlib
import itertools
import logging
import socket
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from .._aio.blocking import BlockingCall
from .._aio.flows import end_when_silent, retry_soon
from .._aio.fork import close_on_fork
from .._aio.loops import LoopThread, call_soon
from .._aio.sockets import Acceptor, is_same_user
from .._aio.threads import run_in_thread
from .._port.strangers import Strangers, host_of
from . import directory_messages as wire
from .directory import Directory
from .directory_messages import FromWorker, ToWorker
from .directory_stream import ANY_WORLD, LINGER, Stream, encode, greeting, open_stream
from .record import MIN_LEASE, Claim

log = logging.getLogger("aiorpc_torch")

MAX_REQUEST = 1 << 18  # bytes of a message of a worker: its device maps are the most
MAX_KNOWN = 1 << 26  # bytes of one that is asked what it knows: it lists all members
MAX_UNSENT = 1 << 23  # bytes to a worker that does not read; before further ones it is closed
MAX_STRANGERS = 256  # connections that are no member's; beyond it one is closed
MAX_WAITING = 64  # connections of a port that the event loop has not taken
REGISTER_TIMEOUT = 5.0  # seconds
RENEWALS = 4  # of the claim in the time of its lease
RETRY_INTERVAL = 0.1  # seconds between two attempts to reach the place
LOG_INTERVAL = 10.0  # seconds between two warnings about connections that were closed


class DirectoryServer:
    """The server of a directory, at sockets that listen, until `close`. For any thread.

    With a `claim` it also ends once another worker has claimed the place. So it does if the place
    is not reached for the lease, or if most members are not connected, perhaps beyond a cut link.
    """

    def __init__(
        self,
        world: str,
        listening: Sequence[socket.socket],
        claim: Claim | None = None,  # its record at a place that can be rewritten
        *,
        silence: float = MIN_LEASE,  # seconds until a connection ends that acknowledges nothing
        keeper: str = "",  # this and the others: see `Directory`
        grace: float = 0.0,
        known: wire.Known | None = None,
    ) -> None:
        self._world = world
        self._listening = listening
        self._claim = claim
        self._silence = silence
        self._numbers = itertools.count()
        self._accepted: deque[tuple[socket.socket, str]] = deque()
        self._streams: dict[int, Stream[FromWorker]] = {}
        self._strangers = Strangers(MAX_STRANGERS)
        self._unregistered: dict[int, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._next_warning = 0.0
        self._thread = LoopThread("aiorpc-directory", self._serve)
        self._loop = self._thread.loop
        self._write_lock = asyncio.Lock()
        self.is_isolated = False  # it has ended, since most members were not connected
        numbers = (0, 0) if claim is None else claim.numbers
        self._directory = Directory(self, keeper, grace, known, numbers, world)
        self._thread.start()

    def connect(self) -> socket.socket:
        """Return a socket that is connected, for the worker of this process."""
        ours, theirs = socket.socketpair()
        call_soon(self._loop, self._start, ours)
        return theirs

    def accept(self, connected: socket.socket, host: str = "") -> None:
        """Serve a worker at a socket, or at one end of a socket pair; then it is on that host."""
        self._accepted.append((connected, host))
        # Only so many wait for the loop, as in the backlog of a socket that listens.
        if len(self._accepted) > MAX_WAITING and (oldest := self._next_accepted()) is not None:
            oldest[0].close()

        def take() -> None:
            if (found := self._next_accepted()) is not None:
                self._start(*found)

        call_soon(self._loop, take)

    def close(self) -> None:
        """Close all sockets, and wait until the thread has ended: for some `LINGER` at most."""
        self._thread.close(4 * LINGER)

    # ── on the loop ─────────────────────────────────────────────────────────────────────────────

    async def _serve(self) -> None:
        acceptor = Acceptor("rank 0", self._start)
        for listening in self._listening:
            acceptor.add(listening)
        renewing = self._loop.create_task(self._renew())
        renewing.add_done_callback(lambda _: self._thread.closing.set())
        await self._thread.closing.wait()  # beside a place that does not answer
        acceptor.close()
        leaving = self._loop.create_task(self._leave_place())
        await asyncio.wait((leaving,), timeout=LINGER)
        if self._directory.has_failed:
            # A worker may send before it reads of the failure. To a closed socket that is an error,
            # which takes what was not read away. So the workers close first.
            for task in self._unregistered.values():
                task.cancel()
            if self._tasks:
                await asyncio.wait(self._tasks, timeout=LINGER)
        for task in (renewing, *self._tasks):
            task.cancel()
        await asyncio.gather(renewing, *self._tasks, return_exceptions=True)
        while (found := self._next_accepted()) is not None:
            found[0].close()
        if self._claim is not None and leaving.done():
            self._claim.close()

    def _next_accepted(self) -> tuple[socket.socket, str] | None:
        try:
            return self._accepted.popleft()
        except IndexError:  # the other thread may have taken the last one
            return None

    def _start(self, accepted: socket.socket, host: str = "") -> None:
        close_on_fork(accepted)
        number = next(self._numbers)
        task = self._loop.create_task(self._talk(number, accepted))
        if not host and accepted.family != socket.AF_UNIX:
            host = host_of(accepted)
        self._strangers.add(number, host, task.cancel)
        self._unregistered[number] = task
        self._tasks.add(task)
        task.add_done_callback(partial(self._end, number, accepted))

    def _end(self, number: int, accepted: socket.socket, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        self._unregistered.pop(number, None)
        self._strangers.remove(number)
        accepted.close()  # the task may not have begun
        if self._streams.pop(number, None) is not None:
            self._directory.gone(number)

    async def _talk(self, number: int, accepted: socket.socket) -> None:
        """Receive from a connection until it ends, or sends what it must not."""
        if accepted.family == socket.AF_UNIX and not is_same_user(accepted):
            return
        stream = await open_stream(accepted, wire.read_from_worker, MAX_REQUEST)
        if accepted.family != socket.AF_UNIX:
            # A link that is cut. Not a member whose event loop is blocked, or that is frozen.
            end_when_silent(accepted, self._silence)
            retry_soon(accepted)
        try:
            async with asyncio.timeout(REGISTER_TIMEOUT):
                stream.write(greeting(self._world))
                if await stream.read_greeting() not in (self._world, ANY_WORLD):
                    raise ValueError("it looks for another world")
                message: FromWorker = await _first_message(stream)
            self._unregistered.pop(number, None)
            self._streams[number] = stream
            if isinstance(message, wire.Register):
                log.info("%s has registered", message.registration)
            while number in self._streams:  # else it was closed meanwhile
                self._directory.receive(number, message)
                if self._directory.is_member(number):
                    self._strangers.remove(number)
                message = await stream.receive()
        except (EOFError, OSError) as exc:  # also a TimeoutError
            log.debug("the directory's connection %d has ended: %r", number, exc)
        except Exception as exc:
            self._log_refusal(exc)
        finally:
            await stream.close()

    def _log_refusal(self, exc: Exception) -> None:
        """Warn that a connection was closed, at most once in `LOG_INTERVAL`."""
        level, now = logging.DEBUG, self._loop.time()
        if now >= self._next_warning:
            level, self._next_warning = logging.WARNING, now + LOG_INTERVAL
        log.log(level, "the directory closed a connection: %r", exc)

    # ── for the directory ───────────────────────────────────────────────────────────────────────

    def send(self, connections: Iterable[int], message: ToWorker) -> None:
        data = encode(message)
        for number in connections:
            if (stream := self._streams.get(number)) is not None:
                if isinstance(message, wire.Recall):
                    stream.limit = MAX_KNOWN
                if stream.unsent <= MAX_UNSENT:
                    stream.write(data)
                else:  # a member connects again, and gets all that it has missed
                    log.warning("the directory closes a connection that reads nothing")
                    stream.abort()

    def close_connection(self, connection: int) -> None:
        if (stream := self._streams.pop(connection, None)) is not None:
            stream.abort()

    def call_later(self, seconds: float, step: Callable[[], None]) -> None:
        self._loop.call_later(seconds, step)

    def record(self, step: Callable[[], None]) -> None:
        """Write the numbers at the place, then call `step`: not if another directory is there."""
        if self._claim is None:
            step()
            return

        async def write_first() -> None:
            if await self._write():
                step()

        task = self._loop.create_task(write_first())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # ── the place ───────────────────────────────────────────────────────────────────────────────

    async def _renew(self) -> None:
        """Wait until this server is closed. Renew the claim until then."""
        pause = None if self._claim is None else self._claim.lease / RENEWALS
        while not self._thread.closing.is_set():
            try:
                async with asyncio.timeout(pause):
                    await self._thread.closing.wait()
            except TimeoutError:
                await self._write()
                if self._directory.is_isolated:
                    log.warning("the directory is cut off from most members, and moves")
                    self.is_isolated = True
                    self._thread.closing.set()

    async def _write(self, *, is_closed: bool = False) -> bool:
        """Renew the claim; return whether it is valid. If it is not, end this server."""
        async with self._write_lock:
            claim, reason = self._claim, "it does not reach its place in time"
            assert claim is not None
            while time.monotonic() < claim.end:
                renew = partial(claim.renew, time.monotonic(), *self._directory.numbers)
                writing = BlockingCall(partial(renew, is_closed=is_closed), "no answer")
                try:
                    if not await writing.result(claim.end - time.monotonic()):
                        reason = "another worker has claimed its place"
                        break
                    # Not after an answer that took the whole lease: others may have claimed it.
                    # (tests/unit/directory/test_directory_server.py)
                    if time.monotonic() < claim.end:
                        return True
                except (OSError, ValueError) as exc:
                    reason = f"it does not reach its place: {exc}"
                    await asyncio.sleep(RETRY_INTERVAL)
            if not self._thread.closing.is_set():
                log.warning("the directory ends, and moves to another worker: %s", reason)
                self._thread.closing.set()
            return False

    async def _leave_place(self) -> None:
        """Let another worker claim the place at once; if the world ends, leave none."""
        if self._claim is None or time.monotonic() >= self._claim.end:
            return
        with contextlib.suppress(OSError, ValueError):
            if self._directory.is_needed:
                await self._write(is_closed=True)
            else:
                async with self._write_lock:
                    await run_in_thread(self._claim.clear, "aiorpc-claim")


async def _first_message(stream: Stream[FromWorker]) -> wire.Register | wire.Resume:
    """Wait for the first message; refuse an unreadable one, or the worker would connect again."""
    try:
        message = await stream.receive()
    except ValueError as exc:
        remedy = "every worker must run the same version of aiorpc_torch"
        text = f"rank 0 cannot read the registration of this worker: {exc}; {remedy}"
        stream.send(wire.Failed(text))
        raise
    if not isinstance(message, wire.Register | wire.Resume):
        raise ValueError("a connection must register first")
    return message
