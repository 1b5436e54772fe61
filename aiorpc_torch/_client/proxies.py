"""Handles of remote objects: what `remote` returns. Their methods return calls.

A handle also stands for its object wherever an RRef does: in `call`, `fetch`, `create`, `Group`,
`register` and arguments.
"""

import functools
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeVar

from .._handles.mistakes import no_attribute
from .._torch.compat import RRef
from .._torch.rrefs import known_class, owner_name
from .._wire.targets import CALL, MethodTarget, check_public_name, public_methods
from .call import RemoteCall
from .group import Group
from .group_call import GroupCall
from .named_members import NamedMembers
from .routes import AnyMember, RoutedCall, call_of, placeholder
from .supervised import Supervised

T = TypeVar("T")

MOST_METHODS = 64  # that a handle remembers


class RemoteProxy(Generic[T]):
    """A handle of the object behind an RRef: its methods return awaitables. Made by `remote`."""

    __slots__ = ("_methods", "_retries", "_rref", "_timeout")

    def __init__(self, rref: RRef[T], timeout: float | None, retries: int = 0) -> None:
        self._rref = rref
        self._methods: dict[str, RemoteMethod] = {}  # that were named: to make one is 6 % of a call
        self._timeout = timeout
        self._retries = retries

    def __repr__(self) -> str:
        return f"<remote object on {owner_name(self._rref)}>"

    def __dir__(self) -> list[str]:
        cls = known_class(self._rref)
        return [] if cls is None else public_methods(cls)

    # Type checkers cannot see T's methods here: `proxy` and `call` are the typed forms.
    # Not `__getattr__`: the search before it makes an AttributeError in each call.
    def __getattribute__(self, name: str) -> Callable[..., RemoteCall]:
        methods: dict[str, RemoteMethod] = _methods_of(self)
        if (known := methods.get(name)) is not None:
            return known
        if name.startswith("_"):
            return _own_attribute(self, name)  # type: ignore[no-any-return]
        rref = _rref_of(self)
        target = MethodTarget(rref, check_public_name(name))
        if retries := _retries_of(self):
            method = RemoteMethod(RoutedCall, rref, target, _timeout_of(self), retries)
        else:
            call = _TorchStyleCall if name in _OF_TORCH else RemoteCall
            method = RemoteMethod(call, rref, target, _timeout_of(self))
        if len(methods) < MOST_METHODS:
            methods[name] = method
        return method

    def __call__(self, *args: Any, **kwargs: Any) -> RemoteCall:
        """Call the object itself: `await remote(net)(x)`, with a module's hooks."""
        target = MethodTarget(self._rref, CALL)
        return call_of(self._rref, target, self._timeout, self._retries, *args, **kwargs)

    def __aiorpc_handle__(self) -> RRef[T]:
        return self._rref

    def __reduce__(self) -> Any:
        return RemoteProxy, (self._rref, self._timeout, self._retries)


class RemoteMethod(partial[Any]):
    """A method of a remote object, as `remote(rref).name`: a call of it returns an awaitable."""

    __slots__ = ()

    def __repr__(self) -> str:
        return f"<remote method {_name_of(self)}>"

    def __await__(self) -> NoReturn:
        name = _name_of(self)
        raise TypeError(
            f"{name} was not called: write `await remote(rref).{name}()`. Only methods are reached "
            "by remote(); for data, add a method that returns it, or fetch the object"
        )

    if not TYPE_CHECKING:  # type checkers report these mistakes themselves

        def __aiter__(self) -> NoReturn:
            name = _name_of(self)
            raise TypeError(
                f"{name} was not called: write `async for ... in remote(rref).{name}()`"
            )

        def __getitem__(self, _: object) -> NoReturn:
            raise TypeError(f"'{_name_of(self)}[...]' is not a method. {_PARTS}")

        def __getattr__(self, part: str) -> NoReturn:
            if part.startswith("_"):
                raise no_attribute(self, part)
            name = _name_of(self)
            if part in _OF_OTHERS:
                text = f"there is no '.{part}' here: write `await remote(rref).{name}(...)`"
            else:
                text = f"'{name}.{part}' is not a method. {_PARTS}"
            raise AttributeError(text, name=part, obj=self)


_PARTS = (
    "remote() reaches methods of the object, not of its parts: write a function of the object, "
    "`def f(obj, x): ...`, and `await call(rref, f, x)`"
)
_OF_TORCH = frozenset(("rpc_sync", "rpc_async", "remote"))
"""What torch calls between an RRef and a method of its object."""

_OF_OTHERS = _OF_TORCH | {"options", "call", "call_one"}
"""What other libraries call between a method and its arguments."""


class _TorchStyleCall(RemoteCall):
    """A call of a method that is named as what torch has between an RRef and a method."""

    __slots__ = ()

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            if name.startswith("_"):
                raise no_attribute(self, name)
            text = f"there is no '{self._what()}()' here: write `await remote(rref).{name}(...)`"
            raise AttributeError(text, name=name, obj=self)


def _name_of(method: RemoteMethod) -> str:
    args = method.args  # of a `RemoteProxy`, or the name alone
    return str(next((each.name for each in args if type(each) is MethodTarget), args[0]))


# Read past `__getattribute__`, which would call itself.
_slots: Any = vars(RemoteProxy)
_rref_of, _timeout_of = _slots["_rref"].__get__, _slots["_timeout"].__get__
_retries_of, _methods_of = _slots["_retries"].__get__, _slots["_methods"].__get__


def _own_attribute(proxy: RemoteProxy[Any], name: str) -> Any:
    try:
        return object.__getattribute__(proxy, name)
    except AttributeError:
        check_public_name(name)
        raise


class _Proxy(Generic[T]):
    """A handle of what chooses the object of each call, or calls several."""

    __slots__ = ("_of", "_retries", "_timeout")

    def __init__(self, of: Any, timeout: float | None, retries: int = 0) -> None:
        self._of = of
        self._timeout = timeout
        self._retries = retries

    def __repr__(self) -> str:
        return f"<remote object: {self._of!r}>"

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return RemoteMethod(self._make, check_public_name(name))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the object itself, or each of a group."""
        return self._make(CALL, *args, **kwargs)

    def __aiorpc_handle__(self) -> Any:
        return self._of

    def __reduce__(self) -> Any:
        return type(self), (self._of, self._timeout, self._retries)

    def _make(self, name: str, /, *args: Any, **kwargs: Any) -> Any:
        target = MethodTarget(placeholder(self._of), name)
        return RoutedCall(self._of, target, self._timeout, self._retries, *args, **kwargs)


class SupervisedProxy(_Proxy[T]):
    """A handle of a supervised object: its methods return awaitables. Made by `remote`."""

    __slots__ = ()

    _of: Supervised[T]

    def __dir__(self) -> list[str]:
        cls = known_class(self._of.rref)
        return [] if cls is None else public_methods(cls)


class AnyProxy(_Proxy[T]):
    """A handle of the least busy member of a group. Made by `remote`."""

    __slots__ = ()

    _of: AnyMember[T]


class GroupProxy(_Proxy[T]):
    """A handle of the objects of a group: its methods call all of them. Made by `remote`."""

    __slots__ = ()

    _of: Group[T] | NamedMembers[T]

    def __repr__(self) -> str:
        return f"<remote objects of {self._of!r}>"

    def __getattr__(self, name: str) -> "Callable[..., GroupCall[RRef[T], Any]]":
        return super().__getattr__(name)

    def __call__(self, *args: Any, **kwargs: Any) -> "GroupCall[RRef[T], Any]":
        """Call each object of the group."""
        return self._make(CALL, *args, **kwargs)  # type: ignore[no-any-return]

    def _make(self, name: str, /, *args: Any, **kwargs: Any) -> Any:
        target = functools.partial(MethodTarget, name=name)
        return GroupCall(self._of, target, args, kwargs, self._timeout, self._retries)
