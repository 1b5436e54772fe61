"""Clients that speak HTTP by hand, on the loopback interface."""

import contextlib
import socket

SOON = 30.0  # seconds
GET = b"GET /metrics?a=b HTTP/1.1\r\nHost: x\r\nAccept-Encoding: gzip\r\n\r\n"


def dial(number: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", number), SOON)


def received(client: socket.socket) -> bytes:
    """Return all that comes until the other end closes."""
    found = b""
    with contextlib.suppress(ConnectionResetError):
        while data := client.recv(1 << 20):
            found += data
    return found
