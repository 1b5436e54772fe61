"""What the user types: `remote(rref).method(...)`, `call`, `create`, `fetch`.

Sugar over the outbox: it names what is to run where, and gives it types.
"""

from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, overload

from torch.distributed.rpc import RRef

from .._protocol.targets import Create, Fetch, Function, Method, TypedMethod, check_public
from .._torch.compat import RRefBase
from .call import Calling
from .pool import Worker

__all__ = ("call", "create", "fetch", "remote")

T = TypeVar("T")
R = TypeVar("R")
P = ParamSpec("P")


class Remote(Generic[T]):
    """The methods of the object behind an RRef, as awaitables. Made by `remote`."""

    __slots__ = ("_rref", "_timeout")

    def __init__(self, rref: RRef[T], timeout: float | None) -> None:
        self._rref = rref
        self._timeout = timeout

    def __repr__(self) -> str:
        return f"<remote object on {self._rref.owner_name()}>"

    # No signature of T's methods can be given here: `call(rref, T.method, ...)` is the typed form.
    def __getattr__(self, name: str) -> Callable[..., Calling]:
        check_public(name)
        rref, timeout = self._rref, self._timeout

        def method(*args: Any, **kwargs: Any) -> Calling:
            return Calling(rref, Method(rref, name), args, kwargs, timeout)

        return method


def remote(rref: RRef[T], *, timeout: float | None = None) -> Remote[T]:
    """The object behind `rref`, on its owner: `await remote(rref).method(*args, **kwargs)`.

    An `async def` method runs on the owner's event loop, a plain `def` in a thread of its own; a
    `@batched` method joins a batch. Calls from here to one worker start in the order in which
    they are awaited. Small arguments are copied at the call; tensors are sent without a copy, so
    do not change them before the await returns.

    Args:
        rref: of any object; the class of a method call's arguments and result must be importable
            on both sides.
        timeout: seconds for each call; None, the default: no bound but `aiorpc.timeout`'s.

    Raises:
        TypeError: if `rref` is not an RRef.
        AttributeError: for a method whose name starts with an underscore, or that is not there.
        CallTimeout, WorkerLost, NotServing, RemoteError: from the await, beside whatever the
            method raises, which arrives as itself with a `RemoteTraceback` as its cause.
    """
    return Remote(_check_rref(rref), timeout)


@overload
def call(  # type: ignore[overload-overlap]
    to: RRef[T],
    function: Callable[Concatenate[T, P], AsyncIterator[R] | Iterator[R]],
    /,
    *args: P.args,
    **kwargs: P.kwargs,
) -> AsyncIterable[R]: ...


@overload
def call(
    to: RRef[T],
    function: Callable[Concatenate[T, P], Awaitable[R]],
    /,
    *args: P.args,
    **kwargs: P.kwargs,
) -> Coroutine[Any, Any, R]: ...


@overload
def call(
    to: RRef[T], function: Callable[Concatenate[T, P], R], /, *args: P.args, **kwargs: P.kwargs
) -> Coroutine[Any, Any, R]: ...


@overload
def call(  # type: ignore[overload-overlap]
    to: Worker,
    function: Callable[P, AsyncIterator[R] | Iterator[R]],
    /,
    *args: P.args,
    **kwargs: P.kwargs,
) -> AsyncIterable[R]: ...


@overload
def call(
    to: Worker, function: Callable[P, Awaitable[R]], /, *args: P.args, **kwargs: P.kwargs
) -> Coroutine[Any, Any, R]: ...


@overload
def call(
    to: Worker, function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs
) -> Coroutine[Any, Any, R]: ...


def call(to: Any, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Call a function on a worker, or a method of the object behind an RRef, with its types.

    `await call("ps", torch.add, a, b)` runs a function on the worker with that name (or rank, or
    WorkerInfo). `await call(rref, Net.forward, x)` runs the method on the owner of `rref`, as
    `remote(rref).forward(x)` does and overridden as there, but its parameters and its result are
    seen by type checkers; a function that is not a method gets the object as its first argument.

    Raises:
        ValueError: if there is no such worker.
        TypeError: if `function` cannot be called.
        NotServing: outside a world.
    """
    if not callable(function):
        raise TypeError(f"call takes something that can be called, not {function!r}")
    if isinstance(to, RRefBase):
        return Calling(to, TypedMethod(_check_rref(to), function), args, kwargs)
    return Calling(to, Function(function), args, kwargs)


@overload
async def create(
    to: Worker, factory: Callable[P, Awaitable[T]], /, *args: P.args, **kwargs: P.kwargs
) -> RRef[T]: ...


@overload
async def create(
    to: Worker, factory: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs
) -> RRef[T]: ...


async def create(to: Worker, factory: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Make an object on a worker and return an RRef of it, once it is built.

    `factory` is a class or any function, which runs in a thread of the worker, or an `async def`,
    which runs on its loop. What it raises is raised here (torch's `rpc.remote` raises it at the
    first use of the RRef). The object lives as long as an RRef of it does, on any worker.

    Raises:
        ValueError: if there is no such worker.
        TypeError: if `factory` cannot be called.
        NotServing: outside a world.
    """
    if not callable(factory):
        raise TypeError(f"create takes a class or a factory, not {factory!r}")
    return await Calling(to, Create(factory), args, kwargs)


async def fetch(rref: RRef[T]) -> T:
    """A copy of the object behind `rref`; on its owner, the object itself. `to_here`, awaited.

    Raises:
        TypeError: if `rref` is not an RRef, or if the object cannot be pickled.
    """
    _check_rref(rref)
    if rref.is_owner():
        return rref.local_value()  # type: ignore[no-any-return]
    return await Calling(rref, Fetch(rref), (), {})  # type: ignore[no-any-return]


def _check_rref(rref: Any) -> RRef[Any]:
    # What arrives through torch is a RRefBase, RRef's base: RRef is the class that is written.
    if not isinstance(rref, RRefBase):
        raise TypeError(f"expected an RRef, as `create` or torch returns it, not {rref!r}")
    checked: Any = rref
    return checked  # type: ignore[no-any-return]
