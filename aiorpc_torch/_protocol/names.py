"""Named objects of this worker: `register`, `unregister`, and what `lookup` calls here."""

import asyncio
import functools
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any, TypeVar

from torch.distributed.rpc import RRef

from .._aio.loops import call_soon
from .._torch.compat import RRefBase
from ..errors import NotServing
from . import endpoints

T = TypeVar("T")


class NameTable:
    """The objects registered in one process, and the watchers of changes. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rrefs: dict[str, RRef[Any]] = {}
        self._watchers: set[Callable[[], None]] = set()

    def names(self) -> tuple[str, ...]:
        """Return the names, sorted."""
        with self._lock:
            return tuple(sorted(self._rrefs))

    def find(self, name: str) -> RRef[Any] | None:
        """Return the RRef registered as `name`, None if there is none."""
        with self._lock:
            return self._rrefs.get(name)

    def add(self, name: str, rref: RRef[Any]) -> None:
        """Register an RRef. Raises ValueError if the name is taken."""
        with self._lock:
            if (found := self._rrefs.get(name)) is not None:
                raise ValueError(f"the name {name!r} is taken by {found!r}; unregister it first")
            self._rrefs[name] = rref
        self._notify()

    def remove(self, name: str) -> None:
        """Remove a name. Raises ValueError if it is not registered."""
        with self._lock:
            if self._rrefs.pop(name, None) is None:
                known = ", ".join(sorted(self._rrefs)) or "none"
                raise ValueError(f"{name!r} is not registered; registered names: {known}")
        self._notify()

    def clear(self) -> None:
        """Remove all names."""
        with self._lock:
            self._rrefs.clear()

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


_table = NameTable()


def register(name: str, object: T | RRef[T]) -> RRef[T]:  # noqa: A002
    """Register an object of this worker under a name, for `lookup`; return its RRef.

        register("ps", ParameterServer())            # on worker "server"
        ps = await lookup("ps", on="server")         # on any worker

    The object is held until `unregister(name)`, or until this worker leaves its world. May be
    called from any thread.

    Args:
        name: name, unique on this worker.
        object: any object, or an RRef of an object of this worker.

    Raises:
        ValueError: if the name is taken, or the RRef is another worker's.
        TypeError: if the name is not a str.
        NotServing: outside a world.
    """
    if not isinstance(name, str):
        raise TypeError(f"a name must be a str, got {name!r}")
    if endpoints.serving() is None:
        raise NotServing(endpoints.NO_WORLD)
    rref: Any = object
    if not isinstance(rref, RRefBase):
        rref = RRef(object)
    elif not rref.is_owner():
        owner = rref.owner_name()
        raise ValueError(f"the object is on worker {owner!r}; register it there, or pass its RRef")
    _table.add(name, rref)
    return rref  # type: ignore[no-any-return]


def unregister(name: str) -> None:
    """Remove a name of this worker. RRefs that `lookup` returned keep the object.

    Raises:
        ValueError: if the name is not registered.
    """
    _table.remove(name)


def clear() -> None:
    """Remove all names: this worker leaves its world."""
    _table.clear()


async def watch_name(name: str) -> AsyncIterator[Any]:
    """Yield the registered names, after each change too, until one is `name`; then its RRef."""
    changed = asyncio.Event()
    on_change = functools.partial(call_soon, asyncio.get_running_loop(), changed.set)
    _table.watch(on_change)
    try:
        while (found := _table.find(name)) is None:
            yield _table.names()
            await changed.wait()
            changed.clear()
        yield found
    finally:
        _table.unwatch(on_change)
