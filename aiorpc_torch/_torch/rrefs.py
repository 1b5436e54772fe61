"""RRefs between workers: torch's reference counts where they work, an id elsewhere.

torch counts the references to an object: to pickle an RRef forks it, and torch sends a message for
the fork. That took 170 µs of a lone call (2.13). Also, torch counts correctly in a process's first
world only: in later ones its messages fail, and an owner that waits for them reports an error, a
second late. An RRef that reaches its owner when torch there does not know the object is waited for
without end: torch has shut down, or no fork of the RRef is left. (2.13, 2.15;
tests/integration/test_rrefs.py)

So a call refers to its object by the RRef id, torch's number for the RRef. The owner finds the
object in a table of this module. torch counts only in a world whose workers are all in
their first; in other worlds nothing counts.

What a worker sends of another one's object, it lends. With a fork of torch's, the receiver would
ask the owner and tell the sender. If one of them has died meanwhile, torch aborts the receiver's
process some 10 s later. So the receiver borrows: its RRef is no fork of the owner's, and the sender
keeps its own until it is told that the other one was dropped. A lender that dies leaves its fork
behind, as torch does. (tests/integration/test_borrowed_rrefs.py)
"""

import contextlib
import itertools
import re
import weakref
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

from .compat import PythonUDF, RRef, RRefBase, current_agent, invoke_rpc, make_rref, serialize
from .thread_state import pin_thread_state

RRefId = tuple[int, int]
"""The worker id of the process that made the RRef, and the RRef's number there."""

SharingMode = Literal["forked", "named", "kept"]
"""Ways to use an RRef, as the wire spells them.

"forked": by torch alone, for objects without weak references. "named": by RRef id, while torch
counts. "kept": by RRef id, and the object lives until its owner's world ends.
"""

BY_TORCH: Literal["forked"] = "forked"
BY_ID: Literal["named"] = "named"
PINNED: Literal["kept"] = "kept"

FREED = (
    "the object of this call was freed, because every RRef of it was dropped: keep the one that "
    "create() returned"
)


class RRefTable:
    """The objects of this process that other workers of one world may refer to."""

    def __init__(self, worker_id: int, *, counted: bool, adopted: bool = False) -> None:
        self.worker_id = worker_id
        self._counted = counted
        self.adopted = adopted
        self._objects = weakref.WeakValueDictionary[RRefId, Any]()
        self.rrefs = weakref.WeakValueDictionary[RRefId, "RRefBase[Any]"]()
        self._ids = weakref.WeakKeyDictionary["RRefBase[Any]", RRefId]()
        self._pinned: dict[RRefBase[Any], Any] = {}  # with the fork by which torch keeps it
        # For RRefs of own objects from earlier worlds, those of this world.
        self.renewed = weakref.WeakKeyDictionary["RRefBase[Any]", "RRef[Any]"]()
        self.is_closed = False
        self.lent: dict[int, RRefBase[Any]] = {}  # until the borrower has dropped its own
        self._borrowed = weakref.WeakValueDictionary[RRefId, "RRefBase[Any]"]()
        self.gone: dict[int, str] = {}  # names of workers that are lost or have left, by worker id

    def id_of(self, rref: "RRefBase[Any]") -> RRefId:
        """Return the id of an RRef that this process made."""
        if (known := self._ids.get(rref)) is not None:
            return known
        data = rref._serialize()
        _cancel_fork(data)
        found = self._ids[rref] = _id_in(data)
        self.rrefs[found] = rref
        return found

    def share(self, rref: "RRefBase[Any]", data: Any) -> SharingMode:
        """Register an RRef that is sent, and return how its receivers use it."""
        own_id = _id_in(data)
        if self._counted:
            try:
                self._objects[own_id] = rref.local_value()
            except TypeError:  # its class has no weak references
                return BY_TORCH
            return BY_ID
        self.rrefs[own_id] = rref
        if rref not in self._pinned:
            # Without a fork torch forgets the object, and a plain torch call of the RRef waits for
            # it without end. In an adopted world the program's `rpc.shutdown` would wait for it.
            fork = None if self.adopted else rref._serialize()
            if self._pinned.setdefault(rref, fork) is not fork:  # another thread has pinned it
                _cancel_fork(fork)
            if self.is_closed:
                self.unpin()
        _cancel_fork(data)
        return PINNED

    def find(self, named: "RRefBase[Any] | RRefId") -> Any:
        """Return the object of a call."""
        if self.is_closed:  # torch may have shut down, and would wait for the object without end
            raise ReferenceError("the worker of this call has left its world")
        if not isinstance(named, tuple):
            return named.local_value()
        if (rref := self.rrefs.get(named)) is not None:
            return rref.local_value()
        if (found := self._objects.get(named)) is None:
            raise ReferenceError(FREED)
        return found

    def borrow(self, data: Any) -> "RRefBase[Any]":
        """Return the RRef of a loan: one for each object, else two workers could lend in turns.

        Raises:
            ReferenceError: if the owner is lost.
        """
        rref_id, lender = _id_in(data), data[3]
        end = serialize(PythonUDF(end_loan, (data[4],), {}))  # type: ignore[no-untyped-call]
        found = self._borrowed.get(rref_id)
        if found is not None or data[0] in self.gone:
            self._return(lender, end)
        _check_owner(data[0])
        if found is None:
            # torch here takes it for a fork that the owner knows, and the owner ignores its end.
            found = RRefBase._deserialize((*data[:5], data[0], data[6]))
            weakref.finalize(found, self._return, lender, end).atexit = False
            found = self._borrowed.setdefault(rref_id, found)  # another thread may have borrowed it
        return found

    def _return(self, lender: int, end: tuple[Any, Any]) -> None:
        """End a loan. In any thread, perhaps in a finalizer."""
        if self is _table and not self.is_closed:
            with contextlib.suppress(RuntimeError):  # the lender has left
                invoke_rpc(current_agent().get_worker_info(lender), *end, 0.0, False)

    def close(self) -> None:
        """Disable `find`, and free pinned objects."""
        self.is_closed = True
        self.unpin()

    def unpin(self) -> None:
        """Free pinned objects, unless an RRef of this process holds them."""
        for rref in [*self._pinned]:
            fork = self._pinned.pop(rref, None)
            if fork is not None:
                _cancel_fork(fork)


class _Received(NamedTuple):
    """Facts of an RRef that another process made."""

    table: RRefTable  # of the world in which it arrived
    mode: SharingMode
    data: Any
    rref_id: RRefId | None


NO_WORLD = -1

_FIRST_LOAN = 1 << 62
"""The first number of a loan, in place of a fork's: those of torch count up from 0."""

_loans = itertools.count(_FIRST_LOAN)  # of all worlds: the end of one may come in a later world


def end_loan(loan: int) -> None:
    """Drop what this process has lent. The borrower calls it by torch RPC, in a thread of torch."""
    pin_thread_state()
    _table.lent.pop(loan, None)


_table = RRefTable(NO_WORLD, counted=True)
_classes = weakref.WeakKeyDictionary["RRefBase[Any]", type]()
_adopted_generation: int | None = None
"""`init_rpc` count of the world of `_table`; None if this library started the world."""
_received = weakref.WeakKeyDictionary["RRefBase[Any]", _Received]()


def enter_world(worker_id: int, *, counted: bool, generation: int | None = None) -> None:
    """Start a new table for a world in which torch counts references, or does not.

    A world that `init_rpc` has started has a `generation`, and one table however often it is
    adopted.
    """
    global _table, _adopted_generation
    if generation is None or generation != _adopted_generation:
        _adopted_generation = generation
        _table = RRefTable(worker_id, counted=counted, adopted=generation is not None)
        past_ids.clear()


def is_adopted() -> bool:
    """Return whether this process was last in a world that `init_rpc` started."""
    return _adopted_generation is not None


def leave_to_parent() -> None:
    """Leave the RRefs to the process that this one was forked from, and send nothing."""
    _table.is_closed = True


@contextlib.contextmanager
def leaving_world() -> Iterator[None]:
    """Disable RRef lookup while torch shuts down."""
    global _table
    _table.close()
    try:
        yield
    finally:
        _table = RRefTable(NO_WORLD, counted=True)


def note_gone(worker_id: int, name: str) -> None:
    """Refuse to send or receive RRefs of a process that is lost or has left.

    Of one that `rpc.remote` has made, torch asks the owner five times, and then aborts the process
    that has received it. (2.15; tests/integration/test_rrefs.py)
    """
    _table.gone[worker_id] = name


def note_back(worker_id: int) -> None:
    """Send and receive RRefs of that process again: it was silent only."""
    _table.gone.pop(worker_id, None)


def _check_owner(worker_id: int) -> None:
    if (name := _table.gone.get(worker_id)) is not None:
        error: Any = ReferenceError(
            f"this RRef is of an object of worker {name!r}, which is lost or has left: create() "
            "the object again"
        )
        error.worker = name  # `_client.answers` tells of it, for an object that was being made
        raise error


def owner_name(owned: Any) -> str:
    """Return the name of the owner of an RRef, or of what else has one.

    Of a process that is gone it is the `past_name`: another process may have its name, or torch may
    have no name for it.
    """
    try:
        name = str(owned.owner_name())
        worker_id = _owner_id(owned) if past_ids and isinstance(owned, RRefBase) else None
        return name if worker_id not in past_ids else past_name(name, worker_id)
    except RuntimeError as exc:
        if (found := _UNKNOWN_ID.search(str(exc))) is None:
            raise
        worker_id = int(found[1])
        # The table has every process of this world that is gone.
        unknown = f"rank {worker_id} of an earlier world"
        return past_name(_table.gone.get(worker_id, unknown), worker_id)


def _owner_id(rref: "RRefBase[Any]") -> int | None:
    """Return the worker id of an owner, None if torch does not find it: in later worlds."""
    if (received := _received.get(rref)) is not None:
        return int(received.data[0])
    with contextlib.suppress(RuntimeError):
        return int(rref.owner().id)
    return None


past_ids: set[int] = set()
"""The worker ids of this world's processes that are gone for good: a member with the name of one is
another process."""


def past_name(name: str, worker_id: int) -> str:
    """Return the name of a process that another one has replaced, or that has left."""
    return f"{name[:117]}{_WAS}{worker_id}"  # torch allows 128 characters, and five digits


def split_past_name(name: str) -> tuple[str, int]:
    """Return the name that a process had, and its worker id; -1 if that is no past name."""
    before, _, worker_id = name.rpartition(_WAS)
    return (before, int(worker_id)) if before and worker_id.isdecimal() else (name, -1)


_WAS = ":was:"
_UNKNOWN_ID = re.compile(r"could not find destination id (\d+)")


def serialize_rref(rref: "RRefBase[Any]") -> tuple[Any, SharingMode]:
    """Return the arguments of `deserialize_rref` at the receiver.

    Raises:
        ReferenceError: if the RRef is of a world that this process has left, or its owner is lost.
    """
    rref = _in_this_world(rref)
    received = _received.get(rref)
    if _table.gone and not rref.is_owner() and (owner_id := _owner_id(rref)) is not None:
        _check_owner(owner_id)
    if received is not None and received.mode == PINNED:
        return received.data, received.mode
    if received is not None and not rref.is_owner():
        table, loan, data = _table, next(_loans), received.data
        table.lent[loan] = rref
        return (*data[:3], table.worker_id, loan, table.worker_id, data[6]), received.mode
    data = rref._serialize()
    if received is not None:
        return data, received.mode
    # An RRef of `rpc.remote` is not of this class, and its object may not exist yet.
    return data, _table.share(rref, data) if isinstance(rref, RRef) else BY_TORCH


def deserialize_rref(data: Any, mode: SharingMode) -> "RRefBase[Any]":
    """Return the RRef of `serialize_rref`, at a worker that may be its owner.

    Raises:
        ReferenceError: if it is of an object of this worker that was freed, or its owner is lost.
    """
    is_lent = _is_lent(data)
    if not is_lent:
        _check_owner(data[0])
    if mode == PINNED and data[0] == _table.worker_id:
        if (own := _table.rrefs.get(_id_in(data))) is None:
            raise ReferenceError(FREED)
        return own
    rref: RRefBase[Any] = _table.borrow(data) if is_lent else RRefBase._deserialize(data)
    _received[rref] = _Received(_table, mode, data, None if mode == BY_TORCH else _id_in(data))
    return rref


def take_back(data: Any, mode: SharingMode) -> None:
    """Drop what `serialize_rref` has kept for a receiver that gets nothing."""
    if _is_lent(data):
        _table.lent.pop(data[4], None)
        return
    is_own = data[5] == _table.worker_id  # this process has made the fork
    # The program's own `rpc.shutdown` would wait without end for the fork of an RRef of
    # `rpc.remote`. torch asks the owner, and aborts this process if the owner does not answer: so
    # not if that is known to be gone.
    is_waited_for = _table.adopted and not _table.is_closed and data[0] not in _table.gone
    is_cancelled = (mode == BY_TORCH and is_waited_for) or (mode != PINNED and data[0] == data[5])
    if is_own and is_cancelled:
        with contextlib.suppress(RuntimeError):  # torch has shut down
            _cancel_fork(data)


def rref_id(rref: "RRefBase[Any]") -> RRefId | None:
    """Return the id with which the owner finds the object, None if only torch finds it.

    Raises:
        ReferenceError: if the RRef is of a world that this process has left.
    """
    received = _received.get(rref)
    if received is not None and received.table is _table:  # the usual case
        return received.rref_id
    rref = _in_this_world(rref)
    return _table.id_of(rref) if isinstance(rref, RRef) else None


def note_class(rref: "RRefBase[Any]", cls: type) -> None:
    """Note the class of the object behind an RRef of another worker."""
    _classes[rref] = cls


def known_class(rref: "RRefBase[Any]") -> type | None:
    """Return the class of the object behind an RRef, None if this process does not know it."""
    if (cls := _classes.get(rref)) is not None:
        return cls
    if _table.worker_id == NO_WORLD or _table.is_closed:  # torch may have shut down
        return None
    received = _received.get(rref)
    # An RRef of `rpc.remote` is of neither kind: its object may not exist yet.
    has_object = isinstance(rref, RRef) if received is None else received.mode != BY_TORCH
    return type(rref.local_value()) if has_object and rref.is_owner() else None


def identity(rref: "RRefBase[Any]") -> RRefId:
    """Return the RRef id, which every RRef of one object has, also outside a world."""
    # Only torch's text has it without a fork. The first id in the text is the RRef's.
    found = _ID_IN_TEXT.search(str(rref))
    assert found is not None, str(rref)
    return int(found[1]), int(found[2])


_ID_IN_TEXT = re.compile(r"created_on=(-?\d+), local_id=(-?\d+)")


def find_object(named: "RRefBase[Any] | RRefId") -> Any:
    """Return the object of this worker to which a call refers.

    Raises:
        ReferenceError: if the object was freed, or this worker has left its world.
    """
    return _table.find(named)


def _in_this_world(rref: "RRefBase[Any]") -> "RRefBase[Any]":
    received = _received.get(rref)
    if received is None or received.table is _table:
        return rref
    if rref.is_owner():  # the object is in this process
        table = _table
        if (renewed := table.renewed.get(rref)) is None:
            renewed = table.renewed[rref] = make_rref(rref.local_value())
        return renewed
    raise ReferenceError(
        "this RRef is of a world that this process has left: create() the object again"
    )


def _id_in(data: Any) -> RRefId:
    return data[1], data[2]


def _is_lent(data: Any) -> bool:
    return bool(data[4] >= _FIRST_LOAN)


def _cancel_fork(data: Any) -> None:
    # At the owner this ends the fork, for which torch would wait, or warn.
    RRefBase._deserialize(data)
