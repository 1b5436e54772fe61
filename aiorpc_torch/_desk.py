"""Which message takes which result back: a state machine without a loop, without torch.

A link's messages are answered once each, and a result may travel with any of them. A message is
answered when all its calls are done; or when some are and `flush` is called, so that a slow call
holds back no neighbour. What is done after its own message was answered is an orphan: it goes with
the next answer, for which the caller keeps a message without calls outstanding (a poll) as long
as it waits for anything.
"""

import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

R = TypeVar("R")


class Carrier(Generic[R]):
    """A message that can still carry results back."""

    __slots__ = ("own", "reply", "results", "running")

    def __init__(self, reply: Any, running: int, own: bool) -> None:
        self.reply = reply
        self.running = running
        self.own = own
        self.results: list[R] = []


class Desk(Generic[R]):
    """The messages and results of one link. `send(reply, results)` answers a message."""

    def __init__(self, send: Callable[[Any, list[R]], None]) -> None:
        self._send = send
        self._lock = threading.Lock()
        self._open: dict[Carrier[R], None] = {}
        self._orphans: list[R] = []

    def __repr__(self) -> str:
        return f"<Desk {len(self._open)} messages open, {len(self._orphans)} orphans>"

    @property
    def has_orphans(self) -> bool:
        """Whether a message that stays open shall be answered with them: by `flush`, soon."""
        return bool(self._orphans)

    def admit(self, reply: Any, calls: int, *, poll: bool, own: bool = False) -> Carrier[R]:
        """A message with so many calls came in; `own`, it waits for all of them."""
        carrier: Carrier[R] = Carrier(reply, calls, own)
        with self._lock:
            self._open[carrier] = None
            stays = calls or (poll and not self._orphans)
            answers = [] if stays else self._close([carrier])
        self._send_all(answers)
        return carrier

    def done(self, carrier: Carrier[R], result: R) -> bool:
        """A call of that message is done. True if `flush` is wanted, soon."""
        with self._lock:
            carrier.running -= 1
            is_open = carrier in self._open
            (carrier.results if is_open else self._orphans).append(result)
            if carrier.running or not is_open:
                return True
            answers = self._close([carrier])
        self._send_all(answers)
        return False

    def more(self, result: R) -> None:
        """A call that goes on has something to send: an item of a stream. Then `flush`, soon."""
        with self._lock:
            self._orphans.append(result)

    def flush(self) -> None:
        """Answer every message that has results; orphans go with any message."""
        with self._lock:
            free = [carrier for carrier in self._open if not carrier.own]
            ready = [carrier for carrier in free if carrier.results]
            if self._orphans and free and not ready:
                ready = [min(free, key=lambda carrier: carrier.running)]
            answers = self._close(ready)
        self._send_all(answers)

    def release(self) -> None:
        """Answer every message now: its sender leaves, or this process does."""
        with self._lock:
            answers = self._close(list(self._open))
        self._send_all(answers)

    def _close(self, carriers: list[Carrier[R]]) -> list[Carrier[R]]:
        """These are to be answered; the orphans go with the first. Under the lock."""
        for carrier in carriers:
            del self._open[carrier]
            carrier.results += self._orphans
            self._orphans = []
        return carriers

    def _send_all(self, carriers: list[Carrier[R]]) -> None:
        # Outside the lock: to answer is to pickle and to send.
        for carrier in carriers:
            self._send(carrier.reply, carrier.results)
