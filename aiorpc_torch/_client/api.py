"""The public functions that make calls: `remote(rref).method(...)`, `call`, `create`, `fetch`."""

from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, overload

from torch.distributed.rpc import RRef

from .._protocol.targets import (
    BoundTarget,
    CreateTarget,
    FetchTarget,
    FunctionTarget,
    MethodTarget,
    check_public_name,
)
from .._torch.compat import RRefBase
from .call import RemoteCall
from .group import AnyMember, AnyProxy, Group, GroupProxy, call_any, call_group
from .group_call import GroupCall
from .pool import WorkerRef

__all__ = ("call", "create", "fetch", "remote")

T = TypeVar("T")
R = TypeVar("R")
P = ParamSpec("P")


class RemoteProxy(Generic[T]):
    """A proxy of the object behind an RRef: its methods return awaitables. Made by `remote`."""

    __slots__ = ("_rref", "_timeout")

    def __init__(self, rref: RRef[T], timeout: float | None) -> None:
        self._rref = rref
        self._timeout = timeout

    def __repr__(self) -> str:
        return f"<remote object on {self._rref.owner_name()}>"

    # Type checkers cannot see T's methods here: `call(rref, T.method, ...)` is the typed form.
    def __getattr__(self, name: str) -> Callable[..., RemoteCall]:
        check_public_name(name)
        rref, timeout = self._rref, self._timeout

        def method(*args: Any, **kwargs: Any) -> RemoteCall:
            return RemoteCall(rref, MethodTarget(rref, name), args, kwargs, timeout)

        return method


@overload
def remote(rref: RRef[T], *, timeout: float | None = None) -> RemoteProxy[T]: ...


@overload
def remote(rref: Group[T], *, timeout: float | None = None) -> GroupProxy[T]: ...


@overload
def remote(rref: AnyMember[T], *, timeout: float | None = None) -> AnyProxy[T]: ...


def remote(rref: Any, *, timeout: float | None = None) -> Any:
    """Return a proxy of the object behind `rref`: `await remote(rref).method(*args, **kwargs)`.

    An `async def` method runs on the owner's event loop, a plain `def` in a thread of its own. A
    `@batched` method joins a batch. Calls to one worker start in the order of their awaits. Small
    arguments are copied at the call. Tensors are sent without a copy, so do not change them before
    the await returns.

    The methods of a `Group` call all members. `await` gives the list of their results; `async for`
    gives pairs of member and result as they complete. The methods of `group.any()` call the least
    busy member.

    Args:
        rref: RRef of any object, `Group` or `group.any()`. The classes of arguments and results
            must be importable on both sides.
        timeout: seconds for each call (default: no bound but `aiorpc.timeout`'s).

    Raises:
        TypeError: if `rref` is not an RRef.
        AttributeError: if there is no such method, or its name starts with an underscore.
        GroupError: from a call of a group, if members have failed.
        CallTimeout, WorkerLost, NotServing, RemoteError: from the await. An exception that the
            method raises arrives as itself, with a `RemoteTraceback` as its cause.
    """
    if isinstance(rref, Group):
        return GroupProxy(rref, timeout)
    if isinstance(rref, AnyMember):
        return AnyProxy(rref, timeout)
    return RemoteProxy(_check_rref(rref), timeout)


@overload
def call(
    to: Group[T],
    function: Callable[Concatenate[T, P], Awaitable[R]],
    /,
    *args: P.args,
    **kwargs: P.kwargs,
) -> GroupCall[T, R]: ...


@overload
def call(
    to: Group[T], function: Callable[Concatenate[T, P], R], /, *args: P.args, **kwargs: P.kwargs
) -> GroupCall[T, R]: ...


@overload
def call(  # type: ignore[overload-overlap]
    to: RRef[T] | AnyMember[T],
    function: Callable[Concatenate[T, P], AsyncIterator[R] | Iterator[R]],
    /,
    *args: P.args,
    **kwargs: P.kwargs,
) -> AsyncIterable[R]: ...


@overload
def call(
    to: RRef[T] | AnyMember[T],
    function: Callable[Concatenate[T, P], Awaitable[R]],
    /,
    *args: P.args,
    **kwargs: P.kwargs,
) -> Coroutine[Any, Any, R]: ...


@overload
def call(
    to: RRef[T] | AnyMember[T],
    function: Callable[Concatenate[T, P], R],
    /,
    *args: P.args,
    **kwargs: P.kwargs,
) -> Coroutine[Any, Any, R]: ...


@overload
def call(  # type: ignore[overload-overlap]
    to: WorkerRef,
    function: Callable[P, AsyncIterator[R] | Iterator[R]],
    /,
    *args: P.args,
    **kwargs: P.kwargs,
) -> AsyncIterable[R]: ...


@overload
def call(
    to: WorkerRef, function: Callable[P, Awaitable[R]], /, *args: P.args, **kwargs: P.kwargs
) -> Coroutine[Any, Any, R]: ...


@overload
def call(
    to: WorkerRef, function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs
) -> Coroutine[Any, Any, R]: ...


def call(to: Any, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Call a function on a worker, or a method of the object behind an RRef, with its types.

    `await call("ps", torch.add, a, b)` runs a function on the worker with that name (or rank, or
    WorkerInfo). `await call(rref, Net.forward, x)` runs the method on the owner of `rref`, like
    `remote(rref).forward(x)`. An override of the method runs there as well, and type checkers see
    the parameters and the result. A function that is not a method gets the object as its first
    argument. With a `Group` or `group.any()` in place of `rref`, it calls all members or the least
    busy one, as `remote` does.

    Raises:
        ValueError: if there is no such worker.
        TypeError: if `function` cannot be called.
        NotServing: outside a world.
    """
    if not callable(function):
        raise TypeError(f"the function of call() must be callable, got {function!r}")
    if isinstance(to, RRefBase):
        return RemoteCall(to, BoundTarget(_check_rref(to), function), args, kwargs)
    if isinstance(to, Group):
        return call_group(to, function, args, kwargs)
    if isinstance(to, AnyMember):
        return call_any(to, function, args, kwargs)
    return RemoteCall(to, FunctionTarget(function), args, kwargs)


@overload
async def create(
    to: WorkerRef, factory: Callable[P, Awaitable[T]], /, *args: P.args, **kwargs: P.kwargs
) -> RRef[T]: ...


@overload
async def create(
    to: WorkerRef, factory: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs
) -> RRef[T]: ...


async def create(to: WorkerRef, factory: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Make an object on a worker; return an RRef of it once it is made.

    `factory` is a class or any function, which runs in a thread of the worker, or an `async def`,
    which runs on its loop. An exception of the factory is raised here; torch's `rpc.remote` raises
    it at the first use of the RRef. The object lives as long as an RRef of it on any worker.

    Raises:
        ValueError: if there is no such worker.
        TypeError: if `factory` cannot be called.
        NotServing: outside a world.
    """
    if not callable(factory):
        raise TypeError(f"the factory of create() must be callable, got {factory!r}")
    return await RemoteCall(to, CreateTarget(factory), args, kwargs)


async def fetch(rref: RRef[T]) -> T:
    """Return a copy of the object behind `rref`, or on its owner the object: `to_here`, awaited.

    Raises:
        TypeError: if `rref` is not an RRef, or if the object cannot be pickled.
    """
    _check_rref(rref)
    if rref.is_owner():
        return rref.local_value()  # type: ignore[no-any-return]
    return await RemoteCall(rref, FetchTarget(rref), (), {})  # type: ignore[no-any-return]


def _check_rref(rref: Any) -> RRef[Any]:
    # torch passes RRefBase, the base class of RRef; users annotate RRef.
    if not isinstance(rref, RRefBase):
        raise TypeError(f"rref must be an RRef, as create() or torch returns it, got {rref!r}")
    checked: Any = rref
    return checked  # type: ignore[no-any-return]
