"""Texts of errors for frequent mistakes: what to write instead."""

import contextlib
import functools
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from types import CoroutineType
from typing import TYPE_CHECKING, Any, NoReturn, ParamSpec, TypeVar

from .._torch.compat import RRefBase
from .._wire.exceptions import try_add_note

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


class AsyncOnly(contextlib._AsyncGeneratorContextManager[T]):  # private to CPython (3.11 to 3.14)
    """An asynchronous context manager that says so in a plain `with`, or to an `__exit__`."""

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


def note_rref(exc: BaseException) -> None:
    """Add the remedy to the error of a method that was looked up on an RRef itself."""
    if isinstance(exc, AttributeError) and isinstance(exc.obj, RRefBase):
        name = exc.name
        try_add_note(
            exc,
            f"(this is an RRef: write `await remote(rref).{name}()` for a method of its object, or "
            f"`(await fetch(rref)).{name}` for a copy's attribute)",
        )


@contextlib.contextmanager
def mistakes_explained() -> Iterator[None]:
    """Add the remedy to an error that leaves a world's block."""
    try:
        yield
    except AttributeError as exc:
        note_rref(exc)
        raise


def refuse_attribute(obj: Any, name: str) -> NoReturn:
    """Raise AttributeError; the `__getattr__` of what `remote` takes. Type checkers need none."""
    text = f"{type(obj).__name__!r} object has no attribute {name!r}"
    if not name.startswith("_"):
        text += f": for a method of the object write `await remote(...).{name}()`"
    raise AttributeError(text, name=name, obj=obj)
