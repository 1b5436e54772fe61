"""Sessions of the package `requests` whose connection another thread may close.

The limits of `requests` hold for one step each, and it reads an answer of any size. Here a request
that is given up has its connection closed, whatever it waits for, and an answer is cut off.
(tests/network/test_etcd_value.py)
"""

import contextlib
import io
import socket
import threading
from typing import Any

import requests
from requests.adapters import HTTPAdapter
from urllib3.exceptions import HTTPError

MAX_ANSWER = 1 << 16  # bytes: a record has some hundreds


class Sockets:
    """The connections of one attempt. For any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: list[socket.socket] = []
        self._is_closed = False

    def add(self, connected: socket.socket) -> None:
        """Add a connection. Raises TimeoutError if the attempt was given up."""
        with self._lock:
            if self._is_closed:
                connected.close()
                raise TimeoutError("given up")
            self._open.append(connected.dup())  # TLS takes the descriptor itself

    def close(self) -> None:
        """Close the connections, also those that a thread waits for, and take no more."""
        with self._lock:
            self._is_closed = True
            while self._open:
                with contextlib.suppress(OSError), self._open.pop() as each:
                    each.shutdown(socket.SHUT_RDWR)


class Session(requests.Session):
    """A session with its connections in `sockets`. It raises ValueError for a long answer."""

    def __init__(self, sockets: Sockets) -> None:
        super().__init__()
        self.headers["Accept-Encoding"] = "identity"
        for scheme in ("http://", "https://"):
            self.mount(scheme, _Adapter(sockets))


class _Adapter(HTTPAdapter):
    def __init__(self, sockets: Sockets) -> None:
        super().__init__()
        pools = self.poolmanager.pool_classes_by_scheme
        self.poolmanager.pool_classes_by_scheme = {
            scheme: _telling(pool, sockets) for scheme, pool in pools.items()
        }

    def send(self, *args: Any, **options: Any) -> requests.Response:
        found = super().send(*args, **options)
        try:
            data = found.raw.read(MAX_ANSWER + 1, decode_content=False)
        except HTTPError as exc:
            raise requests.ConnectionError(exc) from exc
        finally:
            found.close()
        if len(data) > MAX_ANSWER:
            raise ValueError(f"an answer of more than {MAX_ANSWER} bytes")
        found.raw = io.BytesIO(data)
        return found


def _telling(pool: Any, sockets: Sockets) -> Any:
    """Return a class of pools whose connections are added to `sockets`."""

    class Connection(pool.ConnectionCls):  # type: ignore[misc]
        def _new_conn(self) -> socket.socket:
            connected: socket.socket = super()._new_conn()
            sockets.add(connected)
            return connected

    class Pool(pool):  # type: ignore[misc]
        ConnectionCls = Connection

    return Pool
