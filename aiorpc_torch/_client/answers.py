"""Errors of calls: what an answer, or the end of a connection, stands for."""

from types import MethodType
from typing import Any, NoReturn, TypeGuard

from .._endpoint import entry_points
from .._text import printable
from .._wire.exceptions import RECEIVER, RemoteFailure, text_of, try_add_note
from .._wire.pickling import CallAborted
from .._wire.targets import CreateTarget, MakeTarget, Target, call_name
from ..errors import (
    NotInWorld,
    RemoteError,
    RemoteTraceback,
    RpcError,
    WorkerGone,
    WorkerLeft,
    WorkerLost,
)


def error_of_close(peer: str, what: str, text: str) -> RpcError:
    """Return the error of calls that were pending when the peer's last frame came."""
    if what == "failed":
        summary, _, rest = text.partition("\n")
        error = WorkerLost(peer, printable(summary))
        error.__cause__ = RemoteTraceback(peer, rest) if rest else None
        return error
    text = printable(text)
    if what == "broken":
        return RemoteError(f"worker {peer!r} has closed the connection: {text}")
    if what == "detached":
        return WorkerLeft(peer, "it has left attach(), and this call was cancelled")
    return NotInWorld(text) if what == "replaced" else WorkerLeft(peer, text)


def raise_aborted(aborted: CallAborted, name: str) -> NoReturn:
    """Raise the error of a call without a reply; that of a worker which is gone names the call."""
    error = aborted.error
    if type(error) is NotInWorld:
        raise NotInWorld(*error.args, may_have_run=aborted.was_sent) from None
    if isinstance(error, WorkerGone) and error.method is None:
        raise type(error)(
            error.worker,
            error.reason,
            method=name,
            may_have_run=aborted.was_sent and error.may_have_run,
            may_return=error.may_return,
        ) from error
    aborted.raise_()


def is_own(exc: BaseException | None) -> TypeGuard[WorkerGone]:
    """Return whether the call's own worker is gone; False if its method has raised that.

    The method's exception has a RemoteTraceback as its cause.
    """
    return isinstance(exc, WorkerGone) and not isinstance(exc.__cause__, RemoteTraceback)


def is_interrupted(exc: BaseException | None) -> TypeGuard[WorkerGone]:
    """Return whether a call's own worker was lost, or its connection.

    In both cases the worker may be waited for (`wait_until_alive`), and called again.
    """
    return is_own(exc) and exc.may_return


def exception_of(answer: Any, target: Target) -> BaseException | None:
    """Return the exception that the answer to a call of `target` stands for, None for a value."""
    if type(answer) is RemoteFailure:
        found = answer.exception()
        is_created = isinstance(target, CreateTarget)
        is_type_error = isinstance(found, TypeError) and not is_created
        if is_type_error and "positional argument" in text_of(found):
            function = getattr(target, "function", None)
            # The method of an object here got the remote object as an argument.
            if isinstance(function, MethodType) and not isinstance(function.__self__, type):
                name = function.__qualname__
                text = f"(this is a method of an object here: pass the class's, `{name}`)"
                try_add_note(found, text)
        makes = isinstance(target, CreateTarget | MakeTarget)
        if makes and answer.worker == RECEIVER and isinstance(found, ReferenceError):
            return _error_of_made(found, target)
        return found
    if type(answer) is CallAborted:
        try:
            raise_aborted(answer, call_name(target))
        except BaseException as exc:
            return exc
    return None


def _error_of_made(exc: ReferenceError, target: Target) -> Exception:
    """Return the error of a call that has made an object on a worker which is gone by now."""
    worker = getattr(exc, "worker", None)
    if worker is None or (node := entry_points.here) is None:
        return exc
    kind = WorkerLeft if node.pool.has_left(worker) else WorkerLost
    return kind(worker, "the object that it has made is gone", method=call_name(target))
