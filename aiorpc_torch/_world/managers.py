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
from typing import Any, ParamSpec, TypeVar

from .._aio.own_frames import has_user_frames, without_own_frames
from .._aio.tasks import StepContext
from .._endpoint import entry_points
from .._handles.mistakes import AsyncOnly

P = ParamSpec("P")
W = TypeVar("W")


class _World(AsyncOnly[W]):
    _closer: AsyncGenerator[None] | None = None

    async def __aenter__(self) -> W:
        try:
            me = await StepContext(_generators_hidden, super().__aenter__())
        except (TypeError, ValueError) as exc:  # a wrong argument: whose frames would help?
            if has_user_frames(exc.__traceback__):
                raise
            raise without_own_frames(exc) from exc.__cause__
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
    def __enter__(self) -> W:
        me = super().__enter__()
        entry_points.keep(self)
        return me


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
