"""Exceptions of calls, and the remedy for each.

An exception that remote code raises arrives as itself, with a `RemoteTraceback` as its cause. The
classes here are for other failures of a call.
"""

import pickle
from collections.abc import Hashable, Iterable, Sequence
from typing import Any


class RpcError(Exception):
    """Base class: the call failed for a reason other than an exception in remote code.

    Attributes:
        may_have_run: False if the call was not sent, or was not started: it may be made again.
    """

    may_have_run = True


class CallTimeout(RpcError, TimeoutError):
    """Call timeout: the deadline passed before the result arrived.

    On the callee a coroutine is cancelled; a plain `def` runs to its end, and its result is
    dropped. The call may have had its effect: retry only what may run twice. The message tells at
    which line of which method the call stood shortly before, and what that waited for.

    Attributes:
        worker: name of the worker, None if no call is concerned.
        method: name of the method or function, with its class where that is known; None if no call
            is concerned.
        may_have_run: False if the call was not sent, or was not started.
    """

    def __init__(
        self,
        *args: object,
        worker: str | None = None,
        method: str | None = None,
        may_have_run: bool = True,
    ) -> None:
        super().__init__(*args)
        self.worker = worker
        self.method = method
        self.may_have_run = may_have_run


class NotInWorld(RpcError, RuntimeError):
    """No world: this process is in none, has left it, or is a fork of a worker's process.

    Enter `worker()`, `local_world()` or `attach()` first. A fork cannot: start a new interpreter.

    Attributes:
        may_have_run: True if the call was sent before this process left.
    """

    may_have_run = False

    def __init__(self, *args: object, may_have_run: bool = False) -> None:
        super().__init__(*args)
        self.may_have_run = may_have_run


class UnknownWorker(RpcError, ValueError):
    """Unknown worker: this world has none of that name or rank. The call was not sent.

    The message lists the workers. One that joins is known once it has entered the world.
    """

    may_have_run = False


class NoMembers(RpcError, LookupError):
    """No members: `any()` of `members(name)` has none to call now. The call was not sent.

    `await members(name).wait()` waits for one.
    """

    may_have_run = False


class WorkerGone(RpcError, ConnectionError):
    """Base class: the worker of a call is lost, has left, or cannot be reached.

    Attributes:
        worker: name of the worker.
        reason: reason of the end, "" if there is none but the class.
        method: name of the method or function that was called, with its class where that is known;
            None if no call is concerned.
        may_have_run: False if the call was not sent.
        may_return: True if the worker may answer later calls: it was lost, and may be alive or be
            replaced, or only a connection to it was closed. False for one that has left, though
            another process may be started under its name.
    """

    may_return = False
    _HAPPENED = "is gone"
    _REASON = ""  # if none is given

    def __init__(
        self,
        worker: str,
        reason: str | None = None,
        *,
        method: str | None = None,
        may_have_run: bool | None = None,
        may_return: bool | None = None,
    ) -> None:
        self.may_have_run = type(self).may_have_run if may_have_run is None else may_have_run
        self.may_return = type(self).may_return if may_return is None else may_return
        reason = self._REASON if reason is None else reason
        because = f": {reason}" if reason else ""
        call = f"; {method} {'may have run' if self.may_have_run else 'was not sent'}"
        what = f"worker {worker!r} {self._HAPPENED}{because}{call if method else ''}"
        super().__init__(what)
        self.worker = worker
        self.reason = reason
        self.method = method

    def __reduce__(self) -> Any:
        return _read_worker_gone, (type(self), self.args), vars(self)


class WorkerLost(WorkerGone):
    """Loss of a worker: it has died or is unreachable. A call that was sent may have run.

    Continue without it; or restart it (`max_restarts=`), `await me.wait_for(name)`, and create its
    objects again, which `supervised` does.
    """

    may_return = True
    _HAPPENED = "is lost"
    _REASON = "the connection broke"


class WorkerLeft(WorkerGone):
    """Departure of a worker: it has left its world in order. Call another one.

    It also has if its process is in no world of this library, or leaves `attach()` while a call
    runs there.
    """

    _HAPPENED = "has left its world"


class WorkerUnreachable(WorkerGone):
    """Failed connection: the worker may be alive, and this process cannot connect to it.

    The call was not sent, and the reason names an address to open, a certificate, or what is
    missing at the worker. Or a connection between hosts carries nothing any more, though the worker
    is alive: its calls may have run, and the next call connects again.
    """

    may_have_run = False
    _HAPPENED = "cannot be reached"


class NotExported(RpcError, PermissionError):
    """Call of what the worker does not export. It has not run, and its arguments were not read.

    Add the class, the function or its module to the `exports=` of that worker.
    """

    may_have_run = False


class RemoteError(RpcError):
    """Remote exception that cannot be raised here; the cause has its text.

    Either the exception cannot be pickled there or read here. Or it would stop the process or task
    of the caller (`SystemExit`, `KeyboardInterrupt`, `CancelledError`, ...).
    """


class RemoteTraceback(Exception):
    """The traceback on the worker that raised: the `__cause__` of every remote exception.

    Attributes:
        worker: name of the worker.
        text: the formatted traceback.
    """

    def __init__(self, worker: str, text: str) -> None:
        super().__init__(worker, text)
        self.worker = worker
        self.text = text

    def __str__(self) -> str:
        return f"on worker {self.worker!r}:\n\n{self.text}"


class WorldTimeout(RpcError, TimeoutError):
    """Start timeout: the world was not complete within `start_timeout`.

    Start the missing workers, or raise `start_timeout`.

    Attributes:
        missing: ranks that did not register.
    """

    may_have_run = False

    def __init__(self, message: str, missing: Iterable[int] = ()) -> None:
        super().__init__(message)
        self.missing = tuple(missing)


class BatchContractError(RpcError, TypeError):
    """Invalid result of a `@batched` function: not one for each caller.

    Return a list or tuple as long as the batch, a tensor whose first dimension is the batch, or
    `Broadcast(value)`. The message names the function and what it returned.
    """


class QueueFull(RpcError):
    """Full queue: `max_pending` calls of the function wait already. This call has not run.

    Retry later, call another worker, or raise `max_pending`.
    """

    may_have_run = False


class RoundTimeout(RpcError, TimeoutError):
    """Round timeout: neither `size` nor `quorum` members contributed within `timeout`.

    The function has not run for this round. Contribute again once the missing members are back, or
    give the round a `quorum`. Members are the values of `member`, or else names of workers. A
    member that cannot be pickled there, or read here, arrives as its `repr`.

    Attributes:
        present: members that had contributed.
        missing: the most recent past contributors, up to the number needed.
    """

    may_have_run = False

    def __init__(
        self, message: str, present: Iterable[Hashable] = (), missing: Iterable[Hashable] = ()
    ) -> None:
        super().__init__(message)
        self.present = tuple(present)
        self.missing = tuple(missing)

    def __reduce__(self) -> Any:
        rest = {**vars(self)}
        members = [[*map(_dump_member, rest.pop(each))] for each in ("present", "missing")]
        return _read_round_timeout, (type(self), self.args, *members), rest or None


class GroupError(ExceptionGroup[Exception]):
    """Failure of members of a group: the exceptions of those that failed, in the group's order.

    Each exception has the note "member 2 of 3, on worker 'w1'". `split`, `subgroup`, `derive` and
    `except*` give GroupErrors with the same `results`. A result that cannot be pickled, such as an
    RRef, reaches another worker as its `repr`.

    Attributes:
        results: result of each member by position: its value, or its exception.
    """

    def __new__(
        cls, message: str, exceptions: Sequence[Exception], results: Iterable[Any] = ()
    ) -> "GroupError":
        """Return the error of `exceptions`, which are not empty."""
        return super().__new__(cls, message, exceptions)

    def __init__(
        self, message: str, exceptions: Sequence[Exception], results: Iterable[Any] = ()
    ) -> None:
        super().__init__(message, exceptions)
        self.results = [*results]

    def derive(self, excs: Sequence[Exception], /) -> "GroupError":  # type: ignore[override]
        """Return a GroupError of other exceptions, with the same `results`."""
        return type(self)(self.message, excs, self.results)

    def __reduce__(self) -> Any:
        rest = {**vars(self)}
        results = rest.pop("results")
        failed = {id(exc): position for position, exc in enumerate(self.exceptions)}
        packed = [failed.get(id(each), -1) for each in results]
        values = [
            None if at >= 0 else _dump_member(each)
            for at, each in zip(packed, results, strict=True)
        ]
        arguments = self.message, [*self.exceptions], packed, values
        return _read_group_error, (type(self), *arguments), rest or None


def _read_group_error(
    cls: type[GroupError],
    message: str,
    exceptions: list[Exception],
    failed: list[int],
    values: list[Any],
) -> GroupError:
    """Return the GroupError that was pickled; `failed` has positions of exceptions, or -1."""
    results = (
        _load_member(value) if at < 0 else exceptions[at]
        for at, value in zip(failed, values, strict=True)
    )
    return cls(message, exceptions, results)


def _dump_member(member: object) -> tuple[bytes | None, str]:
    try:
        text = repr(member)
    except Exception:  # raised by the user's class
        text = object.__repr__(member)
    try:
        return pickle.dumps(member), text
    except BaseException:  # raised by the user's class
        return None, text


def _load_member(packed: tuple[bytes | None, str]) -> Any:
    data, text = packed
    try:
        return text if data is None else pickle.loads(data)
    except Exception:  # the class cannot be imported here, or its unpickling fails
        return text


def _read_round_timeout(
    cls: type[RoundTimeout], args: tuple[Any, ...], present: list[Any], missing: list[Any]
) -> RoundTimeout:
    exc = cls("", map(_load_member, present), map(_load_member, missing))
    exc.args = args
    return exc


def _read_worker_gone(cls: type[WorkerGone], args: tuple[Any, ...]) -> WorkerGone:
    exc = cls.__new__(cls)  # a subclass may have another `__init__`
    ConnectionError.__init__(exc, *args)
    return exc


def safe_str(exc: BaseException) -> str:
    """Return the exception's text, or its class's name if its `__str__` raises."""
    try:
        return str(exc)
    except BaseException:  # raised by the user's class
        return type(exc).__qualname__
