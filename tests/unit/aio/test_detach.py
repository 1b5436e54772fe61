"""Sockets taken from transports: connected, and what was not read is left in them."""

import asyncio
import socket

from aiorpc_torch._aio.sockets import detach_socket


async def test_a_detached_socket_goes_on() -> None:
    """The transport is closed, and its peer does not notice."""
    near, far = socket.socketpair()
    closed = asyncio.get_running_loop().create_future()

    class Protocol(asyncio.Protocol):
        def connection_lost(self, exc: Exception | None) -> None:
            closed.set_result(exc)

    transport, _ = await asyncio.get_running_loop().create_connection(Protocol, sock=near)
    with detach_socket(transport) as found, far:
        assert await closed is None
        assert transport.is_closing()
        far.sendall(b"more")
        found.setblocking(True)
        assert found.recv(4) == b"more"
        found.sendall(b"back")
        assert far.recv(4) == b"back"
