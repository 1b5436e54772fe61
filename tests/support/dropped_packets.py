"""A TCP connection whose packets are dropped."""

import ctypes
import socket
import struct

_SO_ATTACH_FILTER = 26
_DROP_ALL = struct.pack("HBBI", 0x06, 0, 0, 0)  # of classic BPF: return 0 bytes


def drop_incoming(sock: socket.socket) -> None:
    """Let the kernel drop all that comes for a socket: nothing acknowledges it."""
    program = ctypes.create_string_buffer(_DROP_ALL)
    sock.setsockopt(
        socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HxxxxxxP", 1, ctypes.addressof(program))
    )
