"""The callee: messages in, each sender's in the order in which it sent them, and answers out.

`accept` runs on a thread of torch's and hands over to the runner. The room knows nothing of how a
message comes in, how a caller waits, or what `@batched` is: only that some callables want the loop.
"""

import asyncio
import functools
import logging
import threading
from collections import defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

from torch.futures import Future

from ._deadline import deadline_after
from ._jobs import Devices, Job, RpcJob, TorchJob, runs_on_loop
from ._lane import Lane
from ._runner import Runner
from ._wire import Call, Cancel, Create, Goodbye, Message
from .errors import NotServing

log = logging.getLogger("aiorpc_torch")


class _Start(NamedTuple):
    """How a message takes effect once its turn has come."""

    run: Callable[[], None]
    on_loop: bool = True


class Server:
    """Answers calls on the loop that it was made on, from `open` until `close`."""

    def __init__(self, name: str, threads: int, devices: Devices) -> None:
        self.name = name
        self.goodbyes: dict[str, Goodbye] = {}  # each peer's latest
        self._farewells: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)
        self._devices = devices
        self._runner = Runner(threads)
        self._lock = threading.Lock()
        self._lanes: defaultdict[str, Lane[_Start]] = defaultdict(Lane)
        self._early: list[_Start] | None = []  # until `open`
        self._jobs: dict[Any, Job] = {}

    def __repr__(self) -> str:
        return f"<Server {self.name}: {len(self._jobs)} running, {self._runner}>"

    def open(self) -> None:
        """This process has joined its world: start what its quicker peers have sent already."""
        with self._lock:
            early, self._early = self._early or [], None
            for step in early:
                self._hand_over(step)

    # ── on a thread of torch's ──────────────────────────────────────────────────────────────────

    def accept(self, message: Message) -> "Future[Any]":
        """Take a message in. A call's future completes with its `Packed` or `Failure`."""
        if isinstance(message, Call):
            return self._accept_call(message)
        if isinstance(message, Cancel):
            step = functools.partial(self._abandon, (message.caller, message.call))
        else:
            step = functools.partial(self._note_goodbye, message)
        self._in_order(message, _Start(step))
        return completed(None)

    def accept_torch(
        self, function: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> "Future[Any]":
        """Run `function`, which wants the loop, for a plain torch client."""
        job = TorchJob(self, function, args, kwargs, self._devices)
        self._jobs[job.key] = job
        self._runner.on_loop(functools.partial(self._runner.begin, job))
        return job.reply

    def lend_thread(self, task: Callable[[], None]) -> None:
        """Run `task` in one of the threads for plain `def`s. From any thread."""
        with self._lock:
            self._runner.in_thread(task)

    def _accept_call(self, call: Call) -> "Future[Any]":
        job = self._job(call)
        if runs_on_loop(job.function):
            start = _Start(functools.partial(self._runner.begin, job))
        else:
            start = _Start(functools.partial(self._runner.work, job), on_loop=False)
        self._in_order(call, start)
        return job.reply

    def _job(self, call: Call) -> Job:
        as_rref = False
        try:
            target, args, kwargs = call.work.get()
            function = target.bind()
            as_rref = isinstance(target, Create)
        except BaseException as exc:  # it cannot be read, or not found: that is its answer
            function, args, kwargs = _raise, (exc,), {}
        job = RpcJob(self, function, args, kwargs, self._devices)
        job.key, job.as_rref = (call.caller, call.seq), as_rref
        job.deadline = deadline_after(call.budget)
        self._jobs[job.key] = job
        return job

    def _in_order(self, message: Message, start: _Start) -> None:
        with self._lock:
            due = self._lanes[message.caller].arrived(message.seq, start)
            if self._early is not None:
                self._early += due
                return
            # Here and now, while threads are idle and nobody else's turn has come with ours: a
            # lone `def` is answered without a change of threads.
            here = len(due) == 1 and not start.on_loop and self._runner.borrow()
            if not here:
                for step in due:
                    self._hand_over(step)
        if here:
            self._runner.here(start.run)

    def _hand_over(self, step: _Start) -> None:
        if step.on_loop:
            self._runner.on_loop(step.run)
        else:
            self._runner.in_thread(step.run)

    # ── on the loop ─────────────────────────────────────────────────────────────────────────────

    def farewell(self, peer: str) -> asyncio.Event:
        """Set once `peer` has said goodbye, or was found lost."""
        return self._farewells[peer]

    def _note_goodbye(self, message: Goodbye) -> None:
        self.goodbyes[message.caller] = message
        self.farewell(message.caller).set()

    def _abandon(self, key: Any) -> None:
        job = self._jobs.get(key)
        if job is not None:
            job.abandon()

    def ended(self, job: Job) -> bool:
        """Forget `job`; False if it had ended already. From any thread."""
        return self._jobs.pop(job.key, None) is not None

    async def close(self, patience: float) -> None:
        """Cancel what runs, and answer everybody. Coroutines have `patience` seconds to end."""
        jobs = list(self._jobs.values())
        for job in jobs:
            job.abandon()
        tasks = [job.task for job in jobs if job.task is not None]
        if tasks:
            await asyncio.wait(tasks, timeout=patience)
        for job in list(self._jobs.values()):
            log.warning("%s did not end when its worker %s stopped", job, self.name)
            job.fail(NotServing(f"worker {self.name!r} has stopped"))
        if stuck := self._runner.close(patience=0.1):
            log.warning("%d plain `def` calls still run on worker %s", stuck, self.name)


def _raise(exc: BaseException) -> None:
    raise exc


def completed(value: Any) -> "Future[Any]":
    """A torch future that is done."""
    future: Future[Any] = Future()
    future.set_result(value)
    return future
