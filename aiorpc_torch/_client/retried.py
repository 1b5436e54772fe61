"""Calls that are made again when their worker is gone: `remote(ref, retries=2)`.

Each attempt is a call of its own, so whatever chooses its worker chooses again. The calls of groups
do the same in `group_call`, for each member.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Generator
from typing import Any

from .._aio.deadlines import deadline_in, time_left
from .._wire.exceptions import try_add_note
from ..errors import RpcError, WorkerGone
from .answers import is_own
from .call import ALREADY_AWAITED, USED, LazyCall, RemoteCall
from .pool import current

MakeCall = Callable[[float | None], RemoteCall]
"""Returns a call of at most so many seconds, None for no bound of its own."""


def checked_retries(retries: Any) -> int:
    """Return a number of retries that a user gave.

    Raises:
        ValueError: if it is no number, or negative.
    """
    if not isinstance(retries, int) or isinstance(retries, bool) or retries < 0:
        raise ValueError(f"retries must be an int of at least 0, got {retries!r}")
    return retries


def note_earlier_attempt(error: BaseException) -> None:
    """Let the error of the last attempt say that an earlier one may have run."""
    if isinstance(error, RpcError) and not error.may_have_run:
        error.may_have_run = True
        try_add_note(error, "an earlier attempt of this call may have run")


class _Attempts:
    """The attempts of one call, all of them within its deadline."""

    def __init__(self, make: MakeCall, timeout: float | None, retries: int) -> None:
        self._make = make
        self._due = deadline_in(timeout)
        self._left = retries
        self._may_have_run = False  # an attempt that has failed

    def next(self) -> RemoteCall:
        """Return the call of the next attempt."""
        return self._make(time_left(self._due))

    def stop(self) -> None:
        """Make the call no more: an item of it has come."""
        self._left = 0

    async def wait_after(self, exc: RpcError) -> None:
        """Wait until another attempt may be made; raise the exception if none may.

        A worker whose connection has ended may live. It is pinged, and the attempt waits for that.
        """
        if not self._left or not isinstance(exc, WorkerGone) or not is_own(exc):
            if self._may_have_run:
                note_earlier_attempt(exc)
            raise exc
        self._left -= 1
        self._may_have_run |= exc.may_have_run
        with contextlib.suppress(TimeoutError):  # the next attempt says so
            async with asyncio.timeout(time_left(self._due)):
                await current().wait_until_probed(exc.worker)


class RetriedCall(LazyCall[Any]):
    """A call that is made again, up to so often, when its worker is gone. It may run twice."""

    __slots__ = ("_entered", "_make", "_retries", "_timeout")

    def __init__(self, make: MakeCall, timeout: float | None, retries: int) -> None:
        self._steps = None
        self._make = make
        self._timeout = timeout
        self._retries = retries

    def _what(self) -> str:
        call = self._make(None)
        call.close()
        return call._what()

    def _run(self) -> Generator[Any, Any, Any]:
        attempts = _Attempts(self._make, self._timeout, self._retries)
        try:
            while True:
                try:
                    return (yield from attempts.next().__await__())
                except RpcError as exc:
                    yield from attempts.wait_after(exc).__await__()
        finally:
            self._steps = USED

    # ── iterated and entered ────────────────────────────────────────────────────────────────────

    def _begin(self) -> _Attempts:
        if self._steps is not None:
            raise RuntimeError(ALREADY_AWAITED)
        self._steps = USED
        return _Attempts(self._make, self._timeout, self._retries)

    def __aiter__(self) -> AsyncIterator[Any]:
        return _RetriedStream(self._begin())

    async def __aenter__(self) -> Any:
        attempts = self._begin()
        while True:
            self._entered = attempts.next()
            try:
                return await self._entered.__aenter__()
            except RpcError as exc:
                await attempts.wait_after(exc)

    async def __aexit__(self, *exc: Any) -> None:
        await self._entered.__aexit__(*exc)


class _RetriedStream(AsyncIterator[Any]):
    """The items of a remote generator. Until the first item it is begun again."""

    def __init__(self, attempts: _Attempts) -> None:
        self._attempts = attempts
        self._stream: Any = None
        self._is_over = False

    async def __anext__(self) -> Any:
        while not self._is_over:
            try:
                if self._stream is None:
                    self._stream = aiter(self._attempts.next())
                item = await anext(self._stream)
            except RpcError as exc:
                self._stream = None  # first: the wait may be cancelled
                await self._attempts.wait_after(exc)
            else:
                self._attempts.stop()
                return item
        raise StopAsyncIteration

    def _has_item(self) -> bool:
        return self._stream is not None and self._stream._has_item()

    async def aclose(self) -> None:
        """Close the remote generator: its `finally` runs. `break` does the same."""
        self._is_over = True
        if self._stream is not None:
            with contextlib.suppress(WorkerGone):
                await self._stream.aclose()
