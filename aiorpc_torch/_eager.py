"""A task that waits for a coroutine to run: one that never has to wait needs no task of its own.

A task takes its first step in the loop's next turn, and making one costs more than most methods
compute. This one is there already, and is woken into the coroutine's first step. If the coroutine
waits, it becomes that coroutine's task: `current_task`, cancellation and timeouts are right from
the start. (Python 3.12 has `eager_start`, which makes the task all the same.)
"""

import asyncio
import contextvars
import types
from collections.abc import Coroutine, Generator
from typing import Any

from ._wait import Wait


class Host:
    """Confined to the loop that it was made on; ready in its next turn."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._park: Wait | None = None
        self._given = False
        self._next: tuple[Coroutine[Any, Any, None], contextvars.Context] | None = None
        self.task = self._loop.create_task(self._live(), name="aiorpc-host")

    def __repr__(self) -> str:
        return f"<Host {'parked' if self._park else 'at work'}>"

    def is_free(self) -> bool:
        """Whether it can run a coroutine now."""
        return self._park is not None and not self.task.done()

    def is_gone(self) -> bool:
        """Whether it will never be free again: it is a coroutine's own, or was cancelled."""
        return self._given or self.task.done()

    def run(self, coroutine: Coroutine[Any, Any, None], context: contextvars.Context) -> bool:
        """Take a coroutine's first step, outside any task. True: it is done.

        False: it waits, and `task` has become its own, for good. It must not raise.
        """
        assert self._park is not None
        self._next = coroutine, context
        self._park.settle(None)
        self._park.wake()
        if self.is_free():
            return True
        self._given = True
        asyncio.tasks._register_task(self.task)
        return False

    def close(self) -> None:
        """Run nothing more."""
        if self._park is not None:
            self.task.cancel()

    async def _live(self) -> None:
        # Nobody who gathers all tasks shall wait for one that only waits for work.
        asyncio.tasks._unregister_task(self.task)
        waited = False
        while not waited:
            self._park = Wait(self._loop)
            await self._park
            assert self._next is not None
            (coroutine, context), self._next, self._park = self._next, None, None
            waited = await _within(coroutine, context)
        self._park = None


@types.coroutine
def _within(
    coroutine: Coroutine[Any, Any, None], context: contextvars.Context
) -> Generator[Any, Any, bool]:
    """Run a coroutine in a context of its own; whether it had to wait."""
    step, value, waited = coroutine.send, None, False
    while True:
        try:
            waits_for = context.run(step, value)
        except StopIteration:
            return waited
        waited = True
        try:
            step, value = coroutine.send, (yield waits_for)
        except GeneratorExit:
            context.run(coroutine.close)
            raise
        except BaseException as exc:
            step, value = coroutine.throw, exc
