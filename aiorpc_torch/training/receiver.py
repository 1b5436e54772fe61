"""The receiver of a publisher's versions: it has the newest whole version of them.

It goes on with the publisher's replacement process. A task of its own receives, outside of every
deadline. (tests/unit/training/test_receiver.py)
"""

import asyncio
import contextlib
import contextvars
from collections.abc import Awaitable, Callable
from typing import Any

from .. import (
    CallTimeout,
    NotInWorld,
    RpcError,
    RRef,
    WorkerGone,
    lookup,
    remote,
    timeout as bounded,
)
from .relays import own_host, start_relay
from .snapshots import Snapshot
from .waiting import Changes
from .weights import Weights

REPLACEMENT_TIMEOUT = 60.0
"""Seconds after a publisher's loss in which waits go on: its replacement process may register."""

PAUSE = 0.05  # seconds before another try with a publisher that has gone

RELAY_TIMEOUT = 5.0
"""Seconds for a relay to be there; then another is named."""


class Receiver:
    """The receiver of the versions of one publisher. Confined to its event loop.

    Args:
        name: name of the weights.
        on: worker of the publisher, None for any.
        poll: minimum seconds between two versions, None for no minimum.
        on_version: is awaited for each version, if given.
        host: name of the host whose followers share a relay (default: this one's).

    Attributes:
        newest: the newest version, with its number; None before the first.
        changes: changes of this receiver, for those who wait.
    """

    def __init__(
        self,
        name: str,
        on: str | int | None,
        poll: float | None = None,
        on_version: Callable[[], Awaitable[object]] | None = None,
        host: str | None = None,
    ) -> None:
        self.newest: tuple[int, Snapshot] | None = None
        self.changes = Changes()
        self._name, self._on = name, on
        self._where = "" if on is None else f" on worker {on!r}"
        self._publisher: RRef[Weights] | None = None
        self._source: RRef[Any] | None = None  # the publisher, or a relay
        self._relay: str | None = None  # worker of that relay
        self._poll = poll
        self._on_version = on_version
        self._host = own_host() if host is None else host
        self._wanted: list[int] = []  # versions that tasks wait for
        self._losses = 0
        self._error: Exception | None = None  # that has ended the task
        self._task: asyncio.Task[None] | None = None
        self._is_closed = False

    def __repr__(self) -> str:
        return f"<Receiver of {self._name!r}{self._where}, version {self.version}>"

    @property
    def version(self) -> int:
        """Return the number of the newest version, -1 before the first."""
        return -1 if self.newest is None else self.newest[0]

    async def first(self) -> None:
        """Receive the newest version now, within the caller's deadline.

        Raises:
            CallTimeout, WorkerGone, ValueError, NotInWorld: as `lookup`.
        """
        publisher = await self._connect()
        # A relay may have an older one: nothing has asked it for the newest.
        await self._receive_next(await remote(publisher).newest(self.version) - 1)

    async def update(self) -> None:
        """Receive the newest version, if there is one, and the publisher is there.

        Raises:
            CallTimeout: if the deadline passes.
        """
        losses = self._losses
        try:
            assert self._publisher is not None  # since `first`
            newest = await remote(self._publisher).newest(self.version)
            await self.until(newest, lambda: self._losses > losses)
        except (WorkerGone, NotInWorld):
            self.start()  # it looks for the publisher's replacement process

    async def until(self, version: int, is_over: Callable[[], bool] = lambda: False) -> None:
        """Wait until this version or a later one is received, or `is_over()`.

        Raises:
            CallTimeout: if the deadline passes.
            Exception: that has ended the task, such as WorkerLost.
        """
        self.start()
        self._wanted.append(version)
        self.changes.notify()
        try:
            await self.changes.until(
                lambda: self.version >= version or is_over() or self._has_ended(),
                f"the wait for version {version} of {self._name!r}",
            )
        finally:
            self._wanted.remove(version)
        self.check_open()
        if self.version < version and self._error is not None:
            raise self._error

    def check_open(self) -> None:
        """Raise RuntimeError if this receiver is closed."""
        if self._is_closed:
            raise RuntimeError(f"{self!r} is closed: follow the weights again")

    def start(self) -> None:
        """Start to receive, unless it does. The task has no deadline, and no context of a call."""
        if self._is_closed or (self._task is not None and not self._task.done()):
            return
        self._error = None
        loop, context = asyncio.get_running_loop(), contextvars.Context()
        name = f"follow {self._name!r}"
        self._task = loop.create_task(self._receive(), name=name, context=context)

    def close(self) -> None:
        """Stop receiving, and end all waits."""
        self._is_closed = True
        if self._task is not None:
            self._task.cancel()
        self.changes.notify()

    # ── its task ────────────────────────────────────────────────────────────────────────────────

    def _has_ended(self) -> bool:
        return self._is_closed or self._error is not None

    async def _receive(self) -> None:
        """Receive versions until the publisher is gone for good."""
        try:
            while True:
                try:
                    await self._receive_next(self.version)
                    await self._pause()
                except CallTimeout as late:  # of the search for another relay
                    await self._find_again(late)
                except WorkerGone as lost:
                    if not self._may_come_again(lost):
                        raise
                    await self._find_again(lost)
        except Exception as exc:  # of any class: a version may be unreadable here
            self._error = exc
        finally:
            self.changes.notify()

    async def _find_again(self, lost: RpcError) -> None:
        """Wait until the publisher's replacement process has registered its weights.

        Waits fail after `REPLACEMENT_TIMEOUT`, but the replacement process may come at any time.

        Raises:
            WorkerLost: if none will come.
        """
        self._losses += 1
        self.changes.notify()
        while True:
            try:
                await self._connect(timeout=REPLACEMENT_TIMEOUT)
            except CallTimeout:
                self._error = lost
                self.changes.notify()
            else:
                self._error = None
                return

    async def _connect(
        self, lost: str | None = None, timeout: float | None = None
    ) -> RRef[Weights]:
        """Find the publisher, and the relay of this host if there is one; return the publisher.

        Args:
            lost: worker of a relay that is lost.
            timeout: seconds for the name to be registered, None for no bound but the caller's.
        """
        me = RRef(self.changes).owner_name()  # of any object of this worker
        while True:
            with bounded(timeout):
                publisher = await lookup(self._name, on=self._on)
            try:
                relay, name = await self._find_source(publisher, me, lost)
            except WorkerGone as exc:  # once more; `lookup` raises if none will come
                if not self._may_come_again(exc):
                    raise
                await asyncio.sleep(PAUSE)  # the worker is known to have left some moments later
                continue
            if relay == me:
                start_relay(name, publisher)
            try:
                source: RRef[Any] = publisher
                if relay is not None:
                    with bounded(RELAY_TIMEOUT):
                        source = await lookup(name, on=relay)
            except (CallTimeout, WorkerGone):
                if relay == me:
                    raise
                lost = relay
            else:
                self._publisher, self._source, self._relay = publisher, source, relay
                return publisher

    def _may_come_again(self, gone: WorkerGone) -> bool:
        """Return whether a publisher of that name may come, after the last one has gone."""
        return gone.may_return or self._on is None  # any other worker may register one

    async def _find_source(
        self, publisher: RRef[Weights], me: str, lost: str | None
    ) -> tuple[str | None, str]:
        """Return the worker and the name of this host's relay, as `Weights.source`."""
        try:
            found: tuple[str | None, str] = await remote(publisher).source(self._host, me, lost)
        except AttributeError as exc:
            text = f"{self._name!r}{self._where} is no Weights: register one there"
            raise TypeError(text) from exc
        return found

    async def _receive_next(self, seen: int) -> None:
        """Receive a version newer than `seen`; if the relay is lost, by way of another."""
        while True:
            try:
                assert self._source is not None
                number, *parts = await remote(self._source).after(seen)
                break
            except WorkerGone as exc:
                # A relay reports the loss of the publisher with the same class.
                if self._relay is None or getattr(exc, "worker", self._relay) != self._relay:
                    raise
                await self._connect(self._relay)
        self.newest = number, Snapshot(*parts)
        self.changes.notify()
        if self._on_version is not None:
            await self._on_version()

    async def _pause(self) -> None:
        """Wait for the time between two versions, or until a task waits for the next."""
        if self._poll is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._poll):
                    await self.changes.until(self._is_wanted, "the pause between versions")

    def _is_wanted(self) -> bool:
        return max(self._wanted, default=-1) > self.version
