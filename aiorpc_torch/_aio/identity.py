"""A dict by the identity of objects, which it refers to weakly."""

import weakref
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class WeakIdentityDict(Generic[K, V]):
    """A dict of values by the identity of objects, held weakly. Each method is thread-safe.

    Not a `WeakKeyDictionary`: an instance may define equality and forbid hashing, and iteration
    fails if another thread adds an object meanwhile.
    """

    def __init__(self) -> None:
        self._entries: dict[int, tuple[weakref.ref[K], V]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, owner: K) -> V | None:
        """Return the value of an object, None if it has none."""
        found = self._entries.get(id(owner))
        return found[1] if found is not None and found[0]() is owner else None

    def set(self, owner: K, value: V) -> None:
        """Set the value of an object. Raises TypeError if it cannot be weakly referenced."""
        entries, key = self._entries, id(owner)
        entries[key] = weakref.ref(owner, lambda _: entries.pop(key, None)), value

    def owners(self) -> list[K]:
        """Return the objects that are alive."""
        # `[*values()]` of a dict is one step of the interpreter: no thread can interrupt it.
        found = [ref() for ref, _ in [*self._entries.values()]]
        return [owner for owner in found if owner is not None]
