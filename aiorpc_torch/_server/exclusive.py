"""`@exclusive`: one call at a time for each object, in the order of arrival.

Calls of peers wait on the event loop, without a task or a thread, and take the turn when they
start. Batches take it when they run (`_batching.queue`). Coroutines that are called directly in
this process take it too.
"""

import functools
import inspect
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from types import FunctionType
from typing import Any, NamedTuple, TypeVar

from .._protocol.ancestry import NO_BATCHES, add_scope, ancestor_batches, enter_scopes
from .._protocol.exclusive import EXCLUSIVE, Turn, Turns, own_turn, turns_of
from .calls import RpcCall, ServerCall
from .stream_writer import StreamCall
from .torch_clients import COROUTINE, async_execution

T = TypeVar("T", bound=type)


def exclusive(cls: T) -> T:
    """Run one call at a time on each object of this class, in the order of arrival.

        @aiorpc.exclusive
        class Env:
            async def step(self, action: Tensor) -> Tensor: ...

    A call has its turn from its start to its end, awaits included. A batch of a `@batched` method
    is one call. A stream is one from its first item to its end. A call that is cancelled or whose
    deadline passes while it waits leaves the queue. One that is cancelled while it runs ends its
    turn when its code has ended. Subclasses are exclusive too.

    Calls of any worker wait in one queue, and so do `async def` methods and asynchronous generators
    that code of this process awaits directly. A method that calls another one as plain Python,
    `self.other()`, stays in its own turn. A plain `def` that is called directly runs at once, also
    for plain torch clients. Two objects that call each other may wait for each other, so set
    deadlines.

    Raises:
        TypeError: if `cls` is no class, or its instances cannot be weakly referenced.
        RuntimeError: at the call, if a call of an object would wait for itself, directly or through
            other workers.
    """
    if not isinstance(cls, type):
        raise TypeError(f"exclusive decorates a class, got {cls!r}")
    if not cls.__weakrefoffset__:
        raise TypeError(
            f"exclusive needs weak references to its instances: add '__weakref__' to the "
            f"__slots__ of {cls.__name__}"
        )
    setattr(cls, EXCLUSIVE, True)
    _guard_methods(cls)
    _guard_subclasses(cls)
    return cls


# ── calls of peers ──────────────────────────────────────────────────────────────────────────────


class Entrance(NamedTuple):
    """A call's way into the queue of an exclusive object; `on_loop` if its function runs there."""

    turns: Turns
    on_loop: bool


class CallInTurn(ServerCall):
    """A call on an exclusive object. Its turn ends when its function has ended."""

    __slots__ = ()

    turn: Turn | None  # a slot of each subclass
    joiner: Any  # an `Entrance` until the turn begins

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.turn = None  # type: ignore[misc]

    def enter(self, begin: Callable[[], None]) -> bool:
        """Enter the queue; return whether the turn has begun, otherwise `begin` is called later.

        Raises:
            RuntimeError: if the call would wait for itself.
        """
        batches = NO_BATCHES if self.scope is None else self.scope.batches
        turns: Turns = self.joiner.turns
        self.turn = turn = Turn(turns, begin)  # type: ignore[misc]
        self.leave_batch = turn.leave
        return turns.enter(turn, self.name, batches)

    def begin(self) -> bool:
        """Begin the turn; return whether the function runs on the loop."""
        runs_on_loop: bool = self.joiner.on_loop
        self.joiner = self.leave_batch = None
        return runs_on_loop

    def invoke(self) -> Any:
        self.enter_context()
        return super().invoke()

    def enter_context(self) -> None:
        super().enter_context()
        assert self.turn is not None
        scopes = {self.turn.scope()}
        enter_scopes(scopes if self.scope is None else scopes | {self.scope})

    def succeed(self, value: Any) -> None:
        super().succeed(value)
        self._leave()

    def fail(self, exc: BaseException) -> None:
        super().fail(exc)
        self._leave()

    def abandon(self, exc: BaseException) -> None:
        super().fail(exc)
        if self.joiner is not None:  # it waits; otherwise its function still runs
            self._leave()

    def _leave(self) -> None:
        if self.turn is not None:
            self.turn.leave()


class ExclusiveCall(CallInTurn, RpcCall):
    """A call of a function."""

    __slots__ = ("turn",)

    def succeed(self, value: Any) -> None:
        if self.reply is None and self.session.send_lone_result(self.number, value):
            self._leave()
        else:
            super().succeed(value)


class ExclusiveStream(CallInTurn, StreamCall):
    """A call of a generator. Its turn ends when the generator has ended."""

    __slots__ = ("turn",)


# ── local calls ─────────────────────────────────────────────────────────────────────────────────

_GUARDED = "__aiorpc_guarded__"


def _guard_methods(cls: type) -> None:
    """Let the coroutines of a class take turns when this process calls them directly."""
    for name in {name for base in cls.__mro__ for name in vars(base)}:
        function = next(vars(base)[name] for base in cls.__mro__ if name in vars(base))
        if name.startswith("_") or not isinstance(function, FunctionType):
            continue
        if hasattr(function, _GUARDED):
            continue
        if (guarded := _guarded(cls, name, function)) is not None:
            setattr(guarded, _GUARDED, True)
            setattr(cls, name, guarded)


def _guarded(cls: type, name: str, function: FunctionType) -> Any:
    """Return a method in place of `function` that takes a turn, None if it cannot wait for one."""
    if name in vars(cls):
        coroutine = getattr(function, COROUTINE, None)
        if coroutine is not None:
            return async_execution(_guarded_coroutine(coroutine, coroutine.__get__))
        bind = function.__get__
    else:  # by the order of inheritance, which may have another class between the two
        bind = functools.partial(_inherited, cls, name)
    if inspect.iscoroutinefunction(function):
        return _guarded_coroutine(function, bind)
    if inspect.isasyncgenfunction(function):
        return _guarded_generator(function, bind)
    return None


def _inherited(cls: type, name: str, found: Any) -> Any:
    return getattr(super(cls, found), name)


def _guarded_coroutine(
    function: Callable[..., Any], bind: Callable[[Any], Any]
) -> Callable[..., Coroutine[Any, Any, Any]]:
    @functools.wraps(function)
    async def guarded(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        if turns_of(self).is_held_by(ancestor_batches()):
            return await bind(self)(*args, **kwargs)
        async with own_turn(self, function.__qualname__):
            return await bind(self)(*args, **kwargs)

    return guarded


def _guarded_generator(
    function: Callable[..., Any], bind: Callable[[Any], Any]
) -> Callable[..., AsyncGenerator[Any, Any]]:
    @functools.wraps(function)
    async def guarded(self: Any, /, *args: Any, **kwargs: Any) -> AsyncGenerator[Any, Any]:
        source, turns = bind(self)(*args, **kwargs), turns_of(self)
        if turns.is_held_by(ancestor_batches()):
            async with aclosing(source):
                async for item in source:
                    yield item
            return
        turn = await turns.wait(function.__qualname__)
        try:
            # The consumer's code between two items is no part of the call.
            sent = None
            while True:
                with add_scope(turn.scope()):
                    try:
                        item = await source.asend(sent)
                    except StopAsyncIteration:
                        return
                sent = yield item
        finally:
            with add_scope(turn.scope()):
                await source.aclose()
            turn.leave()

    return guarded


def _guard_subclasses(cls: Any) -> None:
    own = vars(cls).get("__init_subclass__")

    def guard_subclass(sub: type, /, **kwargs: Any) -> None:
        if own is None:
            super(cls, sub).__init_subclass__(**kwargs)
        else:
            own.__get__(None, sub)(**kwargs)
        _guard_methods(sub)

    cls.__init_subclass__ = classmethod(guard_subclass)
