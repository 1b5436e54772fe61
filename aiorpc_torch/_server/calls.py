"""One call being answered: what runs, and how its end is told.

A job ends in exactly one of `succeed` and `fail`, whichever comes first; a later end is dropped.
It does not know where it runs: that is the runner's.
"""

import abc
import asyncio
import functools
import inspect
import time
import traceback
from collections.abc import Callable
from typing import Any

from torch.distributed.rpc import RRef
from torch.futures import Future

from .._aio.deadlines import adopt
from .._protocol.ancestry import Errand, set_out
from .._protocol.columns import FAILED, PLAIN, Shared, cell, loose
from .._protocol.exceptions import Failure, note
from .._protocol.messages import Work
from .._protocol.recording import Recording, enter
from .._torch.compat import RemoteException
from .._torch.cuda import Fence
from .reply import Reply
from .session import Session

_TAKEN: Work = (), {}

Join = Callable[[Callable[[Any], None], Work, str], Callable[[], object]]
"""Joins a batch: told how to settle the caller, its arguments and its worker, returns how to leave
again.
"""


class Job(abc.ABC):
    """`function(*args, **kwargs)` for a caller who waits. `deadline` is a `time.monotonic()`."""

    __slots__ = (
        "abandoned",
        "begun",
        "deadline",
        "errand",
        "fence",
        "function",
        "join",
        "leave",
        "recording",
        "task",
        "work",
    )

    def __init__(
        self, function: Callable[..., Any], work: Work, deadline: float | None = None
    ) -> None:
        self.function = function
        self.work = work
        self.deadline = deadline
        self.abandoned = False
        self.begun = False
        self.task: asyncio.Task[None] | None = None  # what runs it, on the loop
        self.join: Join | None = None  # a batch, instead of being run
        self.leave: Callable[[], object] | None = None  # gives up its place in a batch
        self.errand: Errand | None = None  # for the batches that wait for it
        self.fence: Fence | None = None  # behind which its arguments are ready
        self.recording: Recording | None = None  # of an autograd context, if it was called in one

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name}{', abandoned' if self.abandoned else ''}>"

    @property
    def name(self) -> str:
        """The function's."""
        try:
            return self.function.__qualname__
        except AttributeError:  # a partial's, say
            return repr(self.function)

    def abandon(self) -> None:
        """Nobody waits any more: stop what can be stopped. On the loop's thread."""
        self.abandoned = True
        if self.leave is not None:
            self.leave()
            self.fail(asyncio.CancelledError())
        elif self.task is not None and self.begun:  # else it sees it when it begins
            self.task.cancel()

    def is_late(self) -> bool:
        """Whether its time is over."""
        return self.deadline is not None and time.monotonic() >= self.deadline

    def call(self) -> Any:
        """Run the function, in whichever thread and context this is."""
        if self.deadline is not None:
            adopt(self.deadline)
        self.set_out()
        args, kwargs = self.take_work()
        return self.function(*args, **kwargs)

    def set_out(self) -> None:
        """From now on, this context is a part of the call."""
        if self.errand is not None:
            set_out((self.errand,))
        if self.recording is not None:
            enter(self.recording)

    def take_work(self) -> Work:
        """The arguments, once: a call may wait for long, and they are its own from now on.

        In the thread that makes use of them.
        """
        if self.fence is not None:
            self.fence.wait()
            self.fence = None
        work, self.work = self.work, _TAKEN
        return work

    def settle(self, answer: Any) -> None:
        """End with what a batch has for this caller: a value, or an exception to raise."""
        if isinstance(answer, BaseException):
            self.fail(answer)
        else:
            self.succeed(answer)

    @property
    def caller(self) -> str:
        """The worker that waits."""
        return "a torch client"

    @abc.abstractmethod
    def succeed(self, value: Any) -> None:
        """The function returned `value`."""

    @abc.abstractmethod
    def fail(self, exc: BaseException) -> None:
        """The function raised `exc`."""


class RpcJob(Job):
    """Call `number` of a session; `reply` answers it if it came by torch RPC."""

    __slots__ = ("key", "number", "on_loop", "reply", "session", "worker")

    def __init__(
        self,
        session: Session,
        reply: Any,
        number: int,
        function: Callable[..., Any],
        work: Work,
        deadline: float | None,
        worker: str,
        on_loop: bool,
        join: Join | None = None,
    ) -> None:
        # All of Job's own, once a call: half a microsecond.
        self.function = function
        self.work = work
        self.deadline = deadline
        self.abandoned = self.begun = False
        self.task = self.leave = self.errand = self.fence = None
        self.recording = reply.recording if type(reply) is Reply else None
        self.on_loop = on_loop
        self.join = join
        self.key: Any = None
        self.session = session
        self.reply = reply
        self.number = number
        self.worker = worker
        session.jobs[number] = self

    @property
    def caller(self) -> str:
        return self.session.caller

    def grant(self, credit: int) -> None:
        """Its caller takes more of what it yields: nothing to a call that yields nothing."""

    def succeed(self, value: Any) -> None:
        try:
            kind, content = self._cell(value)
        except BaseException as exc:  # whatever pickling a user's object raises
            note(exc, f"(while pickling the result of {self.name}{_hint(value)})")
            self.fail(exc)
        else:
            self._end(kind, content)

    def fail(self, exc: BaseException) -> None:
        if self.number in self.session.jobs:
            self._end(FAILED, Failure.of(exc, self.worker))

    def _cell(self, value: Any) -> tuple[Any, Any]:
        kind, content = value.cell() if type(value) is Shared else cell(value)
        if kind is PLAIN or type(kind) is tuple:  # mostly
            return kind, content
        if tensors := loose(kind, content):
            self.session.check(tensors)
        return kind, content

    def _end(self, kind: Any, content: Any) -> None:
        if self.session.jobs.pop(self.number, None) is not None:
            self.leave = None
            self.session.done((self.number, kind, content), self.reply)


def _hint(value: Any) -> str:
    is_stream = inspect.isgenerator(value) or inspect.isasyncgen(value)
    return ", which is a stream: iterate it with `async for`" if is_stream else ""


class CreateJob(RpcJob):
    """A call whose result stays here: the caller gets an RRef of it."""

    __slots__ = ()

    def _cell(self, value: Any) -> tuple[Any, Any]:
        return cell(RRef(value.value if type(value) is Shared else value))


class TorchJob(Job):
    """A call that plain torch made: answered as torch itself answers, by a future."""

    # Never set_exception: torch would hand the exception to the caller as a *value* (seen on 2.13
    # and 2.15, tests/test_interop.py).
    __slots__ = ("_open", "reply", "worker")

    def __init__(
        self,
        open_jobs: "set[TorchJob]",
        reply: "Future[Any]",
        function: Callable[..., Any],
        work: Work,
        worker: str,
    ) -> None:
        super().__init__(function, work)
        self.reply = reply
        self.worker = worker
        self._open = open_jobs
        open_jobs.add(self)

    def succeed(self, value: Any) -> None:
        self._end(value)

    def fail(self, exc: BaseException) -> None:
        text = "".join(traceback.format_exception(exc))
        message = f"On worker {self.worker}:\n{exc!r}\n{text}"
        # torch decodes the message with unicode_escape (internal.py, 2.11 to 2.15), which garbles
        # what is not ASCII and chokes on a backslash; encoded first, it comes out as it was.
        message = message.encode("unicode_escape").decode("ascii")
        self._end(RemoteException(message, type(exc)))

    def _end(self, answer: Any) -> None:
        try:
            self._open.remove(self)
        except KeyError:  # it has ended already
            return
        self.reply.set_result(answer)


# ── where a job runs ────────────────────────────────────────────────────────────────────────────


def join_of(function: Callable[..., Any]) -> Join | None:
    """How a caller joins the batches of `function`, if it has any."""
    inner: Any = getattr(function, "__func__", function)  # a method's
    if not hasattr(type(inner), "_aiorpc_join"):
        return None
    return functools.partial(inner._aiorpc_join, getattr(function, "__self__", None))
