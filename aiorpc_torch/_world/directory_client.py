"""A worker's connection to the directory, from its registration to its exit.

The worker that keeps the directory is connected to it like any other.

A connection that ends is opened again: its link was cut, or the directory has moved. At a place
that can be rewritten, the living worker with the lowest rank makes a directory in place of one that
has ended. At a fixed address the workers wait for a replacement process of rank 0.
"""

import asyncio
import contextlib
import logging
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from .._aio.blocking import Blocked, BlockingCall
from .._aio.fork import close_on_fork
from .._aio.threads import run_in_thread
from .._aio.waiting import WaitReport
from .._directory import directory_messages as wire
from .._directory.directory_messages import ToWorker, read_to_worker
from .._directory.directory_server import DirectoryServer
from .._directory.directory_stream import (
    ANY_WORLD,
    NoDirectoryError,
    Stream,
    encode,
    greeting,
    open_stream,
)
from .._directory.meeting import RETRY_INTERVAL, Connected, Listening, Meeting, Seen
from .._directory.record import MIN_LEASE, Record, Watch
from .._directory.registration import Registration
from .._directory.succession import View
from .._peers.peers import Event
from .._port.port import Port
from .._port.purposes import DIRECTORY
from .._port.tls import TlsError
from .._text import printable
from .._torch.agent import PeerInfo
from .._torch.devices import NamedDeviceMaps
from .._torch.transport import ping, wrap_future
from ..errors import WorkerLost, WorldTimeout

if TYPE_CHECKING:
    from .._node.node import Node

log = logging.getLogger("aiorpc_torch")

T = TypeVar("T")

WORLD_TASK = "aiorpc-directory"
"""Name of the task that follows the changes of a world until it is left."""

MAX_ANSWER = 1 << 30  # bytes of a message of the directory: it lists all members
LOG_INTERVAL = 10.0  # seconds between two log lines about missing ranks
ANSWER_GRACE = 0.5  # seconds beyond the timeout for the directory to say which ranks are missing
GREETING_TIMEOUT = 5.0  # seconds
RESUME_TIMEOUT = 1.0  # the same of a directory that a member knows: it may be frozen
MAX_PAUSE = 0.4  # seconds between two attempts to connect again
GRACE_ALONE = 0.5  # seconds for members of a running world to find a rank 0 that starts alone
GRACE_OF_JOINED = 2.0  # the same at a place whose last directory had workers that had joined
SILENT_LOOKS = 2  # after which a directory that does not answer is taken for frozen
RETIRE_TIMEOUT = 0.3  # seconds for the directory to answer: else the others are told otherwise
CANCEL_TIMEOUT = 1.0  # seconds for an attempt to connect to end
MIN_STEP = 1.0  # seconds for a step of the start, also where less of its timeout is left
STEP_TIMEOUT = 10.0  # seconds in a running world for the place, and name servers, to answer
PING_TIMEOUT = 3.0  # seconds for a process to prove that it is alive


_REFUSED = (ConnectionRefusedError, FileNotFoundError)


class _DirectoryEndedError(Exception):
    """The connection or the world has ended: there may be another one."""


class DirectoryClient:
    """The connection of the worker of a registration, on the loop that it is used on.

    Args:
        port: of a worker that has one for all purposes.
        lease: seconds for which a directory of this worker is valid unless it says more.
        end: time of the loop at which the timeout passes (default: `timeout` from now).

    Attributes:
        coordinator: the worker that keeps the directory.
    """

    def __init__(
        self,
        meeting: Meeting,
        registration: Registration,
        timeout: float,
        port: Port | None = None,
        lease: float = MIN_LEASE,
        end: float | None = None,
    ) -> None:
        self._port = port
        self._lease = lease
        self.coordinator = ""
        self.registration = registration
        self.host = meeting.host
        self._meeting = meeting
        self._timeout = timeout
        self._loop = asyncio.get_running_loop()
        self._end = self._loop.time() + timeout if end is None else end
        self._attempt: BlockingCall[Any] | None = None
        self._server: DirectoryServer | None = None
        self._stream: Stream[ToWorker] | None = None
        self._published: wire.Publish | None = None
        self._view = View()
        self._watch = Watch()
        self._worker_id = -1
        self._has_heard = False  # since the last look
        self._was_isolated = False  # the directory that was here: most members were cut off
        self._answered = asyncio.Event()  # a message has come
        self._is_exiting = self._is_closed = self._has_retired = self._has_exited = False
        self._following: asyncio.Task[None] | None = None
        self._node: Node | None = None  # once it is followed
        self._tasks: set[asyncio.Task[None]] = set()
        self._key = ""
        self._entered: asyncio.Future[Sequence[str]] = self._loop.create_future()
        self._exited = asyncio.Event()

    def remaining(self) -> float:
        """Return the seconds that are left of the timeout."""
        return max(0.0, self._end - self._loop.time())

    # ── start ───────────────────────────────────────────────────────────────────────────────────

    async def register(self) -> wire.Registered | wire.Entering:
        """Register this worker; return all workers once they are there.

        Raises ValueError if two workers have one rank or one name, or the workers disagree. So it
        does if another program listens at the address of rank 0. WorldTimeout names missing ranks.
        """
        while True:
            self._stream = await self._connect()
            # In worlds in a row a worker may be quicker than rank 0: it meets the directory of the
            # last world. A rank 0 that dies while it waits may be started again.
            try:
                answer = await self._receive()
            except _DirectoryEndedError as exc:
                await self._pause(exc)
            else:
                assert isinstance(answer, wire.Registered | wire.Entering), answer
                if isinstance(answer, wire.Entering):
                    self.registration, self._worker_id = answer.own, answer.worker_id
                return answer

    async def publish(self, address: str, maps: NamedDeviceMaps, reaches: bool) -> list[PeerInfo]:
        """Publish the address of this worker's agent; return all members in rank order."""
        self._published = wire.Publish(address, maps, reaches)
        self._send(self._published)
        while True:
            try:
                message = await self._receive()
            except _DirectoryEndedError as exc:
                if not self.registration.entry:
                    raise self._given_up() from exc
                await self._enter_again(exc)  # the directory has moved: so does this entry
                continue
            if isinstance(message, wire.Members):
                members = [_peer_info(each) for each in message.members]
                own = (each for each in members if each.name == self.registration.name)
                self._worker_id = next(own).worker_id
                return members
            assert isinstance(message, wire.Entering), message
            self._send(self._published)

    async def confirm(self, unreachable: Sequence[int], text: str) -> None:
        """Confirm that this worker reaches all others, and wait until all have confirmed.

        If ranks are unreachable, the WorldTimeout of all workers has this `text`.
        """
        self._send(wire.Confirm(unreachable, text))
        try:
            message = await self._receive()
        except _DirectoryEndedError as exc:
            raise self._given_up() from exc
        assert isinstance(message, wire.Complete), message

    def give_up(self) -> None:
        """Tell the others that this worker was stopped while it waited."""
        self._send(wire.GiveUp("before it was stopped"))

    async def _connect(self) -> Stream[ToWorker]:
        """Connect to the directory; rank 0 makes it, unless there is one."""
        await self._disconnect()
        timeout = RESUME_TIMEOUT
        while True:
            try:
                if self.registration.rank == 0 and not self.registration.joined:
                    return await self._open_directory(timeout)
                return await self._dial(self._first_message(), timeout=timeout)
            except TlsError as exc:
                raise ValueError(f"no connection to rank 0: {exc}") from exc
            except (OSError, EOFError) as exc:
                is_refused = isinstance(exc, FileNotFoundError | PermissionError) or (
                    not self._meeting.is_movable  # another process listens there
                )
                if self.registration.rank == 0 and is_refused and not isinstance(exc, Blocked):
                    raise
                await self._pause(exc)
                # A frozen one answers never; one with thousands of workers that start, late.
                timeout = min(2 * timeout, GREETING_TIMEOUT)

    async def _open_directory(self, timeout: float) -> Stream[ToWorker]:
        """Make the directory of a new world, or of one whose members connect before it starts.

        Raises OSError if another one may be there which does not answer.
        """
        seen, is_dead = Seen(None, None), False
        if self._meeting.is_movable:
            seen = await self._look()
            if seen.record is not None and not seen.record.is_closed:
                try:
                    return await self._dial(self._first_message(), seen.record, timeout)
                except (OSError, EOFError) as exc:
                    if isinstance(exc, TlsError | Blocked):
                        raise
                    # Refused, no route, or another program.
                    is_dead = isinstance(exc, ConnectionRefusedError) or type(exc) is OSError
            if not self._watch.may_claim(seen.record, self._loop.time(), 0, is_dead=is_dead):
                raise OSError("a directory is there, and does not answer")
        made = await self._listen(seen)
        grace = 0.0
        if seen.record is not None and seen.record.joins:
            grace = GRACE_OF_JOINED
        elif self.registration.world_size == 1 and made.claim is None:
            grace = 0.0 if self._meeting.is_local else GRACE_ALONE
        return await self._serve(made, self._first_message(), grace=grace)

    async def _look(self) -> Seen:
        seen = await self._in_thread(self._meeting.look)
        self._watch.see(seen.value, self._loop.time())
        return seen

    async def _listen(self, seen: Seen) -> Listening:
        """Claim the place. Raises OSError if another worker was quicker."""
        listen = partial(self._meeting.listen, self.registration.name, self._lease, seen)
        made = await self._in_thread(listen)
        if made is None:
            raise OSError("another worker keeps the directory now")
        return made

    async def _serve(
        self,
        made: Listening,
        first: wire.Register | wire.Resume,
        *,
        grace: float = 0.0,
        known: wire.Known | None = None,
    ) -> Stream[ToWorker]:
        """Run the directory in this process; return this worker's connection to it."""
        at_port = [each for each in made.sockets if self._is_through_port(each)]
        server = self._server = DirectoryServer(
            made.world,
            [each for each in made.sockets if each not in at_port],
            made.claim,
            silence=self._lease,
            keeper=self.registration.name,
            grace=grace,
            known=known,
        )
        if self._port is not None:
            self._port.serve(DIRECTORY, server.accept)
            self._port.listen_for_directory(at_port)
        try:
            return await self._greet(made.world, server.connect(), first)
        except BaseException:
            await self._end_server()
            raise

    def _is_through_port(self, sock: socket.socket) -> bool:
        """Return whether a connection to the directory uses TLS, or comes to a worker's port."""
        if self._port is None or sock.family == socket.AF_UNIX:
            return False
        return self._port.tls is not None or self._meeting.is_at_port

    async def _through_port(self, connected: socket.socket, timeout: float) -> socket.socket:
        if self._port is None or not self._is_through_port(connected):
            return connected
        try:
            async with asyncio.timeout(timeout):  # a frozen host accepts connections
                return await self._port.secure(connected, DIRECTORY, f"rank 0 at {self._meeting}")
        except OSError as exc:
            is_direct = self._port.tls is not None and not self._meeting.is_at_port
            if is_direct and not isinstance(exc, TlsError):
                with contextlib.suppress(Blocked):
                    await self._in_thread(self._meeting.refuse_store)
            raise

    async def _in_thread(self, step: Callable[[], T]) -> T:
        """Run a step in a thread, once the last one has ended: one that blocks may stay for long.

        Raises Blocked if one of the two does not end in time.
        """
        limit = max(self.remaining(), MIN_STEP) if self._following is None else STEP_TIMEOUT
        if (last := self._attempt) is not None:
            await asyncio.wait((last.ended,), timeout=limit)
            if not last.ended.done():
                raise Blocked(last.text)
        place = f"{self._meeting} does not answer: check that it is reached from here"
        attempt = self._attempt = BlockingCall(step, place, self._undo)
        try:
            found: T = await attempt.result(limit)
            return found
        except NoDirectoryError as exc:
            raise self._refusal(exc, "") from exc
        finally:
            if attempt.ended.done() and self._attempt is attempt:
                self._attempt = None

    def _undo(self, found: object) -> None:
        """Close, in a thread, what a step has opened that was given up."""
        if isinstance(found, Connected | Listening):
            for each in found.sockets:
                each.close()
        if isinstance(found, Listening) and found.claim is not None:
            with contextlib.suppress(OSError, ValueError):
                found.claim.abandon(time.monotonic())
            found.claim.close()
        if self._is_closed:
            self._meeting.withdraw()

    async def _dial(
        self,
        first: wire.Register | wire.Resume,
        record: Record | None = None,
        timeout: float = GREETING_TIMEOUT,
    ) -> Stream[ToWorker]:
        """Connect to the directory of the record, by default of the one that is found."""
        connect = self._meeting.connect if record is None else partial(self._meeting.dial, record)
        found, [connected] = await self._in_thread(connect)
        connected = await self._through_port(connected, timeout)
        return await self._greet(found, connected, first, timeout)

    def _first_message(self) -> wire.Register:
        self._key = secrets.token_hex(16)  # a new one: another program may listen there
        return wire.Register(self.registration, self._key)

    async def _greet(
        self,
        world: str,
        connected: socket.socket,
        first: wire.Register | wire.Resume,
        timeout: float = GREETING_TIMEOUT,
    ) -> Stream[ToWorker]:
        """Return the stream of a connection to the directory.

        The first message does not wait for the greeting of the directory, which limits the number
        of connections that have not registered.
        """
        close_on_fork(connected)
        stream = await open_stream(connected, read_to_worker, MAX_ANSWER)
        try:
            async with asyncio.timeout(timeout):
                stream.write(greeting(world or ANY_WORLD) + encode(first))
                found = await stream.read_greeting()
            if world not in ("", found):
                raise OSError("rank 0 of an earlier run wrote the address of what is another world")
        except BaseException as exc:
            await stream.close()
            if isinstance(exc, NoDirectoryError):
                raise self._refusal(exc, world) from exc
            raise
        return stream

    def _refusal(self, exc: NoDirectoryError, world: str) -> Exception:
        text = f"what listens at {self._meeting} is not a world for this worker: {exc}"
        return (OSError if world else ValueError)(text)  # OSError: the address is of a run before

    def _given_up(self) -> WorldTimeout:
        return WorldTimeout(f"rank 0 at {self._meeting} has given up or died", [0])

    async def _pause(self, exc: Exception) -> None:
        """Wait before the next attempt. Raises WorldTimeout if there is no time for one."""
        if isinstance(exc, Blocked):  # for all the time that was left
            text = f"no rank 0 at {self._meeting} within {self._timeout:g} s: {exc}"
            raise WorldTimeout(text, [0]) from exc.with_traceback(None)
        if not self.remaining():
            reason = str(exc) or "what listens there does not answer"
            raise WorldTimeout(
                f"no rank 0 at {self._meeting} within {self._timeout:g} s ({reason}). Check that "
                f"rank 0 runs and that its address is reachable. {self._remedy()}",
                [0],
            ) from exc.with_traceback(None)  # its frames are ours, and its text is here
        await asyncio.sleep(RETRY_INTERVAL)

    def _remedy(self) -> str:
        """Return what lets processes enter a running world whose directory has ended."""
        then = "another worker takes its place"
        if not self._meeting.is_movable:
            then = "start its process again, or end it first if it is frozen: until then no process"
            then += " can enter that world"
        return (
            f"If rank 0 of a running world has ended, {then}. If that world has ended, stop what "
            "starts this process"
        )

    # ── messages of the start ───────────────────────────────────────────────────────────────────

    def _send(self, message: object) -> None:
        if self._stream is not None:
            self._stream.send(message)

    async def _receive(self) -> ToWorker:
        """Return the next message that is no failure, and report which ranks are missing."""
        with WaitReport(logging.WARNING, LOG_INTERVAL) as waiting:
            while isinstance(message := await self._next(waiting.pause), wire.Missing):
                listed = ", ".join(map(str, message.ranks))
                listed += f" and {message.more} more" if message.more else ""
                ended = f" ({message.ended})" if message.ended else ""
                text = f"{self.registration} waits for rank {listed} to {message.action}{ended}"
                waiting.tell(text)
        if isinstance(message, wire.Failed):
            if message.missing is None:
                raise ValueError(message.text)
            raise WorldTimeout(message.text, message.missing)
        if isinstance(message, wire.Ended):
            raise _DirectoryEndedError("the last world there is ending")
        self._hear(message)
        return message

    def _hear(self, message: ToWorker) -> None:
        self._view.hear(message)
        if isinstance(message, wire.Members):
            self.coordinator = message.coordinator

    async def _enter_again(self, exc: Exception) -> None:
        """Connect to the directory that has taken over, before this worker has entered."""
        while True:
            await self._pause(exc)
            if self._stream is not None:
                await self._stream.close()
            try:
                record = None
                if self._meeting.is_movable and (record := (await self._look()).record) is None:
                    raise OSError("the directory has ended")
                self._stream = await self._dial(self._resume_message(), record)
                return
            except (OSError, EOFError) as error:
                exc = error
            now, all_ = self._loop.time(), self.registration.world_size
            if self._meeting.is_movable and self._watch.may_claim(record, now, all_, is_dead=False):
                raise self._given_up() from exc  # no member takes it over

    def _resume_message(self) -> wire.Resume:
        own, view = self.registration, self._view
        is_member = not own.entry or self._entered.done()
        return wire.Resume(own, self._worker_id, self._key, view.entries, is_member, view.world)

    async def _next(self, pause: float) -> ToWorker:
        """Return the next message; ask for the missing ranks after `pause` seconds without one."""
        assert self._stream is not None
        reading = asyncio.ensure_future(self._stream.receive())
        try:
            while self.remaining() and not reading.done():
                await asyncio.wait((reading,), timeout=min(pause, self.remaining()))
                if not reading.done() and self.remaining():
                    self._send(wire.AskMissing())
            if not reading.done():
                self._send(wire.GiveUp(f"within {self._timeout:g} s"))
                await asyncio.wait((reading,), timeout=ANSWER_GRACE)
            if not reading.done():
                raise WorldTimeout(f"rank 0 at {self._meeting} no longer answers", [0])
            if isinstance(error := reading.exception(), EOFError | OSError):
                raise _DirectoryEndedError("its directory has ended") from error
            return reading.result()
        finally:
            reading.cancel()

    # ── the running world ───────────────────────────────────────────────────────────────────────

    def follow(self, node: "Node") -> None:
        """Let a node follow the changes of its world: it has started."""
        self._node = node
        self._following = self._loop.create_task(self._follow(node), name=WORLD_TASK)

    async def entered(self) -> Sequence[str]:
        """Wait until all members have added this worker; return those that do not answer."""
        await asyncio.wait((self._entered,), timeout=self.remaining() + ANSWER_GRACE)
        if not self._entered.done() or self._entered.cancelled():
            self._entered.cancel()
            raise WorldTimeout(f"rank 0 at {self._meeting} no longer answers", [0])
        return self._entered.result()

    async def _follow(self, node: "Node") -> None:
        name = self.registration.name
        watching = self._loop.create_task(self._watch_directory(), name=WORLD_TASK)
        try:
            while True:
                try:
                    await self._handle_all(node)
                except (EOFError, OSError, ValueError) as exc:
                    log.debug("%s: the connection to the directory has ended: %r", name, exc)
                except _DirectoryEndedError as exc:
                    text = f"{name} is in its world no more: {exc}"
                    log.warning("%s", text)
                    node.departures.exclude(text)
                    return
                await self._end_server()
                if self._is_exiting or not await self._resume(node):
                    return
        finally:
            watching.cancel()
            self._entered.cancel()
            self._exited.set()

    async def _handle_all(self, node: "Node") -> None:
        assert self._stream is not None
        while True:
            message = await self._stream.receive()
            self._has_heard = True
            self._answered.set()
            if isinstance(message, wire.Ended):
                raise _DirectoryEndedError("another process has replaced this one")
            if isinstance(message, wire.Failed):
                if not self._entered.done():  # another worker has the name meanwhile, say
                    self._entered.set_exception(WorldTimeout(message.text, message.missing or []))
                raise _DirectoryEndedError(message.text)
            self._hear(message)
            try:
                self._handle(node, message)
            except Exception:
                log.exception("%s could not follow a change", self.registration.name)

    async def _watch_directory(self) -> None:
        """Close the connection to a directory that does not answer: it is frozen, or cut off."""
        interval = self._lease / 4 if self._meeting.is_movable else self._lease
        silent = 0
        while not self._meeting.is_local:
            start = self._loop.time()
            await asyncio.sleep(interval)
            if self._has_heard or self._stream is None or not self._stream.is_open:
                self._has_heard, silent = False, 0
            elif self._loop.time() - start < 2 * interval:  # else answers may be here unread
                silent += 1
            if silent and self._meeting.is_movable:
                with contextlib.suppress(OSError, ValueError):
                    await self._look()  # from now on its lease counts
            if silent >= SILENT_LOOKS and self._stream is not None:
                log.debug("%s: the directory does not answer", self.registration.name)
                self._stream.abort()
            self._send(wire.Greet())

    async def _resume(self, node: "Node") -> bool:
        """Connect again, or keep the directory; return False if the world ends with rank 0."""
        pause, has_warned = RETRY_INTERVAL, False
        while True:
            await asyncio.sleep(pause)
            pause = min(2 * pause, MAX_PAUSE)
            try:
                stream = await self._reach(node)
            except (OSError, EOFError, ValueError) as exc:
                node.membership.probe(self.coordinator)
                is_refused = self._meeting.is_local and isinstance(exc, _REFUSED)
                keeper = node.members.peers.get(self.coordinator)  # as far as is known yet
                has_ended = keeper is None or keeper.is_lost or keeper.has_told
                if node.registry.is_closed or (is_refused and has_ended):
                    return False
                log.debug("%s: %r", self.registration.name, exc)
                if not has_warned and not self._meeting.is_movable:
                    has_warned = True
                    log.warning(
                        "%s: no connection to the directory at %s (%s). This world goes on. %s",
                        *(self.registration.name, self._meeting, exc, self._remedy()),
                    )
            else:
                log.info("%s is connected to the directory", self.registration.name)
                old, self._stream = self._stream, stream  # `close` may run from here on
                self._was_isolated = False
                if self._has_retired:  # the last directory may not have told the others
                    self._send(wire.Retire())
                if old is not None:
                    await old.close()
                return True

    async def _reach(self, node: "Node") -> Stream[ToWorker]:
        """Connect to the directory, wherever it is now, or make it. Raises OSError for now."""
        if not self._meeting.is_movable:
            return await self._dial(self._resume_message(), timeout=RESUME_TIMEOUT)
        seen, is_dead = await self._look(), False
        error: Exception = OSError("another worker is to take it over")
        if (record := seen.record) is not None:
            try:
                return await self._dial(self._resume_message(), record, RESUME_TIMEOUT)
            except (OSError, EOFError) as exc:
                is_dead = isinstance(exc, _REFUSED) and self._meeting.is_here(record)
                error = exc
        if node.members.own.is_done or node.registry.is_closed:  # this worker leaves
            raise error
        before = self._workers_before(node, "" if record is None else record.holder)
        may_claim = partial(self._watch.may_claim, record, self._loop.time(), before)
        if not may_claim(is_dead=is_dead, was_isolated=self._was_isolated):
            raise error
        made = await self._listen(seen)
        log.info("%s keeps the directory from now on", self.registration.name)
        self.coordinator = self.registration.name
        node.departures.move(self.coordinator)  # before any other worker asks it
        lost = {*node.members.lost(), *([] if record is None else [record.holder])}
        known = self._view.known(lost, _left(node))
        return await self._serve(made, self._resume_message(), known=known)

    def _workers_before(self, node: "Node", holder: str) -> int:
        """Return how many workers are to take the directory over rather than this one."""
        peers = (each for each in node.members.peers.values() if each.name != holder)
        living = (each for each in peers if not (each.is_lost or each.has_left))
        return sum(each.rank < self.registration.rank for each in living)

    def _handle(self, node: "Node", message: ToWorker) -> None:
        match message:
            case wire.Add(member):
                if node.members.get(member.name, member.worker_id) is None:
                    node.add(_peer_info(member))
                self._send(wire.Know(member.worker_id))
            case wire.Members(members, entering, coordinator):  # once connected again
                self._update(node, members, entering)
                self._on_move(node, coordinator)
            case wire.Moved(coordinator):
                self._on_move(node, coordinator)
            case wire.Recall():
                self._send(self._view.known(node.members.lost(), _left(node)))
            case wire.Entering():  # this entry goes on at another directory
                self._send(self._published)
            case wire.Announce(name, _, silent) if name == node.members.name:
                if not self._entered.done():
                    self._entered.set_result(silent)
            case wire.Announce(name, worker_id):
                if node.members.get(name, worker_id) is not None:
                    node.membership.announce(name)
            case wire.Gone(name, worker_id):
                error = WorkerLost(name, "its connection to the directory has ended")
                # Before this worker has entered: it was gone before. At the address of one that is
                # dead another program may listen, whose first bytes would end this process: torch
                # raises in a thread of its own. (2.15; tests/integration/test_joining.py)
                if self.registration.entry and not self._entered.done():
                    node.membership.report(node.members.get(name, worker_id), Event.LOSS, error)
                else:
                    node.membership.on_disconnect(name, worker_id, error)
            case wire.Left(name, worker_id):
                node.membership.on_leave_message(name, worker_id, "left", "")
            case wire.Ask(name, worker_id):
                task = self._loop.create_task(self._judge(node, name, worker_id))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            case wire.Exited():
                self._has_exited = True
                self._exited.set()

    def _on_move(self, node: "Node", coordinator: str) -> None:
        self.coordinator = coordinator
        if coordinator != node.members.coordinator:
            log.info("%s: worker %r keeps the directory", node.members.name, coordinator)
            node.departures.move(coordinator)

    def _update(
        self, node: "Node", members: Sequence[wire.Member], entering: Sequence[str]
    ) -> None:
        """Note what has changed while there was no connection."""
        for each in members:
            known = node.members.get(each.name, each.worker_id)
            if known is None:
                node.add(_peer_info(each))
            if known is None or not known.is_here:
                node.membership.announce(each.name)
            elif known.is_lost:
                node.membership.probe(each.name)
        listed = {each.name for each in members}.union(entering)
        for peer in node.members.present():
            if peer not in listed:
                worker_id = node.members.peers[peer].worker_id
                node.membership.on_leave_message(peer, worker_id, "left", "")

    async def _judge(self, node: "Node", name: str, worker_id: int) -> None:
        """Tell the directory whether a process is alive, whose name another one wants."""
        peer, is_alive = node.members.get(name, worker_id), False
        if peer is not None and node.membership.failure_of(name) is None:  # else it ends now
            with contextlib.suppress(Exception):
                async with asyncio.timeout(PING_TIMEOUT):
                    await wrap_future(ping(peer.member.info))
                is_alive = True
        self._send(wire.Verdict(name, worker_id, is_alive))

    # ── end ─────────────────────────────────────────────────────────────────────────────────────

    async def retire(self) -> bool:
        """Let all know that this worker takes no new calls; return whether a directory answers."""
        self._has_retired = True
        if self._stream is None or not self._stream.is_open:
            return False
        self._answered.clear()
        self._send(wire.Retire())
        self._send(wire.Greet())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(RETIRE_TIMEOUT):
                await self._answered.wait()
        return self._answered.is_set()

    def leave(self, *, departs: bool) -> None:
        """Tell the directory that this worker leaves, and with `departs` that the others go on."""
        self._send(wire.Leave(departs))

    async def exit_barrier(
        self, ranks: Sequence[int], seconds: float, *, is_full: bool = False
    ) -> None:
        """Wait until those ranks, or all, are here too, or gone, for at most `seconds`."""
        self._is_exiting = True
        if self._stream is None or not self._stream.is_open:
            return
        self._send(wire.Exit([] if is_full else ranks, is_full))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._exited.wait()

    async def close(self) -> None:
        """Close the connection, and the directory if it is here: another worker takes it over."""
        for task in (self._following, *self._tasks):
            if task is not None:
                task.cancel()
        self._is_closed = True
        if (attempt := self._attempt) is not None:
            attempt.give_up()
            # The next world may need the address of one that makes the directory.
            seconds = CANCEL_TIMEOUT if self._following is None else CANCEL_TIMEOUT / 20
            await asyncio.wait((attempt.ended,), timeout=seconds)
            attempt.ended.cancel()
        with contextlib.suppress(OSError, ValueError):
            async with asyncio.timeout(CANCEL_TIMEOUT):
                await self._clear_record()
        await self._disconnect()

    async def _clear_record(self) -> None:
        """Remove the record if no worker is left that would take the directory over.

        The next world at the place would wait for it. The keeper's end and that of this worker have
        crossed: it may not have closed the record yet.
        """
        if self._node is None or self._server is not None or not self._meeting.is_movable:
            return
        peers = self._node.members.peers
        # `_has_exited`: in order, so the directory knows of each end.
        if self._has_exited or not all(each.is_lost or each.has_told for each in peers.values()):
            return
        while (record := (seen := await self._look()).record) is not None:
            keeper = peers.get(record.holder)
            if keeper is None or not (keeper.is_lost or keeper.has_left):
                return  # it is of another world
            is_dead = record.is_closed
            if not is_dead and self._meeting.is_here(record):
                try:
                    self._undo(await self._in_thread(partial(self._meeting.dial, record)))
                except _REFUSED:
                    is_dead = True
            if is_dead:
                await self._in_thread(partial(self._meeting.clear, seen))
            elif keeper.is_lost:  # on another machine: its lease counts
                return
            await asyncio.sleep(RETRY_INTERVAL)

    async def _disconnect(self) -> None:
        if self._stream is not None:  # before the server, which may wait for it
            stream, self._stream = self._stream, None
            await stream.close()
        await self._end_server()
        self._meeting.withdraw()

    async def _end_server(self) -> None:
        if self._server is not None:
            server, self._server = self._server, None
            self._was_isolated = server.is_isolated
            if self._port is not None:
                self._port.end_directory()
            await run_in_thread(server.close, "aiorpc-stop")


def _left(node: "Node") -> list[str]:
    return [each.name for each in [*node.members.peers.values()] if each.has_left]


def _peer_info(member: wire.Member) -> PeerInfo:
    own = member.registration
    return PeerInfo(
        *(own.name, own.rank, member.worker_id, printable(member.address)),
        *(member.device_maps, own.namespace, own.endpoint),
    )
