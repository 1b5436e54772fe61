"""The HTTP server of the metrics: what its application gets, and clients that take their time."""

import contextlib
import http.client
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from aiorpc_torch._port import http_port as module
from aiorpc_torch._port.http_port import HttpPort, listen
from aiorpc_torch._port.tls import Tls
from tests.support.certificates import Authority
from tests.support.http_clients import GET, SOON, dial, received


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


@pytest.mark.promise("watching.metrics_tls")
def test_a_client_that_begins_no_tls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It reads nothing, and its connection is closed in time."""
    monkeypatch.setattr(module, "REQUEST_TIMEOUT", 0.5)
    with served(tls=Authority(tmp_path).tls()) as (_, number), dial(number) as client:
        assert received(client) == b""
