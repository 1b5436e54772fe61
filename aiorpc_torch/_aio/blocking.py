"""Functions that may block without end, each in a daemon thread and given up after a time limit.

The lookup of a name waits for name servers, a file for its network file system. Neither a signal
nor a timeout ends such a system call. The thread stays until the call returns, and does not delay
the exit of the process. (tests/unit/aio/test_blocking.py)
"""

import asyncio
import concurrent.futures
import contextlib
from collections.abc import Callable
from functools import partial
from typing import Generic, TypeVar

from .awaited import awaited
from .threads import run_in_thread

T = TypeVar("T")


class Blocked(TimeoutError):
    """A function did not return within its time limit; the text names what does not answer."""


class BlockingCall(Generic[T]):
    """A call of a function in a new daemon thread.

    Args:
        function: the function.
        text: text of `Blocked` outside of `blocking_on`.
        undo: takes, in a thread, a result that came after the call was given up.
    """

    def __init__(
        self, function: Callable[[], T], text: str, undo: Callable[[T], object] = lambda _: None
    ) -> None:
        self._function = function
        self._undo = undo
        # The thread sets it or this end cancels it: one of both, so that no result is lost.
        self._outcome: concurrent.futures.Future[T] = concurrent.futures.Future()
        self._texts = [text]
        self.ended = self._in_thread(self._run)  # done when `undo` has returned, too

    @property
    def text(self) -> str:
        """Return what does not answer at this moment."""
        return self._texts[-1]

    async def result(self, seconds: float | None) -> T:
        """Wait for the result; a call that is cancelled, or takes longer, is given up.

        Raises:
            Blocked: if the function has not returned after `seconds`.
        """
        try:
            await asyncio.wait((self.ended,), timeout=seconds)
        except asyncio.CancelledError:
            self.give_up()
            raise
        if self._outcome.cancel():
            if self.ended.done():
                self.ended.result()  # raises: no thread was started
            raise Blocked(self.text)
        self._undo = lambda _: None
        return self._outcome.result()

    def give_up(self) -> None:
        """Let `undo` take the result, if there is one."""
        if not self._outcome.cancel() and self._outcome.exception() is None:
            self.ended = self._in_thread(partial(self._undo, self._outcome.result()))
            self._undo = lambda _: None

    def _in_thread(self, step: Callable[[], object]) -> "asyncio.Future[object]":
        return asyncio.ensure_future(run_in_thread(step, "aiorpc-blocking"))

    def _run(self) -> None:
        awaited.set(self._texts)
        try:
            found = self._function()
        except BaseException as exc:
            with contextlib.suppress(concurrent.futures.InvalidStateError):
                self._outcome.set_exception(exc)
            return
        try:
            self._outcome.set_result(found)
        except concurrent.futures.InvalidStateError:  # it was given up
            self._undo(found)
