"""The child processes of a world: started, watched, started again, and seen to their end.

A process is `_child`'s subject; what a worker does in its world is `_world`'s.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any

from .._aio.interruption import Interruption
from .._aio.threads import daemon, run_blocking
from .child import Child, Main, Word
from .config import OnFailure, Place

log = logging.getLogger("aiorpc_torch")

# Seconds for children to end: those who have left their world, and those told to stop now.
EXIT = 5.0
STOP = 0.7


class Crew:
    """The children at `places`, each running `main(me, *args)`, or only serving.

    `restarts` times altogether, a child that ends badly is started again. What ends badly beyond
    that interrupts the block of `watched`, unless failures are to be gone on from.
    """

    def __init__(
        self,
        places: Sequence[Place],
        main: Main | None,
        args: tuple[Any, ...],
        restarts: int,
    ) -> None:
        self._places = places
        self._main = main
        self._args = args
        self._restarts = restarts
        self._children: list[Child] = []
        self._complete = False  # before, a lost worker cannot come back
        self._word: Word | None = None
        self.failures: list[BaseException] = []
        self.given_up: Callable[[str, BaseException], None] = _nobody_asks
        self._interruption: Interruption | None = None

    def __repr__(self) -> str:
        return f"<Crew {self._children}>"

    @contextlib.asynccontextmanager
    async def aboard(self) -> AsyncIterator[None]:
        """The children are started, and have ended when the block is left."""
        patience = STOP
        try:
            for place in self._places:
                self._start(place)
            yield
            patience = EXIT
        finally:
            if patience == STOP:
                self._tell(Word.CANCEL)
            await self._close(patience)

    def complete(self, given_up: Callable[[str, BaseException], None]) -> None:
        """The world is complete: from now on a child may have a successor, or is given up."""
        self._complete = True
        self.given_up = given_up

    @contextlib.contextmanager
    def last_word(self) -> Iterator[None]:
        """Before this process leaves the world, let the children know how."""
        try:
            yield
        except BaseException:
            self._tell(Word.CANCEL)
            raise
        self._tell(Word.LEAVE)

    @contextlib.asynccontextmanager
    async def watched(self, on_failure: OnFailure) -> AsyncIterator[None]:
        """Interrupt the block when a child fails, and raise what it raised."""
        if on_failure == "continue":
            yield
            return
        async with Interruption() as self._interruption:
            for failure in self.failures:
                self._interruption.end(failure)
            yield

    def _start(self, place: Place) -> None:
        child = Child(place, self._main, self._args)
        self._children.append(child)
        child.ended.add_done_callback(lambda ended: self._ended(place, ended.result()))

    def _ended(self, place: Place, failure: BaseException | None) -> None:
        if failure is None or self._word is Word.CANCEL:
            return
        if self._complete and self._restarts and self._word is None:
            self._restarts -= 1
            log.warning("worker %r is started again: %s", place.name, failure, exc_info=failure)
            self._start(place)
            return
        self.failures.append(failure)
        self.given_up(place.name, failure)
        if self._interruption is not None:
            self._interruption.end(failure)

    def _tell(self, word: Word) -> None:
        self._word = word
        for child in self._children:
            child.tell(word)

    async def _close(self, patience: float) -> None:
        if ends := [child.ended for child in self._children]:
            await asyncio.wait(ends, timeout=patience)
        for child in self._children:
            child.forget()
        await run_blocking(daemon("aiorpc-reaper"), self._reap)

    def _reap(self) -> None:
        for child in self._children:
            child.close()


def _nobody_asks(_: str, __: BaseException) -> None:
    """Who will not come back: until this process is a worker that may wait for it."""
