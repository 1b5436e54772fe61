"""Relays: one follower's worker of each host receives the versions, for all followers of that host.

The publisher names the relay of each host. A relay receives a version when a follower waits for it,
and answers all that wait together, which get one copy in shared memory. If a relay is lost, the
publisher names the follower that reports it. (tests/unit/training/test_relays.py)
"""

import asyncio
import contextlib
import contextvars
import os
import socket
from collections import Counter
from collections.abc import Collection
from typing import Any

from .. import NotInWorld, RRef, remote, unregister
from .._aio.host import this_host
from .shards import Box, Wanted, has_all, union
from .snapshots import Snapshot, Version
from .waiting import ends_at_leave, idles

IDLE = 60.0
"""Seconds after which the version that is held is dropped unless a follower asks for one."""

Key = tuple[str, int, frozenset[tuple[str, Box | None]]]
"""A transfer: the publisher's method, its number, and what is wanted."""


def own_host() -> str:
    """Return the name of the host whose followers share a relay; where unknown, of this process."""
    return this_host() or f"{socket.gethostname()} {os.getpid()}"


class Relay:
    """The versions of a publisher of another host, for the followers of this host.

    It asks for all that its followers want, so each byte of a version crosses the line once. It is
    registered as `name`.
    """

    def __init__(self, name: str, publisher: RRef[Any]) -> None:
        self._name = name
        self._publisher = publisher
        self._held: dict[int, tuple[Snapshot, Wanted]] = {}  # the last version, or two
        self._wanted: Wanted | None = None  # by all followers; None before the first
        self._transfers: dict[Key, asyncio.Task[None]] = {}
        self._waiting: Counter[asyncio.Task[None]] = Counter()
        self._idle: asyncio.TimerHandle | None = None

    @idles
    @ends_at_leave
    async def after(self, seen: int, has: Collection[str], wanted: Wanted) -> Version:
        """Wait until a version is newer than `seen`; return the newest that is here."""
        return await self._answer("after", seen, has, wanted)

    async def get(self, number: int, has: Collection[str], wanted: Wanted) -> Version:
        """Return a version; LookupError if the publisher does not keep it."""
        return await self._answer("get", number, has, wanted)

    async def _answer(
        self, method: str, number: int, has: Collection[str], wanted: Wanted
    ) -> Version:
        self._stop_idling()
        self._wanted = dict(wanted) if self._wanted is None else union(self._wanted, wanted)
        while True:
            for each in sorted(self._held, reverse=True):
                is_asked = each == number if method == "get" else each > number
                # No name for a version: it would be kept as long as this waits.
                if is_asked and has_all(self._held[each][1], wanted):
                    return self._held[each][0].sent(each, has)
            # Also of another follower's number: the publisher learns from it what was seen.
            await self._transferred((method, number, frozenset(self._wanted.items())))

    async def _transferred(self, key: Key) -> None:
        """Wait for a transfer, which lasts as long as anyone waits for it."""
        if key not in self._transfers:
            context = contextvars.Context()  # without the deadline of the call
            transfer = self._receive(key)
            task = asyncio.create_task(transfer, name=self._name, context=context)
            self._transfers[key] = task
        task = self._transfers[key]
        self._waiting[task] += 1
        try:
            await asyncio.shield(task)
        finally:
            self._waiting[task] -= 1
            if not self._waiting[task]:
                del self._waiting[task]
                self._forget(key, task)
                task.cancel()
            if not self._transfers:  # its followers may have left
                self._stop_idling()
                self._idle = asyncio.get_running_loop().call_later(IDLE, self._held.clear)

    def _stop_idling(self) -> None:
        if self._idle is not None:
            self._idle.cancel()

    def _forget(self, key: Key, task: "asyncio.Task[None] | None") -> None:
        if self._transfers.get(key) is task:
            del self._transfers[key]

    async def _receive(self, key: Key) -> None:
        method, number, items = key
        wanted = dict(items)
        blocks = {
            name: data for held, _ in self._held.values() for name, data in held.blocks.items()
        }
        try:
            ask = getattr(remote(self._publisher), method)
            found, head, sent = await ask(number, [*blocks], wanted)
        except LookupError:
            raise
        except Exception:  # followers look for the publisher's replacement process
            self._held.clear()  # this object may live as long as the world
            with contextlib.suppress(ValueError, NotInWorld):
                unregister(self._name)
            raise
        else:
            self._held[found] = Snapshot.received(head, sent, blocks), wanted
            kept = 2 if method == "get" else 1  # of several publishers one may be ahead
            for each in sorted(self._held)[:-kept]:
                del self._held[each]
        finally:
            self._forget(key, asyncio.current_task())
