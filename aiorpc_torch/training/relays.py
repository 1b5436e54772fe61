"""Relays: one follower's worker of each host receives the versions, for all followers of that host.

The publisher names the relay of each host. A relay receives a version when a follower waits for it,
and answers all that wait together, which get one copy in shared memory. If a relay is lost, the
publisher names the follower that reports it. (tests/unit/training/test_relays.py)
"""

import asyncio
import contextlib
import contextvars
import operator
import os
import socket
from typing import Any

from .. import NotInWorld, RRef, register, remote, unregister
from .._aio.host import this_host
from .waiting import Changes, ends_at_leave

Version = tuple[int, bytes, Any]
"""A version on its way: its number, and the two parts of its `Snapshot`."""


def own_host() -> str:
    """Return the name of the host whose followers share a relay; where unknown, of this process."""
    return this_host() or f"{socket.gethostname()} {os.getpid()}"


class Hosts:
    """The relays that a publisher has named."""

    def __init__(self) -> None:
        self._own = own_host()
        self._relays: dict[str, str] = {}  # worker, by host

    def relay_for(self, host: str, worker: str, lost: str | None) -> str | None:
        """Return the worker of the relay of a host; None for the publisher's own host.

        Args:
            host: host of a follower.
            worker: worker of that follower, which becomes the relay if there is none.
            lost: the relay that the follower has found lost.
        """
        if host == self._own:
            return None
        if self._relays.get(host, lost) == lost:
            self._relays[host] = worker
        return self._relays[host]


class Relay:
    """The versions of a publisher of another host, for the followers of this host.

    Args:
        name: name under which this relay is registered.
        publisher: RRef of the weights.
    """

    def __init__(self, name: str, publisher: RRef[Any]) -> None:
        self._name = name
        self._publisher = publisher
        self._newest: Version = (-1, b"", None)
        self._error: Exception | None = None
        self._changes = Changes()
        self._transfers: dict[int, asyncio.Task[None]] = {}  # by the version that followers have

    @ends_at_leave
    async def after(self, seen: int) -> Version:
        """Wait until a version is newer than `seen`; return the newest that is here."""
        if self._newest[0] <= seen and seen not in self._transfers:
            # Also of another follower's number: the publisher learns from it what was seen.
            context = contextvars.Context()  # without the deadline of the call
            task = asyncio.create_task(self._receive(seen), name=self._name, context=context)
            self._transfers[seen] = task
        await self._changes.until(
            lambda: self._newest[0] > seen or self._error is not None, "the wait for a version"
        )
        if self._newest[0] <= seen and self._error is not None:
            raise self._error
        return self._newest

    async def _receive(self, seen: int) -> None:
        try:
            version = await remote(self._publisher).after(seen)
            self._newest = max(self._newest, version, key=operator.itemgetter(0))
        except Exception as exc:  # followers look for the publisher's replacement process
            self._error = exc
            with contextlib.suppress(ValueError, NotInWorld):
                unregister(self._name)
        del self._transfers[seen]
        self._changes.notify()


def start_relay(name: str, publisher: RRef[Any]) -> None:
    """Register the relay of this worker, unless it is."""
    with contextlib.suppress(ValueError):
        register(name, Relay(name, publisher))
