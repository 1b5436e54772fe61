"""Groups that change: the living objects that any workers have registered under one name.

The registry of this worker tells which there are. A `_Watch` keeps their Group; it lives as long as
its `NamedMembers`.
"""

import asyncio
import functools
import weakref
from collections.abc import Callable, Collection, Coroutine, Generator, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, TypeVar

from .._aio.deadlines import deadline_in, time_left
from .._aio.loops import await_on, call_soon, run_on_loop
from .._endpoint import entry_points
from .._handles.mistakes import refuse_attribute
from .._torch.compat import RRef
from ..errors import CallTimeout, NotInWorld
from .group import Group
from .group_map import Items, MapOptions, Mappable, MapResults
from .pool import current
from .routes import AnyMember

T = TypeVar("T")
R = TypeVar("R")

_LEFT = "this worker has left its world"


class Registry(Protocol):
    """The names that the workers of a world have registered: a `_node.registry.Registry`."""

    @property
    def loop(self) -> asyncio.AbstractEventLoop: ...
    @property
    def is_closed(self) -> bool: ...
    def watch(self, name: str, on_change: Callable[[], None]) -> None: ...
    def unwatch(self, name: str, on_change: Callable[[], None]) -> None: ...
    def living(self, name: str) -> Sequence[RRef[Any]]: ...
    async def all_told(self, name: str) -> None: ...


class _Watch:
    """The Group of the objects under a name now, and who is told when it changes.

    The Group is replaced as a whole, and any thread may read it. All else is on the registry's
    loop. This does not refer to the `NamedMembers`, whose end closes it.
    """

    def __init__(self, name: str, registry: Registry) -> None:
        self.name = name
        self.group: Group[Any] = Group(())
        self.registry = registry
        self._listeners: list[Callable[[], None]] = []

    def open(self) -> None:
        """Begin to watch."""
        self.registry.watch(self.name, self._refresh)
        self._refresh()

    def close(self) -> None:
        """Watch no more."""
        self.registry.unwatch(self.name, self._refresh)

    def listen(self, on_change: Callable[[], None]) -> None:
        """Call `on_change` now and after each change, until `ignore`."""
        self._listeners.append(on_change)
        on_change()

    def ignore(self, on_change: Callable[[], None]) -> None:
        """Call `on_change` no more."""
        self._listeners.remove(on_change)

    async def complete(self) -> None:
        """Wait until every living worker has told its object."""
        await self.registry.all_told(self.name)
        if self.registry.is_closed:
            raise NotInWorld(_LEFT)

    async def wait(self, count: int) -> None:
        """Wait until there are so many members."""
        changed = asyncio.Event()
        self.listen(changed.set)
        try:
            while len(self.group) < count:
                if self.registry.is_closed:
                    raise NotInWorld(_LEFT)
                changed.clear()
                await changed.wait()
        finally:
            self.ignore(changed.set)

    def _refresh(self) -> None:
        found = Group(self.registry.living(self.name))
        if found != self.group:  # `any` takes turns among the members of one
            self.group = found
        for on_change in [*self._listeners]:
            on_change()


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
        loop = watch.registry.loop
        # Later: the garbage collector may run inside any function of the registry.
        weakref.finalize(self, call_soon, loop, watch.close).atexit = False
        run_on_loop(loop, watch.open)

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

    def _map(
        self, method: Callable[..., Any], iterables: Sequence[Items[Any]], options: MapOptions
    ) -> MapResults[Any]:
        return MapResults(self, method, iterables, options, self._follow)

    def _follow(self, on_change: Callable[[Exception | None], None]) -> Callable[[], None]:
        """Call `on_change` on the running loop after each change; return what ends that."""
        loop, watch = asyncio.get_running_loop(), self._watch
        registry = watch.registry

        def tell() -> None:
            call_soon(loop, on_change, NotInWorld(_LEFT) if registry.is_closed else None)

        run_on_loop(registry.loop, watch.listen, tell)
        return functools.partial(run_on_loop, registry.loop, watch.ignore, tell)

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
    if not isinstance(name, str):
        raise TypeError(f"a name must be a str, got {name!r}")
    current()
    node = entry_points.current()
    assert node is not None
    return NamedMembers(_Watch(name, node.registry))
