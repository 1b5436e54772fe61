"""The HTTP server of the metrics: requests, and clients that would keep its resources."""

import contextlib
import http.client
import logging
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from aiorpc_torch._port import http_port as module
from aiorpc_torch._port.http_port import MAX_HEAD, HttpPort, listen
from aiorpc_torch._port.tls import Tls
from tests.support.certificates import Authority

SOON = 30.0
GET = b"GET /metrics?a=b HTTP/1.1\r\nHost: x\r\nAccept-Encoding: gzip\r\n\r\n"


def echo(environ: dict[str, Any], start_response: Callable[..., Any]) -> list[bytes]:
    """Answer with what the server has read of the request."""
    start_response("200 OK", [("Content-Type", "text/plain")])
    return ["\n".join(f"{name}={value}" for name, value in environ.items()).encode()]


@contextlib.contextmanager
def served(app: module.App = echo, tls: Tls | None = None) -> Iterator[tuple[HttpPort, int]]:
    listening = listen("127.0.0.1", 0)
    number = listening.getsockname()[1]
    port = HttpPort(listening, app, "aiorpc-test", tls)
    try:
        yield port, number
    finally:
        port.close()
        assert "aiorpc-test" not in {each.name for each in threading.enumerate()}


def dial(number: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", number), SOON)


def received(client: socket.socket) -> bytes:
    """Return all that comes until the other end closes."""
    found = b""
    with contextlib.suppress(ConnectionResetError):
        while data := client.recv(1 << 20):
            found += data
    return found


def test_a_request() -> None:
    """Method, path, query and headers reach the application; the answer has its length."""
    with served() as (_, number):
        client = http.client.HTTPConnection("127.0.0.1", number, timeout=SOON)
        client.request("GET", "/metrics?a=b", headers={"Accept": "text/plain"})
        answer = client.getresponse()
        found = answer.read().decode().splitlines()
        client.close()
    assert (answer.status, answer.headers["Content-Type"]) == (200, "text/plain")
    assert answer.headers["Connection"] == "close"
    assert {"REQUEST_METHOD=GET", "PATH_INFO=/metrics", "QUERY_STRING=a=b"} <= {*found}
    assert "HTTP_ACCEPT=text/plain" in found


def test_a_request_in_pieces_and_a_half_closed_connection() -> None:
    """A client that sends no more still gets the answer; without a whole request nothing."""
    with served() as (_, number):
        with dial(number) as client:
            for piece in (GET[:10], GET[10:-3], GET[-3:]):
                client.sendall(piece)
                time.sleep(0.01)
            client.shutdown(socket.SHUT_WR)
            assert received(client).startswith(b"HTTP/1.1 200 OK\r\n")
        with dial(number) as client:
            client.sendall(GET[:-1])
            client.shutdown(socket.SHUT_WR)
            assert received(client) == b""


@pytest.mark.parametrize(
    "sent", [b"nonsense\r\n\r\n", b"GET / FTP/1.0\r\n\r\n", b"\x16\x03\x01\r\n\r\n"]
)
def test_what_is_no_request(sent: bytes) -> None:
    with served() as (_, number), dial(number) as client:
        client.sendall(sent)
        assert received(client).startswith(b"HTTP/1.1 400 Bad Request\r\n")


@pytest.mark.promise("watching.metrics_strangers")
def test_a_huge_header() -> None:
    """No more is read than `MAX_HEAD` and one piece; the connection is closed."""
    with served() as (_, number), dial(number) as client:
        client.sendall(b"GET / HTTP/1.1\r\nX: " + b"x" * MAX_HEAD)
        assert received(client).startswith(b"HTTP/1.1 431 ")
        with contextlib.suppress(OSError):  # it is closed
            for _ in range(1000):
                client.sendall(b"x" * MAX_HEAD)
            pytest.fail("8 MB of a header were taken")


@pytest.mark.promise("watching.metrics_strangers")
def test_a_byte_at_a_time_does_not_extend_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each byte comes in time; the request does not."""
    monkeypatch.setattr(module, "REQUEST_TIMEOUT", 0.2)
    with served() as (_, number), dial(number) as client:
        with contextlib.suppress(OSError):  # it is closed
            for _ in range(int(SOON / 0.01)):
                client.sendall(b"G")
                time.sleep(0.01)
            pytest.fail("it had all the time")


@pytest.mark.promise("watching.metrics_strangers")
def test_clients_that_read_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers that wait are few, so their memory is bounded; each one ends in time."""
    monkeypatch.setattr(module, "REQUEST_TIMEOUT", 1.0)
    monkeypatch.setattr(module, "MAX_ANSWERS", 2)

    asked: list[object] = []

    def large(environ: object, start_response: Callable[..., Any]) -> list[bytes]:
        asked.append(environ)
        start_response("200 OK", [])
        return [b"x" * (16 << 20)]  # more than a socket buffers

    with served(large) as (port, number), contextlib.ExitStack() as stack:
        for _ in range(6):
            client = stack.enter_context(socket.socket())
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect(("127.0.0.1", number))
            client.sendall(GET)
        most, end = 0, time.monotonic() + SOON
        while len(asked) < 6 or port._tasks:
            most = max(most, len(port._answers))
            assert time.monotonic() < end
            time.sleep(0.001)
    assert 1 <= most <= 2


@pytest.mark.promise("watching.metrics_strangers")
def test_the_oldest_connection_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_CONNECTIONS", 2)
    with served() as (_, number), dial(number) as old, dial(number), dial(number) as new:
        assert received(old) == b""
        new.sendall(GET)
        assert received(new).startswith(b"HTTP/1.1 200 OK\r\n")


def test_an_application_that_fails(caplog: pytest.LogCaptureFixture) -> None:
    """Each request is answered; the log tells of the first alone, since a stranger may cause it."""

    def fail(*_: object) -> list[bytes]:
        raise LookupError("no such metric")

    with served(fail) as (_, number), caplog.at_level(logging.DEBUG, "aiorpc_torch"):
        for _ in range(2):
            with dial(number) as client:
                client.sendall(GET)
                assert received(client).startswith(b"HTTP/1.1 500 ")
    assert caplog.text.count("cannot answer a request") == 1


def test_close_ends_open_connections() -> None:
    with served() as (port, number), dial(number) as client:
        client.sendall(b"G")
        port.close()
        assert received(client) == b""


# ── TLS ─────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.promise("watching.metrics_tls")
def test_a_client_with_a_certificate(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    with served(tls=authority.tls()) as (_, number):
        context = authority.tls("scraper").client
        client = http.client.HTTPSConnection("127.0.0.1", number, timeout=SOON, context=context)
        client.request("GET", "/metrics")
        assert b"PATH_INFO=/metrics" in client.getresponse().read()
        client.close()


@pytest.mark.promise("watching.metrics_tls")
@pytest.mark.parametrize("who", ["none", "another authority", "clear text", "silent"])
def test_a_client_without_a_certificate(
    who: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reads nothing."""
    monkeypatch.setattr(module, "REQUEST_TIMEOUT", 0.5 if who == "silent" else SOON)
    with served(tls=Authority(tmp_path).tls()) as (_, number), dial(number) as client:
        if who == "silent":
            assert received(client) == b""
            return
        if who == "clear text":
            client.sendall(GET)
            assert b"HTTP" not in received(client)
            return
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        if who == "another authority":
            context.load_cert_chain(*Authority(tmp_path, "other").files()[:2])
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        found = b""
        with contextlib.suppress(OSError), context.wrap_socket(client) as secured:
            secured.sendall(GET)
            found = secured.recv(1)  # a client of TLS 1.3 learns here that it is refused
        assert not found
