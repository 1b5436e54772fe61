"""The port of the metrics: requests, and clients that would keep its resources."""

import contextlib
import http.client
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from aiorpc_torch import Tls
from aiorpc_torch.observe import MetricsServer, serve_metrics
from tests.support.certificates import Authority
from tests.support.http_clients import GET, SOON, dial, received

MAX_HEAD = 1 << 13  # bytes of a request
MAX_CONNECTIONS = 64  # at once


@contextlib.contextmanager
def served(tls: Tls | None = None) -> Iterator[MetricsServer]:
    before = {*threading.enumerate()}
    with serve_metrics(tls=tls) as server:
        yield server
    assert not {*threading.enumerate()} - before


def test_a_request_in_pieces_and_a_half_closed_connection() -> None:
    """A client that sends no more still gets the answer; without a whole request nothing."""
    with served() as server:
        with dial(server.port) as client:
            for piece in (GET[:10], GET[10:-3], GET[-3:]):
                client.sendall(piece)
                time.sleep(0.01)
            client.shutdown(socket.SHUT_WR)
            assert received(client).startswith(b"HTTP/1.1 200 OK\r\n")
        with dial(server.port) as client:
            client.sendall(GET[:-1])
            client.shutdown(socket.SHUT_WR)
            assert received(client) == b""


@pytest.mark.parametrize(
    "sent", [b"nonsense\r\n\r\n", b"GET / FTP/1.0\r\n\r\n", b"\x16\x03\x01\r\n\r\n"]
)
def test_what_is_no_request(sent: bytes) -> None:
    with served() as server, dial(server.port) as client:
        client.sendall(sent)
        assert received(client).startswith(b"HTTP/1.1 400 Bad Request\r\n")


@pytest.mark.promise("watching.metrics_strangers")
def test_a_huge_header() -> None:
    """No more is read than `MAX_HEAD` and one piece; the connection is closed."""
    with served() as server, dial(server.port) as client:
        client.sendall(b"GET / HTTP/1.1\r\nX: " + b"x" * MAX_HEAD)
        assert received(client).startswith(b"HTTP/1.1 431 ")
        with contextlib.suppress(OSError):  # it is closed
            for _ in range(1000):
                client.sendall(b"x" * MAX_HEAD)
            pytest.fail("8 MB of a header were taken")


@pytest.mark.promise("watching.metrics_strangers")
def test_the_oldest_connection_makes_room() -> None:
    with served() as server, contextlib.ExitStack() as stack:
        old, *_, new = (stack.enter_context(dial(server.port)) for _ in range(MAX_CONNECTIONS + 1))
        assert received(old) == b""
        new.sendall(GET)
        assert received(new).startswith(b"HTTP/1.1 200 OK\r\n")


def test_close_ends_open_connections() -> None:
    with served() as server, dial(server.port) as client:
        client.sendall(b"G")
        server.close()
        assert received(client) == b""


@pytest.mark.promise("watching.metrics_tls")
def test_a_client_with_a_certificate(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    with served(authority.tls()) as server:
        context = authority.tls("scraper").client
        client = http.client.HTTPSConnection(
            "127.0.0.1", server.port, timeout=SOON, context=context
        )
        client.request("GET", "/metrics")
        assert b"aiorpc_client_calls_total" in client.getresponse().read()
        client.close()


@pytest.mark.promise("watching.metrics_tls")
@pytest.mark.parametrize("who", ["none", "another authority", "clear text"])
def test_a_client_without_a_certificate(who: str, tmp_path: Path) -> None:
    """It reads nothing."""
    with served(Authority(tmp_path).tls()) as server, dial(server.port) as client:
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
