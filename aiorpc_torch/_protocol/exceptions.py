"""How an exception crosses to another process: plain Python, no torch, no event loop.

`pickle` makes an exception again by calling its class with `exc.args`. That fails, or quietly
doubles the message, for every class whose `__init__` takes something other than what it hands to
`super().__init__`. So a class that does not say itself how it pickles is rebuilt *around* its
`__init__`: the nearest builtin base makes it from the arguments that base was given, and the
attributes follow.
"""

import asyncio
import contextlib
import copyreg
import io
import pickle
import traceback
from typing import Any, NoReturn

from ..errors import RemoteError, RemoteTraceback

# Addressed to the process or task in which they are raised (the first four), or impossible to
# raise out of a coroutine (PEP 479): none of them may be raised in the caller.
_STAY = (
    KeyboardInterrupt,
    SystemExit,
    asyncio.CancelledError,
    GeneratorExit,
    StopIteration,
    StopAsyncIteration,
)


class Failure:
    """An exception on its way: the pickled object where it can be pickled, and always the text."""

    __slots__ = ("pickled", "summary", "text", "worker")

    def __init__(self, worker: str, summary: str, text: str, pickled: bytes | None) -> None:
        self.worker = worker
        self.summary = summary
        self.text = text
        self.pickled = pickled

    def __repr__(self) -> str:
        return f"<Failure on {self.worker}: {self.summary}>"

    @classmethod
    def of(cls, exc: BaseException, worker: str) -> "Failure":
        """Describe `exc`, raised on `worker`. Never raises, whatever `exc` is."""
        return cls(worker, _summary(exc), _text(exc), _dump(exc))

    def plain(self) -> tuple[str, str, str, bytes | None]:
        """What it is made of: `Failure(*plain)` is the same again."""
        return self.worker, self.summary, self.text, self.pickled

    def get(self) -> NoReturn:
        """Raise it here: where a value would be got, there is none."""
        raise self.exception()

    def exception(self) -> BaseException:
        """A new exception to raise here, with the remote traceback as its cause."""
        exc = _load(self.pickled)
        if exc is None:
            exc = RemoteError(f"worker {self.worker!r} raised {self.summary}")
        return _caused(exc, RemoteTraceback(self.worker, self.text))


def replica(exc: BaseException, doing: str) -> BaseException:
    """A distinct exception like `exc`, caused by it: one for each caller of a shared failure."""
    copy = _load(_dump(exc))
    if copy is None:
        copy = RemoteError(f"{doing} raised {_summary(exc)}")
    return _caused(copy, exc)


def note(exc: BaseException, text: str) -> None:
    """Add a note, if the exception takes one: its class may be anybody's."""
    with contextlib.suppress(Exception):
        exc.add_note(text)


def raisable(exc: BaseException, doing: str) -> BaseException:
    """`exc` itself, or where it must not be raised in a caller, an exception that it causes."""
    return replica(exc, doing) if isinstance(exc, _STAY) else exc


def _caused(exc: BaseException, cause: BaseException) -> BaseException:
    object.__setattr__(exc, "__cause__", cause)  # a frozen dataclass forbids the plain way
    return exc


def _summary(exc: BaseException) -> str:
    try:
        return "".join(traceback.format_exception_only(exc)).strip()
    except BaseException:  # a SyntaxError whose line number is a text, for one
        return type(exc).__qualname__


def _text(exc: BaseException) -> str:
    # The first frame is ours (the one that called the user's code): of no use to the reader.
    where = exc.__traceback__
    where = where and (where.tb_next or where)
    try:
        return "".join(traceback.format_exception(type(exc), exc, where))
    except BaseException:
        return "".join(traceback.format_tb(where)) + _summary(exc)


def _dump(exc: BaseException) -> bytes | None:
    if isinstance(exc, _STAY):
        return None
    file = io.BytesIO()
    try:
        _ExceptionPickler(file).dump(exc)
    except BaseException:  # whatever a user's __reduce__ raises: the text still crosses
        return None
    return file.getvalue()


def _load(pickled: bytes | None) -> BaseException | None:
    if pickled is None:
        return None
    try:
        exc = pickle.loads(pickled)
    except BaseException:  # the class is not importable here, or its pickle raises: SystemExit, say
        return None
    # `_dump` writes none of those that must not be raised in a caller, but somebody else may.
    return exc if isinstance(exc, BaseException) and not isinstance(exc, _STAY) else None


class _ExceptionPickler(pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        return reduce_exception(obj) if isinstance(obj, BaseException) else NotImplemented


def reduce_exception(exc: BaseException) -> Any:
    """The pickle of an exception, or NotImplemented where its class has its own."""
    cls, base = type(exc), _builtin_base(type(exc))
    own = cls.__reduce__ is not base.__reduce__ or cls.__reduce_ex__ is not base.__reduce_ex__
    if own or cls in copyreg.dispatch_table:
        return NotImplemented
    reduced: Any = base.__reduce__(exc)  # the class, its arguments and, if there is one, a state
    slots = {name: getattr(exc, name) for name in _slots(cls) if hasattr(exc, name)}
    state = {**(reduced[2] or {}), **slots} if len(reduced) > 2 else slots
    return rebuild, (cls, reduced[1], state)


def rebuild(cls: type[BaseException], args: tuple[Any, ...], state: Any = None) -> BaseException:
    """Make the exception without running a Python `__init__` of its class."""
    base = _builtin_base(cls)
    exc = base.__new__(cls, *args)
    base.__init__(exc, *args)
    if state and cls.__setstate__ is not BaseException.__setstate__:
        exc.__setstate__(state)
    elif state:
        for name, value in state.items():
            object.__setattr__(exc, name, value)  # a frozen dataclass forbids the plain way
    return exc


def _slots(cls: type) -> list[str]:
    return copyreg._slotnames(cls)  # type: ignore[attr-defined,no-any-return]


def _builtin_base(cls: type[BaseException]) -> type[BaseException]:
    return next(base for base in cls.__mro__ if base.__module__ == "builtins")
