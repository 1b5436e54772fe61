"""Connections for calls and tensors to the ports of workers on other hosts.

(tests/unit/port/test_dialer.py)
"""

import asyncio
import socket
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from .._aio.sockets import closed_on_error
from .port import connect
from .purposes import CALLS, TENSORS, preface, server_name
from .tls import Tls

Address = str | tuple[str, int]
"""The name of an abstract Unix socket, or host and port."""


class Dialer:
    """Opens connections in clear text, or by TLS if there is a certificate."""

    def __init__(self, tls: Tls | None) -> None:
        self.tls = tls

    def explaining(self, address: Address) -> AbstractContextManager[None]:
        """Raise `TlsError` if the other end refuses the certificate, as a client learns later."""
        if self.tls is None or isinstance(address, str):
            return nullcontext()
        return self.tls.explaining(f"the worker at {address[0]}, port {address[1]}")

    async def transport(
        self, protocol: Callable[[], Any], address: tuple[str, int]
    ) -> tuple[asyncio.Transport, Any]:
        """Return transport and protocol of a connection for calls, of the running loop.

        Raises:
            TlsError: if the certificate of the other end is refused.
            OSError: if there is no connection.
        """
        loop = asyncio.get_running_loop()
        if self.tls is None:
            transport, made = await loop.create_connection(protocol, *address)
            transport.write(preface(CALLS))
            return transport, made
        with closed_on_error(await connect(address)) as connected, self.explaining(address):
            return await loop.create_connection(
                protocol, sock=connected, ssl=self.tls.client, server_hostname=server_name(CALLS)
            )

    def tensor_socket(self, address: tuple[str, int], timeout: float) -> socket.socket:
        """Return a socket for tensors, with TLS. Blocks for `timeout` a step at most.

        Raises:
            TlsError: if the certificate of the other end is refused.
            OSError: if there is no connection.
        """
        assert self.tls is not None
        connected = socket.create_connection(address, timeout)
        with closed_on_error(connected), self.explaining(address):
            return self.tls.client.wrap_socket(connected, server_hostname=server_name(TENSORS))


def receive_exactly(sock: socket.socket, size: int) -> bytes:
    """Return so many bytes of a blocking socket.

    Raises:
        ConnectionResetError: if it ends before.
    """
    received = b""
    while len(received) < size:
        if not (data := sock.recv(size - len(received))):
            raise ConnectionResetError("closed before the handshake was done")
        received += data
    return received
