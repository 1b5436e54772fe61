"""Abstract Unix sockets, which connect the processes of one network namespace.

They leave no file behind after `kill -9`.
"""

import os
import socket
import struct

BACKLOG = 128
_UCRED = struct.Struct("3i")  # pid, uid, gid of SO_PEERCRED


def listen_unix(name: str) -> socket.socket:
    """Return a socket that listens. Raises OSError if the name is in use."""
    found = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        found.setblocking(False)
        found.bind(f"\0{name}")
        found.listen(BACKLOG)
    except BaseException:
        found.close()
        raise
    return found


def connect_unix(name: str) -> socket.socket:
    """Return a socket that is connected.

    If the backlog is full, this `connect` fails. asyncio's seems to succeed, and the first write
    fails.
    """
    found = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        found.setblocking(False)
        found.connect(f"\0{name}")
    except BaseException:
        found.close()
        raise
    return found


def peer_pid(peer: socket.socket) -> int:
    """Return the pid of the process at the other end, 0 if it is in another pid namespace.

    At the end that has connected it is known before the other process answers.
    """
    return _credentials(peer)[0]


def is_same_user(peer: socket.socket) -> bool:
    """Return whether the other end is a process of this process's user.

    A user that this user namespace does not map has the overflow id, 65534 mostly, which is also
    the id of a real user: it is another one, like all others.
    """
    return _credentials(peer)[1] == os.geteuid()


def _credentials(peer: socket.socket) -> tuple[int, int, int]:
    """Return pid, user and group of the process at the other end."""
    data = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    pid, uid, gid = _UCRED.unpack(data)
    return pid, uid, gid
