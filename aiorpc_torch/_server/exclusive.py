"""`@exclusive`: one call at a time for each object, in the order of arrival.

The decorator marks a class. Calls of peers find the mark and take the turn when they start
(`exclusive_calls`), and so do batches when they run (`_batching.queue`).

A coroutine that code of this process awaits directly takes the turn too. Python looks it up on the
class alone, so a guard stands there in the place of each `async def`, also of subclasses. (A
`__getattribute__` would slow each `self.x`.) A call that holds the turn does without the guards.
"""

import contextlib
import functools
import inspect
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import AbstractContextManager
from types import FunctionType, MethodType
from typing import Any, TypeVar

from .._turns.turns import EXCLUSIVE, own_turn, turns_of
from .._wire.ancestry import add_scope, ancestor_batches
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


def unguarded(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return the method behind a guard, for a call that holds the turn; another one as it is."""
    while type(method) is MethodType and (bind := _bind_of(method.__func__)):
        method = bind(method.__self__)
    return method


# ── guards of local calls ───────────────────────────────────────────────────────────────────────

_GUARD = "__aiorpc_guard__"
"""Attribute of a guard: itself, and what returns the method behind it, given the object."""


def _bind_of(function: Any) -> Callable[[Any], Any] | None:
    guard, bind = getattr(function, _GUARD, (None, None))
    return bind if guard is function else None  # `functools.wraps` of a user copies the attribute


def _guard_methods(cls: type) -> None:
    """Let the coroutines of a class take turns when this process calls them directly."""
    for name in dir(cls):
        function = inspect.getattr_static(cls, name, None)
        if name.startswith("_") or type(function) is not FunctionType or _bind_of(function):
            continue
        coroutine = getattr(function, COROUTINE, function)
        # Inherited: by the order of inheritance, which may have another class between the two.
        is_own = name in vars(cls)
        bind = function.__get__ if is_own else functools.partial(_inherited, cls, name)
        if (guard := _guard_of(coroutine, bind)) is not None:
            guard = guard if coroutine is function else async_execution(guard)
            setattr(guard, _GUARD, (guard, bind))
            setattr(cls, name, guard)


def _inherited(cls: type, name: str, instance: Any) -> Any:
    return getattr(super(cls, instance), name)


def _guard_of(function: Callable[..., Any], bind: Callable[[Any], Any]) -> Any:
    """Return a function that takes a turn, None if `function` cannot wait for one.

    A plain `def` cannot. On the loop, waiting would block all. In a thread, it could wait for the
    method that has started the thread, as it lacks that method's context.
    """
    if inspect.iscoroutinefunction(function):
        return _guarded_coroutine(function, bind)
    return _guarded_generator(function, bind) if inspect.isasyncgenfunction(function) else None


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
        turn = None
        in_turn: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext
        if not turns.is_held_by(ancestor_batches()):
            turn = await turns.wait(function.__qualname__)
            # Entered for each step: the consumer's code between two items is no part of the call.
            in_turn = functools.partial(add_scope, turn.scope())
        step = source.__anext__
        try:
            while True:
                with in_turn():
                    try:
                        item = await step()
                    except StopAsyncIteration:
                        return
                try:
                    step = functools.partial(source.asend, (yield item))
                except GeneratorExit:
                    raise
                except BaseException as exc:  # thrown in by the consumer
                    step = functools.partial(source.athrow, exc)
        finally:
            try:
                with in_turn():
                    await source.aclose()
            finally:
                if turn is not None:
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
