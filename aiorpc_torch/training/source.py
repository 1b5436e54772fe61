"""One publisher of versions, as a follower knows it: its object, and the relay of this host."""

import asyncio
from collections.abc import Mapping
from typing import Any

from .. import CallTimeout, RRef, UnknownWorker, WorkerGone, lookup, remote, timeout as bounded
from .relays import own_host, start_relay
from .shards import Slice, Wanted
from .snapshots import Snapshot
from .weights import NOTHING, Weights

PAUSE = 0.05
"""Seconds before another try with a publisher that has gone."""

RELAY_TIMEOUT = 5.0
"""Seconds for a relay to be there; then another is named."""


def may_come_again(gone: WorkerGone, on: object) -> bool:
    """Return whether a publisher on worker `on` may come after the last one has gone."""
    return gone.may_return or on is None  # any other worker may register one


class Source:
    """The way from a publisher to this process: straight, or by way of a relay on this host.

    Args:
        name: name of the weights.
        on: worker of the publisher, None for any.
        host: name of the host whose followers share a relay (default: this one's).

    Attributes:
        relay: worker of the relay, None without.
        wanted: the slices that are wanted by way of the relay.
        newest: number of the newest version that it is known to have published.
    """

    def __init__(self, name: str, on: str | int | None, host: str | None = None) -> None:
        self.relay: str | None = None
        self.wanted: Wanted = NOTHING
        self.newest = -1
        self._name, self._on = name, on
        self._where = "" if on is None else f" on worker {on!r}"
        self._host = own_host() if host is None else host
        self._publisher: RRef[Weights] | None = None
        self._sender: RRef[Any] | None = None  # the publisher, or the relay
        self._last: Snapshot | None = None

    @property
    def worker(self) -> str:
        """Return the worker of the publisher."""
        assert self._publisher is not None  # since `find`
        return self._publisher.owner_name()

    async def find(self, lost: str | None = None, timeout: float | None = None) -> None:
        """Find the publisher, and the relay of this host if there is one.

        Args:
            lost: worker of a relay that is lost.
            timeout: seconds for the name to be registered, None for no bound but the caller's.
        """
        me = RRef(self).owner_name()  # of any object of this worker
        while True:
            with bounded(timeout):
                publisher: RRef[Weights] = await lookup(self._name, on=self._on)
            try:
                relay, name = await self._ask_for_relay(publisher, me, lost)
            except WorkerGone as exc:  # once more; `lookup` raises if none will come
                if not may_come_again(exc, self._on):
                    raise
                await asyncio.sleep(PAUSE)  # the worker is known to have left some moments later
                continue
            if relay == me:
                start_relay(name, publisher)
            try:
                sender: RRef[Any] = publisher
                if relay is not None:
                    with bounded(RELAY_TIMEOUT):
                        sender = await lookup(name, on=relay)
            except (CallTimeout, WorkerGone, UnknownWorker):  # it may have left before we came
                if relay == me:
                    raise
                lost = relay
            else:
                self._publisher, self._sender, self.relay = publisher, sender, relay
                return

    async def _ask_for_relay(
        self, publisher: RRef[Weights], me: str, lost: str | None
    ) -> tuple[str | None, str]:
        """Return the worker and the name of this host's relay, as `Weights.source`."""
        try:
            found: tuple[str | None, str] = await remote(publisher).source(self._host, me, lost)
        except AttributeError as exc:
            text = f"{self._name!r}{self._where} is no Weights: register one there"
            raise TypeError(text) from exc
        return found

    async def slices(self, number: int) -> Mapping[str, Slice]:
        """Return the slices that the publisher has of a version's tensors, by their names."""
        assert self._publisher is not None
        found: Mapping[str, Slice] = await remote(self._publisher).slices(number)
        return found

    async def kept(self, seen: int, least: int = -1) -> tuple[int, int]:
        """Wait for version `least`; return the numbers of the oldest and newest that are kept."""
        assert self._publisher is not None
        found: tuple[int, int] = await remote(self._publisher).kept(seen, least)
        self.newest = max(self.newest, found[1])
        return found

    async def after(self, seen: int) -> tuple[int, Snapshot]:
        """Wait until a version is newer than `seen`; return the newest."""
        return await self._receive("after", seen)

    async def get(self, number: int) -> tuple[int, Snapshot]:
        """Return a version that the publisher keeps.

        Raises:
            LookupError: if it does not.
        """
        return await self._receive("get", number)

    def forget(self) -> None:
        """Forget what is here: the next version travels whole."""
        self._last = None

    async def _receive(self, method: str, number: int) -> tuple[int, Snapshot]:
        """Ask for a version; if the relay is lost, by way of another."""
        while True:
            assert self._sender is not None  # since `find`
            own = {} if self._last is None else self._last.blocks
            wanted = NOTHING if self.relay is None else self.wanted
            try:
                ask = getattr(remote(self._sender), method)
                found, head, sent = await ask(number, [*own], wanted)
                break
            except WorkerGone as exc:
                # A relay reports the loss of the publisher with the same class.
                if self.relay is None or getattr(exc, "worker", self.relay) != self.relay:
                    raise
                await self.find(self.relay)
        self._last = Snapshot.received(head, sent, own)
        return found, self._last
