"""The table of the named objects of one worker."""

import threading
from collections.abc import Callable
from typing import Any

from .._torch.compat import RRef


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
