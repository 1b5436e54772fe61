"""Sockets taken from transports, for threads. (tests/unit/aio/test_detach.py)"""

import asyncio
import os
import socket


def detach_socket(transport: asyncio.Transport) -> socket.socket:
    """Return the socket of a transport, which ends. What the transport has read is no part of it.

    A transport closes its descriptor and does not shut the socket down, so a copy stays connected.
    """
    descriptor = os.dup(transport.get_extra_info("socket").fileno())
    transport.abort()
    return socket.socket(fileno=descriptor)
