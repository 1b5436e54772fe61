"""Transfer of exceptions to other processes.

`pickle` rebuilds an exception by calling its class with `exc.args`. That fails, or doubles the
message, if `__init__` passes other arguments to `super().__init__` than it takes. So a class
without its own `__reduce__` is rebuilt without its `__init__`. The nearest builtin base creates the
exception from `exc.args`; then the attributes are set.
"""

import asyncio
import contextlib
import copyreg
import pickle
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, NoReturn

from torch import Tensor

from .._aio.own_frames import behind_own_frames, keep_own_frames
from ..errors import (
    GroupError,
    RemoteError,
    RemoteTraceback,
    RpcError,
    WorkerGone,
    WorkerLeft,
    WorkerLost,
)
from .buffers import NOTHING, OWN_REDUCTIONS, Outside, PickleParts, open_pickle
from .by_value import NAMED, NotByName, dump_by_value, refuse_by_value
from .plain import wire_text

# Never raised in the caller. The first four address the process or task that they are raised in;
# the last two cannot be raised from a coroutine (PEP 479).
_NOT_TRANSFERABLE = (
    KeyboardInterrupt,
    SystemExit,
    asyncio.CancelledError,
    GeneratorExit,
    StopIteration,
    StopAsyncIteration,
)

RECEIVER = "the receiver"
"""The worker of a `RemoteFailure` that is of this process: what was sent cannot be read here."""


class _OwnEnd(WorkerGone):
    """The error of calls that this worker ends since it leaves or has failed.

    Its callers get one of the public class, without a remote traceback, and so tell it from one
    that a method has raised. The traceback of what ended the worker's block is that of its cause.
    """

    block_traceback = ""

    def __reduce__(self) -> Any:
        told = (self.worker, self.reason, self.method, self.may_have_run, self.block_traceback)
        return _read_own_end, (type(self).__bases__[-1], *told)


def _read_own_end(
    cls: type[WorkerGone],
    worker: str,
    reason: str,
    method: str | None,
    may_have_run: bool,
    block_traceback: str,
) -> WorkerGone:
    exc = cls(worker, reason, method=method, may_have_run=may_have_run)
    if block_traceback:
        cause = exc.__cause__ = cls(worker, reason)
        cause.__cause__ = RemoteTraceback(worker, block_traceback)
    return exc


class LeavingWorker(_OwnEnd, WorkerLeft):
    """It leaves."""


class FailedWorker(_OwnEnd, WorkerLost):
    """It has failed."""


for _kind in (LeavingWorker, FailedWorker):  # their summaries name the public class
    _public = _kind.__bases__[-1]
    _kind.__name__ = _kind.__qualname__ = _public.__name__
    _kind.__module__ = _public.__module__


@dataclass(slots=True, eq=False, repr=False)
class RemoteFailure:
    """An exception of another worker: always its text, and its pickle if there is one.

    torch itself keeps only the classes `ValueError` and `TypeError`. It returns an exception that
    was set in a future as a value. So every result says whether it is a value or a failure.
    """

    worker: str
    summary: str
    text: str
    pickled: bytes | None
    tensors: Sequence[Tensor] = ()
    outside: Outside = NOTHING

    def __repr__(self) -> str:
        return f"<RemoteFailure on {self.worker}: {self.summary}>"

    @classmethod
    def of(cls, exc: BaseException, worker: str) -> "RemoteFailure":
        """Describe `exc`, raised on `worker`. Never raises."""
        if isinstance(exc, _OwnEnd):
            return cls.refusal(exc, worker)
        return cls(worker, _summary(exc), _text(exc), *(_dump(exc) or (None,)))

    @classmethod
    def refusal(cls, error: RpcError, worker: str) -> "RemoteFailure":
        """Describe an error of `worker` itself, which no method has raised: without a traceback."""
        return cls(worker, _summary(error), "", *(_dump(error) or (None,)))

    @property
    def size(self) -> int:
        """Return its bytes in a message."""
        return len(self.text) + len(self.pickled or b"") + sum(each.nbytes for each in self.tensors)

    def on_the_wire(self) -> tuple[Any, ...]:
        """Return the failure as a message holds it, beside its tensors."""
        told = self.worker, wire_text(self.summary), wire_text(self.text), self.pickled
        return (*told, len(self.tensors), self.outside) if self.tensors else told

    @classmethod
    def from_wire(cls, told: Sequence[Any], tensors: Iterator[Tensor]) -> "RemoteFailure":
        """Return the failure that a message holds; take its tensors."""
        worker, summary, text, pickled, *more = told
        if not more:
            return cls(worker, summary, text, pickled)
        count, outside = more
        return cls(worker, summary, text, pickled, [*islice(tensors, count)], outside)

    def raise_(self) -> NoReturn:
        """Raise the exception in this process."""
        raise self.exception()

    def exception(self) -> BaseException:
        """Return a new exception whose cause is the remote traceback, if there is one."""
        pickled = self.pickled
        exc = None if pickled is None else _load(pickled, self.tensors, self.outside)
        if exc is None:
            exc = RemoteError(f"worker {self.worker!r} raised {self.summary}")
        return _caused(exc, RemoteTraceback(self.worker, self.text)) if self.text else exc


def copy_exception(exc: BaseException, doing: str) -> BaseException:
    """Return a copy of `exc`, caused by it: one for each caller of a shared failure."""
    copy = None
    if (dumped := _dump(exc)) is not None:
        data, tensors, outside = dumped
        copy = _load(data, [each.clone() for each in tensors], outside)
    if copy is None:
        copy = RemoteError(f"{doing} raised {_summary(exc)}")
    return _caused(copy, exc)


def note_has_run(exc: BaseException) -> None:
    """Let an error that leaves a method say that the call of that method has run.

    It may be the error of a call that the method has made, and that was not sent. One that names
    its call speaks of that.
    """
    # First the class: an attribute of another exception is the user's, and may raise anything.
    if isinstance(exc, RpcError) and not exc.may_have_run and getattr(exc, "method", None) is None:
        exc.may_have_run = True


def try_add_note(exc: BaseException, text: str) -> None:
    """Add a note; do nothing if a user's class refuses it."""
    with contextlib.suppress(Exception):
        exc.add_note(text)


def text_of(exc: BaseException) -> str:
    """Return `str(exc)`, or the name of its class if that raises."""
    try:
        return str(exc)
    except BaseException:  # of a user's class
        return type(exc).__qualname__


def ensure_raisable(exc: BaseException, doing: str) -> BaseException:
    """Return `exc`, or an exception caused by it if `exc` must not be raised in a caller."""
    return copy_exception(exc, doing) if isinstance(exc, _NOT_TRANSFERABLE) else exc


def _caused(exc: BaseException, cause: BaseException) -> BaseException:
    object.__setattr__(exc, "__cause__", cause)  # works for frozen dataclasses too
    return exc


def _summary(exc: BaseException) -> str:
    try:
        return "".join(traceback.format_exception_only(exc)).strip()
    except BaseException:  # a SyntaxError whose line number is a str, for example
        return type(exc).__qualname__


def _text(exc: BaseException) -> str:
    where = behind_own_frames(exc.__traceback__)
    try:
        if where is None:  # a wrong name, or no such argument
            keep_own_frames(exc)  # it is logged: also a handler may raise
        return "".join(traceback.format_exception(type(exc), exc, where))
    except BaseException:
        return "".join(traceback.format_tb(where)) + _summary(exc)


def _dump(exc: BaseException) -> tuple[bytes, list[Tensor], Outside] | None:
    """Return what `PickleParts.end` returns, None if the exception cannot be sent."""
    if isinstance(exc, _NOT_TRANSFERABLE):
        return None
    parts = PickleParts()
    try:
        try:
            portable = _portable(exc) if isinstance(exc, GroupError) else exc
            _ExceptionPickler(parts).dump(portable)
        except NotByName as failure:
            parts = PickleParts()
            dump_by_value(exc, parts, partial(_reduce, parts), failure)
        return parts.end()
    except BaseException:  # from a user's __reduce__: the text is sent anyway
        return None


def _portable(group: GroupError) -> GroupError:
    """Return a copy whose exceptions can be pickled: a RemoteError for each that cannot be."""
    copies: dict[int, Exception] = {}
    for exc in group.exceptions:
        if isinstance(exc, GroupError):
            copies[id(exc)] = _portable(exc)
        elif _dump(exc) is None:
            copies[id(exc)] = RemoteError(f"a member of a group raised {_summary(exc)}")
    if not copies:
        return group
    exceptions = [copies.get(id(exc), exc) for exc in group.exceptions]
    results = [copies.get(id(result), result) for result in group.results]
    copy = type(group)(group.message, exceptions, results)
    vars(copy).update({**vars(group), "results": copy.results})
    return copy


def _load(pickled: bytes, tensors: Sequence[Tensor], outside: Outside) -> BaseException | None:
    try:
        file, buffers = open_pickle(pickled, tensors, outside)
        exc = pickle.Unpickler(file, buffers=buffers).load()
    except BaseException:  # not importable here, or its __reduce__ raises, even SystemExit
        return None
    # `_dump` writes no exception that must not be raised in a caller, but a malicious peer may.
    is_raisable = isinstance(exc, BaseException) and not isinstance(exc, _NOT_TRANSFERABLE)
    return exc if is_raisable else None


class _ExceptionPickler(pickle.Pickler):
    def __init__(self, parts: PickleParts) -> None:
        super().__init__(parts, pickle.HIGHEST_PROTOCOL, buffer_callback=parts.keeps_inside)
        self._parts = parts

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, NAMED):
            refuse_by_value(obj, unless_unknown=True)
        return _reduce(self._parts, obj)


def _reduce(parts: PickleParts, obj: Any) -> Any:
    if isinstance(obj, BaseException):
        return reduce_exception(obj)
    own = OWN_REDUCTIONS.get(type(obj))
    return NotImplemented if own is None else own(obj, parts)


def reduce_exception(exc: BaseException) -> Any:
    """Return the reduction of an exception, NotImplemented if its class has its own."""
    cls, base = type(exc), _builtin_base(type(exc))
    own = cls.__reduce__ is not base.__reduce__ or cls.__reduce_ex__ is not base.__reduce_ex__
    if own or cls in copyreg.dispatch_table:
        return NotImplemented
    reduced: Any = base.__reduce__(exc)  # class, arguments and, optionally, state
    names: list[str] = copyreg._slotnames(cls)  # type: ignore[attr-defined]
    slots = {name: getattr(exc, name) for name in names if hasattr(exc, name)}
    state = {**(reduced[2] or {}), **slots} if len(reduced) > 2 else slots
    return rebuild, (cls, reduced[1], state)


def rebuild(cls: type[BaseException], args: tuple[Any, ...], state: Any) -> BaseException:
    """Create the exception without the `__init__` of its class."""
    base = _builtin_base(cls)
    exc = base.__new__(cls, *args)
    base.__init__(exc, *args)
    if state and cls.__setstate__ is not BaseException.__setstate__:
        exc.__setstate__(state)
    elif state:
        for name, value in state.items():
            object.__setattr__(exc, name, value)  # works for frozen dataclasses too
    return exc


def _builtin_base(cls: type[BaseException]) -> type[BaseException]:
    return next(base for base in cls.__mro__ if base.__module__ == "builtins")
