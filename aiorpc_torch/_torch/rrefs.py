"""RRefs between workers: torch's books of who holds what, and a name where those do not serve.

torch counts the holders of an object: whoever pickles an RRef forks it, for which torch sends a
message of its own. That costs more than a call does, and torch's books are those of a process's
first world for good: in later ones it cannot send such a message, and says so with an error, and
who is to be told that an RRef is gone waits for it. An RRef that reaches an owner who has closed
its books is waited for without end. (2.13, 2.15; tests/test_rrefs.py)

So calls name an object by torch's number for its RRef, its ident, by which the owner finds it here.
Only in a world whose workers are all in their first does torch count; else nobody does.
"""

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

from torch.distributed.rpc import RRef

from .compat import RRefBase

Ident = tuple[int, int]
"""The number of the process that made an RRef, and that of the RRef there."""

Way = Literal["forked", "named", "kept"]
"""How an RRef is used by its holders: torch's way alone, for what cannot be held weakly; by its
ident, while torch counts; or by its ident, and its object lives until its owner's world ends."""

GONE = "the object of this call is gone: nobody held its RRef"


class _Books:
    """Of one world that this process is in: its own objects that others know."""

    def __init__(self, number: int, *, counted: bool) -> None:
        self.number = number
        self._counted = counted
        self._named: weakref.WeakValueDictionary[Ident, Any] = weakref.WeakValueDictionary()
        self._own: weakref.WeakValueDictionary[Ident, RRefBase[Any]] = weakref.WeakValueDictionary()
        self._idents: weakref.WeakKeyDictionary[RRefBase[Any], Ident] = weakref.WeakKeyDictionary()
        self._kept: set[RRefBase[Any]] = set()
        self._again: weakref.WeakKeyDictionary[RRefBase[Any], RRef[Any]] = (
            weakref.WeakKeyDictionary()
        )
        self._closed = False

    def ident(self, rref: "RRefBase[Any]") -> Ident:
        """By which this process calls an object of its own."""
        if (known := self._idents.get(rref)) is not None:
            return known
        data = rref._serialize()
        _take_back(data)
        ident = self._idents[rref] = _ident(data)
        self._own[ident] = rref
        return ident

    def enter(self, rref: "RRefBase[Any]", data: Any) -> Way:
        """How those to whom it is sent are to use it."""
        ident = _ident(data)
        if not self._counted:
            self._own[ident] = rref
            self._kept.add(rref)
            _take_back(data)
            return "kept"
        try:
            self._named[ident] = rref.local_value()
        except TypeError:  # no weak references to its class
            return "forked"
        return "named"

    def find(self, named: "RRefBase[Any] | Ident") -> Any:
        """The object that a call names."""
        if self._closed:  # torch may have closed its own, and would wait for it without end
            raise ReferenceError("the worker of this call has left its world")
        if not isinstance(named, tuple):
            return named.local_value()
        if (rref := self._own.get(named)) is not None:
            return rref.local_value()
        if (found := self._named.get(named)) is None:
            raise ReferenceError(GONE)
        return found

    def again(self, rref: "RRefBase[Any]") -> RRef[Any]:
        """One of this world for an RRef of an own object from an earlier one."""
        if (fresh := self._again.get(rref)) is None:
            fresh = self._again[rref] = RRef(rref.local_value())
        return fresh

    def its_own(self, ident: Ident) -> "RRefBase[Any]":
        """The RRef of this process that has come back."""
        if (rref := self._own.get(ident)) is None:
            raise ReferenceError(GONE)
        return rref

    def close(self) -> None:
        """torch closes its own."""
        self._closed = True
        self._kept.clear()


class _Held(NamedTuple):
    """What came with an RRef."""

    books: _Books  # in whose world
    way: Way
    data: Any
    ident: Ident | None


NOWHERE = -1

_books = _Books(NOWHERE, counted=True)
_held: "weakref.WeakKeyDictionary[RRefBase[Any], _Held]" = weakref.WeakKeyDictionary()


def begin(number: int, *, counted: bool) -> None:
    """This process enters a world, by that number, in which torch counts holders or nobody."""
    global _books
    _books = _Books(number, counted=counted)


@contextlib.contextmanager
def closing() -> Iterator[None]:
    """It leaves: torch closes its books inside."""
    global _books
    _books.close()
    try:
        yield
    finally:
        _books = _Books(NOWHERE, counted=True)


def depart(rref: "RRefBase[Any]") -> tuple[Any, Way]:
    """What `arrive` takes.

    Raises:
        ReferenceError: if it is of a world that this process has left.
    """
    rref = _in_this_world(rref)
    held = _held.get(rref)
    if held is not None and held.way == "kept":
        return held.data, held.way
    data = rref._serialize()
    if held is not None:
        return data, held.way
    # What torch made by `remote()` may wait for its object yet, and is not of this class.
    return data, _books.enter(rref, data) if isinstance(rref, RRef) else "forked"


def arrive(data: Any, way: Way) -> "RRefBase[Any]":
    """The RRef, at a worker that may be its owner.

    Raises:
        ReferenceError: if it is of an object of this worker that is gone.
    """
    if way == "kept" and data[0] == _books.number:
        return _books.its_own(_ident(data))
    rref: RRefBase[Any] = RRefBase._deserialize(data)
    _held[rref] = _Held(_books, way, data, None if way == "forked" else _ident(data))
    return rref


def ident(rref: "RRefBase[Any]") -> Ident | None:
    """By which its owner finds the object, None if only torch does.

    Raises:
        ReferenceError: if it is of a world that this process has left.
    """
    held = _held.get(rref)
    if held is not None and held.books is _books:  # most calls
        return held.ident
    rref = _in_this_world(rref)
    return _books.ident(rref) if isinstance(rref, RRef) else None


def find(named: "RRefBase[Any] | Ident") -> Any:
    """The object of this worker that a call names.

    Raises:
        ReferenceError: if it is gone, or this worker's world is.
    """
    return _books.find(named)


def _in_this_world(rref: "RRefBase[Any]") -> "RRefBase[Any]":
    held = _held.get(rref)
    if held is None or held.books is _books:
        return rref
    if rref.is_owner():  # the object is here, whichever world it is
        return _books.again(rref)
    raise ReferenceError("this RRef is of a world that this process has left")


def _ident(data: Any) -> Ident:
    return data[1], data[2]


def _take_back(data: Any) -> None:
    # At its owner it ends the fork, for which torch would wait, or warn.
    RRefBase._deserialize(data)
