"""The callee: calls of every session in the order in which each was sent, and results out.

All of it runs on the worker's event loop, but for what torch RPC calls on its own threads, which
hands over to the loop. It does not know how a caller waits, or what `@batched` is: only that some
callables want the loop.
"""

import asyncio
import functools
import itertools
import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from torch import Tensor
from torch.futures import Future

from .._aio.tasks import disown
from .._protocol.endpoints import completed
from .._protocol.exceptions import Failure
from .._protocol.handshake import Party, dump_introduction
from .._protocol.messages import Calls, dump_results, load_payload
from .._protocol.payloads import detach
from .._protocol.recording import in_torchs
from .._protocol.targets import plain
from .._torch.compat import RawFuture
from .._torch.cuda import fence, fence_of
from .._torch.devices import Reach
from ..errors import NotServing, RemoteError, RpcError, WorkerLost
from .calls import Job, RpcJob, TorchJob
from .dispatch import arrived, unreadable
from .executor import Runner
from .exports import Exports
from .listener import Listener
from .peers import Peers, replaced
from .reply import recorded
from .session import Key, Payload, Session

log = logging.getLogger("aiorpc_torch")

NOTHING, _ = dump_results(())  # the answer to a message whose sender does not wait any more


class Server:
    """Answers calls on the loop that it was made on, from `open` until `close`."""

    def __init__(self, name: str, threads: int, exports: Exports | None = None) -> None:
        self.name = name
        self.peers = Peers()
        self.observed: Callable[[str], None] = _ignore
        self.suspected: Callable[[str, int], None] = _ignore
        self._exports = exports
        self._reach = Reach()
        self._runner = Runner(threads)
        self._listener: Listener | None = None
        self._sessions: dict[Key, Session] = {}
        self._ended: list[Session] = []  # sessions that have ended, some of whose calls have not
        self._served = 0  # by sessions that have ended
        self._closed = False
        self._failure = ""  # what ended this worker's block, if something did
        self._torch_jobs: set[TorchJob] = set()
        self._early: list[tuple[bytes, Future[Any]]] | None = []  # introductions, until `open`

    def __repr__(self) -> str:
        running = sum(len(session.jobs) for session in self._sessions.values())
        return f"<Server {self.name}: {running} running, {self._runner}>"

    def use(self, reach: Reach) -> None:
        """Set the devices on which tensors may come and go. Before torch starts."""
        self._reach = reach

    async def open(self, me: Party, host: str | None = None) -> None:
        """Listen, and answer peers that want a connection.

        Args:
            me: this process.
            host: address for peers in other network namespaces, None if there are none.
        """
        self._listener = await Listener.start(me, host, self._accept)
        early, self._early = self._early or [], None
        for data, reply in early:
            reply.set_result(self._introduction(data))

    def _accept(self, caller: Party, link: int) -> Session:
        """Return the session for a connection whose caller has proven who it is."""
        mapped = self._reach.answers.get(caller.name, ())
        session = Session(self, caller, link, self._runner.on_loop, mapped)
        if (former := self._sessions.get(session.key)) is not None:  # its caller has given it up
            former.abort()
        self._sessions[session.key] = session
        return session

    # ── on threads of torch's ───────────────────────────────────────────────────────────────────

    def introduce(self, data: bytes) -> "Future[Any]":
        """Answer a caller that wants a connection, once this worker is open."""
        reply: Future[Any] = Future()
        self._runner.on_loop(functools.partial(self._introduce, data, reply))
        return reply

    def payload(self, data: bytes, tensors: Sequence[Tensor]) -> "Future[Any]":
        """Take the payload of a call. The future completes with its result."""
        answer: Any = RawFuture(self._reach.used)  # torch.futures.Future's base: quicker to make
        try:
            data, tensors = detach(data, tensors)
            key, context, calls = load_payload(data)
            reply = recorded(context, answer, tensors)
        except BaseException as exc:
            log.warning("worker %r takes a payload for none: %r", self.name, exc)
            error = RemoteError(f"worker {self.name!r} cannot read the payload of a call: {exc!r}")
            return completed(Failure.of(error, self.name))
        payload = Payload(calls, tensors, reply, context, fence(tensors))
        self._runner.on_loop(functools.partial(self._fill, key, payload))
        return answer  # type: ignore[no-any-return]

    def collect(self, data: bytes) -> "Future[Any]":
        """Answer with a result that is held."""
        reply: Any = RawFuture(self._reach.used)
        session = None
        try:
            key, number = plain(data)
            session = self._sessions.get(key)
        except Exception as exc:
            log.warning("worker %r is asked for what is no result: %r", self.name, exc)
        if session is None:
            reply.set_result(Failure.of(self._why_not(), self.name))
        else:
            session.collect(number, reply)
        return reply  # type: ignore[no-any-return]

    def farewell(self, data: bytes) -> "Future[Any]":
        """Learn that a peer fails and leaves, from a peer without a connection."""
        name, number, failure = plain(data)
        if (type(name), type(number), type(failure)) != (str, int, str):
            raise TypeError("no farewell")
        self._runner.on_loop(lambda: self.peers.part(name, number, "failed", failure))
        return completed(None)

    def rejoin(self, data: bytes) -> "Future[Any]":
        """Answer a worker that has come back: what the loop says to that."""
        reply: Future[Any] = Future()
        self._runner.on_loop(lambda: self.peers.introduce(data, reply))
        return reply

    def accept_torch(
        self, function: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> "Future[Any]":
        """Run `function`, which wants the loop, for a plain torch client."""
        reply: Future[Any] = Future(devices=[*self._reach.used])
        job = TorchJob(self._torch_jobs, reply, function, (args, kwargs), self.name)
        if self._reach.used:
            job.fence = fence_of((args, kwargs))
        job.recording = in_torchs()
        self._runner.on_loop(functools.partial(self._runner.begin, job))
        return reply

    def lend_thread(self, task: Callable[[], None]) -> None:
        """Run `task` in one of the threads for plain `def`s. From any thread."""
        self._runner.in_threads((task,))

    def start(self, coroutine: Coroutine[Any, Any, None], name: str) -> "asyncio.Task[None]":
        """Start what is nobody's call, as the runner does. On a loop."""
        return self._runner.start(coroutine, name)

    # ── on the loop ─────────────────────────────────────────────────────────────────────────────

    def _introduce(self, data: bytes, reply: "Future[Any]") -> None:
        if self._early is None:
            reply.set_result(self._introduction(data))
        else:
            self._early.append((data, reply))

    def _introduction(self, data: bytes) -> Any:
        try:
            caller = Party(*plain(data))
            self.peers.check(caller)
            if self._closed or self._listener is None:
                raise self._why_not()
            return dump_introduction(*self._listener.introduce(caller))
        except RpcError as exc:
            return Failure.of(exc, self.name)
        except Exception as exc:
            log.warning("worker %r introduces itself to nobody: %r", self.name, exc)
            return Failure.of(RemoteError(f"no connection to worker {self.name!r}: {exc}"), "")

    def heard(self, caller: str) -> None:
        """Note a sign of life."""
        self.observed(caller)

    def begin(self, session: Session, calls: Calls) -> None:
        """Start the calls of a frame, in their order."""
        jobs = self._jobs(session, calls, (), None)
        if session.slots:
            jobs = [job for job in jobs if session.admit(job)]
        self._start(jobs)

    def begin_payload(self, session: Session, payload: Payload) -> None:
        """Start a call whose payload is there."""
        if payload.calls.numbers[0] in session.jobs:
            payload.reply.set_result(NOTHING)  # a caller that counts wrongly has it so
            return
        jobs = self._jobs(session, payload.calls, payload.tensors, payload)
        for job in jobs:
            job.fence = payload.fence
        self._start(jobs)

    def begin_job(self, job: RpcJob) -> None:
        """Start a call that was held back."""
        self._start([job])

    def _jobs(
        self,
        session: Session,
        calls: Calls,
        tensors: Sequence[Tensor],
        payload: Payload | None,
    ) -> list[RpcJob]:
        session.served += len(calls.numbers)
        if not session.jobs.keys().isdisjoint(calls.numbers):
            raise ValueError("a call has the number of a running one")
        reply = None if payload is None else payload.reply
        try:
            return arrived(calls, tensors, session, reply, self.name, self._exports)
        except (
            BaseException
        ) as exc:  # whatever is wrong with them, those that follow have their turn
            log.warning("calls from %s cannot be read: %r", session.caller, exc)
            return unreadable(calls, session, reply, self.name, exc)

    def _start(self, jobs: list[RpcJob]) -> None:
        if self._closed:
            self._refuse(jobs)
            return
        if len(jobs) == 1:
            job = jobs[0]
            if job.on_loop:
                self._runner.begin(job)
            else:
                self._in_threads(jobs)
            return
        for on_loop, group in itertools.groupby(jobs, _on_loop):
            if on_loop:
                for job in group:
                    self._runner.begin(job)
            else:
                self._in_threads([*group])

    def _fill(self, key: Key, payload: Payload) -> None:
        session = self._sessions.get(key)
        if session is None:
            payload.reply.set_result(NOTHING)
        else:
            session.payload(payload.calls.numbers[0], payload)

    def _in_threads(self, jobs: Sequence[Job]) -> None:
        try:
            self._runner.in_threads([functools.partial(self._runner.work, job) for job in jobs])
        except RuntimeError as exc:  # no thread can be started
            for job in jobs:
                job.fail(exc)

    def cancel(self, job: RpcJob) -> None:
        """Cancel a call: nobody waits for it."""
        self._runner.cancel(job)

    def ended(self, session: Session, what: str, text: str) -> None:
        """Cancel what runs for a connection that has ended."""
        if self._sessions.get(session.key) is session:
            del self._sessions[session.key]
        self._served += session.served
        self._abandon(session)
        self._ended = [each for each in (*self._ended, session) if each.jobs]
        name, number, _ = session.key
        if what == "lost":
            self.suspected(name, number)
        else:
            self.peers.part(name, number, what, text)

    def _abandon(self, session: Session) -> None:
        for job in [*session.jobs.values()]:
            job.abandon()
            if job.task is None:  # in a thread, or waiting behind what will never come
                job.fail(asyncio.CancelledError())

    # ── who calls ───────────────────────────────────────────────────────────────────────────────

    def callers(self) -> set[str]:
        """Return the workers for whom something runs here."""
        return {each.caller for each in [*self._sessions.values()] if each.jobs}

    def connected(self) -> set[str]:
        """Return the workers that have a connection to this one."""
        return {each.caller for each in [*self._sessions.values()]}

    def tally(self) -> tuple[int, int, int]:
        """Return how many calls came in, how many of them run, and the bytes of held results."""
        sessions = [*self._sessions.values()]
        served = self._served + sum(each.served for each in sessions)
        running = sum(len(each.jobs) for each in (*sessions, *self._ended))
        return served, running, sum(each.held_bytes for each in sessions)

    def lost(self, caller: str) -> None:
        """Cancel what runs for a worker that is lost."""
        for session in [*self._sessions.values()]:
            if session.caller == caller:
                self._abandon(session)

    def replace(self, caller: Party) -> None:
        """Forget the predecessor of a worker that has come back."""
        self.lost(caller.name)
        self.peers.replace(caller)
        if self._listener is not None:
            self._listener.forget(caller.name)
        for session in [*self._sessions.values()]:
            if session.caller == caller.name:
                session.close("replaced", replaced(caller.name))

    # ── its end ─────────────────────────────────────────────────────────────────────────────────

    def _refuse(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            job.fail(self._why_not())

    def _why_not(self) -> RpcError:
        if self._failure:
            return WorkerLost(self.name, self._failure)
        return NotServing(f"worker {self.name!r} has stopped")

    def _running(self) -> list[Job]:
        sessions = [*self._sessions.values(), *self._ended]
        jobs = [job for each in sessions for job in [*each.jobs.values()]]
        return [*jobs, *self._torch_jobs]

    async def close(self, patience: float, failure: str = "", text: str = "") -> None:
        """Answer everybody, cancel what runs and close the connections.

        Args:
            patience: seconds for what was cancelled to end.
            failure: what ends this worker's block, in one line, if not the user's will.
            text: the same with its traceback.
        """
        self._closed = True
        self._failure = failure
        self._refuse(jobs := self._running())
        for job in jobs:
            job.abandon()
        sessions = [*self._sessions.values()]
        for session in sessions:
            session.close("failed" if failure else "left", text)
        if self._listener is not None:
            self._listener.close()
        tasks = {job.task: job for job in jobs if job.task is not None}
        for task in tasks and (await asyncio.wait(tasks, timeout=patience))[1]:
            disown(task, f"{tasks[task]} of worker {self.name}")
        await asyncio.gather(*(session.ended.wait() for session in sessions))
        for data, reply in self._early or []:
            reply.set_result(self._introduction(data))
        self._runner.close(0.1, self.name)


def _on_loop(job: RpcJob) -> bool:
    return job.on_loop


def _ignore(*_: Any) -> None:
    """Observe nothing: replaced by the failure detector."""
