"""Registered objects: `lookup` finds one, `members` follows all of a name, a group that changes.

The registry of this worker tells which there are. A `_Watch` keeps their Group; it lives as long as
its `NamedMembers`.
"""

import asyncio
import functools
import logging
import weakref
from collections.abc import Callable, Collection, Coroutine, Generator, Iterator
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from .._aio.deadlines import deadline_in, in_seconds, time_left
from .._aio.loops import await_on, call_soon, run_on_loop
from .._aio.waiting import LOG_DELAY, announced
from .._endpoint import entry_points
from .._endpoint.names import watch_name
from .._handles.mistakes import refuse_attribute
from .._torch.compat import RRef, RRefBase
from .._wire.targets import FunctionTarget
from ..errors import CallTimeout, NotInWorld, RemoteError, WorkerGone
from .answers import is_interrupted
from .call import RemoteCall
from .group import Group
from .group_map import Mappable
from .pool import WORLD_ENDED, ConnectionPool, WorkerRef, current
from .routes import AnyMember

T = TypeVar("T")


class _Watch:
    """The Group of the objects under a name now, and who is told when it changes.

    The Group is replaced as a whole, and any thread may read it. All else is on the registry's
    loop. This does not refer to the `NamedMembers`, whose end closes it.
    """

    def __init__(self, name: str, registry: Any) -> None:
        self.name = name
        self.group: Group[Any] = Group(())
        self.registry = registry  # a `_node.registry.Registry`
        self.listeners: list[Callable[[], None]] = []  # are called after each change

    def open(self) -> None:
        """Begin to watch."""
        self.registry.watch(self.name, self.refresh)
        self.refresh()

    def refresh(self) -> None:
        """Note which objects there are, and tell it."""
        found = Group(self.registry.living(self.name))
        if found != self.group:  # `any` takes turns among the members of one
            self.group = found
        for on_change in [*self.listeners]:
            on_change()

    def listen(self, on_change: Callable[[], None]) -> None:
        """Call `on_change` now and after each change, while it is one of the `listeners`."""
        self.listeners.append(on_change)
        on_change()

    async def complete(self) -> None:
        """Wait until every living worker has told its object."""
        await self.registry.all_told(self.name)
        if self.registry.is_closed:
            raise NotInWorld(WORLD_ENDED)

    async def wait(self, count: int) -> None:
        """Wait until there are so many members."""
        changed = asyncio.Event()
        self.listen(changed.set)
        try:
            while len(self.group) < count:
                if self.registry.is_closed:
                    raise NotInWorld(WORLD_ENDED)
                changed.clear()
                await changed.wait()
        finally:
            self.listeners.remove(changed.set)


class NamedMembers(Collection[RRef[T]], Mappable[T]):
    """The living objects under one name: a group that changes. Made by `members`.

    `len` and iteration are of those that are there now, in rank order of their workers. The object
    of a lost worker is none of them, until that answers again or a replacement process registers
    one.
    """

    __slots__ = ("__weakref__", "_watch")

    __aiorpc_stands_for__ = True

    def __init__(self, watch: _Watch) -> None:
        self._watch = watch
        registry = watch.registry
        # Later: the garbage collector may run inside any function of the registry.
        end = weakref.finalize(
            self, call_soon, registry.loop, registry.unwatch, watch.name, watch.refresh
        )
        end.atexit = False
        run_on_loop(registry.loop, watch.open)

    if not TYPE_CHECKING:
        __getattr__ = refuse_attribute

        def __getitem__(self, index: Any) -> NoReturn:
            raise TypeError(f"{self!r} changes, and has no indices: take `Group(members)[{index}]`")

    def __repr__(self) -> str:
        return f"<members {self._watch.name!r}, {len(self)} now>"

    def __len__(self) -> int:
        return len(self._watch.group)

    def __iter__(self) -> Iterator[RRef[T]]:
        return iter(self._watch.group)

    def __contains__(self, member: object) -> bool:
        return member in self._watch.group

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"{self!r} belongs to this process: send Group(members), or the name")

    def __await__(self) -> Generator[Any, Any, "NamedMembers[T]"]:
        return self._complete().__await__()

    async def _complete(self) -> "NamedMembers[T]":
        text = f"waited for all workers to tell of their {self._watch.name!r}"
        await self._on_registry(self._watch.complete(), lambda: text)
        return self

    def any(self) -> AnyMember[T]:
        """Return what `remote` and `call` take for the least busy member, as `Group.any` does.

        Each call chooses among those that are there when it starts.

        Raises:
            NoMembers: from the call, if there is none.
        """
        return AnyMember(self, lambda: self._watch.group)

    def _follow(self, on_change: Callable[[Exception | None], None]) -> Callable[[], None]:
        loop, watch = asyncio.get_running_loop(), self._watch
        registry = watch.registry

        def tell() -> None:
            call_soon(loop, on_change, NotInWorld(WORLD_ENDED) if registry.is_closed else None)

        run_on_loop(registry.loop, watch.listen, tell)
        return functools.partial(run_on_loop, registry.loop, watch.listeners.remove, tell)

    async def wait(self, count: int = 1) -> None:
        """Wait until there are at least `count` members, within the deadline of `aiorpc.timeout`.

        Raises:
            CallTimeout: if there are not so many in time; it tells how many there are.
            NotInWorld: once this worker has left its world.
        """
        if not isinstance(count, int):
            raise TypeError(f"count must be an int, got {count!r}")
        text = f"waited for {count} members {self._watch.name!r}, there are "
        await self._on_registry(self._watch.wait(count), lambda: f"{text}{len(self)}")

    async def _on_registry(
        self, waiting: Coroutine[Any, Any, None], late: Callable[[], str]
    ) -> None:
        """Wait on the registry's loop, within the deadline; `late` returns the error's text."""
        limit = asyncio.timeout(time_left(deadline_in(None)))
        try:
            async with limit:
                await await_on(self._watch.registry.loop, waiting)
        except TimeoutError:
            if not limit.expired():
                raise
            raise CallTimeout(late(), method="members", may_have_run=False) from None


def members(name: str) -> NamedMembers[Any]:
    """Return the living objects that workers have registered under `name`: a group that changes.

        envs = await aiorpc.members("env")
        await envs.wait(8)
        observations = await aiorpc.remote(envs).reset()     # of those that are there now
        async for episode in envs.map(Env.rollout, seeds): ...    # joiners get their share

    `remote` and `call` take it as a `Group`: a call is made by those that are there when it starts.
    It follows from then on. Without the `await` it is empty at first, unless this process has
    members of that name already; the `await` ends when every living worker has told its object.

    Args:
        name: name given to `register`, on any worker.

    Raises:
        TypeError: if the name is not a str.
        NotInWorld: outside a world.
        CallTimeout: from the `await`, if a worker does not tell in time.
    """
    _check_name(name)
    current()
    node = entry_points.here
    assert node is not None
    return NamedMembers(_Watch(name, node.registry))


def _check_name(name: object) -> None:
    if not isinstance(name, str):
        raise TypeError(f"a name must be a str, got {name!r}")


async def lookup(name: str, *, on: WorkerRef | None = None) -> RRef[Any]:
    """Return an RRef of the object that a living worker has registered as `name`.

    It waits until a worker registers the name, within the deadline of `aiorpc.timeout`. Without a
    deadline, the log warns once after 10 s that it waits. Workers answer whatever their `exports`
    are. Each lookup asks every worker: in a loop keep its result until a call raises `WorkerGone`,
    or keep `members(name)`, which is told of changes.

    Args:
        name: name given to `register`. If several workers have an object of that name, the result
            is one of these: `members(name)` has all.
        on: worker that registers it, by name, rank or WorkerInfo (default: any). If that worker is
            lost, its replacement process is waited for.

    Raises:
        CallTimeout: if the name is not registered in time.
        WorkerLost: if worker `on` is lost, and no replacement process will come.
        WorkerLeft: if worker `on` has left.
        UnknownWorker: if there is no worker `on`.
        NotInWorld: outside a world, or once this worker leaves it.
    """
    _check_name(name)
    pool, due = current(), deadline_in(None)
    worker = None if on is None else pool.find(on)
    # Which worker would register the object is unknown, so its death ends no lookup.
    level = logging.WARNING if due is None else logging.DEBUG
    who = "a living worker" if worker is None else f"worker {worker!r}"
    text = f"the lookup of {name!r} waits until {who} registers it"
    left = time_left(due)  # the scope's deadline may be earlier
    limit = "" if left is None else f" after {in_seconds(left)}"
    with announced(text, level, LOG_DELAY):
        if worker is not None:
            return await _find(pool, worker, name, due, limit)
        found = members(name)
        while True:
            try:
                await found.wait()
            except CallTimeout as exc:
                text = f"lookup of {name!r} timed out{limit}; no living worker has registered it"
                raise CallTimeout(text, method="lookup") from exc
            for rref in found:  # unless the last one has gone since
                return rref


async def _find(
    pool: ConnectionPool, worker: str, name: str, due: float | None, limit: str
) -> RRef[Any]:
    known = "it has not answered"
    while True:
        late: TimeoutError
        try:
            async for found in RemoteCall(worker, FunctionTarget(watch_name), time_left(due), name):
                if isinstance(found, RRefBase):
                    return found  # type: ignore[return-value]
                known = f"registered there: {', '.join(map(repr, found)) or 'nothing'}"
            raise RemoteError(f"worker {worker!r} ended the lookup of {name!r}")
        except WorkerGone as exc:
            if not is_interrupted(exc):
                raise
            try:
                async with asyncio.timeout(time_left(due)):
                    await pool.observer.wait_until_alive(worker)
                continue
            except TimeoutError as over:
                late = over
        except CallTimeout as exc:
            late = exc
        text = f"lookup of {name!r} on worker {worker!r} timed out{limit}; {known}"
        raise CallTimeout(text, worker=worker, method="lookup") from late
