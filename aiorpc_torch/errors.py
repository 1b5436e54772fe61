"""What can go wrong, and what to do about each.

Whatever the remote code raises arrives as itself, with a `RemoteTraceback` as its cause. The
classes here are for what happens *to* a call: plain Python, no torch, no event loop.
"""

import pickle
from collections.abc import Hashable, Iterable
from typing import Any

__all__ = (
    "BatchContractError",
    "CallTimeout",
    "NotExported",
    "NotServing",
    "QueueFull",
    "RemoteError",
    "RemoteTraceback",
    "RoundTimeout",
    "RpcError",
    "WorkerLost",
    "WorldTimeout",
)


class RpcError(Exception):
    """Something happened to a call that is not the callee's own exception."""


class CallTimeout(RpcError, TimeoutError):
    """The deadline passed before the answer came.

    A coroutine on the callee has been told to stop; a plain `def` runs to its end and its
    result is dropped. The call may have had its effect: retry only what may run twice.
    """


class WorkerLost(RpcError, ConnectionError):
    """The worker is gone. The call may or may not have run.

    `worker` is its name. Finish without it, or let it be started again (`restart=`) and
    `await me.wait_for(name)`; what it held is to be created anew.
    """

    def __init__(self, worker: str, reason: str = "the connection broke") -> None:
        super().__init__(f"worker {worker!r} is lost: {reason}")
        self.worker = worker


class NotServing(RpcError):
    """There is no serving worker, here or at the other end.

    Here: enter `worker()` or `local_world()` first. There: the peer has not entered its world
    through this library, or has left it already.
    """


class NotExported(RpcError, PermissionError):
    """The worker does not answer to this call; it has not run, and its arguments were not read.

    The worker was entered with `exports=`, and what is called is not among it: name its class, its
    function or its module there.
    """


class RemoteError(RpcError):
    """The callee raised something that cannot be raised here; its text is the cause.

    Either its class or a value in it cannot be pickled or imported here, or it is addressed to
    the callee's own process or task (`SystemExit`, `KeyboardInterrupt`, `CancelledError`, ...)
    and would be misunderstood in the caller's.
    """


class RemoteTraceback(Exception):
    """The traceback on the worker that raised: the `__cause__` of every remote exception."""

    def __init__(self, worker: str, text: str) -> None:
        super().__init__(worker, text)
        self.worker = worker
        self.text = text

    def __str__(self) -> str:
        return f"on worker {self.worker!r}:\n\n{self.text}"


class WorldTimeout(RpcError, TimeoutError):
    """The world was not complete within `start_timeout`.

    `missing` holds the ranks that did not come. Start them, or raise `start_timeout`.
    """

    def __init__(self, message: str, missing: Iterable[int] = ()) -> None:
        super().__init__(message)
        self.missing = tuple(missing)


class BatchContractError(RpcError, TypeError):
    """A `@batched` body answered something that is not one result for each caller.

    It may return a list or tuple as long as the batch, a tensor whose first dimension is the
    batch, or `Broadcast(value)`. The message names the function and what it returned.
    """


class QueueFull(RpcError):
    """`max_pending` calls wait for a batch of this function already: this one was not admitted.

    It has not run and will not: wait before the next try, or ask another worker.
    """


class RoundTimeout(RpcError, TimeoutError):
    """A round's `timeout` was over, and neither `size` nor `quorum` had contributed.

    The body has not run for it. `present` are those who had contributed, `missing` those who did
    so before and had not now: what `member` returns for a call or, without it, names of workers. A
    member that cannot be pickled, or not be read here, arrives as its `repr`. Contribute again once
    they are back, or give the round a `quorum`.
    """

    def __init__(
        self, message: str, present: Iterable[Hashable] = (), missing: Iterable[Hashable] = ()
    ) -> None:
        super().__init__(message)
        self.present = tuple(present)
        self.missing = tuple(missing)

    def __reduce__(self) -> Any:
        rest = {**vars(self)}
        members = [[*map(_packed, rest.pop(each))] for each in ("present", "missing")]
        return _read_round_timeout, (type(self), self.args, *members), rest or None


def _packed(member: Hashable) -> tuple[bytes | None, str]:
    try:
        text = repr(member)
    except Exception:  # of the user's own class
        text = object.__repr__(member)
    try:
        return pickle.dumps(member), text
    except BaseException:  # whatever pickling a user's object raises
        return None, text


def _read(packed: tuple[bytes | None, str]) -> Any:
    data, text = packed
    try:
        return text if data is None else pickle.loads(data)
    except Exception:  # its class is not importable here, or does not come back from its pickle
        return text


def _read_round_timeout(
    cls: type[RoundTimeout], args: tuple[Any, ...], present: list[Any], missing: list[Any]
) -> RoundTimeout:
    exc = cls("", map(_read, present), map(_read, missing))
    exc.args = args
    return exc


def said(exc: BaseException) -> str:
    """Return the exception's text, or its class's name if its `__str__` raises."""
    try:
        return str(exc)
    except BaseException:  # its class may be anybody's
        return type(exc).__qualname__
