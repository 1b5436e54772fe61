"""Remote calls and streams: what the user awaits or iterates. Deadlines and cancellation.

`remote(rref).method(x)` makes a `RemoteCall`, and sends nothing. `await` or a task sends it as a
coroutine; `async for` and `async with` send it as a stream.
"""

import asyncio
import time
import warnings
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Generator
from functools import partial
from sys import modules
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from .._aio.deadlines import (
    ANYIO_BACKEND,
    ForeseenTimer,
    anyio_scope_deadline,
    call_at,
    current_deadline,
    deadline_in,
    earlier,
)
from .._aio.items import ItemIterator, has_passed
from .._aio.own_frames import without_own_frames
from .._handles.mistakes import no_attribute
from .._torch.compat import RRefBase
from .._torch.rrefs import note_class
from .._wire.ancestry import running_call
from .._wire.exceptions import RemoteFailure, text_of, try_add_note
from .._wire.pickling import CallAborted
from .._wire.targets import CreateTarget, Target, call_name, target_name
from ..errors import CallTimeout, UnknownWorker, WorkerGone
from .answers import exception_of
from .connection import Connection
from .pending import cancel, expire, foresee
from .pool import WorkerRef, connection_to
from .stream_reader import StreamReader

R = TypeVar("R")

ALREADY_AWAITED = "this call was awaited already: make a new one"


class _UsedSteps:
    """The steps of a call that has ended, or is iterated: each raises RuntimeError."""

    def send(self, *_: Any) -> NoReturn:
        raise RuntimeError(ALREADY_AWAITED)

    throw = send

    def close(self) -> None:
        pass


USED = _UsedSteps()

_OF_RESULTS = (
    *("shape", "dtype", "device", "grad", "item", "tolist", "numpy", "detach", "clone", "backward"),
    *("to", "cpu", "cuda", "float", "long", "mean", "sum", "max", "min", "argmax", "squeeze"),
    *("view", "reshape", "size", "dim", "keys", "values", "items", "get", "append", "loss"),
    *("result", "add_done_callback", "done", "cancel", "wait", "then", "value", "to_here"),
)
"""What results and futures have often. A call refuses it, with the remedy."""


def _refuse_attribute(name: str, made: "LazyCall[Any]") -> NoReturn:
    raise no_attribute(made, name, f": `await` <{made.__name__}> first, it gives the result")


class LazyCall(Coroutine[Any, Any, R]):
    """A call that starts at its first step, and is used once.

    `__await__` of a subclass makes its steps: a generator that begins with `_use`.
    """

    __slots__ = ("__weakref__", "_steps")

    _steps: Generator[Any, Any, R] | _UsedSteps | None

    def __await__(self) -> Generator[Any, Any, R]:
        raise NotImplementedError

    def _use(self) -> None:
        """Note that the call is used. Raise RuntimeError if it was already."""
        if self._steps is not None:
            raise RuntimeError(ALREADY_AWAITED)
        self._steps = USED

    def _what(self) -> str:
        """Return what is called, for texts."""
        raise NotImplementedError

    def __repr__(self) -> str:
        # A notebook shows it for a cell without the `await`.
        return f"<{self.__name__}{', not sent: await it' if self._steps is None else ''}>"

    @property
    def __name__(self) -> str:  # for the repr of a task
        return f"call of {self._what()}"

    if not TYPE_CHECKING:  # type checkers report these mistakes themselves

        def _refuse_use(self, *_: Any) -> NoReturn:
            text = f"<{self.__name__}> was used in place of its result: `await` it first"
            raise TypeError(text)

        def __format__(self, spec: str) -> str:
            return self._refuse_use() if spec else str(self)

        def __bool__(self) -> bool:
            return True  # as any coroutine: an event loop may ask

        __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _refuse_use
        __truediv__ = __rtruediv__ = __matmul__ = __rmatmul__ = __pow__ = __neg__ = _refuse_use
        __lt__ = __le__ = __gt__ = __ge__ = __getitem__ = __len__ = __float__ = __int__ = (
            _refuse_use
        )

        @classmethod
        def __torch_function__(cls, function: Any, _: Any, *arguments: Any) -> NoReturn:
            name = getattr(function, "__name__", "a function of torch")
            raise TypeError(f"{name}() got a remote call in place of its result: `await` it first")

        def __iter__(self) -> NoReturn:
            raise TypeError(
                f"<{self.__name__}> cannot be iterated with `for`: write `async for` for a "
                "generator's items, or `await` it for a list"
            )

        def __init_subclass__(cls) -> None:
            # Python's error of any other attribute: `'RemoteCall (await it first)' object has no
            # attribute 'upper'`.
            cls.__name__ += " (await it first)"

        # Not `__getattr__`: a class that has it looks up all attributes slowly, which is 3 % of the
        # instructions of a call.
        for _name in _OF_RESULTS:
            locals()[_name] = property(partial(_refuse_attribute, _name))
        del _name

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"{self!r} cannot be sent, only its result can: `await` the call first")

    def send(self, value: Any) -> Any:
        """Run the next step, for a task."""
        if (steps := self._steps) is not None:
            return steps.send(value)
        steps = self.__await__()
        waits_for = steps.send(value)  # it notes that the call is used
        self._steps = steps
        return waits_for

    def throw(self, *exc: Any) -> Any:
        """Raise an exception in the call, for a task."""
        if (steps := self._steps) is None:
            steps, self._steps = self.__await__(), USED
        return steps.throw(*exc)

    def close(self) -> None:
        """Cancel the call."""
        if (steps := self._steps) is None:
            self._steps = USED
        else:
            steps.close()

    def __del__(self) -> None:
        if self._steps is None:
            text = f"<{self.__name__}> was never awaited"
            warnings.warn(text, RuntimeWarning, stacklevel=2, source=self)


class RemoteCall(LazyCall[Any]):
    """A call of `target(*args, **kwargs)` on a worker, or on the owner of an RRef."""

    __slots__ = ("_arguments", "_entered", "_target", "_timeout", "_worker")

    def __init__(
        self,
        worker: "WorkerRef | RRefBase[Any]",
        target: Target,
        timeout: float | None,
        /,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        self._steps = None
        self._worker = worker
        self._target = target
        self._arguments = args, kwargs
        self._timeout = timeout

    def _what(self) -> str:
        return target_name(self._target)

    # ── awaited ─────────────────────────────────────────────────────────────────────────────────

    def __await__(self) -> Generator[Any, Any, Any]:
        if self._steps is not None:  # as `_use`
            raise RuntimeError(ALREADY_AWAITED)
        self._steps = USED
        future = timer = own_due = due = None
        try:
            try:
                connection = connection_to(self._worker)
            except WorkerGone as exc:
                raise self._not_sent(exc) from None
            except UnknownWorker as exc:
                raise without_own_frames(exc) from None
            if (
                self._timeout is not None
                or current_deadline() is not None
                or ANYIO_BACKEND in modules
            ):
                own_due, due = self._deadlines(connection)  # else it has none
            # The target keeps its RRef, so the object lives until the result is here.
            future = connection.call(self._target, self._arguments, due)
            if own_due is not None:
                left = own_due - time.monotonic()
                timer = call_at(own_due, left, foresee, expire, future, left)
            yield future  # raises CancelledError if the wait is cancelled
            answer = future.answer
            if type(answer) in _FAILURES:
                if has_passed(due) and type(answer) is RemoteFailure:
                    yield  # if a scope's deadline has passed as well, the scope reports it
                raise self._failure(answer)
            return answer
        except BaseException:
            if future is not None:
                cancel(future)
            raise
        finally:
            self._steps = USED  # `send` has put this generator there, for a task
            if timer is not None:
                timer.cancel()

    def _failure(self, answer: Any) -> BaseException:
        """Return the exception of an answer; that of a keyword which no method has, with a hint."""
        found = exception_of(answer, self._target)
        assert found is not None
        if isinstance(found, TypeError) and type(answer) is RemoteFailure:
            for keyword in self._arguments[1].keys() & _HINTS.keys():
                text = text_of(found)
                if f"keyword argument {keyword!r}" in text or _NO_PARAMETERS in text:
                    try_add_note(found, _HINTS[keyword])
        return found

    # ── iterated ────────────────────────────────────────────────────────────────────────────────

    def __aiter__(self) -> AsyncIterator[Any]:
        return self._iterate(enters=False)

    def _iterate(self, *, enters: bool) -> "RemoteStream":
        self._use()
        try:
            connection = connection_to(self._worker)
        except WorkerGone as exc:
            raise self._not_sent(exc) from None
        own_due, due = self._deadlines(connection)
        reader = connection.stream(self._target, self._arguments, due)
        reader.enters, timer = enters, None
        if enters:
            reader.entered_by = running_call()
            if (task := asyncio.current_task()) is not None:
                reader.entered_in = weakref.ref(task)  # a task that was dropped closes its stream
        if own_due is not None:  # not `call_at`: the stream may outlive the deadline's block
            left = own_due - time.monotonic()
            timer = ForeseenTimer(left, partial(foresee, reader), partial(expire, reader))
        return RemoteStream(reader, due, timer)

    # ── entered ─────────────────────────────────────────────────────────────────────────────────

    async def __aenter__(self) -> Any:
        self._entered = self._iterate(enters=True)
        return await anext(self._entered)

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self._entered.raise_failure()
        finally:
            await self._entered.aclose()

    def outlive_deadline(self) -> None:
        """Let the block that was entered go on after the deadline of its entry."""
        self._entered.outlive_deadline()

    # ── for both ────────────────────────────────────────────────────────────────────────────────

    def _not_sent(self, exc: WorkerGone) -> WorkerGone:
        method = call_name(self._target)
        return type(exc)(exc.worker, exc.reason, method=method, may_have_run=False)

    def _deadlines(self, connection: Connection) -> tuple[float | None, float | None]:
        """Return the call's own deadline, and the earlier of it and a scope's deadline."""
        own_due = deadline_in(self._timeout)
        if has_passed(own_due):
            method, peer = call_name(self._target), connection.peer.name
            text = f"{method} on worker {peer!r} timed out before the call; it was not sent"
            raise CallTimeout(text, worker=peer, method=method, may_have_run=False)
        # A scope's deadline is sent along and not enforced here: the scope cancels the call.
        return own_due, earlier(own_due, anyio_scope_deadline())


async def create_object(
    to: WorkerRef, factory: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Make an object on a worker; return its RRef."""
    rref = await RemoteCall(to, CreateTarget(factory), None, *args, **kwargs)
    if isinstance(factory, type):
        note_class(rref, factory)
    return rref


_FAILURES = frozenset((RemoteFailure, CallAborted))

_NO_PARAMETERS = "takes no arguments"  # in the text of a TypeError
_HINTS = {
    "timeout": "(a deadline is no argument of the method: `with aiorpc_torch.timeout(5):` around "
    "the call, or `remote(rref, timeout=5)`)",
    "restarts": "(supervised() has no budget of its own: it is max_restarts= of the world)",
    "args": "(arguments stand as in a plain call, `create(to, f, x, key=y)`: not args=(x,))",
    "kwargs": "(arguments stand as in a plain call, `create(to, f, x, key=y)`: not kwargs={...})",
}
"""Notes for a TypeError of a method that has no such parameter."""


class RemoteStream(ItemIterator[Any]):
    """The items of a remote generator. If the consumer leaves early, the generator is closed."""

    def __init__(
        self, reader: StreamReader, due: float | None, timer: ForeseenTimer | None
    ) -> None:
        super().__init__()
        self._loop = asyncio.get_running_loop()
        self._reader = reader
        self._bound = due
        self._timer = timer

    def __repr__(self) -> str:
        return f"<stream of {target_name(self._reader.target)}>"

    def _next(self) -> Awaitable[Any]:
        return self._reader.next()

    def _has_item(self) -> bool:
        return self._reader.has_item()

    def outlive_deadline(self) -> None:
        """Go on after the deadline."""
        if self._timer is not None:
            self._timer.cancel()
        self._bound = None

    def raise_failure(self) -> None:
        """Raise what has ended the stream before its consumer: a deadline, or a loss."""
        self._reader.raise_failure()

    def _stop(self) -> None:
        self._reader.close()
        _cancel(self._reader, self._timer)

    def __del__(self) -> None:
        # Garbage may be collected in any thread, inside any code of the connection, and after the
        # loop's end.
        if not self._loop.is_closed():
            is_here = asyncio._get_running_loop() is self._loop
            call = self._loop.call_soon if is_here else self._loop.call_soon_threadsafe
            call(_cancel, self._reader, self._timer)


def _cancel(reader: StreamReader, timer: ForeseenTimer | None) -> None:
    cancel(reader)
    if timer is not None:
        timer.cancel()
