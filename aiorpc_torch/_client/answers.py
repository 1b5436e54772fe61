"""Results and errors that do not come in frames of results: torch's replies, and last frames."""

import logging
from types import MethodType
from typing import Any, NoReturn, TypeGuard

from .._context.recording import without_gradient_parts
from .._text import printable
from .._torch.cuda import note_delivered
from .._torch.transport import classify_error
from .._wire.exceptions import RemoteFailure, try_add_note
from .._wire.messages import decode_reply
from .._wire.payloads import detach_data
from .._wire.pickling import CallAborted
from .._wire.targets import CreateTarget, Target, call_name
from .._wire.tensors import INLINE_BYTES
from ..errors import (
    NotInWorld,
    RemoteError,
    RemoteTraceback,
    RpcError,
    WorkerGone,
    WorkerLeft,
    WorkerLost,
)

log = logging.getLogger("aiorpc_torch")


def read_answer(answer: Any, peer: str, *, recorded: bool = False) -> list[Any] | RpcError:
    """Return the results in a completed reply of torch, or the error that it stands for."""
    try:
        results = answer.wait()
        if isinstance(results, RemoteFailure):  # the peer does not serve, or rejected the message
            results.raise_()
    except RpcError as exc:
        return exc
    except BaseException as exc:  # the peer chooses the class: SystemExit must not be raised here
        return classify_error(exc, peer)
    try:
        if recorded:
            results = without_gradient_parts(results)
        parts = (results, ()) if isinstance(results, bytes) else results
        note_delivered(parts[1])
        return decode_reply(*detach_data(*parts))
    except BaseException as exc:
        log.warning("a reply of worker %r cannot be read: %r", peer, exc)
        return RemoteError(f"a reply of worker {peer!r} cannot be read: {exc!r}")


def is_inline(results: Any) -> bool:
    """Return whether the results in a reply of torch are small enough for the connection."""
    return isinstance(results, bytes) or (not results[1] and len(results[0]) <= INLINE_BYTES)


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
        may_have_run = aborted.was_sent and error.may_have_run
        kind = type(error)
        raise kind(
            error.worker,
            error.reason,
            method=name,
            may_have_run=may_have_run,
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


def _note_bound_method(exc: TypeError, function: Any) -> None:
    """Add the remedy where the method of another object got the remote one as an argument."""
    if isinstance(function, MethodType) and not isinstance(function.__self__, type):
        name = function.__qualname__
        try_add_note(exc, f"(this is a method of an object here: pass the class's, `{name}`)")


def exception_of(answer: Any, target: Target) -> BaseException | None:
    """Return the exception that the answer to a call of `target` stands for, None for a value."""
    if type(answer) is RemoteFailure:
        found = answer.exception()
        is_created = isinstance(target, CreateTarget)
        if isinstance(found, TypeError) and "positional argument" in str(found) and not is_created:
            _note_bound_method(found, getattr(target, "function", None))
        return found
    if type(answer) is CallAborted:
        try:
            raise_aborted(answer, call_name(target))
        except BaseException as exc:
            return exc
    return None
