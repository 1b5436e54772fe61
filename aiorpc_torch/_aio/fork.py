"""Forks of a process inside its world: their descriptors, and their exit.

A child made by `fork` (a DataLoader's, say) inherits every descriptor. A connection would then end
only with the child. The child calls `os.close`: a transport's `close` would change
the event loop's epoll, which the child shares with its parent.
(tests/loopback/test_connections_internals.py)

For the same reason a child must not unwind the world and the event loop around it. `os._exit` does
not, and any other end of the block is made to do the same. (tests/unit/aio/test_fork.py)
"""

import asyncio
import contextlib
import os
import socket
import weakref
from collections.abc import Iterator
from multiprocessing.connection import Connection

from .signals import exit_code, force_exit

_Owner = asyncio.Transport | socket.socket | Connection

_descriptors: "weakref.WeakKeyDictionary[_Owner, int]" = weakref.WeakKeyDictionary()


def close_on_fork(owner: _Owner) -> None:
    """Close the descriptor of a transport, socket or pipe in children forked from now on.

    A transport with TLS is left out: give its socket. uvloop's cannot be referred to weakly.
    """
    if isinstance(owner, socket.socket | Connection):
        _descriptors[owner] = owner.fileno()
    elif owner.get_extra_info("sslcontext") is None:
        _descriptors[owner] = owner.get_extra_info("socket").fileno()


@contextlib.contextmanager
def forks_exit_here() -> Iterator[None]:
    """End a fork of this process here if it leaves the block, by `sys.exit`, an error or `return`.

    Streams are flushed; exit functions do not run, as those of any process that `os.fork` has made
    beside threads.
    """
    owner, code = os.getpid(), 0
    try:
        yield
    except BaseException as exc:
        if os.getpid() == owner:
            raise
        code = exit_code(exc)
    if os.getpid() != owner:
        force_exit(code)


def _close_all() -> None:
    for owner, descriptor in list(_descriptors.items()):
        if isinstance(owner, Connection):
            owner.close()
            continue
        is_closed = owner.fileno() < 0 if isinstance(owner, socket.socket) else owner.is_closing()
        if not is_closed:
            with contextlib.suppress(OSError):
                os.close(descriptor)


os.register_at_fork(after_in_child=_close_all)
