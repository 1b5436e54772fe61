"""A call that was written down and waits to be awaited, or iterated.

`remote(r).m(x)` is one: a coroutine for whoever awaits it or makes a task of it, and a stream for
`async for`. Nothing is sent before. It knows deadlines and cancellation; how calls travel is the
connection's.
"""

import asyncio
import time
import warnings
from collections.abc import AsyncIterator, Coroutine, Generator
from typing import Any, NoReturn

from .._aio.deadlines import deadline_in
from .._aio.scopes import scope_deadline
from .._protocol.exceptions import Failure
from .._protocol.targets import Broken, Target
from .._torch.compat import RRefBase
from ..errors import CallTimeout
from .connection import Connection
from .pool import Worker, link_to
from .stream_reader import Incoming

TWICE = "this call was awaited already: make a new one"


class _Spent:
    """The steps of a call that has none left."""

    def send(self, *_: Any) -> NoReturn:
        raise RuntimeError(TWICE)

    throw = send

    def close(self) -> None:
        pass


_SPENT = _Spent()


class Calling(Coroutine[Any, Any, Any]):
    """`target(*args, **kwargs)` on `worker`, which may be an RRef's owner, in `timeout` seconds."""

    __slots__ = ("__weakref__", "_args", "_kwargs", "_steps", "_target", "_timeout", "_worker")

    def __init__(
        self,
        worker: "Worker | RRefBase[Any]",
        target: Target,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        timeout: float | None = None,
    ) -> None:
        self._steps: Generator[Any, Any, Any] | _Spent | None = None
        self._worker = worker
        self._target = target
        self._args = args
        self._kwargs = kwargs
        self._timeout = timeout

    def __repr__(self) -> str:
        return f"<call of {self._target}>"

    # ── awaited ─────────────────────────────────────────────────────────────────────────────────

    def __await__(self) -> Generator[Any, Any, Any]:
        if self._steps is not None:
            raise RuntimeError(TWICE)
        self._steps = steps = self._run()
        return steps

    def send(self, value: Any) -> Any:
        """The next step, when a task runs it."""
        return (self._steps or self.__await__()).send(value)

    def throw(self, *exc: Any) -> Any:
        """The next step, with an exception."""
        return (self._steps or self.__await__()).throw(*exc)

    def close(self) -> None:
        """Give up."""
        (self._steps or self.__await__()).close()

    def __del__(self) -> None:
        if self._steps is None:
            warnings.warn(f"{self!r} was never awaited", RuntimeWarning, stacklevel=2, source=self)

    def _run(self) -> Generator[Any, Any, Any]:
        link = link_to(self._worker)
        due, bound = _bounds(self._timeout)
        # The target keeps its RRef, and with it the object, alive until the answer is here.
        number, wait = link.call(self._target, (self._args, self._kwargs), bound)
        timer = None if due is None else _timer(link, number, due)
        try:
            answer = yield from wait.__await__()
            if type(answer) is Failure and _is_over(bound):
                yield  # the time of a scope may be over too, and then it is the scope that says so
        except BaseException:
            link.cancel(number)
            raise
        finally:
            self._steps = _SPENT
            if timer is not None:
                timer.cancel()
        if type(answer) is Failure or type(answer) is Broken:
            answer.get()
        return answer

    # ── iterated ────────────────────────────────────────────────────────────────────────────────

    def __aiter__(self) -> "Stream":
        if self._steps is not None:
            raise RuntimeError(TWICE)
        self._steps = _SPENT
        link = link_to(self._worker)
        due, bound = _bounds(self._timeout)
        number, incoming = link.stream(self._target, (self._args, self._kwargs), bound)
        timer = None if due is None else _timer(link, number, due)
        return Stream(link, number, incoming, bound, timer, self._target)


class Stream(AsyncIterator[Any]):
    """The items of a remote generator. Left before its end, it closes the generator."""

    def __init__(
        self,
        link: Connection,
        number: int,
        incoming: Incoming,
        bound: float | None,
        timer: asyncio.TimerHandle | None,
        target: Target,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._link = link
        self._number = number
        self._incoming = incoming
        self._bound = bound
        self._timer = timer
        self._target = target

    def __repr__(self) -> str:
        return f"<stream of {self._target}>"

    async def __anext__(self) -> Any:
        if self._incoming.is_awaited():  # as for an async generator
            raise RuntimeError("another task waits for the next item of this stream")
        try:
            return await self._incoming.next()
        except BaseException as exc:
            self._leave()
            if isinstance(exc, Exception) and _is_over(self._bound):
                await asyncio.sleep(0)  # as above: a scope speaks first
            raise

    async def aclose(self) -> None:
        """Close the remote generator: its `finally` runs. Also what `break` does."""
        self._leave()

    def __del__(self) -> None:
        # Garbage may be collected in any thread, and after the loop has ended.
        if not self._loop.is_closed():
            if asyncio._get_running_loop() is self._loop:
                self._leave()
            else:
                self._loop.call_soon_threadsafe(_leave, self._link, self._number, self._timer)

    def _leave(self) -> None:
        self._incoming.close()
        _leave(self._link, self._number, self._timer)


def _leave(link: Connection, number: int, timer: asyncio.TimerHandle | None) -> None:
    link.cancel(number)
    if timer is not None:
        timer.cancel()


def _bounds(seconds: float | None) -> tuple[float | None, float | None]:
    """Return when the call's own time is over, and when that or a scope's is."""
    due = deadline_in(seconds)
    if _is_over(due):
        raise CallTimeout("the deadline had passed before the call was sent")
    # Sent along, but not enforced here: the scope cancels, and says what that means.
    scope = scope_deadline()
    return due, due if scope is None else scope if due is None else min(due, scope)


def _is_over(bound: float | None) -> bool:
    return bound is not None and bound <= time.monotonic()


def _timer(link: Connection, number: int, due: float) -> asyncio.TimerHandle:
    left = due - time.monotonic()
    return asyncio.get_running_loop().call_later(left, link.expire, number, left)
