"""The caller's connections: one for each of its loops and each peer. It knows who they are."""

import asyncio
import contextlib
import functools
import itertools
import weakref
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Collection, Iterator, Sequence
from typing import Any

from .._protocol.handshake import Party
from .._torch.agent import Member
from .._torch.compat import RRefBase, WorkerInfo
from .._torch.devices import Reach
from ..errors import NotServing, RpcError, WorkerLost
from .connection import Connection
from .introduction import Introductions

Worker = str | int | WorkerInfo
"""A worker by name, by rank or as torch's `WorkerInfo`."""

_Links = tuple[Callable[[], asyncio.AbstractEventLoop | None], dict[str, Connection]]


class Outbox:
    """Sends on behalf of the process `me` to any of `members` (all of the world, in rank order).

    It is the observer of its connections, and passes on what they see to whom it is given.
    """

    def __init__(self, me: Party, members: Sequence[Member]) -> None:
        self.name = me.name
        self.me = me
        self._introductions = Introductions(me)
        self._members: dict[str | int, Member] = {}
        for member in members:
            self._members[member.name] = self._members[member.rank] = member
        maps = {member.name: member.device_maps for member in members}
        self._mapped = Reach.of(me.name, maps).calls
        self._past: dict[str, str] = {}  # the owners of objects that went with their process
        # Each loop that calls has links of its own, so nothing here needs a lock.
        # By identity and not in a WeakKeyDictionary: other threads count them, at any time.
        self._links: dict[int, _Links] = {}
        self._last: _Links = (lambda: None, {})  # those of the loop that called last
        self._holders: dict[int, AsyncGenerator[None]] = {}  # of those loops
        self._numbers = itertools.count()
        self._finished: Counter[str] = Counter()  # what connections that have ended had done
        self._needed: dict[object, tuple[Collection[str], Callable[[RpcError], None]]] = {}
        self.heard: Callable[[str], None] = _ignore
        self.suspected: Callable[[str, int], None] = _ignore
        self.parted: Callable[[str, int, str, str], None] = _ignore

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

    def link(self, worker: str) -> Connection:
        """From the running loop to `worker`."""
        loop = asyncio.get_running_loop()
        last, links = self._last
        if last() is not loop:
            links = self._links_of(loop)
        link = links.get(worker)
        if link is None or link.is_over:
            link = links[worker] = self._connect(worker, link)
        return link

    def _connect(self, worker: str, former: Connection | None) -> Connection:
        peer = self._peer(worker)
        if former is not None:
            self._finished.update(former.tally())
        mapped = self._mapped.get(worker, ())
        connection = Connection(self.me, peer, next(self._numbers), self, mapped)
        connection.open(self._introductions)
        return connection

    def _peer(self, worker: str) -> WorkerInfo:
        if (name := self._past.get(worker)) is not None:
            raise WorkerLost(name, "this object went with its process, which has a successor")
        return self._members[worker].info

    def _links_of(self, loop: asyncio.AbstractEventLoop) -> dict[str, Connection]:
        every, key = self._links, id(loop)
        known = every.get(key)
        if known is None or known[0]() is not loop:
            for other in [each for each, (ref, _) in [*every.items()] if _is_over(ref())]:
                self._forget_loop(other)  # it ended without a word
            known = every[key] = weakref.ref(loop), {}
            # The loop knows an asynchronous generator from its first step on, and closes it when it
            # ends, as `asyncio.run` and its like end it.
            holder = self._holders[key] = self._hold(key, known[1])
            with contextlib.suppress(StopIteration):
                holder.__anext__().send(None)
        self._last = known
        return known[1]

    async def _hold(self, key: int, links: dict[str, Connection]) -> AsyncGenerator[None]:
        """Close the running loop's connections when it ends, or when this worker leaves."""
        try:
            yield
        finally:
            open_links = [link for link in links.values() if not link.ended.is_set()]
            for link in open_links:
                link.leave("ended", "", NotServing("the event loop of this call has ended"))
            self._forget_loop(key)
            await asyncio.gather(*(link.ended.wait() for link in open_links))

    def _forget_loop(self, key: int) -> None:
        self._last = (lambda: None, {})
        _, links = self._links.pop(key, (None, {}))
        self._holders.pop(key, None)
        for link in [*links.values()]:  # nobody waits any more, on a loop that has ended
            self._finished.update(link.tally() | {"in_flight": 0, "unsent": 0})

    def _every(self) -> list[tuple[asyncio.AbstractEventLoop, dict[str, Connection]]]:
        found = [(loop(), links) for loop, links in [*self._links.values()]]
        return [(loop, links) for loop, links in found if loop is not None]

    def tally(self) -> dict[str, int]:
        """What the links have done, added up; the names are those of `Stats`. In any thread."""
        total = Counter(self._finished)
        for _, links in self._every():
            for link in [*links.values()]:
                total.update(link.tally())
        return {**total}

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

    def connected(self) -> set[str]:
        """The peers to which the running loop has a connection."""
        loop = asyncio.get_running_loop()
        return {name for name, each in self._links_of(loop).items() if each.is_open}

    def replace(self, member: Member, past: str) -> None:
        """A worker has come back; objects of its predecessor are owned by `past`. On any thread."""
        self._members[member.name] = self._members[member.rank] = member
        self._past[past] = member.name
        error = WorkerLost(member.name, "its process has a successor")
        for loop, links in self._every():
            _on(loop, self._forget, links, member.name, error)

    def _forget(self, links: dict[str, Connection], worker: str, error: RpcError) -> None:
        link = links.pop(worker, None)
        if link is not None:
            link.lost(error)
            link.leave("ended", "", error)
            self._finished.update(link.tally())

    async def close(self, what: str = "left", text: str = "") -> None:
        """This process leaves its world: every call that is still awaited ends.

        Args:
            what: "left" or "failed", for the peers.
            text: why it failed.
        """
        for _, tell in [*self._needed.values()]:
            tell(NotServing("this worker has left its world"))
        here = asyncio.get_running_loop()
        for loop, links in self._every():
            for link in [*links.values()]:
                error = NotServing(f"this worker left its world before {link.peer.name!r} answered")
                if loop is here:
                    link.leave(what, text, error)
                else:
                    _on(loop, link.leave, what, text, error)
        if (holder := self._holders.get(id(here))) is not None:
            await holder.aclose()


def _is_over(loop: asyncio.AbstractEventLoop | None) -> bool:
    return loop is None or loop.is_closed()


def _ignore(*_: Any) -> None:
    """Observe nothing: replaced by the failure detector."""


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


def link_to(worker: "Worker | RRefBase[Any]") -> Connection:
    """From the running loop to that worker, or to the owner of that RRef.

    Raises:
        NotServing: if this process is in no world.
        ValueError: if there is no such worker in it.
    """
    outbox = current()
    if isinstance(worker, RRefBase):
        return outbox.link(worker.owner_name())
    return outbox.link(outbox.find(worker))
