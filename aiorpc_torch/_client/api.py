"""The public functions that make calls: `remote(rref).method(...)`, `call`, `create`, `fetch`."""

from collections.abc import (
    AsyncIterable,
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Iterable,
    Iterator,
    Sequence,
)
from functools import partial
from typing import Any, Concatenate, ParamSpec, TypeGuard, TypeVar, cast, overload

import torch

from .._aio.deadlines import checked_call_timeout
from .._handles.handles import described, of_handle
from .._handles.mistakes import await_hint
from .._torch.compat import RRef, RRefBase, WorkerInfo
from .._torch.rrefs import note_class
from .._wire.shared_arguments import arguments_of
from .._wire.targets import BoundTarget, CreateTarget, FetchTarget, FunctionTarget, MakeTarget
from .call import RemoteCall, create_object
from .group import Group
from .group_call import GroupCall
from .named_members import NamedMembers
from .pool import WorkerRef, current
from .proxies import AnyProxy, GroupProxy, RemoteProxy, SupervisedProxy
from .routes import AnyMember, call_of, checked_retries, placeholder
from .supervised import Supervised

S = TypeVar("S")
T = TypeVar("T")
R = TypeVar("R")
P = ParamSpec("P")

Workers = Sequence[WorkerRef]
"""Several workers, by name, rank or WorkerInfo."""


_NO_GROUP = "objects are called together as a group: write Group([...])"


def _are_workers(to: Any) -> TypeGuard[Workers]:
    """Return whether it is a list or tuple, or another sequence of workers.

    Raises:
        TypeError: if it holds something else, as RRefs.
    """
    if not isinstance(to, Sequence) or isinstance(to, str | bytes | bytearray | Group):
        return False
    for each in to:
        if not isinstance(each, str | int | WorkerInfo):
            if isinstance(of_handle(each), RRefBase | Supervised):
                raise TypeError(_NO_GROUP)
            raise TypeError(f"workers are names, ranks or WorkerInfos, got {described(each)}")
    return True


_One = RRef[T] | RemoteProxy[T] | Supervised[T] | SupervisedProxy[T] | AnyMember[T] | AnyProxy[T]
_Many = Group[T] | NamedMembers[T] | GroupProxy[T]


@overload
def remote(
    rref: RRef[T] | RemoteProxy[T], *, timeout: float | None = None, retries: int = 0
) -> RemoteProxy[T]: ...


@overload
def remote(
    rref: Supervised[T] | SupervisedProxy[T], *, timeout: float | None = None, retries: int = 0
) -> SupervisedProxy[T]: ...


@overload
def remote(rref: _Many[T], *, timeout: float | None = None, retries: int = 0) -> GroupProxy[T]: ...


@overload
def remote(
    rref: AnyMember[T] | AnyProxy[T], *, timeout: float | None = None, retries: int = 0
) -> AnyProxy[T]: ...


def remote(
    rref: Any, *more: Any, timeout: float | None = None, retries: int = 0, **others: Any
) -> Any:
    """Return a handle of the object behind `rref`: `await remote(rref).method(*args, **kwargs)`.

    An `async def` method runs on the owner's event loop, a plain `def` in a thread of its own. A
    `@batched` method joins a batch. Calls to one worker start in the order of their awaits. Small
    arguments, of up to 128 KiB in all, are copied at the call. Do not change larger tensors before
    the await returns: they are copied or sent meanwhile.

    `await remote(net)(x)` calls the object itself, a module with its hooks. The handle can be
    passed where an RRef can: to `call`, `create`, `fetch`, `Group`, `register`, and as an argument,
    which arrives as a handle.

    The methods of a `Group` or of `members(name)` call all members. `await` gives the list of their
    results; `async for` gives pairs of member and result as they complete. The methods of
    `group.any()` call the least busy member.

    Args:
        rref: RRef of any object, `supervised` object, `Group`, `members(name)` or `group.any()`.
            The classes of arguments and results must be importable on both sides, or else
            `cloudpickle` installed there.
        timeout: seconds for each call, from its await (default: that of a handle, or no bound but
            `aiorpc.timeout`'s). The earlier of both applies.
        retries: how often a call that ends with `WorkerGone` is made again, also if it may have
            run: that of `any()` by another member, that of a supervised object once it is there
            again (default: that of a handle, or 0). The timeout bounds all attempts together. A
            stream is begun again until its first item.

    Raises:
        TypeError: if `rref` is not an RRef, or if `timeout` is not a number.
        ValueError: if `retries` is not a number, or negative.
        AttributeError: if there is no such method, or its name starts with an underscore.
        GroupError: from a call of a group, if members have failed.
        CallTimeout, WorkerGone, NotInWorld, RemoteError: from the await. An exception that the
            method raises arrives as itself, with a `RemoteTraceback` as its cause.
    """
    bound = None if timeout is None else checked_call_timeout(timeout)
    if isinstance(rref, RRefBase) and not (retries or more or others):  # the usual case
        return RemoteProxy(rref, bound)  # type: ignore[arg-type]  # torch passes RRefBase
    if more or others:
        unknown = others.keys() - {"args", "kwargs"}
        if unknown and not more and isinstance(rref, RRefBase):
            raise TypeError(f"remote() has no parameter {', '.join(sorted(unknown))}")
        raise TypeError(_NOT_TORCH)
    return _remote(rref, bound, retries)


def _remote(rref: Any, timeout: float | None, retries: int) -> Any:
    found, own_timeout, own_retries = _of_handle(rref)
    timeout = own_timeout if timeout is None else timeout
    retries = checked_retries(retries) or own_retries
    for kinds, proxy_of in _PROXIES:
        if isinstance(found, kinds):
            return proxy_of(found, timeout, retries)
    if isinstance(found, str | int | WorkerInfo | type):
        raise TypeError(_NOT_TORCH)
    raise _no_rref(found)


_PROXIES: tuple[tuple[Any, Callable[..., Any]], ...] = (
    (RRefBase, RemoteProxy),
    (Group | NamedMembers, GroupProxy),
    (AnyMember, AnyProxy),
    (Supervised, SupervisedProxy),
)

_NOT_TORCH = (
    "this is not rpc.remote: make objects with `await create('ps', PS)`, call functions with "
    "`await call('ps', f, x)`"
)


def _of_handle(value: Any) -> tuple[Any, float | None, int]:
    """Return what a handle was made of, with its timeout and retries; any other value as it is."""
    if isinstance(value, RemoteProxy):
        return value._rref, value._timeout, value._retries
    if isinstance(value, GroupProxy | AnyProxy | SupervisedProxy):
        return value._of, value._timeout, value._retries
    return value, None, 0


def proxy(
    rref: RRef[T] | RemoteProxy[T] | Supervised[T] | SupervisedProxy[T],
    *,
    timeout: float | None = None,
    retries: int = 0,
) -> T:
    """Return `remote(rref)` under the type of the object: `await proxy(rref).method(...)`.

    Type checkers then see the parameters and results of `async def` methods, and the items of async
    generators. A plain `def` method has to be awaited too, which its type does not say. For such a
    method use `call(rref, PS.method, ...)`.

    Args:
        rref: RRef of any object, or supervised object.
        timeout: as for `remote`.
        retries: as for `remote`.

    Raises:
        TypeError: if `rref` is not an RRef, or if `timeout` is not a number.
        ValueError, AttributeError, CallTimeout, WorkerGone, NotInWorld, RemoteError: as `remote`.
    """
    if isinstance(rref, Group | NamedMembers | GroupProxy):
        raise TypeError("proxy() takes an RRef or group.any(), got a Group: use remote(group)")
    bound = None if timeout is None else checked_call_timeout(timeout)
    return cast(T, _remote(rref, bound, retries))


# ── functions and methods ───────────────────────────────────────────────────────────────────────

_Method = Callable[Concatenate[T, P], R]
_Items = AsyncIterator[R] | Iterator[R]


@overload
def call(
    to: _Many[T], function: _Method[T, P, Awaitable[R]], /, *args: P.args, **kwargs: P.kwargs
) -> GroupCall[RRef[T], R]: ...


@overload
def call(
    to: _Many[T], function: _Method[T, P, R], /, *args: P.args, **kwargs: P.kwargs
) -> GroupCall[RRef[T], R]: ...


@overload
def call(  # type: ignore[overload-overlap]
    to: _One[T], function: _Method[T, P, _Items[R]], /, *args: P.args, **kwargs: P.kwargs
) -> AsyncIterable[R]: ...


@overload
def call(
    to: _One[T], function: _Method[T, P, Awaitable[R]], /, *args: P.args, **kwargs: P.kwargs
) -> Coroutine[Any, Any, R]: ...


@overload
def call(
    to: _One[T], function: _Method[T, P, R], /, *args: P.args, **kwargs: P.kwargs
) -> Coroutine[Any, Any, R]: ...


@overload
def call(  # type: ignore[overload-overlap]
    to: WorkerRef, function: Callable[P, _Items[R]], /, *args: P.args, **kwargs: P.kwargs
) -> AsyncIterable[R]: ...


@overload
def call(  # type: ignore[overload-overlap]
    to: WorkerRef, function: Callable[P, Awaitable[R]], /, *args: P.args, **kwargs: P.kwargs
) -> Coroutine[Any, Any, R]: ...


@overload
def call(  # type: ignore[overload-overlap]
    to: WorkerRef, function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs
) -> Coroutine[Any, Any, R]: ...


@overload
def call(
    to: Workers, function: Callable[P, Awaitable[R]], /, *args: P.args, **kwargs: P.kwargs
) -> GroupCall[str, R]: ...


@overload
def call(
    to: Workers, function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs
) -> GroupCall[str, R]: ...


def call(to: Any, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Call a function on one or many workers, or a method of an object, with its types.

    `await call("ps", torch.add, a, b)` runs a function on the worker with that name (or rank, or
    WorkerInfo). With a list or tuple of workers it runs on each of them, concurrently: `await`
    gives the list of the results, `async for` gives pairs of worker and result as they complete;
    `each` gives every worker its own argument.

    `await call(rref, Net.forward, x)` runs the method on the owner of `rref`, like
    `remote(rref).forward(x)`. An override of the method runs there as well, and type checkers see
    the parameters and the result. A function that is not a method gets the object as its first
    argument. With a `Group`, `members(name)` or `group.any()` in place of `rref`, it calls all
    members or the least busy one, as `remote` does. With what `remote` returns, its timeout and
    retries apply. Keywords are the function's; for a bound in seconds write
    `with aiorpc.timeout(5.0):` around it.

    Raises:
        UnknownWorker: from the await, if there is no such worker.
        TypeError: if `function` cannot be called, or `to` is none of these.
        GroupError: from the await, if workers or members have failed.
        NotInWorld: from the await, outside a world.
    """
    if not callable(function):
        raise TypeError(
            f"the function of call() must be callable, got {function!r}: pass the function and its "
            "arguments apart, `call(to, f, x)`"
        )
    if isinstance(to, RRefBase):
        return RemoteCall(to, BoundTarget(to, function), None, *args, **kwargs)
    if isinstance(to, str | int | WorkerInfo):
        return RemoteCall(to, FunctionTarget(function), None, *args, **kwargs)
    return _call_object(to, BoundTarget, function, args, kwargs)


def _call_object(
    to: Any,
    target: Any,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Return the call of a function of an object or of several, or on several workers.

    `target` is the class of the target: `BoundTarget` or `MakeTarget`.
    """
    to, timeout, retries = _of_handle(to)
    if _are_workers(to):
        of_workers = FunctionTarget(function)
        return GroupCall[Any, Any](to, lambda _: of_workers, args, kwargs)
    if isinstance(to, Group | NamedMembers):
        of_members = partial(target, function=function)
        return GroupCall[Any, Any](to, of_members, args, kwargs, timeout, retries)
    if isinstance(to, RRefBase | Supervised | AnyMember):
        of_object = target(placeholder(to), function)
        return call_of(to, of_object, timeout, retries, *args, **kwargs)
    hint = await_hint(to)
    if not hint and isinstance(to, Iterable):
        hint = f"; write [*{to!r}]"
    raise TypeError(
        "the first argument must be a worker, a list or tuple of workers, an RRef or a Group, got "
        f"{described(to)}{hint}"
    )


# ── objects ─────────────────────────────────────────────────────────────────────────────────────


@overload
async def create(  # type: ignore[overload-overlap]
    to: WorkerRef, factory: Callable[P, Awaitable[T]], /, *args: P.args, **kwargs: P.kwargs
) -> RRef[T]: ...


@overload
async def create(  # type: ignore[overload-overlap]
    to: WorkerRef, factory: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs
) -> RRef[T]: ...


@overload
async def create(
    to: Workers, factory: Callable[P, Awaitable[T]], /, *args: P.args, **kwargs: P.kwargs
) -> Group[T]: ...


@overload
async def create(
    to: Workers, factory: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs
) -> Group[T]: ...


@overload
async def create(
    to: _One[S], method: _Method[S, P, Awaitable[T]], /, *args: P.args, **kwargs: P.kwargs
) -> RRef[T]: ...


@overload
async def create(
    to: _One[S], method: _Method[S, P, T], /, *args: P.args, **kwargs: P.kwargs
) -> RRef[T]: ...


@overload
async def create(
    to: _Many[S], method: _Method[S, P, Awaitable[T]], /, *args: P.args, **kwargs: P.kwargs
) -> Group[T]: ...


@overload
async def create(
    to: _Many[S], method: _Method[S, P, T], /, *args: P.args, **kwargs: P.kwargs
) -> Group[T]: ...


async def create(to: Any, factory: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Make an object on a worker, and return an RRef of it once it is made; or one on each of many.

        ps = await aiorpc.create("ps", ParameterServer, lr=0.1)  # an RRef
        envs = await aiorpc.create(["env0", "env1"], Env, aiorpc.each(seeds))  # a Group
        latent = await aiorpc.create(encoder, Encoder.forward, x)  # stays where the encoder is

    `factory` is a class or any function, which runs in a thread of the worker, or an `async def`,
    which runs on its loop. An exception of the factory is raised here; torch's `rpc.remote` raises
    it at the first use of the RRef. The object lives as long as an RRef of it on any worker. For a
    bound in seconds write `with aiorpc.timeout(5.0):` around it.

    With a list or tuple of workers, the objects are made concurrently. Arguments are encoded once
    for all; `each` gives every object its own. A worker that is named twice gets two objects.

    With an RRef in place of the worker, `factory` is a method of its object, or a function that
    gets it as first argument. The result stays at the owner, as torch's `rref.remote().method(x)`.
    With a `Group` or `members(name)` there is one for each member.

    Args:
        to: worker by name, rank or WorkerInfo; a list or tuple of workers; an RRef, a supervised
            object, a Group, or what `remote` returns for one.
        factory: class, function or method that makes the object.
        args: its arguments, and `kwargs`.

    Raises:
        UnknownWorker: if there is no such worker. Nothing has run.
        TypeError: if `factory` cannot be called, or `to` is none of these.
        GroupError: if some of many fail; `results` has the RRefs of the others.
        NotInWorld: outside a world.
    """
    _check_factory("create", factory)
    if isinstance(to, str | int | WorkerInfo):
        return await create_object(to, factory, args, kwargs)
    if _are_workers(to):
        return Group(await _create_on(to, factory, args, kwargs))
    made = await _call_object(to, MakeTarget, factory, args, kwargs)
    return Group(made) if isinstance(made, list) else made


@overload
async def supervised(  # type: ignore[overload-overlap]
    to: WorkerRef, factory: Callable[P, Awaitable[T]], /, *args: P.args, **kwargs: P.kwargs
) -> Supervised[T]: ...


@overload
async def supervised(  # type: ignore[overload-overlap]
    to: WorkerRef, factory: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs
) -> Supervised[T]: ...


@overload
async def supervised(
    to: Workers, factory: Callable[P, Awaitable[T]], /, *args: P.args, **kwargs: P.kwargs
) -> Group[T]: ...


@overload
async def supervised(
    to: Workers, factory: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs
) -> Group[T]: ...


async def supervised(to: Any, factory: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Make an object on a worker, and again whenever the worker's process is replaced.

        async with aiorpc.local_world(["env0", "env1"], max_restarts=3):
            env = await aiorpc.supervised("env0", Env, seed)
            state = await aiorpc.remote(env).step(action)
            envs = await aiorpc.supervised(["env0", "env1"], Env, aiorpc.each(seeds))    # a Group

    Calls wait from the loss until the object is made again on the replacement process, within their
    deadlines. A call that was sent raises `WorkerLost`, and is not repeated unless `retries=` of
    `remote` says so. One process makes the object again once, however many of its calls wait. All
    calls of `env` then reach the new object, whose state is that of a new one.

    A replacement process comes with `max_restarts=` of `local_world` or `run_local`, which is the
    one budget, or from your own supervisor. An exception of the factory is raised from the calls
    that wait; the next call tries again. If the worker was silent only, the object is still there.
    Of a worker that is not started again, calls raise `WorkerLost`; of one that has left in order,
    `WorkerLeft`. `.incarnation` counts from 0, `.rref` is the RRef of the last one.

    With a list or tuple of workers, the objects are made concurrently, as by `create`. Each is made
    again on its own, with its own values of `each`.

    Args:
        to: worker by name, rank or WorkerInfo; or a list or tuple of workers.
        factory: class or function, also `async def`, that makes the object. Let it register the
            object's name.
        args: its arguments, and `kwargs`: kept, and sent again with what they hold then.

    Raises:
        UnknownWorker: if there is no such worker. Nothing has run.
        ValueError: if the worker is a child of a local world whose `max_restarts` is 0.
        TypeError: if `factory` cannot be called.
        GroupError: if some of many fail; `results` has the RRefs of the others.
        NotInWorld: outside a world.
        WorkerLost: if the worker is lost before the first object is made.
    """
    _check_factory("supervised", factory)
    if not _are_workers(to):
        worker = _replaceable(to)
        rref = await create_object(worker, factory, args, kwargs)
        return Supervised(rref, worker, factory, args, kwargs)
    workers = [*map(_replaceable, to)]
    rrefs = await _create_on(workers, factory, args, kwargs)
    rows = [arguments_of(member, (args, kwargs)) for member in range(len(workers))]
    return Group(
        Supervised(rref, worker, factory, *row)
        for rref, worker, row in zip(rrefs, workers, rows, strict=True)
    )


async def _create_on(
    workers: Workers, factory: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[RRef[Any]]:
    """Make an object on each of these workers, concurrently; return their RRefs.

    Raises:
        GroupError: if some fail.
    """
    target = CreateTarget(factory)
    rrefs = await GroupCall[Any, Any](workers, lambda _: target, args, kwargs)
    if isinstance(factory, type):
        for rref in rrefs:
            note_class(rref, factory)
    return rrefs


def _check_factory(name: str, factory: Any) -> None:
    """Raise TypeError for what makes no object, as a module in place of its class."""
    # A module can be called, but that is its forward.
    if callable(factory) and not isinstance(factory, torch.nn.Module):
        return
    hint = await_hint(factory) or (
        f": pass a class and its arguments, `{name}(to, Net, 3)`, or for a copy of an object a "
        f"function that returns it, `{name}(to, f, obj)`"
    )
    got = f"a {type(factory).__name__}" if callable(factory) else repr(factory)
    raise TypeError(
        f"the factory of {name}() must be callable and make the object, got {got}{hint}"
    )


def _replaceable(to: Any) -> str:
    """Return the name of a worker whose process may be replaced."""
    if not isinstance(to, str | int | WorkerInfo):
        raise TypeError(f"supervised() takes a worker, or a list or tuple of workers, got {to!r}")
    pool = current()
    worker = pool.find(to)
    if pool.is_never_replaced(worker):
        raise ValueError(
            f"worker {worker!r} is not restarted when it dies, so its object would not be made "
            "again: give local_world() or run_local() max_restarts=, or use create()"
        )
    return worker


async def fetch(
    rref: RRef[T] | RemoteProxy[T] | Supervised[T] | SupervisedProxy[T],
    *,
    timeout: float | None = None,
) -> T:
    """Return a copy of the object behind `rref`, or on its owner the object: `to_here`, awaited.

    Args:
        rref: RRef of any object, or supervised object, or what `remote` returns for one.
        timeout: seconds for the copy (default: no bound but `aiorpc.timeout`'s). The earlier of
            both applies.

    Raises:
        TypeError: if `rref` is not an RRef, if the object cannot be pickled, or if `timeout` is not
            a number.
        CallTimeout, WorkerGone, NotInWorld, RemoteError: as `remote`.
    """
    found, own, retries = _of_handle(rref)
    bound = own if timeout is None else checked_call_timeout(timeout)
    if not isinstance(found, RRefBase | Supervised):
        raise _no_rref(found)
    if isinstance(found, RRefBase) and found.is_owner():
        return found.local_value()  # type: ignore[no-any-return]
    target = FetchTarget(placeholder(found))
    return await call_of(found, target, bound, retries)  # type: ignore[no-any-return]


def _no_rref(value: Any) -> TypeError:
    if isinstance(value, list | tuple):
        return TypeError(_NO_GROUP)
    hint = await_hint(value)
    if isinstance(getattr(value, "__self__", None), Group | NamedMembers):  # `remote(group.any)`
        hint = f", which was not called: write `{value.__name__}()`"
    return TypeError(
        "rref must be an RRef, as create() returns it, or its caller's RRef(x) of an object x, got "
        f"{described(value)}{hint}"
    )
