"""`@exclusive` and `@max_concurrency`: calls of an object that wait in the order of arrival.

The decorators mark a class or a method. Calls of peers find the mark and take a turn when they
start (`exclusive_calls`), and so do batches when they run (`_batching.queue`).

A coroutine that code of this process awaits directly takes a turn too. Python looks it up on the
class alone, so a guard stands there in the place of each `async def`, also of subclasses. (A
`__getattribute__` would slow each `self.x`.) A call that holds a turn does without the guards.
"""

import contextlib
import functools
import inspect
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractContextManager
from types import FunctionType, MethodType
from typing import Any, TypeVar

from .._turns.turns import LIMIT, METHOD_TURNS, Turns, turns_of
from .._wire.ancestry import add_scope, ancestor_batches
from .torch_clients import COROUTINE, async_execution

T = TypeVar("T", bound=type)
D = TypeVar("D", bound=Callable[..., Any])


_MISSING: Any = None


def exclusive(cls: T = _MISSING) -> T:
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
        raise TypeError(
            "exclusive decorates a class: write `@exclusive`, without parentheses"
            if cls is None
            else f"exclusive decorates a class, got {cls!r}"
        )
    _limit_class(cls, 1, "exclusive")
    return cls


def max_concurrency(limit: int) -> Callable[[D], D]:
    """Run at most `limit` calls at once in each object, the others in the order of arrival.

        class Simulator:
            @aiorpc.max_concurrency(4)
            def render(self, frame: int) -> Tensor: ...

    It decorates a class, which limits all calls of an object together as `exclusive` does, or a
    method, which limits the calls of that method.

    A call that an object makes of itself, directly or through other workers, takes the next free
    turn.

    Args:
        limit: number of calls that run at once, at least 1.

    Raises:
        TypeError: if it decorates something else, a `@batched` method (use its
            `max_concurrent_batches=`) or a method of a class with a limit; or if the instances of
            the class cannot be weakly referenced.
        ValueError: if the limit is no int of at least 1.
        RuntimeError: at a call of an object by itself, if all turns are held by calls that wait for
            such a call.
    """
    if callable(limit):
        raise TypeError("max_concurrency needs a number: @max_concurrency(4)")
    if not isinstance(limit, int) or isinstance(limit, bool) or limit < 1:
        raise ValueError(f"max_concurrency takes an int of at least 1, got {limit!r}")

    def decorate(decorated: Any) -> Any:
        if isinstance(decorated, type):
            _limit_class(decorated, limit, "max_concurrency")
            return decorated
        return _limited_method(decorated, limit)

    return decorate


_HEAP_TYPE = 1 << 9  # flag of classes that Python code has made


def _limit_class(cls: Any, limit: int, name: str) -> None:
    if not cls.__weakrefoffset__:
        own = f"class My{cls.__name__.title()}({cls.__name__})"
        slots = f"add '__weakref__' to the __slots__ of {cls.__name__}"
        remedy = slots if cls.__flags__ & _HEAP_TYPE else f"decorate a class of yours, `{own}`"
        raise TypeError(f"{name} needs weak references to its instances: {remedy}")
    if LIMIT in vars(cls):
        raise TypeError(f"{cls.__name__} has a limit already: it is exclusive, or max_concurrency")
    setattr(cls, LIMIT, limit)
    _guard_methods(cls)
    own = vars(cls).get("__init_subclass__")

    def guard_subclass(sub: type, /, **kwargs: Any) -> None:
        if own is None:
            super(cls, sub).__init_subclass__(**kwargs)
        else:
            own.__get__(None, sub)(**kwargs)
        _guard_methods(sub)

    cls.__init_subclass__ = classmethod(guard_subclass)


def _limited_method(function: Any, limit: int) -> Any:
    if hasattr(type(function), "__aiorpc_join__"):
        raise TypeError(
            "max_concurrency does not take a @batched method: use batched(max_concurrent_batches=)"
        )
    outer = function.__qualname__.rpartition(".")[0] if type(function) is FunctionType else ""
    if not outer or outer.endswith("<locals>"):  # no method
        raise TypeError(f"max_concurrency decorates a class or a method, got {function!r}")
    turns = functools.partial(turns_of, method=function.__name__, limit=limit)
    coroutine = getattr(function, COROUTINE, function)
    found = _guard_of(function, coroutine.__get__, turns) or function
    setattr(found, METHOD_TURNS, (found, turns))
    return found


def turns_for(instance: Any, function: Any) -> Turns | None:
    """Return the turns that a call of `function` on an object takes, None if nothing limits it."""
    if getattr(type(instance), LIMIT, None) is not None:
        return turns_of(instance)
    limited, turns = getattr(function, METHOD_TURNS, (None, None))
    if turns is None or limited is not getattr(function, "__func__", function):
        return None  # `functools.wraps` of a user copies the attribute
    return turns(getattr(function, "__self__", instance))  # type: ignore[no-any-return]


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
        if name.startswith("_") or type(function) is not FunctionType:
            continue
        if METHOD_TURNS in vars(function):
            raise TypeError(
                f"{cls.__name__} limits its calls together: {name} cannot have a limit of its own"
            )
        if _bind_of(function):
            continue
        # Inherited: by the order of inheritance, which may have another class between the two.
        bind = function.__get__
        if name not in vars(cls):
            bind = functools.partial(
                lambda name, instance: getattr(super(cls, instance), name), name
            )
        if (guard := _guard_of(function, bind, turns_of)) is not None:
            setattr(cls, name, guard)


def _guard_of(
    function: Callable[..., Any], bind: Callable[[Any], Any], turns_of: Callable[[Any], Turns]
) -> Any:
    """Return the guard of a function, which takes a turn; None if `function` cannot wait for one.

    A plain `def` cannot. On the loop, waiting would block all. In a thread, it could wait for the
    method that has started the thread, as it lacks that method's context.
    """
    coroutine = getattr(function, COROUTINE, function)
    guard: Any
    if inspect.iscoroutinefunction(coroutine):

        @functools.wraps(coroutine)
        async def guard(self: Any, /, *args: Any, **kwargs: Any) -> Any:
            turns = turns_of(self)
            if turns.is_held_by(ancestor_batches()):
                return await bind(self)(*args, **kwargs)
            async with turns.hold(coroutine.__qualname__):
                return await bind(self)(*args, **kwargs)

    elif inspect.isasyncgenfunction(coroutine):
        guard = _guarded_generator(coroutine, bind, turns_of)
    else:
        return None
    if coroutine is not function:
        guard = async_execution(guard)
    setattr(guard, _GUARD, (guard, bind))
    return guard


def _guarded_generator(
    function: Callable[..., Any], bind: Callable[[Any], Any], turns_of: Callable[[Any], Turns]
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
