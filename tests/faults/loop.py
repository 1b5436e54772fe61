"""An event loop that counts its callbacks, calls a hook before each, and lives in virtual time.

What other threads bring arrives when the loop has nothing else to do, and a thread that waits for
the loop to be idle (`parked`) is released only then. So the order of the callbacks of one run is
the order of the next one, whatever the machine does.
"""

import asyncio
import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

real_monotonic = time.monotonic

STUCK = 2000
"""Looks, a millisecond apart at least, after which what another thread does is not waited for any
more. A process without a processor does not look, so a busy machine gives its threads longer."""

PARKED = 60.0  # real seconds after which a thread waits no more for the loop to be idle


class Clock:
    """`time.monotonic` of this process, which may be set forward."""

    def __init__(self) -> None:
        self.offset = 0.0

    def now(self) -> float:
        return real_monotonic() + self.offset

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        before, time.monotonic = time.monotonic, self.now
        try:
            yield
        finally:
            time.monotonic = before


class _Ready(deque[Any]):
    """The due callbacks of a loop. `BaseEventLoop` takes them out with `popleft` to run them."""

    def __init__(self, loop: "SteppingLoop", handles: Any) -> None:
        super().__init__(handles)
        self._loop = loop

    def popleft(self) -> Any:
        self._loop.about_to_run(self[0])
        return super().popleft()


class SteppingLoop(asyncio.SelectorEventLoop):
    """See the module. `before_callback` is called before each callback, outside any task."""

    def __init__(self, clock: Clock, *, is_virtual: bool = True) -> None:
        super().__init__()
        self.clock = clock
        self._is_virtual = is_virtual  # False where another process takes part
        self.before_callback: Callable[[], object] = _nothing
        self.is_busy: Callable[[], bool] = bool  # whether another thread does work for this loop
        self.give_up: Callable[[], object] = _nothing  # on what is under way
        self.on_park: Callable[[], object] = _nothing
        self._outside: deque[Any] = deque()  # callbacks of other threads
        self._parked: deque[threading.Event] = deque()
        self._ready: Any = _Ready(self, self._ready)

    # ── steps ───────────────────────────────────────────────────────────────────────────────────

    def about_to_run(self, handle: Any) -> None:
        """Count a step; a cancelled callback and the loop's own are none."""
        own = getattr(handle._callback, "__self__", None) is self
        if not own and not handle._cancelled:
            self.before_callback()

    # ── other threads ───────────────────────────────────────────────────────────────────────────

    def call_soon_threadsafe(self, callback: Any, *args: Any, context: Any = None) -> Any:
        is_own = asyncio._get_running_loop() is self
        if is_own or not self._is_virtual or not self.is_running():
            return super().call_soon_threadsafe(callback, *args, context=context)
        self._check_closed()  # type: ignore[attr-defined]
        handle = asyncio.Handle(callback, args, self, context)
        self._outside.append(handle)
        self._write_to_self()  # type: ignore[attr-defined]
        return handle

    def parked(self) -> None:
        """Block the current thread, not the loop's, until the loop has nothing else to do."""
        event = threading.Event()
        self._parked.append(event)
        self.on_park()
        if self.is_closed() or not event.wait(PARKED):
            raise TimeoutError("the loop was never idle")

    @property
    def waiting_threads(self) -> int:
        return len(self._parked)

    # ── waiting ─────────────────────────────────────────────────────────────────────────────────

    def _run_once(self) -> None:
        if self._is_virtual and not self._ready and not self._stopping:  # type: ignore[attr-defined]
            self._wait()
        super()._run_once()  # type: ignore[misc]

    def _wait(self) -> None:
        """Return when something is due: a socket first, then other threads, then a timer."""
        looks = 0
        while not self._has_input(0.0) and not self._stopping:  # type: ignore[attr-defined]
            if self._outside:
                self._ready.append(self._outside.popleft())
                return
            if self.is_busy():
                self._has_input(0.001)
                looks += 1
                if looks > STUCK:
                    self.give_up()
            elif self._parked:
                self._parked.popleft().set()
                self._has_input(0.0002)
            elif not self._outside and self._jump():  # the last one may just have brought it
                return

    def _has_input(self, seconds: float) -> bool:
        """Wait for a socket; those bytes that only wake the loop are taken out."""
        own = self._ssock  # type: ignore[attr-defined]
        keys = [key.fileobj for key, _ in self._selector.select(seconds)]  # type: ignore[attr-defined]
        if own in keys or own.fileno() in keys:
            self._read_from_self()  # type: ignore[attr-defined]
        return any(key not in (own, own.fileno()) for key in keys)

    def _jump(self) -> bool:
        """Go to the next timer; without one, wait for other threads."""
        timers = [each for each in self._scheduled if not each.cancelled()]  # type: ignore[attr-defined]
        if not timers:
            self._has_input(0.01)
            return False
        self.clock.offset += max(0.0, min(timers).when() - self.time())
        return True


def _nothing() -> None:
    pass
