"""Targets of calls: a method, a function, a constructor or an object, as a message names them."""

import functools
import inspect
from collections.abc import Callable
from functools import partial, partialmethod, singledispatchmethod
from types import FunctionType, MethodType
from typing import Any, NamedTuple, Union

from .._text import printable
from .._torch.compat import CachedForward, RRefBase
from .._torch.modules import python_function
from .._torch.rrefs import RRefId, known_class
from .by_value import came_by_value, is_among
from .exceptions import try_add_note
from .plain import wire_text

CALL = "__call__"
"""The method by which an object itself is called, the only one that begins with an underscore."""

GENERATOR_HINT = "a generator; use `async for`, not `await`; in synchronous code `me.iterate`"
"""Part of an error: the method of an awaited call is a generator."""

ObjectRef = Union[RRefId, "RRefBase[Any]"]
"""The object of a call: its RRef id, or an RRef that only torch can resolve."""


class MethodTarget(NamedTuple):
    """The method `name` of the object `on`."""

    on: ObjectRef
    name: str

    def bind(self, found: Any) -> Callable[..., Any]:
        return public_method(found, self.name)


class BoundTarget(NamedTuple):
    """`function` with the object `on` as first argument; if it is a method, the override of it."""

    on: ObjectRef
    function: Callable[..., Any]

    def bind(self, found: Any) -> Callable[..., Any]:
        own = getattr(self.function, "__name__", "")
        # The private method that is `Module.__call__` too is called as that.
        for name in (CALL, own) if own.startswith("_") else (own, CALL):
            if is_among(self.function, (vars(cls).get(name) for cls in type(found).__mro__)):
                return public_method(found, name)
        return partial(self.function, found)


class FunctionTarget(NamedTuple):
    """A function, or any other callable that is pickled by reference."""

    function: Callable[..., Any]
    on: None = None

    def bind(self, _: None) -> Callable[..., Any]:
        return self.function


class CreateTarget(NamedTuple):
    """A class or factory; the result is an RRef of the new object."""

    function: Callable[..., Any]
    on: None = None

    def bind(self, _: None) -> Callable[..., Any]:
        return self.function


class MakeTarget(NamedTuple):
    """As `BoundTarget`; the result is an RRef of what the function returns."""

    on: ObjectRef
    function: Callable[..., Any]

    def bind(self, found: Any) -> Callable[..., Any]:
        return BoundTarget(*self).bind(found)


class FetchTarget(NamedTuple):
    """The object `on` itself."""

    on: ObjectRef

    def bind(self, found: Any) -> Callable[..., Any]:
        return partial(fetch, found)


def fetch(found: Any) -> Any:
    """Return the object of a `FetchTarget`. Errors and `pending` name this function."""
    return found


class Entered(NamedTuple):
    """The one item that a remote context manager sends: what it has returned at its entry.

    (tests/loopback/test_context_managers.py)
    """

    value: Any


Target = MethodTarget | BoundTarget | FunctionTarget | CreateTarget | MakeTarget | FetchTarget


def function_name(function: Callable[..., Any]) -> str:
    """Return the name of a function, of a partial's function, or of a callable's class."""
    inner = python_function(getattr(function, "func", function))
    name = getattr(inner, "__qualname__", None)
    return printable(name if isinstance(name, str) else type(inner).__qualname__)


def call_name(target: Target) -> str:
    """Return the name of a call for errors, with the class of its object where that is known."""
    name = target_name(target)
    if isinstance(target, MethodTarget) and isinstance(target.on, RRefBase):
        cls = known_class(target.on)
        name = name if cls is None else f"{cls.__qualname__}.{name}"
    return name.rpartition("<locals>.")[2]


def target_name(target: Target) -> str:
    """Return the name of a call, without the class of a method."""
    if isinstance(target, FetchTarget):
        return "fetch"
    return target.name if isinstance(target, MethodTarget) else function_name(target.function)


def order_key(target: Target) -> Any:
    """Return a key of the target's object or function, None if calls cannot be told apart."""
    if target.on is not None:
        return target.on if isinstance(target.on, tuple) else None
    function = getattr(target, "function", None)
    name = getattr(function, "__qualname__", None)
    if not isinstance(name, str):
        return None
    return wire_text(f"{getattr(function, '__module__', '')}.{name}")  # a slot's frame holds it


@functools.lru_cache(maxsize=4096)
def check_public_name(name: Any) -> str:
    """Return the name as a plain str. Raises for a name that remote calls must not use."""
    if not isinstance(name, str):
        raise TypeError(f"a method name must be a str, got {name!r}")
    if name.startswith("_") and name != CALL:
        raise AttributeError(f"{name!r} is private; only public methods can be called remotely")
    if not name.isidentifier():
        raise AttributeError(
            f"{name!r} is not a method name; nested attributes cannot be called remotely"
        )
    return str.__str__(name)  # of a subclass too, which messages do not hold


def public_methods(cls: type) -> list[str]:
    """Return the names of the methods of a class that can be called remotely."""
    public = [name for name in dir(cls) if not name.startswith("_")]
    return [name for name in public if _is_method(inspect.getattr_static(cls, name, None))]


def _is_method(found: Any) -> bool:
    return callable(found) or isinstance(found, _METHODS)


def public_method(obj: Any, name: str) -> Callable[..., Any]:
    """Return the public method `name` of `obj`. Raises if it is missing or not a method."""
    check_public_name(name)
    if name == CALL and isinstance(obj, (*_FUNCTIONS, type)):  # `type(obj)` has the method
        return obj
    for cls in type(obj).__mro__:
        if name in cls.__dict__:
            found = cls.__dict__[name]
            if not _is_method(found) and hasattr(type(found), "__get__"):  # it computes a value
                raise _no_method(f"{type(obj).__name__}.{name}", found)
            break
    try:
        method = getattr(obj, name)
    except AttributeError as exc:
        if came_by_value(type(obj)):
            try_add_note(
                exc,
                "(an object keeps the class with which it was made, and a worker the class as it "
                "was sent: run the cell of the class again, and `create` the object again)",
            )
        raise
    if not callable(method):
        raise _no_method(f"{type(obj).__name__}.{name}", method)
    return method  # type: ignore[no-any-return]


def _no_method(name: str, found: Any) -> TypeError:
    return TypeError(f"{name} is of type {type(found).__name__}, not a method")


_FUNCTIONS = (FunctionType, MethodType, partial)
# With what computes the `forward` of script modules, which is a method.
_METHODS = (classmethod, staticmethod, partialmethod, singledispatchmethod, CachedForward)
