"""One call being answered: what runs, and how its end is told.

A job ends in exactly one of `succeed` and `fail`, whichever comes first; a later end is dropped.
It does not know where it runs: that is the server's.
"""

import abc
import asyncio
import inspect
import time
import traceback
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch.distributed.rpc import RRef
from torch.distributed.rpc.internal import RemoteException
from torch.futures import Future

from ._exceptions import Failure
from ._wire import Packed, pack

Devices = list[torch.device]


class Host(Protocol):
    """Whom a job tells that it ended."""

    name: str

    def ended(self, job: "Job") -> bool:
        """Forget the job; False if it had ended already."""


class Job(abc.ABC):
    """`function(*args, **kwargs)` for a caller who waits."""

    def __init__(
        self,
        host: Host,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        self.host = host
        self.function = function
        self.args = args
        self.kwargs = kwargs
        self.key: Any = self
        self.deadline: float | None = None  # time.monotonic()
        self.abandoned = False
        self.task: asyncio.Future[Any] | None = None  # what runs it, on the loop

    def __repr__(self) -> str:
        name = getattr(self.function, "__qualname__", repr(self.function))
        return f"<{type(self).__name__} {name}{', abandoned' if self.abandoned else ''}>"

    def abandon(self) -> None:
        """Nobody waits any more: stop what can be stopped. On the loop's thread."""
        self.abandoned = True
        if self.task is not None:
            self.task.cancel()

    def is_late(self) -> bool:
        """Whether its time is over."""
        return self.deadline is not None and time.monotonic() >= self.deadline

    def call(self) -> Any:
        """Run the function, in whichever thread this is."""
        return self.function(*self.args, **self.kwargs)

    def succeed(self, value: Any) -> None:
        """The function returned `value`."""
        if self.host.ended(self):
            self.deliver(self.answer(value))

    def fail(self, exc: BaseException) -> None:
        """The function raised `exc`."""
        if self.host.ended(self):
            self.deliver(self.error(exc))

    @abc.abstractmethod
    def deliver(self, answer: Any) -> None:
        """Send what `answer` or `error` made."""

    @abc.abstractmethod
    def answer(self, value: Any) -> Any:
        """What the caller is sent for `value`. Never raises."""

    @abc.abstractmethod
    def error(self, exc: BaseException) -> Any:
        """What the caller is sent for `exc`. Never raises."""


class RpcJob(Job):
    """A call that came in a message of ours: answered by a `Packed` or a `Failure`."""

    as_rref = False
    take: Callable[[Packed | Failure], None]

    def deliver(self, answer: Packed | Failure) -> None:
        self.take(answer)

    def answer(self, value: Any) -> Packed | Failure:
        try:
            return pack(RRef(value) if self.as_rref else value)
        except Exception as exc:  # whatever pickling a user's object raises
            exc.add_note(f"(while pickling the result of {self.function!r})")
            return self.error(exc)

    def error(self, exc: BaseException) -> Failure:
        return Failure.of(exc, self.host.name)


class TorchJob(Job):
    """A call that plain torch made: answered as torch itself answers, by a future."""

    # Never set_exception: torch would hand the exception to the caller as a *value* (seen on 2.13
    # and 2.15, tests/test_interop.py).
    reply: Future[Any]

    def deliver(self, answer: Any) -> None:
        self.reply.set_result(answer)

    def answer(self, value: Any) -> Any:
        return value

    def error(self, exc: BaseException) -> RemoteException:
        text = "".join(traceback.format_exception(exc))
        message = f"On worker {self.host.name}:\n{exc!r}\n{text}"
        # torch decodes the message with unicode_escape (internal.py, 2.11 to 2.15), which garbles
        # what is not ASCII and chokes on a backslash; encoded first, it comes out as it was.
        return RemoteException(message.encode("unicode_escape").decode("ascii"), type(exc))


# ── where a job runs ────────────────────────────────────────────────────────────────────────────

_WANTS_LOOP = "_aiorpc_wants_loop"


def wants_loop(function: Any) -> None:
    """Mark a callable that returns an awaitable when it is called on an event loop."""
    setattr(function, _WANTS_LOOP, True)


def runs_on_loop(function: Callable[..., Any]) -> bool:
    """Whether a call of `function` starts on the loop and not in a thread."""
    return inspect.iscoroutinefunction(function) or getattr(function, _WANTS_LOOP, False)
