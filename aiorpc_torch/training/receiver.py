"""The receiver of versions: it has the newest whole version of one publisher, or of several.

It goes on with a publisher's replacement process. A task of its own receives, outside of every
deadline. A `Source` is one publisher as it knows it. (tests/unit/training/test_receiver.py)
"""

import asyncio
import contextlib
import contextvars
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any, Literal, TypeVar

from .. import (
    CallTimeout,
    NotInWorld,
    RpcError,
    RRef,
    UnknownWorker,
    WorkerGone,
    lookup,
    register,
    remote,
    timeout as bounded,
)
from .joining import PartsLackingError, merge
from .relays import Relay, own_host
from .shards import NOTHING, Box, Wanted, assign
from .snapshots import Memory, Snapshot, Taking
from .waiting import Changes
from .weights import Weights

T = TypeVar("T")

log = logging.getLogger("aiorpc_torch")

REPLACEMENT_TIMEOUT = 60.0
"""Seconds after a publisher's loss in which waits go on: its replacement process may register."""

PAUSE = 0.05
"""Seconds before another try with a publisher that has gone."""

RELAY_TIMEOUT = 5.0
"""Seconds for a relay to be there; then another is named."""


def may_come_again(gone: WorkerGone, on: object) -> bool:
    """Return whether a publisher on worker `on` may come after the last one has gone."""
    return gone.may_return or on is None  # any other worker may register one


class Source:
    """The way from a publisher to this process: straight, or by way of a relay on this host.

    Attributes:
        publisher: the weights, since `find`.
        relay: worker of the relay, None without.
        wanted: the slices that are wanted by way of the relay.
        newest: number of the newest version that it is known to have published.
        last: the last version that came from it, whose blocks are not sent again.
    """

    publisher: RRef[Weights]
    _sender: RRef[Any]  # the publisher, or the relay

    def __init__(self, name: str, on: str | int | None, host: str | None) -> None:
        self.relay: str | None = None
        self.wanted: Wanted = NOTHING
        self.newest = -1
        self.last: Snapshot | None = None
        self._name, self._on = name, on
        self._host = own_host() if host is None else host

    async def find(self, lost: str | None = None, timeout: float | None = None) -> None:
        """Find the publisher, and the relay of this host if there is one, other than `lost`.

        The name must be registered within `timeout`, None for no bound but the caller's.
        """
        me = RRef(self).owner_name()  # of any object of this worker
        while True:
            with bounded(timeout):
                publisher: RRef[Weights] = await lookup(self._name, on=self._on)
            try:
                relay, name = await remote(publisher).source(self._host, me, lost)
            except AttributeError as exc:
                where = "" if self._on is None else f" on worker {self._on!r}"
                text = f"{self._name!r}{where} is no Weights: register one there"
                raise TypeError(text) from exc
            except WorkerGone as exc:  # once more; `lookup` raises if none will come
                if not may_come_again(exc, self._on):
                    raise
                await asyncio.sleep(PAUSE)  # the worker is known to have left some moments later
                continue
            if relay == me:
                with contextlib.suppress(ValueError):  # it is registered
                    register(name, Relay(name, publisher))
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
                self.publisher, self._sender, self.relay = publisher, sender, relay
                return

    async def kept(self, seen: int, least: int = -1) -> tuple[int, int]:
        """Wait for version `least`; return the numbers of the oldest and newest that are kept."""
        found: tuple[int, int] = await remote(self.publisher).kept(seen, least)
        self.newest = max(self.newest, found[1])
        return found

    async def receive(self, method: Literal["after", "get"], number: int) -> tuple[int, Snapshot]:
        """Receive version `number`, or wait for one after it; if the relay is lost, by another."""
        while True:
            own = {} if self.last is None else self.last.blocks
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
        self.last = Snapshot.received(head, sent, own)
        return found, self.last


class Receiver:
    """The receiver of the versions of a name. Confined to its event loop.

    Args:
        on: worker of the publisher, None for any; or the workers of several.
        poll: minimum seconds between two versions, None for no minimum.
        on_version: is awaited for each version, if given.
        host: name of the host whose followers share a relay (default: this one's).
        needed: the slices that are needed of some tensors, by their names.

    Attributes:
        newest: the newest version, with its number; None before the first.
        changes: changes of this receiver, for those who wait.
    """

    def __init__(
        self,
        name: str,
        on: str | int | Sequence[str | int] | None,
        poll: float | None = None,
        on_version: Callable[[], Awaitable[object]] | None = None,
        host: str | None = None,
        needed: Mapping[str, Box] | None = None,
    ) -> None:
        self.newest: tuple[int, Snapshot] | None = None
        self.changes = Changes()
        self._name, self._on = name, on
        is_one = on is None or isinstance(on, str | int)
        workers: Any = [on] if is_one else on
        self._sources = [Source(name, each, host) for each in workers]
        self._is_joined = not is_one or bool(needed)
        self._needed = needed or {}
        self._memory = Memory()  # of what is joined
        self._poll = poll
        self._on_version = on_version
        self._wanted: list[int] = []  # versions that tasks wait for
        self._losses = 0
        self._error: Exception | None = None  # that has ended the task
        self._task: asyncio.Task[None] | None = None
        self._is_closed = False
        self._is_spoiled = False  # the newest version is not as it was published
        self._is_planned = False  # what each source sends is decided

    def __repr__(self) -> str:
        where = "" if self._on is None else f" on {self._on!r}"
        return f"<Receiver of {self._name!r}{where}, version {self.version}>"

    @property
    def version(self) -> int:
        """Return the number of the newest version, -1 before the first."""
        return -1 if self.newest is None else self.newest[0]

    async def first(self) -> None:
        """Receive the newest version now, within the caller's deadline."""
        await self._find()
        # A relay may have an older one: nothing has asked it for the newest.
        await self._receive_next(self.version if self._is_joined else await self._available() - 1)

    async def update(self) -> None:
        """Receive the newest version, if there is one, and the publisher is there."""
        losses = self._losses
        try:
            if (newest := await self._available()) > self.version:
                await self.until(newest, lambda: self._losses > losses)
        except (WorkerGone, NotInWorld):
            self.start()  # it looks for the publisher's replacement process

    async def restore(self) -> bool:
        """Receive the newest version again: this process has changed what did not travel with it.

        Return whether the publisher has it. If not, `until` waits for a later version.
        """
        self._is_spoiled = True
        for source in self._sources:
            source.last = None  # the next version travels whole
        if await self._available() < self.version:
            return False
        await self._receive(self.version - 1)
        return True

    async def until(self, version: int, is_over: Callable[[], bool] = lambda: False) -> None:
        """Wait until this version or a later one is received, or `is_over()`.

        What has ended the task is raised here, such as WorkerLost.
        """

        def has() -> bool:
            return self.version >= version and not self._is_spoiled

        self.start()
        self._wanted.append(version)
        self.changes.notify()
        try:
            await self.changes.until(
                lambda: has() or is_over() or self._is_closed or self._error is not None,
                f"the wait for version {version} of {self._name!r}",
                self._known if self._is_joined else None,
            )
        finally:
            self._wanted.remove(version)
        self.check_open()
        if not has() and self._error is not None:
            raise self._error

    def _known(self) -> str:
        known = [f"{each.publisher.owner_name()!r} {each.newest}" for each in self._sources]
        return f"the newest that is known of each publisher: {', '.join(known)}"

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
        self._task = loop.create_task(self._run(), name=name, context=context)
        self._task.add_done_callback(self._on_end)

    def _on_end(self, task: "asyncio.Task[None]") -> None:
        """Let the waits end with the task, also if it was cancelled before its first step."""
        if self._is_closed or task is not self._task:
            return
        if task.cancelled():
            self._error = RuntimeError(f"the task that receives {self._name!r} was cancelled")
        elif (failure := task.exception()) is not None:
            text = f"the task that receives {self._name!r} was ended by {type(failure).__name__}"
            self._error = RuntimeError(text)
            self._error.__cause__ = failure
        self.changes.notify()

    def close(self) -> None:
        """Stop receiving, and end all waits."""
        self._is_closed = True
        if self._task is not None:
            self._task.cancel()
        self.changes.notify()

    # ── its task ────────────────────────────────────────────────────────────────────────────────

    async def _run(self) -> None:
        """Receive versions until a publisher is gone for good."""
        try:
            while True:
                try:
                    await self._receive_next(self.version)
                    if self._poll is not None:  # until then, or until a task waits for the next
                        with contextlib.suppress(TimeoutError):
                            async with asyncio.timeout(self._poll):
                                await self.changes.until(
                                    lambda: max(self._wanted, default=-1) > self.version,
                                    "the pause between versions",
                                )
                except CallTimeout as late:  # of the search for another relay
                    await self._find_again(late)
                except WorkerGone as lost:
                    if not may_come_again(lost, self._on):
                        raise
                    await self._find_again(lost)
        except Exception as exc:  # of any class: a version may be unreadable here
            self._error = exc
        finally:
            self.changes.notify()

    async def _find_again(self, lost: RpcError) -> None:
        """Wait until the publisher's replacement process has registered its weights.

        Waits fail after `REPLACEMENT_TIMEOUT`, but the replacement process may come at any time.
        """
        self._losses += 1
        self.changes.notify()
        while True:
            try:
                await self._find(timeout=REPLACEMENT_TIMEOUT)
            except CallTimeout:
                self._error = lost
                self.changes.notify()
            else:
                self._error = None
                return

    async def _find(self, timeout: float | None = None) -> None:
        """Find the publishers."""
        await together(each.find(timeout=timeout) for each in self._sources)
        self._is_planned = False

    async def _receive_next(self, seen: int) -> None:
        """Receive a version newer than `seen`."""
        await self._receive(seen)
        if self._on_version is None:
            return
        try:
            await self._on_version()
        except RpcError:
            raise
        except Exception:  # of the user's function, or a version that does not fit
            text = "version %d of %r was not put in; the next one is awaited"
            log.warning(text, self.version, self._name, exc_info=True)

    async def _receive(self, seen: int) -> None:
        if self._is_joined:
            number, snapshot = await self._joined(seen)
        else:
            number, snapshot = await self._sources[0].receive("after", seen)
            if not snapshot.is_whole:
                raise ValueError(
                    f"{self._name!r} has shards of DTensors: name the workers of all its "
                    "publishers, as in follow(name, on=[...])"
                )
        if number >= self.version:
            self.newest, self._is_spoiled = (number, snapshot), False
        self.changes.notify()

    async def _joined(self, seen: int) -> tuple[int, Snapshot]:
        """Return the newest version that all publishers have, once it is newer than `seen`."""
        least = seen + 1
        while True:
            kept = await together(each.kept(self.version, least) for each in self._sources)
            number, oldest = common(kept)
            if number < oldest:  # one of them is so far behind that others have dropped its version
                least = oldest
                continue
            was_planned = self._is_planned
            try:
                return number, await self._join(number)
            except LookupError:  # dropped meanwhile, or never published there
                least = number + 1
            except PartsLackingError:  # planned for other shards, of an earlier version
                if not was_planned:
                    raise
                self._is_planned = False

    async def _join(self, number: int) -> Snapshot:
        if not self._is_planned:  # what each source sends of versions like this one
            slices = await together(remote(each.publisher).slices(number) for each in self._sources)
            workers = [each.publisher.owner_name() for each in self._sources]
            wanted = assign(dict(zip(workers, slices, strict=True)), self._needed)
            for each, worker in zip(self._sources, workers, strict=True):
                each.wanted = wanted[worker]
            self._is_planned = True
        found = await together(each.receive("get", number) for each in self._sources)
        others = [snapshot for _, snapshot in found]
        tree = merge([snapshot.loaded() for snapshot in others], self._needed)
        before = None if self.newest is None else self.newest[1]
        return await Taking(tree, self._memory, before, others).take_in_thread()

    async def _available(self) -> int:
        """Return the number of the newest version that can be had now, -1 without one."""
        number, oldest = common(await together(each.kept(self.version) for each in self._sources))
        return number if number >= oldest else -1


def common(kept: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """Return the newest version that all have had, and the oldest that all still keep."""
    return min(newest for _, newest in kept), max(oldest for oldest, _ in kept)


async def together(coroutines: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Return the results of all; the first error cancels the others."""
    first, *others = coroutines
    if not others:
        return [await first]
    tasks = [asyncio.ensure_future(each) for each in (first, *others)]
    try:
        return [*await asyncio.gather(*tasks)]
    finally:
        for task in tasks:
            task.cancel()
