"""The caller's links: one for each of its loops and each peer. It knows who the peers are."""

import asyncio
import contextlib
import functools
import itertools
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

from torch._C._distributed_rpc import PyRRef, WorkerInfo

from ._agent import Member
from ._devices import Reach
from ._link import Link
from .errors import NotServing, RpcError, WorkerLost

Worker = str | int | WorkerInfo
"""A worker by name, by rank or as torch's `WorkerInfo`."""

_Links = tuple[Callable[[], asyncio.AbstractEventLoop | None], dict[str, Link]]


class Outbox:
    """Sends on behalf of worker `name` to any of `members` (all of the world, in rank order).

    `first` is the number of its first link: one that came back has others than its predecessor.
    """

    def __init__(self, name: str, members: Sequence[Member], first: int = 0) -> None:
        self.name = name
        self._members: dict[str | int, Member] = {}
        for member in members:
            self._members[member.name] = self._members[member.rank] = member
        maps = {member.name: member.device_maps for member in members}
        self._mapped = Reach.of(name, maps).calls
        self._past: dict[str, str] = {}  # the owners of objects that went with their process
        # Each loop that calls has links of its own, so nothing here needs a lock.
        # By identity and not in a WeakKeyDictionary: other threads count them, at any time.
        self._links: dict[int, _Links] = {}
        self._last: _Links = (lambda: None, {})  # those of the loop that called last
        self._numbers = itertools.count(first)
        self._needed: dict[object, tuple[Collection[str], Callable[[RpcError], None]]] = {}
        self.heard: Callable[[str], None] = _nobody_asks
        self.broken: Callable[[WorkerInfo, RpcError], None] = _nobody_cares

    def __repr__(self) -> str:
        links = [link for _, links in self._every() for link in links.values()]
        return f"<Outbox of {self.name}: {links}>"

    def find(self, worker: Worker) -> str:
        """The name of a worker of this world.

        Raises:
            ValueError: if there is none; the message names those there are.
        """
        key = worker.name if isinstance(worker, WorkerInfo) else worker
        try:
            return self._members[key].name
        except (KeyError, TypeError):
            names = ", ".join(name for name in self._members if isinstance(name, str))
            raise ValueError(f"no worker {worker!r} in this world; there are: {names}") from None

    def link(self, worker: str) -> Link:
        """From the running loop to `worker`."""
        loop = asyncio.get_running_loop()
        last, links = self._last
        if last() is not loop:
            links = self._links_of(loop)
        link = links.get(worker)
        if link is None:
            number = next(self._numbers)
            peer = self._peer(worker)
            mapped = self._mapped.get(worker, ())
            link = Link(self.name, number, peer, self.heard, self.broken, mapped)
            links[worker] = link
        return link

    def _peer(self, worker: str) -> WorkerInfo:
        if (name := self._past.get(worker)) is not None:
            raise WorkerLost(name, "this object went with its process, which has a successor")
        return self._members[worker].info

    def _links_of(self, loop: asyncio.AbstractEventLoop) -> dict[str, Link]:
        every, key = self._links, id(loop)
        known = every.get(key)
        if known is None or known[0]() is not loop:
            known = every[key] = weakref.ref(loop, lambda _: every.pop(key, None)), {}
        self._last = known
        return known[1]

    def _every(self) -> list[tuple[asyncio.AbstractEventLoop, dict[str, Link]]]:
        found = [(loop(), links) for loop, links in [*self._links.values()]]
        return [(loop, links) for loop, links in found if loop is not None]

    def tally(self) -> dict[str, int]:
        """What the links have done, added up; the names are those of `Stats`. In any thread."""
        counts = [link.tally() for _, links in self._every() for link in [*links.values()]]
        return {name: sum(count[name] for count in counts) for name in counts[0]} if counts else {}

    def waited_for(self) -> set[str]:
        """The peers from whom an answer is awaited."""
        every = self._every()
        calls = {peer for _, links in every for peer, link in [*links.items()] if link.waiting}
        return calls.union(*(workers for workers, _ in [*self._needed.values()]))

    @contextlib.contextmanager
    def needing(self, workers: Collection[str], tell: Callable[[RpcError], None]) -> Iterator[None]:
        """Meanwhile something waits for those peers: the loss of one is told, on this loop."""
        on_loop = functools.partial(_on, asyncio.get_running_loop(), tell)
        self._needed[key := object()] = workers, on_loop
        try:
            yield
        finally:
            del self._needed[key]

    def lost(self, worker: str, error: RpcError) -> None:
        """That peer gives no sign of life."""
        for workers, tell in [*self._needed.values()]:
            if worker in workers:
                tell(error)
        for loop, links in self._every():
            if worker in links:
                _on(loop, links[worker].lost, error)

    def replace(self, member: Member, past: str) -> None:
        """A worker has come back; objects of its predecessor are owned by `past`. On any thread."""
        self._members[member.name] = self._members[member.rank] = member
        self._past[past] = member.name
        error = WorkerLost(member.name, "its process has a successor")
        for loop, links in self._every():
            _on(loop, _forget, links, member.name, error)

    def close(self) -> None:
        """This process leaves its world: every call that is still awaited ends. On any loop."""
        for _, tell in [*self._needed.values()]:
            tell(NotServing("this worker has left its world"))
        for loop, links in self._every():
            for link in [*links.values()]:
                _on(loop, link.close)


def _nobody_cares(_: WorkerInfo, __: RpcError) -> None:
    """Whose pipe is broken: until a world's vigil wants to know."""


def _forget(links: dict[str, Link], worker: str, error: RpcError) -> None:
    link = links.pop(worker, None)
    if link is not None:
        link.lost(error)


def _nobody_asks(_: str) -> None:
    """Of whom somebody has heard: until a world's vigil wants to know."""


def _on(loop: asyncio.AbstractEventLoop, step: Callable[..., None], *args: Any) -> None:
    with contextlib.suppress(RuntimeError):  # that loop is closed
        loop.call_soon_threadsafe(step, *args)


_current: Outbox | None = None


def use(outbox: Outbox | None) -> None:
    """Let `outbox` send for this process; None: nobody does."""
    global _current
    _current = outbox


def find_current() -> Outbox | None:
    """The outbox of this process's worker, if it is one."""
    return _current


def current() -> Outbox:
    """The outbox of this process's worker.

    Raises:
        NotServing: if this process is in no world.
    """
    if _current is None:
        raise NotServing("this process is in no world: enter worker() or local_world() first")
    return _current


def link_to(worker: "Worker | PyRRef[Any]") -> Link:
    """From the running loop to that worker, or to the owner of that RRef.

    Raises:
        NotServing: if this process is in no world.
        ValueError: if there is no such worker in it.
    """
    outbox = current()
    if isinstance(worker, PyRRef):
        return outbox.link(worker.owner_name())
    return outbox.link(outbox.find(worker))
