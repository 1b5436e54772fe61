"""Named objects of this worker: `register`, `unregister`; what `lookup` and `members` call here."""

import asyncio
import functools
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

from .._aio.loops import call_soon
from .._handles.handles import is_of_this_process, of_handle
from .._handles.mistakes import await_hint
from .._torch.compat import RRef, RRefBase, make_rref
from .._torch.rrefs import owner_name
from .._wire.handshake import Party
from . import entry_points

if TYPE_CHECKING:
    from .._node.registry import Registry

T = TypeVar("T")


class NameTable:
    """The objects registered on one worker, and the watchers of changes. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # the `__del__` of an object that is removed may come back
        self._rrefs: dict[str, RRef[Any]] = {}
        self._changes = 0
        self._watchers: set[Callable[[], None]] = set()

    def names(self) -> tuple[str, ...]:
        """Return the names, sorted."""
        with self._lock:
            return tuple(sorted(self._rrefs))

    def find(self, name: str) -> RRef[Any] | None:
        """Return the RRef registered as `name`, None if there is none."""
        with self._lock:
            return self._rrefs.get(name)

    def state(self, name: str) -> tuple[int, RRef[Any] | None]:
        """Return how often the table has changed, and the RRef registered as `name` or None."""
        with self._lock:
            return self._changes, self._rrefs.get(name)

    def add(self, name: str, rref: RRef[Any]) -> None:
        """Register an RRef. Raises ValueError if the name is taken."""
        with self._lock:
            if (found := self._rrefs.get(name)) is not None:
                raise ValueError(f"the name {name!r} is taken by {found!r}; unregister it first")
            self._rrefs[name] = rref
            self._changes += 1
        self._notify()

    def remove(self, name: str) -> None:
        """Remove a name. Raises ValueError if it is not registered."""
        with self._lock:
            if self._rrefs.pop(name, None) is None:
                known = ", ".join(sorted(self._rrefs)) or "none"
                raise ValueError(f"{name!r} is not registered; registered names: {known}")
            self._changes += 1
        self._notify()

    def clear(self) -> None:
        """Remove all names."""
        with self._lock:
            self._rrefs.clear()
            self._changes += 1

    def watch(self, on_change: Callable[[], None]) -> None:
        """Call `on_change` after each change, in any thread, until `unwatch`."""
        with self._lock:
            self._watchers.add(on_change)

    def unwatch(self, on_change: Callable[[], None]) -> None:
        """Call `on_change` no more."""
        with self._lock:
            self._watchers.discard(on_change)

    def _notify(self) -> None:
        with self._lock:
            watchers = [*self._watchers]
        for on_change in watchers:
            on_change()


def register(name: str, object: T | RRef[T]) -> RRef[T]:  # noqa: A002
    """Register an object of this worker under a name, for `lookup`; return its RRef.

        aiorpc.register("ps", ParameterServer())            # on worker "server"
        ps = await aiorpc.lookup("ps", on="server")         # on any worker

    The object is held until `unregister(name)`, or until this worker leaves its world. May be
    called from any thread.

    Args:
        name: name, unique on this worker.
        object: any object, or an RRef of an object of this worker, or what `remote` returns for
            one.

    Raises:
        ValueError: if the name is taken, or the RRef is another worker's.
        TypeError: if the name is not a str, or for a supervised object or `any()`.
        NotInWorld: outside a world.
    """
    if not isinstance(name, str):
        raise TypeError(f"a name must be a str, got {name!r}")
    if (server := entry_points.serving()) is None:
        raise entry_points.not_in_world()
    rref: Any = of_handle(object)
    if is_of_this_process(rref) or isinstance(rref, Coroutine):
        hint = await_hint(rref)
        raise TypeError(
            f"register() takes an object of this worker or its RRef, got {object!r}{hint}"
        )
    if not isinstance(rref, RRefBase):
        rref = make_rref(rref)
    elif not rref.is_owner():
        owner = owner_name(rref)
        raise ValueError(f"the object is on worker {owner!r}; register it there, or pass its RRef")
    server.names.add(name, rref)
    return rref  # type: ignore[no-any-return]


def unregister(name: str) -> None:
    """Remove a name of this worker. RRefs that `lookup` returned keep the object.

    Raises:
        ValueError: if the name is not registered.
    """
    _table().remove(name)


def _table() -> NameTable:
    """Return the table of this worker, an empty one outside a world."""
    server = entry_points.serving()
    return NameTable() if server is None else server.names


WAITS, ALWAYS, FOR_AN_ITEM = "__aiorpc_waits__", "always", "for an item"
"""An attribute of functions that only wait, or do so until the first item of their stream, and its
values. As a worker leaves, such calls end at once: what they wait for does not come any more.
(tests/integration/test_drained_workers.py)"""


async def watch_name(name: str) -> AsyncIterator[Any]:
    """Yield the registered names, after each change too, until one is `name`; then its RRef."""
    table, changed = _table(), asyncio.Event()
    on_change = functools.partial(call_soon, asyncio.get_running_loop(), changed.set)
    table.watch(on_change)
    try:
        while (found := table.find(name)) is None:
            yield table.names()
            await changed.wait()
            changed.clear()
        yield found
    finally:
        table.unwatch(on_change)


setattr(watch_name, WAITS, ALWAYS)

State = tuple[int, RRef[Any] | None]
"""An object that is registered under a name, or None; how often that worker's table has changed."""


async def watch_state(name: str, watcher: str, process: int) -> State:
    """Return the state of a name here. From now on its changes are told to that process."""
    return _registry().add_watcher(name, Party(watcher, process))


async def take_state(name: str, worker: str, process: int, state: State) -> bool:
    """Note the state of a name in a process; return whether it is watched here."""
    return _registry().take(name, Party(worker, process), state)


def _registry() -> "Registry":
    if (node := entry_points.here) is None or node.registry.is_closed:
        raise entry_points.not_in_world(entry_points.NOT_SERVING)
    return node.registry
