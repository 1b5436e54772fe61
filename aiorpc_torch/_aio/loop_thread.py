"""An event loop in a daemon thread of its own, for what a user's blocked loop must not delay."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any

from .loops import call_soon


class LoopThread:
    """A thread whose event loop runs `serve()`, which returns once `closing` is set.

    Attributes:
        loop: the event loop; it is closed when the thread has ended.
    """

    def __init__(self, name: str, serve: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self.loop = asyncio.new_event_loop()
        self.closing = asyncio.Event()
        self._serve = serve
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Start the thread: what `serve` uses is there."""
        self._thread.start()

    def close(self, timeout: float) -> None:
        """Set `closing`, and wait until the thread has ended. In any other thread."""
        call_soon(self.loop, self.closing.set)
        self._thread.join(timeout)

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self.loop) as runner:
            runner.run(self._serve())
