"""A gate for tests: calls stand at it until somebody opens it, and others know how many do.

Knows nothing of worlds or calls: it is an object like any other, and another process reaches it by
its RRef.
"""

import asyncio
import contextlib
import threading

__all__ = ("Gate",)


class Gate:
    """Where calls wait until a test lets them through, in whatever process they run.

        gate = await create("a", Gate)
        waiting = asyncio.create_task(remote(gate).passed())
        await remote(gate).entered()  # it stands there: not before, however fast the machine is
        await remote(gate).open()
        await waiting

    Its methods answer callers in other processes and in its own, and an actor may hold it itself.
    """

    def __init__(self) -> None:
        self._opened = asyncio.Event()  # for coroutines
        self._open = threading.Event()  # for threads
        self._entered, self._cancelled = _Count(), _Count()

    def __repr__(self) -> str:
        state = "open" if self._open.is_set() else "shut"
        return f"<Gate {state}, {self._entered.value} entered, {self._cancelled.value} cancelled>"

    async def passed(self) -> None:
        """Wait until the gate is open."""
        self._entered.add()
        try:
            await self._opened.wait()
        except asyncio.CancelledError:
            self._cancelled.add()
            raise

    def passed_in_thread(self) -> None:
        """Hold this thread until the gate is open: for a plain `def`, which nobody can cancel."""
        self._entered.add()
        self._open.wait()

    async def open(self) -> None:
        """Let pass who waits, and who comes from now on."""
        self._open.set()
        self._opened.set()

    async def shut(self) -> None:
        """Let nobody pass who comes from now on."""
        self._open.clear()
        self._opened.clear()

    async def entered(self, count: int = 1) -> int:
        """Wait until `count` calls have come to the gate; how many have, ever. 0 waits for none."""
        return await self._entered.reach(count)

    async def cancelled(self, count: int = 1) -> int:
        """Wait until `count` calls were cancelled at the gate; how many were. 0 waits for none."""
        return await self._cancelled.reach(count)


class _Count:
    """A number that any thread adds to, and any coroutine waits for."""

    def __init__(self) -> None:
        self.value = 0
        self._lock = threading.Lock()
        self._waiting: list[tuple[int, asyncio.Future[None]]] = []

    def add(self) -> None:
        with self._lock:
            self.value += 1
            due = [future for count, future in self._waiting if count <= self.value]
            self._waiting = [each for each in self._waiting if each[0] > self.value]
        for future in due:
            with contextlib.suppress(RuntimeError):  # its loop was closed meanwhile
                future.get_loop().call_soon_threadsafe(_settle, future)

    async def reach(self, count: int) -> int:
        with self._lock:
            reached: asyncio.Future[None] | None = None
            if self.value < count:
                reached = asyncio.get_running_loop().create_future()
                self._waiting.append((count, reached))
        if reached is not None:
            await reached
        return self.value


def _settle(future: "asyncio.Future[None]") -> None:
    if not future.done():
        future.set_result(None)
