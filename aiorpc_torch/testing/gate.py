"""A gate that makes calls wait until a test opens it."""

import asyncio
import threading

from .._aio.loops import call_soon


class Gate:
    """A gate at which calls wait until a test opens it, in whatever process they run.

        gate = await aiorpc.create("a", Gate)
        waiting = asyncio.create_task(aiorpc.remote(gate).passed())
        await aiorpc.remote(gate).entered()  # the call waits at the gate now
        await aiorpc.remote(gate).open()
        await waiting

    Call its methods by RRef or directly; an actor may hold the gate itself.
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
        """Block this thread until the gate is open; a plain `def` cannot be cancelled."""
        self._entered.add()
        self._open.wait()

    async def open(self) -> None:
        """Let waiting calls and later calls pass."""
        self._open.set()
        self._opened.set()

    async def shut(self) -> None:
        """Make calls wait from now on."""
        self._open.clear()
        self._opened.clear()

    async def entered(self, count: int = 1) -> int:
        """Wait until `count` calls have ever entered; return how many. 0 waits for none."""
        return await self._entered.reach(count)

    async def cancelled(self, count: int = 1) -> int:
        """Wait until `count` calls were cancelled here; return how many. 0 waits for none."""
        return await self._cancelled.reach(count)


class _Count:
    """A counter that threads increment and coroutines wait for."""

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
            call_soon(future.get_loop(), _complete, future)

    async def reach(self, count: int) -> int:
        with self._lock:
            if self.value >= count:
                return self.value
            reached: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append((count, reached))
        await reached
        return self.value


def _complete(future: "asyncio.Future[None]") -> None:
    if not future.done():
        future.set_result(None)
