"""What a call names its object by: something short, in place of the RRef.

To pickle an RRef is to fork it, for which torch sends a message of its own and keeps books at both
ends: more than the call itself costs (torch 2.13: 170 µs of a lone call, and a message for each of
a thousand). Those that came with this library are named by their ident. One that torch brought is
sent itself, if it is used again with a number once, and from then on as the number.

The owner holds the object weakly: it lives as long as the caller's RRef, which the caller's pending
call keeps alive. An object that cannot be held weakly keeps travelling as an RRef.
"""

import itertools
import weakref
from collections.abc import Iterable
from typing import Any, NamedTuple

from torch.distributed.rpc import RRef

from . import _rrefs
from ._rrefs import GONE, Ident


class Offer(NamedTuple):
    """An RRef, and the number that will stand for it once the owner knows it."""

    rref: RRef[Any]
    number: int


Named = RRef[Any] | Offer | int | Ident


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
        """What to send for `rref`.

        Raises:
            ReferenceError: if it is of a world that this process has left.
        """
        if (ident := _rrefs.ident(rref)) is not None:
            return ident
        handle = self._handles.get(rref)
        if handle is None:
            handle = self._handles[rref] = _Handle(next(self._numbers))
            self._by_number[handle.number] = handle
            first: RRef[Any] = rref  # itself: most are used but once
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
            ReferenceError: if it is gone.
        """
        if isinstance(named, int):
            found = self._objects.get(named)
            if found is None:
                raise ReferenceError(GONE)
            return found
        return _rrefs.find(named.rref if isinstance(named, Offer) else named)

    def learn(self, named: Named, found: Any) -> int | None:
        """Remember an object that was offered; its number, or None."""
        if not isinstance(named, Offer):
            return None
        try:
            self._objects[named.number] = found
        except TypeError:  # no weak references to its class
            return None
        return named.number
