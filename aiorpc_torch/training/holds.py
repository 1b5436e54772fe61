"""Readers of a value that one writer replaces: a reader sees one value from its start to its end.

Readers are coroutines and threads; the writer is a coroutine. While the writer waits, new readers
wait too, for at most `PATIENCE`. So the writer is not kept out by readers that overlap, and readers
that wait for each other do not deadlock. (tests/unit/training/test_holds.py)
"""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass

from .waiting import Changes

PATIENCE = 1.0
"""Seconds for which a new reader waits for a writer that waits for earlier readers."""


@dataclass(eq=False)
class _Reader:
    """One reader, and the readers inside it."""

    holds: "Holds"
    depth: int = 1


_current: ContextVar[tuple[_Reader, ...]] = ContextVar("aiorpc_training_readers", default=())


class Holds:
    """A lock for many readers, or one writer. The writer runs on the event loop that made it."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._condition = threading.Condition()
        self._readers = 0
        self._is_writing = False
        self._changes = Changes()  # for coroutines
        self.entries = 0  # how many readers there were
        self.on_patience: Callable[[], object] = lambda: None
        """Is called for each `PATIENCE` that the writer waits: ends readers that have gone."""

    # ── readers ─────────────────────────────────────────────────────────────────────────────────

    @contextlib.contextmanager
    def in_thread(self) -> Iterator[None]:
        """Read in a thread."""
        if (outer := self._outer()) is None:
            with self._condition:
                self._condition.wait_for(lambda: not self._is_writing, PATIENCE)
        with self._inside(outer):
            yield

    @contextlib.asynccontextmanager
    async def in_task(self) -> AsyncIterator[None]:
        """Read in a coroutine."""
        if (outer := self._outer()) is None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(PATIENCE):
                    await self._changes.until(lambda: not self._is_writing, "hold()")
        with self._inside(outer):
            yield

    def is_held_here(self) -> bool:
        """Return whether the current context reads."""
        return self._outer(is_new=False) is not None

    def _outer(self, is_new: bool = True) -> _Reader | None:
        """Return the reader around the current code, with one more reader in it."""
        with self._condition:
            for reader in _current.get():
                if reader.holds is self and reader.depth:
                    reader.depth += is_new
                    return reader
        return None

    @contextlib.contextmanager
    def _inside(self, outer: _Reader | None) -> Iterator[None]:
        """Read inside of a reader, or as a new one."""
        reader = outer or _Reader(self)
        if outer is None:
            with self._condition:  # the writer has it as it replaces the value
                self._readers += 1
                self.entries += 1
            _current.set((*_current.get(), reader))
        try:
            yield
        finally:  # maybe in another context: a generator may be closed by another task
            if outer is None:
                _current.set(tuple(each for each in _current.get() if each is not reader))
            with self._condition:
                reader.depth -= 1
                self._readers -= reader.depth == 0
                must_tell = self._is_writing and not self._readers
            if must_tell:
                with contextlib.suppress(RuntimeError):  # the loop is closed
                    self._loop.call_soon_threadsafe(self._changes.notify)

    # ── the writer ──────────────────────────────────────────────────────────────────────────────

    @contextlib.asynccontextmanager
    async def writing(self) -> AsyncIterator[None]:
        """Wait until no reader is left. Replace the value without an await then."""
        what = "the change of the version"
        await self._changes.until(lambda: not self._is_writing, what)
        self._set_writing(True)
        try:
            while self._readers:
                try:
                    async with asyncio.timeout(PATIENCE) as patience:
                        await self._changes.until(lambda: not self._readers, what)
                except TimeoutError:
                    if not patience.expired():
                        raise
                    self.on_patience()
            yield
        finally:
            self._set_writing(False)

    @contextlib.contextmanager
    def placing(self) -> Iterator[bool]:
        """Keep new readers out, also those of threads, in a step without an await.

        The value is whether no reader is left: one may have entered as its patience ended.
        """
        with self._condition:
            yield not self._readers

    def _set_writing(self, is_writing: bool) -> None:
        with self._condition:
            self._is_writing = is_writing
            self._condition.notify_all()
        self._changes.notify()
