"""The server of one worker: starts the calls of its sessions in the order of their sending.

It runs on the worker's event loop. Methods that torch RPC calls on its own threads pass their work
to the loop.
"""

import asyncio
import contextlib
import functools
import itertools
import logging
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.futures import Future

from .._aio.tasks import detach_task
from .._context.interception import is_needed
from .._context.recording import record_of_torch_context
from .._endpoint.entry_points import completed_future
from .._endpoint.names import ALWAYS, FOR_AN_ITEM, WAITS, NameTable
from .._peers.observer import PeerObserver
from .._peers.peers import Peer, Peers
from .._port.port import Port
from .._torch.agent import PeerInfo
from .._torch.compat import RawFuture
from .._torch.cuda import fence_tensors, fence_tree
from .._torch.devices import NO_DEVICES, DeviceRoutes
from .._wire.exceptions import FailedWorker, LeavingWorker, RemoteFailure
from .._wire.frames import CloseReason
from .._wire.handshake import Party, dump_introduction
from .._wire.messages import ResultKey, SessionKey, load_payload
from .._wire.payloads import detach_data
from .._wire.plain import reader
from ..errors import RemoteError, RpcError, WorkerGone, WorkerLost
from .calls import RpcCall, ServerCall
from .created import CreatedObjects
from .dispatch import Payload
from .executor import Executor
from .exports import ExportPolicy
from .listener import Listener
from .pauses import Pauses
from .reply import complete_reply, reply_for
from .session import Session
from .torch_clients import TorchCall

log = logging.getLogger("aiorpc_torch")

_read_collect = reader(tuple[SessionKey, ResultKey])
_read_party = reader(tuple[str, int])

DRAIN_POLL = 0.01  # seconds between two looks at the calls that run
RETIRE_TIMEOUT = 2.0  # seconds for callers to answer that they send no further calls


class SessionTable(dict[SessionKey, Session]):
    """The open sessions of worker `name`, and the ended ones that have calls which still run.

    The worker's loop changes the table; any thread may read it.
    """

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name
        self._ended: list[Session] = []
        self._served = 0  # calls of ended sessions

    def add(self, session: Session) -> None:
        """Add an open session; one with the same key was given up by its caller."""
        if (former := self.get(session.key)) is not None:
            former.abort()
        self[session.key] = session

    def end(self, session: Session) -> None:
        """Cancel the calls of a session that has ended."""
        if self.get(session.key) is session:
            del self[session.key]
        self._served += session.dispatcher.served
        self._cancel_calls(session)
        self._ended = [each for each in (*self._ended, session) if each.calls]

    def of(self, caller: str) -> list[Session]:
        """Return the open sessions of a worker."""
        return [each for each in [*self.values()] if each.caller == caller]

    def of_peers(self) -> list[Session]:
        """Return the open sessions of other workers."""
        return [each for each in [*self.values()] if each.caller != self._name]

    def callers(self) -> set[str]:
        """Return the workers that have calls running here."""
        return {each.caller for each in [*self.values()] if each.calls}

    def connected(self) -> set[str]:
        """Return the workers that have a connection to this one."""
        return {each.caller for each in [*self.values()]}

    def linked(self) -> set[str]:
        """Return the workers that have an open connection to this one."""
        return {each.caller for each in [*self.values()] if each.is_open}

    def open_calls(self, most: int | None = None) -> list[RpcCall]:
        """Return the unanswered calls; at most the `most` oldest of each session."""
        every = (*self.values(), *self._ended)
        return [call for each in every for call in [*itertools.islice(each.calls.values(), most)]]

    def tally(self) -> tuple[int, int, int]:
        """Return the calls served, those that run, and the bytes of held results."""
        sessions = [*self.values()]
        served = self._served + sum(each.dispatcher.served for each in sessions)
        running = sum(len(each.calls) for each in (*sessions, *self._ended))
        return served, running, sum(each.held_bytes for each in sessions)

    def has_work(self) -> bool:
        """Return whether a call runs or is on its way, or a result waits to be collected."""
        return bool(self.open_calls()) or any(each.has_work() for each in self.values())

    def ping(self, caller: str) -> None:
        """Ask the event loops of a worker for a sign of life, on each connection."""
        for session in self.of(caller):
            session.ping()

    def check_paths(self, timeout: float) -> None:
        """End the connections whose path has carried nothing for `timeout` seconds."""
        for session in [*self.values()]:
            session.check_path(timeout)

    def cancel_calls_of(self, caller: str, why_lost: str | None = None) -> None:
        """Cancel the calls of a worker, because it was lost or has left."""
        for session in self.of(caller):
            self._cancel_calls(session, why_lost)

    def _cancel_calls(self, session: Session, why_lost: str | None = None) -> None:
        for call in [*session.calls.values()]:
            if not call.is_cancelled:
                call.why_lost = why_lost
            call.cancel()
            if call.task is None:  # in a thread, or waits for a payload
                call.abandon(asyncio.CancelledError())


class Server:
    """The server of one worker, on the loop that it was made on. Serves from `open` to `close`.

    Args:
        observer: is told of the messages of callers, and of the ends of their connections.
        threads: number of threads for plain `def`s.
        exports: what calls may reach, None for everything.
        on_question: answers the questions of callers where their calls stand.
    """

    def __init__(
        self,
        members: Peers,
        observer: PeerObserver,
        threads: int,
        exports: ExportPolicy | None = None,
        on_question: Callable[[Session, bytes], None] = lambda *_: None,
    ) -> None:
        self.name = members.name
        self.names = NameTable()
        self.sessions = SessionTable(members.name)
        self.observer = observer
        self.exports = exports
        self.on_question = on_question
        self.executor = Executor(threads)
        self.created = CreatedObjects(self.executor.call_on_loop)
        self.pauses = Pauses(self.executor, self.sessions.open_calls)
        self._members = members
        self._routes = DeviceRoutes()
        self._listener: Listener | None = None
        self._is_leaving = False
        self._failure = ""  # the error that ended this worker's block
        self._block_traceback = ""  # of that error
        self._torch_calls: set[TorchCall] = set()

    def __repr__(self) -> str:
        return f"<Server {self.name}: {len(self.sessions.open_calls())} running>"

    def set_device_routes(self, routes: DeviceRoutes) -> None:
        """Set the devices between which tensors travel: before torch starts, and at a rejoin."""
        self._routes = routes

    def open(self, host: str | None = None, port: Port | None = None) -> None:
        """Listen; for peers in other network namespaces at the address `host`, or at `port`."""
        self._listener = Listener(self._members.me, host, self.accept, self.accept_socket, port)

    def listen_at(self, host: str) -> None:
        """Listen at the address `host` from now on: a peer in another network namespace enters."""
        if self._listener is not None:
            self._listener.listen_at(host)

    def accept(self, caller: Party, connection: int) -> Session:
        """Return the session of an authenticated connection."""
        mapped = self._routes.answers.get(caller.name, NO_DEVICES)
        peer = self._members.get(caller.name, caller.worker_id)
        # Another process may have taken its place since it was introduced: it is refused then.
        if peer is None:
            peer = Peer(PeerInfo(caller.name, -1, caller.worker_id, ""))
        session = Session(self, peer, connection, mapped)
        self.sessions.add(session)
        return session

    def accept_socket(
        self, caller: Party, connection: int, purpose: int, sock: socket.socket
    ) -> None:
        """Use a proven socket for tensors of an open session, or close it."""
        if (peer := self._members.get(caller.name, caller.worker_id)) is not None:
            peer.last_heard = time.monotonic()  # no other path may work
        if (session := self.sessions.get((caller.name, caller.worker_id, connection))) is None:
            sock.close()
        else:
            session.carriers.sockets.add_socket(purpose, sock)

    # ── on threads of torch ────────────────────────────────────────────────────────────────────

    def payload(self, data: bytes, tensors: Sequence[Tensor]) -> "Future[Any]":
        """Handle the payload of a call. The future completes with its result."""
        answer: Any = RawFuture(self._routes.used)  # base of torch.futures.Future, faster to create
        try:
            data, tensors = detach_data(data, tensors)
            key, context, groups = load_payload(data)
            reply = reply_for(context, answer, tensors)
        except BaseException as exc:
            log.warning("worker %r rejected an unreadable payload: %r", self.name, exc)
            error = RemoteError(f"worker {self.name!r} cannot read the payload of a call: {exc!r}")
            return completed_future(RemoteFailure.of(error, self.name))
        payload = Payload(groups, tensors, reply, context, fence_tensors(tensors))
        self.executor.call_on_loop(functools.partial(self._on_payload, key, payload))
        return answer  # type: ignore[no-any-return]

    def collect(self, data: bytes) -> "Future[Any]":
        """Answer with a held result."""
        reply: Any = RawFuture(self._routes.used)
        session = None
        try:
            key, number = _read_collect(data)
            session = self.sessions.get(key)
        except Exception as exc:
            log.warning("worker %r rejected a request for a held result: %r", self.name, exc)
        if session is None:  # its call has run
            error = self._gone(may_have_run=True)
            reply.set_result(RemoteFailure.refusal(error, self.name))
        else:
            session.collect(number, reply)
        return reply  # type: ignore[no-any-return]

    def accept_torch(
        self, function: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> "Future[Any]":
        """Run `function`, which runs on the loop, for a plain torch client."""
        reply: Future[Any] = Future(devices=[*self._routes.used])
        call = TorchCall(self._torch_calls, reply, function, (args, kwargs), self.name)
        if self._routes.used:
            call.fence = fence_tree((args, kwargs))
        call.recording = record_of_torch_context()
        if is_needed():
            call.carried = ()
        self.executor.call_on_loop(functools.partial(self.executor.start, (call,)))
        return reply

    # ── on the loop ─────────────────────────────────────────────────────────────────────────────

    def introduce(self, data: bytes, reply: "Future[Any]") -> None:
        """Answer a request for an introduction."""
        try:
            caller = self._members.check(Party(*_read_party(data)))
            if self._is_leaving or self._listener is None:
                raise self._gone()
            answer: Any = dump_introduction(*self._listener.introduce(caller))
        except RpcError as exc:
            answer = RemoteFailure.of(exc, self.name)
        except Exception as exc:
            log.warning("worker %r rejected a request for an introduction: %r", self.name, exc)
            error = RemoteError(f"no connection to worker {self.name!r}: {exc}")
            answer = RemoteFailure.of(error, "")
        reply.set_result(answer)

    def _on_payload(self, key: SessionKey, payload: Payload) -> None:
        session = self.sessions.get(key)
        if session is None:
            complete_reply(payload.reply, ())
        else:
            session.dispatcher.on_payload(payload.groups[0].numbers[0], payload)

    def on_session_end(self, session: Session, what: str, text: str) -> None:
        """Cancel the calls of a session that has ended, and report why it has."""
        self.sessions.end(session)
        name, worker_id, _ = session.key
        if what == "lost":
            lost = WorkerLost(name, "its connection has ended")
            self.observer.on_disconnect(name, worker_id, lost)
        else:
            self.observer.on_leave_message(name, worker_id, what, text)

    def open_calls(self, most: int | None = None) -> list[ServerCall]:
        """Return the unanswered calls; at most the `most` oldest of each caller. In any thread."""
        return [*self.sessions.open_calls(most), *itertools.islice([*self._torch_calls], most)]

    def end_process(self, peer: Peer, text: str) -> None:
        """End what a member's process has here, which was replaced or has left; tell it why."""
        self.sessions.cancel_calls_of(peer.name)
        if self._listener is not None:
            self._listener.revoke(peer)
        for session in self.sessions.of(peer.name):
            session.close("replaced", text)

    # ── end ─────────────────────────────────────────────────────────────────────────────────────

    def _gone(self, *, may_have_run: bool = False, method: str | None = None) -> WorkerGone:
        """Return the error for calls of this worker, which leaves or has failed."""
        kind = FailedWorker if self._failure else LeavingWorker
        error = kind(self.name, self._failure, method=method, may_have_run=may_have_run)
        error.block_traceback = self._block_traceback
        return error

    def retire(self) -> None:
        """Refuse new connections, and ask the callers for no further calls on those that are open.

        A call after that is held by its caller, so none arrives when this worker has left.
        """
        self._is_leaving = True
        if self._listener is not None:
            self._listener.close()
        for session in self.sessions.of_peers():
            session.retire()

    async def drain(self, timeout: float | None) -> None:
        """Serve until no call runs or comes, for at most `timeout` seconds; None sets no limit."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                # An event loop that does not answer sends no calls.
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(RETIRE_TIMEOUT):
                        for session in self.sessions.of_peers():
                            await session.retired.wait()
                self._end([call for call in self.open_calls() if _only_waits(call)])
                # Calls end in any thread.
                while self._torch_calls or self.sessions.has_work():  # noqa: ASYNC110
                    await asyncio.sleep(DRAIN_POLL)

    async def close(
        self, timeout: float, failure: str = "", text: str = "", what: CloseReason | None = None
    ) -> None:
        """Fail and cancel all calls, and close the connections.

        Args:
            timeout: seconds for cancelled calls to end.
            failure: the error that ended this worker's block, in one line (default: none).
            text: the same error with its traceback.
            what: reason for the peers (default: "failed" with a failure, else "left").
        """
        self._is_leaving, self._failure = True, failure
        self._block_traceback = text.partition("\n")[2] if failure else ""
        self.executor.refusal = self._gone
        self.names.clear()
        calls = self.end_calls()
        sessions = [*self.sessions.values()]
        for session in sessions:
            session.close(what or ("failed" if failure else "left"), text)
        if self._listener is not None:
            self._listener.close()
        tasks = {call.task: call for call in calls if call.task is not None}
        for task in tasks and (await asyncio.wait(tasks, timeout=timeout))[1]:
            detach_task(task, f"{tasks[task].name} of worker {self.name}")
        await asyncio.gather(*(session.ended.wait() for session in sessions))
        self.executor.close(0.1, self.name)

    def end_calls(self) -> list[ServerCall]:
        """Fail and cancel the calls that run here; return them."""
        calls = self.open_calls()
        self._end(calls)
        return calls

    def _end(self, calls: Sequence[ServerCall]) -> None:
        for call in calls:
            # It has arrived: its caller must not take it for unsent.
            call.abandon(self._gone(may_have_run=True, method=call.name))
        for call in calls:
            call.cancel()

    async def handle_last_messages(self) -> None:
        """Wait until the messages that torch has delivered so far are handled."""
        is_handled = asyncio.Event()
        self.executor.call_on_loop(is_handled.set)
        await is_handled.wait()


def _only_waits(call: ServerCall) -> bool:
    found = getattr(call.function, WAITS, None)  # an object may have any attribute
    return found == ALWAYS or (found == FOR_AN_ITEM and not call.has_sent)
