"""Objects that are called often: a number in place of an RRef.

To pickle an RRef is to fork it, for which torch sends a message of its own and keeps books at both
ends: more than the call itself costs (torch 2.13: 170 µs of a lone call, and a message for each of
a thousand). An RRef that is used again is sent with a number once, and from then on as the number.

The owner holds the object weakly: it lives as long as the caller's RRef, which the caller's pending
call keeps alive. An object that cannot be held weakly keeps travelling as an RRef.
"""

import itertools
import weakref
from collections.abc import Iterable
from typing import Any, NamedTuple

from torch.distributed.rpc import RRef


class Offer(NamedTuple):
    """An RRef, and the number that will stand for it once the owner knows it."""

    rref: RRef[Any]
    number: int


Named = RRef[Any] | Offer | int


class _Handle:
    __slots__ = ("__weakref__", "known", "number")

    def __init__(self, number: int) -> None:
        self.number = number
        self.known = False


class Handles:
    """The caller's side, for one link."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._handles: weakref.WeakKeyDictionary[RRef[Any], _Handle] = weakref.WeakKeyDictionary()
        self._by_number: weakref.WeakValueDictionary[int, _Handle] = weakref.WeakValueDictionary()

    def name(self, rref: Any) -> Named:
        """What to send for `rref`. The first time itself: most are used but once."""
        handle = self._handles.get(rref)
        if handle is None:
            handle = self._handles[rref] = _Handle(next(self._numbers))
            self._by_number[handle.number] = handle
            first: RRef[Any] = rref
            return first
        number: int = handle.number
        return number if handle.known else Offer(rref, number)

    def learned(self, numbers: Iterable[int]) -> None:
        """The owner knows those numbers."""
        for number in numbers:
            handle = self._by_number.get(number)
            if handle is not None:
                handle.known = True


class Objects:
    """The owner's side, for one link."""

    def __init__(self) -> None:
        self._objects: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()

    def find(self, named: Named) -> Any:
        """The object.

        Raises:
            ReferenceError: if it was known by that number and is gone.
        """
        if isinstance(named, int):
            found = self._objects.get(named)
            if found is None:
                raise ReferenceError("the object of this call is gone: nobody held its RRef")
            return found
        return named.rref.local_value() if isinstance(named, Offer) else named.local_value()

    def learn(self, named: Named, found: Any) -> int | None:
        """Remember an object that was offered; its number, or None."""
        if not isinstance(named, Offer):
            return None
        try:
            self._objects[named.number] = found
        except TypeError:  # no weak references to its class
            return None
        return named.number
