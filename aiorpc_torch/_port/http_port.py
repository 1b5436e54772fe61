"""A small HTTP server in a thread of its own, whose costs strangers cannot raise.

Not `wsgiref` or `http.server`, which hold a thread and a descriptor for each connection: a client
that sends a byte every few seconds keeps both, and descriptors run out.
(tests/unit/port/test_http_port.py)
"""

import asyncio
import logging
import socket
from collections.abc import Callable, Iterable
from typing import Any

from .._aio.loops import LoopThread
from .._aio.sockets import BACKLOG, Acceptor
from .port import prepare
from .strangers import Strangers, host_of
from .streams import PlainStream, TlsStream
from .tls import Tls

log = logging.getLogger("aiorpc_torch")

MAX_CONNECTIONS = 64  # at once; beyond it one is closed
MAX_ANSWERS = 8  # that are sent at once, since each may take megabytes; beyond it one is closed
MAX_HEAD = 1 << 13  # bytes of a request
REQUEST_TIMEOUT = 10.0  # seconds from a connection to the last byte of the answer
CLOSE_TIMEOUT = 0.5  # seconds for the thread to end

App = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]
"""An application of WSGI. It gets method, path, query and the headers of the request alone."""

_NOT_READ = "431 Request Header Fields Too Large"


class HttpPort:
    """Answers requests without a body at a socket that listens, until `close`. For any thread.

    The application runs in the thread of this port: meanwhile connections wait in the backlog.
    `name` is that of the thread, and of this port in the log.
    """

    def __init__(self, listening: socket.socket, app: App, name: str, tls: Tls | None) -> None:
        self._listening, self._app, self._name, self._tls = listening, app, name, tls
        self._connections, self._answers = Strangers(MAX_CONNECTIONS), Strangers(MAX_ANSWERS)
        self._tasks: set[asyncio.Task[None]] = set()
        self._has_warned = False
        self._thread = LoopThread(name, self._serve)
        self._thread.start()

    def close(self) -> None:
        """Close all sockets, and wait until the thread has ended: up to half a second."""
        self._thread.close(CLOSE_TIMEOUT)

    # ── on the loop ─────────────────────────────────────────────────────────────────────────────

    async def _serve(self) -> None:
        acceptor = Acceptor(self._name, self._accept)
        acceptor.add(self._listening)
        await self._thread.closing.wait()
        acceptor.close()
        self._connections.close()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _accept(self, accepted: socket.socket) -> None:
        prepare(accepted)
        host = host_of(accepted)
        task = self._thread.loop.create_task(self._talk(accepted, host))
        self._tasks.add(task)
        self._connections.add(task, host, task.cancel)

        def on_end(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            self._connections.remove(task)
            self._answers.remove(task)
            accepted.close()  # the task may not have begun

        task.add_done_callback(on_end)

    async def _talk(self, accepted: socket.socket, host: str) -> None:
        """Answer one request. Each step counts for the timeout: a slow client gets no more time."""
        with accepted:
            try:
                async with asyncio.timeout(REQUEST_TIMEOUT):
                    stream = PlainStream(accepted)
                    if self._tls is not None:
                        stream = secured = TlsStream(accepted, self._tls.server)
                        await secured.handshake()
                    answer = self._answer(await _read_head(stream))
                    task: Any = asyncio.current_task()
                    self._answers.add(task, host, task.cancel)
                    await stream.send(answer)
            except OSError as exc:  # also a TimeoutError, and the errors of TLS
                log.debug("%s closed a connection from %s: %r", self._name, host, exc)

    def _answer(self, head: bytes | None) -> bytes:
        if head is None:
            return _response(_NOT_READ, (), b"")
        try:
            environ = _environ(head)
        except ValueError:
            return _response("400 Bad Request", (), b"")
        told: list[Any] = []
        try:
            body = b"".join(self._app(environ, lambda *status: told.extend(status)))
        except Exception:
            if not self._has_warned:  # the request may have caused it: not at each one
                self._has_warned = True
                log.exception("%s cannot answer a request", self._name)
            return _response("500 Internal Server Error", (), b"")
        return _response(told[0], told[1], body)


async def _read_head(stream: PlainStream) -> bytes | None:
    """Return a request without the empty line at its end; None if it is too long.

    Raises:
        ConnectionResetError: if it ends before.
    """
    head = b""
    while len(head) <= MAX_HEAD:
        if not (data := await stream.receive(MAX_HEAD)):
            raise ConnectionResetError("it has ended")
        head += data
        if (end := head.find(b"\r\n\r\n")) >= 0:
            return head[:end]
    return None


def _environ(head: bytes) -> dict[str, Any]:
    """Return what WSGI calls the environment. Raises ValueError for what is no request of HTTP."""
    first, *lines = head.decode("latin-1").split("\r\n")
    method, target, version = first.split(" ")
    if not version.startswith("HTTP/1."):
        raise ValueError(f"no version of HTTP: {version!r}")
    path, _, query = target.partition("?")
    found = {"REQUEST_METHOD": method, "PATH_INFO": path, "QUERY_STRING": query}
    for line in lines:
        name, _, value = line.partition(":")
        found[f"HTTP_{name.upper().replace('-', '_')}"] = value.strip()
    return found


def _response(status: str, headers: Iterable[tuple[str, str]], body: bytes) -> bytes:
    told = (*headers, ("Content-Length", str(len(body))), ("Connection", "close"))
    lines = (f"HTTP/1.1 {status}", *(f"{name}: {value}" for name, value in told), "", "")
    return "\r\n".join(lines).encode("latin-1") + body


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens at an address; at `::` for IPv4 too.

    Raises:
        OSError: if the port is taken, or the host has no address.
    """
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, _, _, _, address = found[0]
    is_dual = family == socket.AF_INET6 and socket.has_dualstack_ipv6()
    return socket.create_server(address[:2], family=family, backlog=BACKLOG, dualstack_ipv6=is_dual)
