"""What the threads of tensor sockets still have to do for the event loop.

They wait for ever, each for its queue or its socket: that a thread runs tells nothing.
"""

import contextlib
import queue
import socket
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

from aiorpc_torch._carrier import socket_threads
from aiorpc_torch._carrier.socket_threads import SocketReceiver, SocketSender

Replace = Callable[[Any, str, Callable[[Any], Any]], None]


class SocketWork:
    """Counts the chunks at each end of the sockets, and finds those between."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: weakref.WeakKeyDictionary[Any, Counter[str]] = weakref.WeakKeyDictionary()

    def install(self, replace: Replace) -> None:
        """Count what is begun from now on."""
        replace(socket_threads, "queue", lambda _: SimpleNamespace(SimpleQueue=_Queue))
        replace(socket_threads._SocketThreads, "_run", lambda run: self._counted("threads", run))
        for owner, name in ((SocketSender, "_send_chunk"), (SocketReceiver, "_receive_chunk")):
            replace(owner, name, lambda handle: self._counted("chunks", handle))

    def is_under_way(self) -> bool:
        """Return whether a thread has something to do, or is about to end."""
        with self._lock:
            owners = [*self._counts.items()]
        return any(_has_work(*each) for each in owners)

    def clear(self) -> None:
        """Forget what is under way."""
        with self._lock:
            self._counts.clear()

    def _counted(self, what: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def called(owner: Any, *args: Any) -> Any:
            with self._counting(owner, what):
                return function(owner, *args)

        return called

    @contextlib.contextmanager
    def _counting(self, owner: Any, what: str) -> Iterator[None]:
        with self._lock:
            counts = self._counts.setdefault(owner, Counter())
            counts[what] += 1
        ended = Counter({what: 1})
        try:
            yield
        except BaseException:
            if what == "chunks":  # until its thread has told of it, and ends
                with self._lock:
                    counts["broken chunks"] += 1
                ended.clear()
            raise
        finally:
            with self._lock:
                if what == "threads":
                    ended["chunks"] = counts.pop("broken chunks", 0)
                counts.subtract(ended)
                counts.update({f"ended {each}": count for each, count in ended.items()})


class _Queue(queue.SimpleQueue[Any]):
    """Counts the transfers that were put: each is for one chunk."""

    def __init__(self) -> None:
        self.chunks = 0
        self._lock = threading.Lock()

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        with self._lock:
            self.chunks += item is not None
        super().put(item, block, timeout)


def _has_work(owner: Any, counts: Counter[str]) -> bool:
    if owner._is_closed:
        return counts["threads"] > 0
    sockets = [*owner._sockets]
    if isinstance(owner, SocketSender):
        chunks: Any = owner._transfers
        return bool(sockets) and chunks.chunks > counts["ended chunks"]
    return counts["chunks"] > 0 or any(map(_has_input, sockets))


def _has_input(sock: socket.socket) -> bool:
    """Return whether bytes, or the end, have come; a thread then reads them, or ends."""
    try:
        sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True
