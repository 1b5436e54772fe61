"""Texts of errors for frequent mistakes: what to write instead."""

import contextlib
import functools
from collections.abc import AsyncIterator, Awaitable, Callable
from types import CoroutineType
from typing import TYPE_CHECKING, Any, NoReturn, ParamSpec, TypeVar

from .._torch.compat import RRefBase, explain_missing_attributes

P = ParamSpec("P")
T = TypeVar("T")


def await_hint(value: Any) -> str:
    """Return the remedy for an awaitable that stands where its result should; "" for others."""
    if not isinstance(value, Awaitable):
        return ""
    name = f"`await {value.__name__}(...)`" if isinstance(value, CoroutineType) else "`await` it"
    return f", which was not awaited: write {name}"


class OnlyIterated:
    """An asynchronous iterator that says so where it is awaited, or iterated by a plain `for`."""

    if not TYPE_CHECKING:  # type checkers report both mistakes themselves

        def __await__(self) -> NoReturn:
            raise TypeError(f"{self!r} cannot be awaited: write `async for`")

        def __iter__(self) -> NoReturn:
            raise TypeError(f"{self!r} cannot be iterated with `for`: write `async for`")


def check_not_entered(manager: Any) -> None:
    """Raise RuntimeError if a context manager of a generator, which is for one block, was used."""
    if "args" not in vars(manager):  # CPython deletes it as the block begins (3.11 to 3.14)
        name = manager.gen.__name__
        raise RuntimeError(f"this {name}() was entered before: call {name}(...) again")


class AsyncOnly(contextlib._AsyncGeneratorContextManager[T]):  # private to CPython (3.11 to 3.14)
    """An asynchronous context manager that says so in a plain `with`, or to an `__exit__`."""

    async def __aenter__(self) -> T:
        check_not_entered(self)
        return await super().__aenter__()

    async def __aexit__(self, *exc: Any) -> bool | None:
        return await super().__aexit__(*exc) or None  # False would be a notebook cell's output

    if not TYPE_CHECKING:  # type checkers report the mistake themselves

        def __enter__(self) -> NoReturn:
            name = self.gen.__name__
            raise TypeError(f"{name}() is asynchronous: write `async with {name}(...)`")

        def __exit__(self, *_: object) -> NoReturn:
            name = self.gen.__name__
            raise TypeError(f"{name}() is asynchronous: `await` its `__aexit__(None, None, None)`")


def async_only(
    function: Callable[P, AsyncIterator[T]],
) -> Callable[P, contextlib._AsyncGeneratorContextManager[T]]:
    """Decorate as `asynccontextmanager`, with an error that names the remedy for a plain `with`."""
    generator: Any = function

    @functools.wraps(function)
    def make(*args: P.args, **kwargs: P.kwargs) -> contextlib._AsyncGeneratorContextManager[T]:
        return AsyncOnly(generator, args, kwargs)

    return make


def no_attribute(obj: Any, name: str, remedy: str = "") -> AttributeError:
    """Return the error of a missing attribute: Python's text, then the remedy."""
    text = f"{type(obj).__name__!r} object has no attribute {name!r}{remedy}"
    return AttributeError(text, name=name, obj=obj)


def refuse_attribute(obj: Any, name: str) -> NoReturn:
    """Raise AttributeError; the `__getattr__` of what `remote` takes. Type checkers need none."""
    remedy = f": for a method of the object write `await remote(...).{name}()`"
    raise no_attribute(obj, name, "" if name.startswith("_") else remedy)


def _refuse_attribute_of_rref(rref: "RRefBase[Any]", name: str) -> NoReturn:
    remedy = (
        f": write `await remote(rref).{name}()` for a method of the RRef's object, or "
        f"`(await fetch(rref)).{name}` for a copy's attribute"
    )
    raise no_attribute(rref, name, "" if name.startswith("_") else remedy)


# A notebook has no block at whose end the error could be explained.
explain_missing_attributes(_refuse_attribute_of_rref)
