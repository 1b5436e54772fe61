"""Objects for as long as they live: listed from any thread, while others come and go.

Not a `WeakSet`: that is iterated in Python, and another thread that adds to it meanwhile ends the
iteration with an error. Knows nothing of what it lists.
"""

import weakref
from typing import Generic, TypeVar

T = TypeVar("T")


class Living(Generic[T]):
    """What was added and is still alive."""

    def __init__(self) -> None:
        self._refs: dict[int, weakref.ref[T]] = {}  # by identity

    def __len__(self) -> int:
        return len(self._refs)

    def add(self, thing: T) -> None:
        """List it until it is gone."""
        refs, key = self._refs, id(thing)
        refs[key] = weakref.ref(thing, lambda _: refs.pop(key, None))

    def all(self) -> list[T]:
        """Those there are now."""
        # `[*values()]` of a dict is one step of the interpreter: no thread comes in between.
        found = [ref() for ref in [*self._refs.values()]]
        return [thing for thing in found if thing is not None]
