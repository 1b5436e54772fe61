"""Context managers of worlds: a world lasts until it is left, though its manager is dropped.

Python closes a generator that nothing refers to, and the world would end. So the node refers to its
context manager. At its end an event loop closes all asynchronous generators that it knows, at once,
and those of a world are nested. So it knows one only, which leaves the world.
(tests/loopback/test_open_worlds.py, tests/integration/test_notebooks.py)
"""

import asyncio
import contextlib
import functools
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from typing import TYPE_CHECKING, Any, NoReturn, ParamSpec, TypeVar

from .._aio.own_frames import has_user_frames, without_own_frames
from .._aio.tasks import StepContext
from .._endpoint import entry_points
from .._handles.mistakes import AsyncOnly, check_not_entered, no_attribute
from ..errors import RpcError

P = ParamSpec("P")
W = TypeVar("W")


class _World(AsyncOnly[W]):
    leave_text = "await me.world.__aexit__(None, None, None)"
    _closer: AsyncGenerator[None] | None = None

    async def __aenter__(self) -> W:
        try:
            me = await StepContext(_generators_hidden, super().__aenter__())
        except _MISTAKES as exc:
            _hide_own_frames(exc)
            raise
        entry_points.keep(self)
        self._closer = self._leave_with_loop()
        await anext(self._closer)  # from now on the loop knows it
        return me

    async def __aexit__(self, *exc: Any) -> bool | None:
        closer, self._closer = self._closer, None
        if closer is not None:
            await closer.aclose()
        return await super().__aexit__(*exc)

    async def _leave_with_loop(self) -> AsyncGenerator[None]:
        try:
            yield
        finally:
            if self._closer is not None:
                self._closer = None  # `__aexit__` was not called: the loop ends
                end = asyncio.CancelledError("the event loop has ended")
                await super().__aexit__(type(end), end, None)

    if not TYPE_CHECKING:  # type checkers report the mistake themselves

        def __await__(self) -> NoReturn:
            name = self.gen.__name__
            raise TypeError(
                f"{name}() is a context manager: write `async with {name}(...) as me`, or in a "
                f"notebook `me = await {name}(...).__aenter__()`"
            )

        def __getattr__(self, name: str) -> NoReturn:
            _refuse_attribute(self, name, "async with {0}(...)", "await {0}(...).__aenter__()")


@contextlib.contextmanager
def _generators_hidden() -> Iterator[None]:
    """Hide asynchronous generators that start now from the event loop, also as they are freed."""
    hooks = sys.get_asyncgen_hooks()
    sys.set_asyncgen_hooks(None, lambda _: None)
    try:
        yield
    finally:
        sys.set_asyncgen_hooks(*hooks)


class _WorldInThread(contextlib._GeneratorContextManager[W]):
    leave_text = "me.world.__exit__(None, None, None)"

    def __enter__(self) -> W:
        check_not_entered(self)
        try:
            me = super().__enter__()
        except _MISTAKES as exc:
            _hide_own_frames(exc)
            raise
        entry_points.keep(self)
        return me

    if not TYPE_CHECKING:  # type checkers report the mistake themselves

        async def __aenter__(self) -> NoReturn:
            raise TypeError("in_thread() is synchronous: write `with in_thread(...) as me`")

        async def __aexit__(self, *_: object) -> NoReturn:
            raise TypeError("in_thread() is synchronous: call its `__exit__(None, None, None)`")

        def __getattr__(self, name: str) -> NoReturn:
            _refuse_attribute(self, name, "with {0}(...)", "{0}(...).__enter__()")


def _refuse_attribute(manager: Any, name: str, block: str, entry: str) -> NoReturn:
    remedy = ""
    if not name.startswith("_") and name not in ("args", "kwds", "func", "gen"):
        made = manager.gen.__name__
        remedy = (
            f", which is of its worker: write `{block.format(made)} as me`, or in a notebook "
            f"`me = {entry.format(made)}`, and then `me.{name}`"
        )
    raise no_attribute(manager, name, remedy)


_MISTAKES = (TypeError, ValueError, RuntimeError, RpcError)
"""What a start raises for wrong arguments, in a process that is in a world already, or for workers
that do not start."""


def _hide_own_frames(exc: Exception) -> None:
    """Drop the frames of a mistake, unless some are of the user's code: those may help."""
    if not has_user_frames(exc.__traceback__):
        without_own_frames(exc)
        exc.__suppress_context__ = True


def world_manager(
    function: Callable[P, AsyncIterator[W]],
) -> Callable[P, contextlib._AsyncGeneratorContextManager[W]]:
    """Decorate as `asynccontextmanager`: each call returns the context manager of a world."""
    return _making(_World, function)


def thread_manager(
    function: Callable[P, Iterator[W]],
) -> Callable[P, contextlib._GeneratorContextManager[W]]:
    """Decorate as `contextmanager`: each call returns the manager of a world in a thread."""
    return _making(_WorldInThread, function)


def _making(manager: Callable[..., Any], function: Callable[P, Any]) -> Callable[P, Any]:
    @functools.wraps(function)
    def make(*args: P.args, **kwargs: P.kwargs) -> Any:
        return manager(function, args, kwargs)

    return make
