"""The callee: messages in, each sender's in the order in which it sent them, and answers out.

`accept` runs on a thread of torch's and hands over to the runner. The room knows nothing of how a
message comes in, how a caller waits, or what `@batched` is: only that some callables want the loop.
"""

import asyncio
import functools
import itertools
import logging
import threading
import types
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from torch import Tensor
from torch._C import Future as AnyFuture
from torch.futures import Future

from ._arrivals import arrived, unreadable
from ._devices import Reach
from ._exceptions import Failure
from ._exports import Exports
from ._fences import fence, fence_of
from ._jobs import Job, RpcJob, TorchJob
from ._line import Line, Repeated
from ._message import Message, dump_results, load
from ._peers import Peers
from ._recording import in_torchs
from ._reply import recorded
from ._runner import Runner
from ._steps import disown
from ._streams import StreamJob
from .errors import NotServing, RemoteError, RpcError, WorkerLost

log = logging.getLogger("aiorpc_torch")


class _Batch:
    """What a message asks for, once its turn has come."""

    __slots__ = ("jobs", "message", "wants_loop")

    def __init__(self, message: Message, jobs: list[RpcJob]) -> None:
        self.message = message
        self.jobs = jobs
        self.wants_loop = message.controls() or any(job.on_loop for job in jobs)


class Server:
    """Answers calls on the loop that it was made on, from `open` until `close`."""

    def __init__(self, name: str, threads: int, exports: Exports | None = None) -> None:
        self.name = name
        self.peers = Peers()
        self._exports = exports
        self.heard: Callable[[str], None] = _nobody_asks
        self._reach = Reach()
        self._runner = Runner(threads)
        self._lock = threading.Lock()
        self._lines: dict[tuple[str, int], Line] = {}
        self._early: list[tuple[Line, _Batch]] | None = []  # until `open`
        self._closed = False
        self._failure = ""  # what ended this worker's block, if something did
        self._torch_jobs: set[TorchJob] = set()

    def __repr__(self) -> str:
        running = sum(len(line.jobs) for line in self._lines.values())
        return f"<Server {self.name}: {running} running, {self._runner}>"

    def use(self, reach: Reach) -> None:
        """On which devices tensors may come and go. Before torch starts."""
        self._reach = reach

    def open(self) -> None:
        """This process has joined its world: start what its quicker peers have sent already."""
        with self._lock:
            for line, batch in self._early or []:
                self._hand_over(line, [batch])
            self._early = None

    # ── on a thread of torch's ──────────────────────────────────────────────────────────────────

    def accept(self, data: bytes, tensors: Sequence[Tensor]) -> "Future[Any]":
        """Take a message in. Its future completes with the outcomes that it carries back."""
        answer: Any = AnyFuture(self._reach.used)  # torch.futures.Future's base: quicker to make
        try:
            message = load(data)
            line = self._lines.get((message.caller, message.link)) or self._new_line(message)
            line.expect(message)
            reply = recorded(message.context, answer, tensors)
        except BaseException as exc:
            return self._not_taken(answer, exc)
        self.heard(message.caller)
        calls = len(message.numbers)
        poll = not calls and not message.controls()
        carrier = line.admit(reply, calls, poll=poll, own=message.context >= 0)
        try:
            jobs = (
                arrived(message, tensors, line, carrier, self.name, self._exports) if calls else []
            )
        except BaseException as exc:  # whatever is wrong with it, those that follow have their turn
            log.warning("a message from %s cannot be read: %r", line.caller, exc)
            jobs = unreadable(message, line, carrier, self.name, exc)
        if tensors and (ready := fence(tensors)) is not None:
            for job in jobs:
                job.fence = ready
        self._in_order(line, _Batch(message, jobs))
        return answer  # type: ignore[no-any-return]

    def _not_taken(self, reply: Any, exc: BaseException) -> "Future[Any]":
        # Nothing has changed; its sender sends an empty message in its place, for the order.
        if isinstance(exc, Repeated):
            reply.set_result(dump_results((), ()))
            return reply  # type: ignore[no-any-return]
        log.warning("worker %r takes a message for none: %r", self.name, exc)
        if not isinstance(exc, NotServing):
            exc = RemoteError(f"worker {self.name!r} cannot take the message in: {exc!r}")
        reply.set_result(Failure.of(exc, self.name))
        return reply  # type: ignore[no-any-return]

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

    def meet(self, member: bytes) -> "Future[Any]":
        """A worker has come back. Completes with what the loop says to that."""
        reply: Future[Any] = Future()
        self._runner.on_loop(lambda: self.peers.introduce(member, reply))
        return reply

    def lend_thread(self, task: Callable[[], None]) -> None:
        """Run `task` in one of the threads for plain `def`s. From any thread."""
        self._runner.in_threads((task,))

    def start(
        self, code: types.CodeType | None, coroutine: Coroutine[Any, Any, None], name: str
    ) -> "asyncio.Task[None] | None":
        """Start what is nobody's call, as the runner does. On a loop."""
        return self._runner.start(code, coroutine, name)

    def _new_line(self, message: Message) -> Line:
        self.peers.check(message.caller, message.link)
        with self._lock:
            mapped = self._reach.answers.get(message.caller, ())
            fresh = Line(message.caller, self._runner.after_turn, mapped)
            return self._lines.setdefault((message.caller, message.link), fresh)

    def _in_order(self, line: Line, batch: _Batch) -> None:
        with line.lock:
            line.served += len(batch.jobs)
            due = line.lane.arrived(batch.message.seq, batch)
            if self._early is not None and self._keep(line, due):
                return
            # Here and now, while threads are idle and nobody else's turn has come with ours: a
            # lone `def` is answered without a change of threads.
            here = self._is_lone(line, due) and self._runner.borrow()
            if not here:
                self._hand_over(line, due)
        if here:
            self._runner.here(due[0].jobs[0])

    def _keep(self, line: Line, due: list[_Batch]) -> bool:
        with self._lock:
            if self._early is None:
                return False
            self._early += [(line, each) for each in due]
            return True

    def _is_lone(self, line: Line, due: list[_Batch]) -> bool:
        return (
            len(due) == 1 and len(due[0].jobs) == 1 and not line.on_loop and not due[0].wants_loop
        )

    def _hand_over(self, line: Line, due: list[_Batch]) -> None:
        for batch in due:
            if self._closed:
                self._refuse(batch.jobs, line)
                continue
            # Plain functions take the way over the loop too while others are on it, for the order.
            if line.on_loop or batch.wants_loop:
                line.on_loop += 1
                self._runner.on_loop(functools.partial(self._begin, line, batch))
            elif batch.jobs:
                self._in_threads(batch.jobs)

    def _refuse(self, jobs: Sequence[Job], line: Line | None = None) -> None:
        for job in jobs:
            job.fail(self._why_not())
        if line is not None:
            line.release()  # a message that is not answered keeps torch's shutdown waiting

    def _why_not(self) -> RpcError:
        if self._failure:
            return WorkerLost(self.name, self._failure)
        return NotServing(f"worker {self.name!r} has stopped")

    def _in_threads(self, jobs: Sequence[Job]) -> None:
        self._runner.in_threads([functools.partial(self._runner.work, job) for job in jobs])

    # ── on the loop ─────────────────────────────────────────────────────────────────────────────

    def _begin(self, line: Line, batch: _Batch) -> None:
        try:
            self._control(line, batch.message)  # of calls in earlier messages, so before these
        except Exception as exc:
            log.warning("a message from %s asks for what cannot be: %r", line.caller, exc)
        if self._closed:
            self._refuse(batch.jobs, line)
            return
        for on_loop, jobs in itertools.groupby(batch.jobs, _on_loop):
            if on_loop:
                for job in jobs:
                    self._runner.begin(job)
            else:
                self._in_threads([*jobs])
        with line.lock:
            line.on_loop -= 1

    def _control(self, line: Line, message: Message) -> None:
        for number in message.cancels:
            if (job := line.jobs.get(number)) is not None:
                job.abandon()
                self._runner.hold()
        for number, credit in message.credits:
            if isinstance(job := line.jobs.get(number), StreamJob):
                job.grant(credit)
        if message.goodbye is not None:
            self.peers.part(line.caller, message.goodbye)
            self._release(line.caller)

    def callers(self) -> set[str]:
        """Those for whom something runs here."""
        return {line.caller for line in [*self._lines.values()] if line.jobs}

    def tally(self) -> tuple[int, int]:
        """How many calls came in, and how many of them are running."""
        lines = [*self._lines.values()]
        return sum(line.served for line in lines), sum(len(line.jobs) for line in lines)

    def lost(self, caller: str) -> None:
        """That worker is gone: nobody waits for what runs for it."""
        for line in [*self._lines.values()]:
            if line.caller == caller:
                for job in [*line.jobs.values()]:
                    job.abandon()
                    if job.task is None:  # in a thread, or waiting behind what will never come
                        job.fail(asyncio.CancelledError())

    def replace(self, caller: str, first_link: int) -> None:
        """That worker has come back: with new links, and nothing of its predecessor's counts."""
        self.lost(caller)
        self._release(caller)
        with self._lock:
            self.peers.replace(caller, first_link)
            self._lines = {key: line for key, line in self._lines.items() if key[0] != caller}

    def _release(self, caller: str | None = None) -> None:
        with self._lock:
            lines = [line for line in self._lines.values() if caller in (line.caller, None)]
        for line in lines:
            line.release()
        self.peers.release(caller)

    def _running(self) -> list[Job]:
        jobs = [job for line in [*self._lines.values()] for job in [*line.jobs.values()]]
        return [*jobs, *self._torch_jobs]

    async def close(self, patience: float, failure: str = "") -> bool:
        """Answer everybody, and cancel what runs, which has `patience` seconds to end.

        Returns whether threads of torch's still run plain `def`s.
        """
        self._closed = True
        self._failure = failure
        self._refuse(jobs := self._running())
        for job in jobs:
            job.abandon()
        tasks = {job.task: job for job in jobs if job.task is not None}
        for task in tasks and (await asyncio.wait(tasks, timeout=patience))[1]:
            disown(task, f"{tasks[task]} of worker {self.name}")
        self._release()
        return self._runner.close(0.1, self.name)


def _on_loop(job: RpcJob) -> bool:
    return job.on_loop


def _nobody_asks(_: str) -> None:
    """Of whom somebody has heard: until a world's vigil wants to know."""
