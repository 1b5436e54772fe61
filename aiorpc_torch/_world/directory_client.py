"""A worker's connection to the directory, from its registration to its exit.

Rank 0's process has the directory too. Its own worker is connected to it like any other.

A connection that ends although rank 0 lives is opened again: its link was cut. When the directory
ends, its rank 0 has ended. The others go on without it: none can enter then.
"""

import asyncio
import contextlib
import logging
import secrets
import socket
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

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
from .._directory.meeting import RETRY_INTERVAL, Meeting
from .._directory.registration import Registration
from .._peers.peers import Event
from .._port.port import Port
from .._port.purposes import DIRECTORY
from .._port.tls import TlsError
from .._torch.agent import PeerInfo
from .._torch.devices import NamedDeviceMaps
from .._torch.transport import ping, wrap_future
from ..errors import WorkerLost, WorldTimeout

if TYPE_CHECKING:
    from .._node.node import Node

log = logging.getLogger("aiorpc_torch")

M = TypeVar("M", bound=ToWorker)
_Sockets = tuple[str, list[socket.socket]]

WORLD_TASK = "aiorpc-directory"
"""Name of the task that follows the changes of a world until it is left."""

MAX_ANSWER = 1 << 30  # bytes of a message of the directory: it lists all members
LOG_INTERVAL = 10.0  # seconds between two log lines about missing ranks
ANSWER_GRACE = 0.5  # seconds beyond the timeout for the directory to say which ranks are missing
GREETING_TIMEOUT = 5.0  # seconds
MAX_PAUSE = 30.0  # seconds between two attempts to connect again
CANCEL_TIMEOUT = 1.0  # seconds for an attempt to connect to end
PING_TIMEOUT = 3.0  # seconds for a process to prove that it is alive


class _DirectoryEndedError(Exception):
    """The connection or the world has ended: there may be another one."""


class DirectoryClient:
    """The connection of the worker of a registration, on the loop that it is used on.

    The `port` is that of a worker which has one for all purposes.
    """

    def __init__(
        self,
        meeting: Meeting,
        registration: Registration,
        timeout: float,
        port: Port | None = None,
    ) -> None:
        self._port = port
        self.registration = registration
        self.host = meeting.host
        self._meeting = meeting
        self._timeout = timeout
        self._loop = asyncio.get_running_loop()
        self._end = self._loop.time() + timeout
        self._attempt: asyncio.Future[_Sockets] | None = None
        self._server: DirectoryServer | None = None
        self._stream: Stream[ToWorker] | None = None
        self._following: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._key = self._world = ""
        self._pause_of_resume = RETRY_INTERVAL
        self._entered: asyncio.Future[Sequence[str]] = self._loop.create_future()
        self._exited = asyncio.Event()

    def remaining(self) -> float:
        """Return the seconds that are left of the timeout."""
        return max(0.0, self._end - self._loop.time())

    # ── start ───────────────────────────────────────────────────────────────────────────────────

    async def register(self) -> wire.Registered | wire.Entering:
        """Register this worker; return all workers once they are there.

        Raises:
            WorldTimeout: if ranks are missing at the timeout; it names them.
            ValueError: if two workers have one rank or one name, or the workers disagree; if
                another program listens at the address of rank 0.
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
                return answer

    async def publish(self, address: str, maps: NamedDeviceMaps, reaches: bool) -> list[PeerInfo]:
        """Publish the address of this worker's agent; return all members in rank order.

        Raises:
            WorldTimeout: if registered ranks did not start in time; it names them.
        """
        self._send(wire.Publish(address, maps, reaches))
        members = (await self._await(wire.Members)).members
        return [PeerInfo(*each) for each in members]

    async def confirm(self, unreachable: Sequence[int], text: str) -> None:
        """Confirm that this worker reaches all others, and wait until all have confirmed.

        Raises:
            WorldTimeout: with `text` if ranks are unreachable; if a worker does not confirm.
        """
        self._send(wire.Confirm(unreachable, text))
        await self._await(wire.Complete)

    def give_up(self) -> None:
        """Tell the others that this worker was stopped while it waited."""
        self._send(wire.GiveUp("before it was stopped"))

    async def _connect(self) -> Stream[ToWorker]:
        """Connect to the directory; rank 0 makes it."""
        await self._disconnect()
        if self.registration.rank == 0:
            world, listening = await self._in_thread(self._meeting.listen)
            self._server = self._serve(world, listening)
            return await self._greet(world, self._server.connect(), self._first_message())
        while True:
            try:
                return await self._dial(self._first_message())
            except TlsError as exc:
                raise ValueError(f"no connection to rank 0: {exc}") from exc
            except (OSError, EOFError) as exc:
                await self._pause(exc)

    def _serve(self, world: str, listening: list[socket.socket]) -> DirectoryServer:
        if self._port is None:
            return DirectoryServer(world, listening)
        at_port = [each for each in listening if self._is_through_port(each)]
        server = DirectoryServer(world, [each for each in listening if each not in at_port])
        self._port.serve(DIRECTORY, server.accept)
        self._port.listen_for_directory(at_port)
        return server

    def _is_through_port(self, sock: socket.socket) -> bool:
        """Return whether a connection to the directory uses TLS, or comes to a worker's port."""
        if self._port is None or sock.family == socket.AF_UNIX:
            return False
        return self._port.tls is not None or self._meeting.is_at_port

    async def _through_port(self, connected: socket.socket) -> socket.socket:
        if self._port is None or not self._is_through_port(connected):
            return connected
        try:
            async with asyncio.timeout(GREETING_TIMEOUT):  # a frozen host accepts connections
                return await self._port.secure(connected, DIRECTORY, f"rank 0 at {self._meeting}")
        except OSError as exc:
            is_direct = self._port.tls is not None and not self._meeting.is_at_port
            if is_direct and not isinstance(exc, TlsError):
                await run_in_thread(self._meeting.refuse_store, "aiorpc-join")
            raise

    async def _in_thread(self, step: Callable[[], _Sockets]) -> _Sockets:
        self._attempt = asyncio.ensure_future(run_in_thread(step, "aiorpc-join"))
        found = await asyncio.shield(self._attempt)
        self._attempt = None
        return found

    async def _dial(self, first: wire.Register | wire.Resume, world: str = "") -> Stream[ToWorker]:
        """Connect to the directory of rank 0, in that world or the one that is found."""
        try:
            found, [connected] = await self._in_thread(self._meeting.connect)
            connected = await self._through_port(connected)
        except NoDirectoryError as exc:
            raise self._refusal(exc, world) from exc
        return await self._greet(world or found, connected, first)

    def _first_message(self) -> wire.Register:
        self._key = secrets.token_hex(16)  # a new one: another program may listen there
        return wire.Register(self.registration, self._key)

    async def _greet(
        self, world: str, connected: socket.socket, first: wire.Register | wire.Resume
    ) -> Stream[ToWorker]:
        """Return the stream of a connection to the directory.

        The first message does not wait for the greeting of the directory, which limits the number
        of connections that have not registered.
        """
        close_on_fork(connected)
        stream = await open_stream(connected, read_to_worker, MAX_ANSWER)
        try:
            async with asyncio.timeout(GREETING_TIMEOUT):
                stream.write(greeting(world or ANY_WORLD) + encode(first))
                found = await stream.read_greeting()
            if world not in ("", found):
                raise OSError("rank 0 of an earlier run wrote the address of what is another world")
            self._world = found
        except BaseException as exc:
            await stream.close()
            if isinstance(exc, NoDirectoryError):
                raise self._refusal(exc, world) from exc
            raise
        return stream

    def _refusal(self, exc: NoDirectoryError, world: str) -> Exception:
        text = f"what listens at {self._meeting} is not a world for this worker: {exc}"
        return (OSError if world else ValueError)(text)  # OSError: the address is of a run before

    async def _pause(self, exc: Exception) -> None:
        """Wait before the next attempt. Raises WorldTimeout if there is no time for one."""
        if not self.remaining():
            reason = str(exc) or "what listens there does not answer"
            raise WorldTimeout(
                f"no rank 0 at {self._meeting} within {self._timeout:g} s ({reason}). Check that "
                "rank 0 runs and that its address is reachable. If rank 0 of a world has ended, no "
                "process can enter that world any more",
                [0],
            ) from exc
        await asyncio.sleep(RETRY_INTERVAL)

    # ── messages of the start ───────────────────────────────────────────────────────────────────

    def _send(self, message: object) -> None:
        if self._stream is not None:
            self._stream.send(message)

    async def _await(self, kind: type[M]) -> M:
        try:
            message = await self._receive()
        except _DirectoryEndedError as exc:
            raise WorldTimeout(f"rank 0 at {self._meeting} has given up or died", [0]) from exc
        assert isinstance(message, kind), message
        return message

    async def _receive(self) -> ToWorker:
        """Return the next message that is no failure, and report which ranks are missing."""
        with WaitReport(logging.WARNING, LOG_INTERVAL) as waiting:
            while isinstance(message := await self._next(waiting.pause), wire.Missing):
                listed = ", ".join(map(str, message.ranks))
                ended = f" ({message.ended})" if message.ended else ""
                text = f"{self.registration} waits for rank {listed} to {message.action}{ended}"
                waiting.tell(text)
        if isinstance(message, wire.Failed):
            if message.missing is None:
                raise ValueError(message.text)
            raise WorldTimeout(message.text, message.missing)
        if isinstance(message, wire.Ended):
            raise _DirectoryEndedError("the last world there is ending")
        return message

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
        self._following = self._loop.create_task(self._follow(node), name=WORLD_TASK)

    async def entered(self) -> Sequence[str]:
        """Wait until all members have added this worker; return those that do not answer.

        Raises:
            WorldTimeout: if rank 0 has died or does not answer.
        """
        await asyncio.wait((self._entered,), timeout=self.remaining() + ANSWER_GRACE)
        if not self._entered.done() or self._entered.cancelled():
            raise WorldTimeout(f"rank 0 at {self._meeting} no longer answers", [0])
        return self._entered.result()

    async def _follow(self, node: "Node") -> None:
        name = self.registration.name
        try:
            while True:
                try:
                    await self._handle_all(node)
                except (EOFError, OSError, ValueError) as exc:
                    log.debug("%s: the connection to rank 0 has ended: %r", name, exc)
                except _DirectoryEndedError:
                    return
                is_member = not self.registration.entry or self._entered.done()
                if self._server is not None or not is_member or not await self._resume(node):
                    return
        finally:
            self._entered.cancel()
            self._exited.set()

    async def _handle_all(self, node: "Node") -> None:
        assert self._stream is not None
        while True:
            message = await self._stream.receive()
            if isinstance(message, wire.Ended):
                raise _DirectoryEndedError("another process has replaced this one")
            try:
                self._handle(node, message)
            except Exception:
                log.exception("%s could not follow a change", self.registration.name)

    async def _resume(self, node: "Node") -> bool:
        """Connect again: a link was cut. Return False if rank 0 has ended."""
        me = node.members.me
        while True:
            await asyncio.sleep(self._pause_of_resume)
            self._pause_of_resume = min(2 * self._pause_of_resume, MAX_PAUSE)
            try:
                resume = wire.Resume(me.name, me.worker_id, self._key)
                stream = await self._dial(resume, self._world)
            except (ConnectionRefusedError, FileNotFoundError) as exc:
                if self._has_ended(node):
                    return False
                log.debug("%s: no process listens at %s: %r", me.name, self._meeting, exc)
            except (OSError, EOFError) as exc:
                log.debug("%s does not reach rank 0: %r", self.registration.name, exc)
            else:
                log.info("%s is connected to rank 0 again", me.name)
                old, self._stream = self._stream, stream  # `close` may run from here on
                if old is not None:
                    await old.close()
                return True

    def _has_ended(self, node: "Node") -> bool:
        """Return whether rank 0 has ended, as far as is known yet; ask it.

        A refused connection is no proof: a proxy before a rank 0 that lives may refuse one.
        """
        rank0 = node.members.workers[0].name
        node.membership.probe(rank0)
        peer = node.members.workers[rank0]
        return peer.is_lost or peer.has_told or node.registry.is_closed  # this worker leaves

    def _handle(self, node: "Node", message: ToWorker) -> None:
        match message:
            case wire.Add(member):
                node.add(PeerInfo(*member))
                self._send(wire.Know(member.worker_id))
            case wire.Members(members, entering):  # once connected again
                self._pause_of_resume = RETRY_INTERVAL
                self._update(node, members, entering)
            case wire.Announce(name, _, silent) if name == node.members.name:
                self._entered.set_result(silent)
            case wire.Announce(name, worker_id):
                if node.members.get(name, worker_id) is not None:
                    node.membership.announce(name)
            case wire.Gone(name, worker_id):
                error = WorkerLost(name, "its connection to rank 0 has ended")
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
                self._exited.set()

    def _update(
        self, node: "Node", members: Sequence[wire.Member], entering: Sequence[str]
    ) -> None:
        """Note what has changed while there was no connection."""
        for each in members:
            known = node.members.get(each.name, each.worker_id)
            if known is None:
                node.add(PeerInfo(*each))
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
        is_alive = node.members.get(name, worker_id) is not None and await _is_alive(node, name)
        self._send(wire.Verdict(name, worker_id, is_alive))

    # ── end ─────────────────────────────────────────────────────────────────────────────────────

    def retire(self) -> bool:
        """Let all know that this worker takes no new calls; return False without a directory."""
        is_connected = self._stream is not None and self._stream.is_open
        self._send(wire.Retire())
        return is_connected

    def leave(self, *, departs: bool) -> None:
        """Tell the directory that this worker leaves, and with `departs` that the others go on."""
        self._send(wire.Leave(departs))

    async def exit_barrier(self, ranks: Sequence[int], seconds: float) -> None:
        """Wait until those ranks are here too, or gone, for at most `seconds`."""
        self._send(wire.Exit(ranks))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._exited.wait()

    async def close(self) -> None:
        """Close the connection; rank 0 ends the directory."""
        for task in (self._following, *self._tasks):
            if task is not None:
                task.cancel()
        if self._attempt is not None:  # it was cancelled
            await asyncio.wait((self._attempt,), timeout=CANCEL_TIMEOUT)
            if self._attempt.done() and self._attempt.exception() is None:
                for each in self._attempt.result()[1]:
                    each.close()
        await self._disconnect()

    async def _disconnect(self) -> None:
        self._meeting.withdraw()
        if self._stream is not None:  # before the server, which may wait for it
            stream, self._stream = self._stream, None
            await stream.close()
        if self._server is not None:
            server, self._server = self._server, None
            if self._port is not None:
                self._port.end_directory()
            await run_in_thread(server.close, "aiorpc-stop")


async def _is_alive(node: "Node", name: str) -> bool:
    if node.membership.failure_of(name) is not None:  # its block has failed: it ends now
        return False
    try:
        async with asyncio.timeout(PING_TIMEOUT):
            await wrap_future(ping(node.members.workers[name].member.info))
    except Exception:
        return False
    return True
