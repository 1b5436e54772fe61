"""The public functions that make calls: `remote(rref).method(...)`, `call`, `create`, `fetch`."""

from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from functools import partial
from typing import Any, Concatenate, Generic, NoReturn, ParamSpec, TypeVar, overload

from torch.distributed.rpc import RRef

from .._aio.deadlines import checked_timeout
from .._torch.compat import RRefBase, WorkerInfo
from .._torch.rrefs import known_class, owner_name
from .._wire.targets import (
    BoundTarget,
    FetchTarget,
    FunctionTarget,
    MethodTarget,
    check_public_name,
    public_methods,
)
from .call import RemoteCall, create_object
from .group import AnyMember, AnyProxy, Group, GroupProxy, call_any, call_group
from .group_call import GroupCall
from .named_members import NamedMembers
from .pool import WorkerRef, current
from .supervised import Supervised, check_restarts
from .supervised_calls import SupervisedCall, SupervisedProxy

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
        return f"<remote object on {owner_name(self._rref)}>"

    def __dir__(self) -> list[str]:
        cls = known_class(self._rref)
        return [] if cls is None else public_methods(cls)

    # Type checkers cannot see T's methods here: `proxy` and `call` are the typed forms.
    # Not `__getattr__`: the search before it makes an AttributeError in each call.
    def __getattribute__(self, name: str) -> Callable[..., RemoteCall]:
        if name.startswith("_"):
            return _own_attribute(self, name)  # type: ignore[no-any-return]
        rref = _rref_of(self)
        target = MethodTarget(rref, check_public_name(name))
        return RemoteMethod(RemoteCall, rref, target, _timeout_of(self))


class RemoteMethod(partial[RemoteCall]):
    """A method of a remote object, as `remote(rref).name`: a call of it returns an awaitable."""

    __slots__ = ()

    def __repr__(self) -> str:
        return f"<remote method {self._name}>"

    def __await__(self) -> NoReturn:
        raise TypeError(
            f"{self._name} was not called: write `await remote(rref).{self._name}()`. Only methods "
            f"are reached by remote(); for data, add a method that returns it, or fetch the object"
        )

    @property
    def _name(self) -> str:
        return str(self.args[1].name)


_slots: Any = vars(RemoteProxy)
_rref_of, _timeout_of = _slots["_rref"].__get__, _slots["_timeout"].__get__


def _own_attribute(proxy: RemoteProxy[Any], name: str) -> Any:
    try:
        return object.__getattribute__(proxy, name)
    except AttributeError:
        check_public_name(name)
        raise


_NOT_TORCH = (
    "this is not rpc.remote: make objects with `await create('ps', PS)`, call functions with "
    "`await call('ps', f, x)`"
)


@overload
def remote(rref: RRef[T], *, timeout: float | None = None) -> RemoteProxy[T]: ...


@overload
def remote(rref: Supervised[T], *, timeout: float | None = None) -> SupervisedProxy[T]: ...


@overload
def remote(rref: Group[T] | NamedMembers[T], *, timeout: float | None = None) -> GroupProxy[T]: ...


@overload
def remote(rref: AnyMember[T], *, timeout: float | None = None) -> AnyProxy[T]: ...


def remote(rref: Any, *more: Any, timeout: float | None = None, **others: Any) -> Any:
    """Return a proxy of the object behind `rref`: `await remote(rref).method(*args, **kwargs)`.

    An `async def` method runs on the owner's event loop, a plain `def` in a thread of its own. A
    `@batched` method joins a batch. Calls to one worker start in the order of their awaits. Small
    arguments, of up to 128 KiB in all, are copied at the call. Do not change larger tensors before
    the await returns: they are copied or sent meanwhile.

    The methods of a `Group` or of `members(name)` call all members. `await` gives the list of their
    results; `async for` gives pairs of member and result as they complete. The methods of
    `group.any()` call the least busy member.

    Args:
        rref: RRef of any object, `supervised` object, `Group`, `members(name)` or `group.any()`.
            The classes of arguments and results must be importable on both sides, or else
            `cloudpickle` installed there.
        timeout: seconds for each call, from its await (default: no bound but `aiorpc.timeout`'s).
            The earlier of both applies.

    Raises:
        TypeError: if `rref` is not an RRef, or if `timeout` is not a number.
        AttributeError: if there is no such method, or its name starts with an underscore.
        GroupError: from a call of a group, if members have failed.
        CallTimeout, WorkerGone, NotInWorld, RemoteError: from the await. An exception that the
            method raises arrives as itself, with a `RemoteTraceback` as its cause.
    """
    bound = None if timeout is None else checked_timeout(timeout)
    if more or others or not isinstance(rref, RRefBase):
        return _remote_members(rref, bound, more, others)
    found: Any = rref
    return RemoteProxy(found, bound)


def _remote_members(
    members: Any, timeout: float | None, more: tuple[Any, ...], others: dict[str, Any]
) -> Any:
    if not (more or others):
        if isinstance(members, Group | NamedMembers):
            return GroupProxy(members, timeout)
        if isinstance(members, AnyMember):
            return AnyProxy(members, timeout)
        if isinstance(members, Supervised):
            return SupervisedProxy(members, timeout)
    _refuse_arguments(members, more, others)


_TORCH_ARGUMENTS = (str, int, WorkerInfo, type)


def _refuse_arguments(rref: Any, more: tuple[Any, ...], others: dict[str, Any]) -> NoReturn:
    if not (more or others or isinstance(rref, _TORCH_ARGUMENTS)):
        _check_rref(rref)
    unknown = others.keys() - {"args", "kwargs"}
    if unknown and not more and isinstance(rref, RRefBase):
        raise TypeError(f"remote() has no parameter {', '.join(sorted(unknown))}")
    raise TypeError(_NOT_TORCH)


def proxy(rref: RRef[T] | Supervised[T], *, timeout: float | None = None) -> T:
    """Return `remote(rref)` under the type of the object: `await proxy(rref).method(...)`.

    Type checkers then see the parameters and results of `async def` methods, and the items of async
    generators. A plain `def` method has to be awaited too, which its type does not say. For such a
    method use `call(rref, PS.method, ...)`.

    Args:
        rref: RRef of any object, or supervised object.
        timeout: seconds for each call (default: no bound but `aiorpc.timeout`'s). The earlier of
            both applies.

    Raises:
        TypeError: if `rref` is not an RRef, or if `timeout` is not a number.
        AttributeError, CallTimeout, WorkerGone, NotInWorld, RemoteError: as `remote`.
    """
    if isinstance(rref, Group | NamedMembers):
        raise TypeError("proxy() takes an RRef or group.any(), got a Group: use remote(group)")
    return remote(rref, timeout=timeout)  # type: ignore[return-value]


_Members = Group[T] | NamedMembers[T]
_Object = RRef[T] | Supervised[T] | AnyMember[T]
_Method = Callable[Concatenate[T, P], R]
_Items = AsyncIterator[R] | Iterator[R]


@overload
def call(
    to: _Members[T], function: _Method[T, P, Awaitable[R]], /, *args: P.args, **kwargs: P.kwargs
) -> GroupCall[T, R]: ...


@overload
def call(
    to: _Members[T], function: _Method[T, P, R], /, *args: P.args, **kwargs: P.kwargs
) -> GroupCall[T, R]: ...


@overload
def call(  # type: ignore[overload-overlap]
    to: _Object[T], function: _Method[T, P, _Items[R]], /, *args: P.args, **kwargs: P.kwargs
) -> AsyncIterable[R]: ...


@overload
def call(
    to: _Object[T], function: _Method[T, P, Awaitable[R]], /, *args: P.args, **kwargs: P.kwargs
) -> Coroutine[Any, Any, R]: ...


@overload
def call(
    to: _Object[T], function: _Method[T, P, R], /, *args: P.args, **kwargs: P.kwargs
) -> Coroutine[Any, Any, R]: ...


@overload
def call(  # type: ignore[overload-overlap]
    to: WorkerRef, function: Callable[P, _Items[R]], /, *args: P.args, **kwargs: P.kwargs
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
    argument. With a `Group`, `members(name)` or `group.any()` in place of `rref`, it calls all
    members or the least busy one, as `remote` does. Keywords are the function's; for a bound in
    seconds write `with aiorpc.timeout(5.0):` around it.

    Raises:
        ValueError: if there is no such worker.
        TypeError: if `function` cannot be called.
        NotInWorld: outside a world.
    """
    if not callable(function):
        raise TypeError(f"the function of call() must be callable, got {function!r}")
    if isinstance(to, RRefBase):
        return RemoteCall(to, BoundTarget(_check_rref(to), function), None, *args, **kwargs)
    if isinstance(to, Group | NamedMembers):
        return call_group(to, function, args, kwargs)
    if isinstance(to, AnyMember):
        return call_any(to, function, args, kwargs)
    if isinstance(to, Supervised):
        return SupervisedCall(to, BoundTarget(to.rref, function), args, kwargs)
    return RemoteCall(to, FunctionTarget(function), None, *args, **kwargs)


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
    it at the first use of the RRef. The object lives as long as an RRef of it on any worker. For a
    bound in seconds write `with aiorpc.timeout(5.0):` around it.

    Raises:
        ValueError: if there is no such worker.
        TypeError: if `factory` cannot be called.
        NotInWorld: outside a world.
    """
    if not callable(factory):
        raise TypeError(f"the factory of create() must be callable, got {factory!r}")
    return await create_object(to, factory, args, kwargs)


@overload
async def supervised(
    to: WorkerRef,
    factory: Callable[..., Awaitable[T]],
    /,
    *args: Any,
    restarts: int = 3,
    **kwargs: Any,
) -> Supervised[T]: ...


@overload
async def supervised(
    to: WorkerRef, factory: Callable[..., T], /, *args: Any, restarts: int = 3, **kwargs: Any
) -> Supervised[T]: ...


async def supervised(
    to: WorkerRef, factory: Callable[..., Any], /, *args: Any, restarts: int = 3, **kwargs: Any
) -> Any:
    """Make an object on a worker, and again when the worker's process is replaced.

        env = await supervised("env0", Env, seed, restarts=3)
        state = await remote(env).step(action)

    Calls wait from the loss until the object is made again on the replacement process, within their
    deadlines. A call that was sent raises `WorkerLost`, and is not repeated. One process makes the
    object again once, however many of its calls wait. All calls of `env` then reach the new object,
    whose state is that of a new one.

    A replacement process comes with `restart=` of `local_world` or `run_local`, or from your own
    supervisor. An exception of the factory is raised from the calls that wait; the next call tries
    again. If the worker was silent only, the object is still there. A worker that has left in order
    raises `WorkerLeft`. `.incarnation` counts from 0, `.rref` is the RRef of the last one.

    Args:
        to: worker by name, rank or WorkerInfo.
        factory: class or function that makes the object. Let it register the object's name.
        args: its arguments, and `kwargs`: kept, and sent again with what they hold then.
        restarts: number of times that the object may be made again. After the next replacement,
            calls raise `WorkerLost` at once.

    Raises:
        ValueError: if there is no such worker, or if `restarts` is negative.
        TypeError: if `factory` cannot be called.
        NotInWorld: outside a world.
        WorkerLost: if the worker is lost before the first object is made.
    """
    if not callable(factory):
        raise TypeError(f"the factory of supervised() must be callable, got {factory!r}")
    check_restarts(restarts)
    worker = current().find(to)
    rref = await create_object(worker, factory, args, kwargs)
    return Supervised(rref, worker, factory, args, kwargs, restarts)


async def fetch(rref: RRef[T] | Supervised[T], *, timeout: float | None = None) -> T:
    """Return a copy of the object behind `rref`, or on its owner the object: `to_here`, awaited.

    Args:
        rref: RRef of any object, or supervised object.
        timeout: seconds for the copy (default: no bound but `aiorpc.timeout`'s). The earlier of
            both applies.

    Raises:
        TypeError: if `rref` is not an RRef, if the object cannot be pickled, or if `timeout` is not
            a number.
        CallTimeout, WorkerGone, NotInWorld, RemoteError: as `remote`.
    """
    bound = checked_timeout(timeout)
    if isinstance(rref, Supervised):
        return await SupervisedCall(rref, FetchTarget(rref.rref), (), {}, bound)  # type: ignore[no-any-return]
    _check_rref(rref)
    if rref.is_owner():
        return rref.local_value()  # type: ignore[no-any-return]
    return await RemoteCall(rref, FetchTarget(rref), bound)  # type: ignore[no-any-return]


def _check_rref(rref: Any) -> RRef[Any]:
    # torch passes RRefBase, the base class of RRef; users annotate RRef.
    if not isinstance(rref, RRefBase):
        raise TypeError(f"rref must be an RRef, as create() or torch returns it, got {rref!r}")
    checked: Any = rref
    return checked  # type: ignore[no-any-return]
