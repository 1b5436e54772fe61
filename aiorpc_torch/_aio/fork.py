"""Sockets that a forked child must not keep open.

A child that is made by `fork` (a DataLoader's, say) has every descriptor of this process: peers
would see the end of a connection only when the child ends too. So the descriptors are closed in the
child, with `os.close`: a transport's own `close` would change the event loop's epoll, which the
child shares. (tests/test_connections.py)
"""

import asyncio
import contextlib
import os
import socket
import weakref

_Owner = asyncio.Transport | socket.socket

_kept: "weakref.WeakKeyDictionary[_Owner, int]" = weakref.WeakKeyDictionary()


def keep_from_children(owner: _Owner) -> None:
    """Close the descriptor of a transport or a socket in children that are forked from now on."""
    if isinstance(owner, socket.socket):
        _kept[owner] = owner.fileno()
    else:
        _kept[owner] = owner.get_extra_info("socket").fileno()


def _close_all() -> None:
    for owner, descriptor in list(_kept.items()):
        is_closed = owner.fileno() < 0 if isinstance(owner, socket.socket) else owner.is_closing()
        if not is_closed:
            with contextlib.suppress(OSError):
                os.close(descriptor)


os.register_at_fork(after_in_child=_close_all)
