"""The callee: messages in, each sender's in the order in which it sent them, and answers out.

`accept` runs on a thread of torch's and hands over to the runner. The room knows nothing of how a
message comes in, how a caller waits, or what `@batched` is: only that some callables want the loop.
"""

import asyncio
import functools
import itertools
import logging
import threading
from collections import defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

from torch.futures import Future

from ._deadline import deadline_after
from ._desk import Carrier, Desk
from ._handles import Objects
from ._jobs import Devices, Job, RpcJob, TorchJob, runs_on_loop
from ._lane import Lane
from ._runner import Runner
from ._wire import Call, Cancel, Create, Goodbye, Item, Message
from .errors import NotServing

log = logging.getLogger("aiorpc_torch")

# A call's number, its Packed or Failure, and the number of an object that this side now knows.
Answer = tuple[int, Any, int | None]


class _Start(NamedTuple):
    """How an item of a message takes effect once its turn has come."""

    run: Callable[[], None]
    on_loop: bool = True


class _Caller:
    """What is kept for one link of one caller: its messages' order, its answers, its objects."""

    def __init__(self) -> None:
        self.lane: Lane[list[_Start]] = Lane()
        self.desk: Desk[Answer] = Desk(_answer)
        self.objects = Objects()
        self.flushing = False


class Server:
    """Answers calls on the loop that it was made on, from `open` until `close`."""

    def __init__(self, name: str, threads: int, devices: Devices) -> None:
        self.name = name
        self.goodbyes: dict[str, Goodbye] = {}  # each peer's latest
        self._farewells: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)
        self._devices = devices
        self._runner = Runner(threads)
        self._lock = threading.Lock()
        self._callers: defaultdict[tuple[str, int], _Caller] = defaultdict(_Caller)
        self._early: list[_Start] | None = []  # until `open`
        self._jobs: dict[Any, Job] = {}

    def __repr__(self) -> str:
        return f"<Server {self.name}: {len(self._jobs)} running, {self._runner}>"

    def open(self) -> None:
        """This process has joined its world: start what its quicker peers have sent already."""
        with self._lock:
            early, self._early = self._early or [], None
            self._hand_over(early)

    # ── on a thread of torch's ──────────────────────────────────────────────────────────────────

    def accept(self, message: Message) -> "Future[Any]":
        """Take a message in. Its future completes with the outcomes that it carries back."""
        reply: Future[Any] = Future(devices=[*self._devices])
        with self._lock:
            caller = self._callers[message.caller, message.link]
        calls = sum(isinstance(item, Call) for item in message.items)
        carrier = caller.desk.admit(reply, calls, poll=not message.items)
        starts = [self._start(message, item, caller, carrier) for item in message.items]
        self._in_order(message, caller, starts)
        return reply

    def accept_torch(
        self, function: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> "Future[Any]":
        """Run `function`, which wants the loop, for a plain torch client."""
        job = TorchJob(self, function, args, kwargs)
        job.reply = Future(devices=[*self._devices])
        self._jobs[job.key] = job
        self._runner.on_loop(functools.partial(self._runner.begin, job))
        return job.reply

    def lend_thread(self, task: Callable[[], None]) -> None:
        """Run `task` in one of the threads for plain `def`s. From any thread."""
        with self._lock:
            self._runner.in_thread(task)

    def _start(
        self, message: Message, item: Item, caller: _Caller, carrier: "Carrier[Answer]"
    ) -> _Start:
        link = (message.caller, message.link)
        if isinstance(item, Cancel):
            return _Start(functools.partial(self._abandon, (*link, item.number)))
        if isinstance(item, Goodbye):
            return _Start(functools.partial(self._note_goodbye, message.caller, item))
        job, learned = self._job(item, caller.objects)
        job.key = (*link, item.number)
        job.take = lambda answer: self._done(caller, carrier, (item.number, answer, learned))
        self._jobs[job.key] = job
        if runs_on_loop(job.function):
            return _Start(functools.partial(self._runner.begin, job))
        return _Start(functools.partial(self._runner.work, job), on_loop=False)

    def _job(self, call: Call, objects: Objects) -> tuple[RpcJob, int | None]:
        as_rref, learned = False, None
        try:
            target, args, kwargs = call.work.get()
            found = None if target.on is None else objects.find(target.on)
            learned = objects.learn(target.on, found)
            function = target.bind(found)
            as_rref = isinstance(target, Create)
        except BaseException as exc:  # it cannot be read, or not found: that is its answer
            function, args, kwargs = _raise, (exc,), {}
        job = RpcJob(self, function, args, kwargs)
        job.as_rref, job.deadline = as_rref, deadline_after(call.budget)
        return job, learned

    def _in_order(self, message: Message, caller: _Caller, starts: list[_Start]) -> None:
        with self._lock:
            due = [*itertools.chain(*caller.lane.arrived(message.seq, starts))]
            if self._early is not None:
                self._early += due
                return
            # Here and now, while threads are idle and nobody else's turn has come with ours: a
            # lone `def` is answered without a change of threads.
            here = len(due) == 1 and not due[0].on_loop and self._runner.borrow()
            if not here:
                self._hand_over(due)
        if here:
            self._runner.here(due[0].run)

    def _hand_over(self, starts: list[_Start]) -> None:
        for on_loop, group in itertools.groupby(starts, key=lambda start: start.on_loop):
            steps = [start.run for start in group]
            if on_loop:
                self._runner.on_loop(functools.partial(_run_all, steps))
            else:
                for step in steps:
                    self._runner.in_thread(step)

    # ── on the thread in which a call ends ──────────────────────────────────────────────────────

    def _done(self, caller: _Caller, carrier: "Carrier[Answer]", answer: Answer) -> None:
        if caller.desk.done(carrier, answer) and not caller.flushing:
            # At the end of this turn of the loop: with all that the turn brings.
            caller.flushing = True
            self._runner.on_loop(functools.partial(self._flush, caller))

    def ended(self, job: Job) -> bool:
        """Forget `job`; False if it had ended already."""
        return self._jobs.pop(job.key, None) is not None

    # ── on the loop ─────────────────────────────────────────────────────────────────────────────

    def farewell(self, peer: str) -> asyncio.Event:
        """Set once `peer` has said goodbye, or was found lost."""
        return self._farewells[peer]

    def _flush(self, caller: _Caller) -> None:
        caller.flushing = False
        caller.desk.flush()

    def _note_goodbye(self, name: str, goodbye: Goodbye) -> None:
        self.goodbyes[name] = goodbye
        self.farewell(name).set()
        self._release(name)

    def _release(self, name: str | None = None) -> None:
        with self._lock:
            desks = [c.desk for (caller, _), c in self._callers.items() if name in (caller, None)]
        for desk in desks:
            desk.release()

    def _abandon(self, key: Any) -> None:
        job = self._jobs.get(key)
        if job is not None:
            job.abandon()

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
        self._release()
        if stuck := self._runner.close(patience=0.1):
            log.warning("%d plain `def` calls still run on worker %s", stuck, self.name)


def _raise(exc: BaseException) -> None:
    raise exc


def _run_all(steps: list[Callable[[], None]]) -> None:
    for step in steps:
        step()


def _answer(reply: "Future[Any]", answers: list[Answer]) -> None:
    reply.set_result(answers)
