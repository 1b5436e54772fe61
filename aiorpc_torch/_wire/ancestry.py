"""Ancestor batches: the batches that cannot end before the current code does.

A batch function that waits for its own queue would wait for ever. So the ids of ancestor batches
travel with each call that the function makes, directly or through other workers.
"""

import contextlib
import itertools
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextvars import Context, ContextVar
from dataclasses import dataclass

BatchId = tuple[str, int]
"""A batch: the worker that runs it and the batch's number on that worker."""

HERE = ""
"""Name of this process's worker in a `BatchId`."""

NO_BATCHES: frozenset[BatchId] = frozenset()

_numbers = itertools.count()


@dataclass(slots=True, eq=False)
class BatchScope:
    """Work that `batches` wait for while it `is_open`."""

    batches: frozenset[BatchId]
    is_open: Callable[[], bool]


_scopes: ContextVar[frozenset[BatchScope]] = ContextVar("aiorpc_batch_scopes", default=frozenset())

entered_scopes = _scopes.get
"""Return the scopes of this context, also closed ones. A function of C: every call asks."""


CallKey = tuple[Hashable, int]
"""A running call: the key of its session, and its number."""

_running: ContextVar[CallKey | None] = ContextVar("aiorpc_running_call", default=None)

note_call = _running.set
"""Make this context a part of a call. A function of C: every call does."""

running_call = _running.get
"""Return the key of the call or batch that this context is a part of, None if it is of none."""


def call_of(context: Context) -> CallKey | None:
    """Return the key of the call or batch that a context is a part of, None if it is of none."""
    return context.get(_running)


BATCH = "batch"
"""In place of a session in the key of a batch."""

awaited: dict[CallKey, set[BatchId]] = {}
"""The calls of this worker that pauses wait for, with the marks of these: what they call has the
marks as ancestors."""


def new_batch() -> BatchId:
    """Return the id of a new batch of this process."""
    return HERE, next(_numbers)


def current_scopes() -> frozenset[BatchScope]:
    """Return the open scopes of this context."""
    found = _scopes.get()
    return found and frozenset(scope for scope in found if scope.is_open())


enter_scopes = _scopes.set
"""Make this context a part of these scopes and of no others. A function of C."""


@contextlib.contextmanager
def add_scope(scope: BatchScope) -> Iterator[None]:
    """Make this context a part of one more scope inside the block."""
    token = _scopes.set(current_scopes() | {scope})
    try:
        yield
    finally:
        _scopes.reset(token)


def ancestor_batches() -> frozenset[BatchId]:
    """Return the batches that cannot end before this context's work does."""
    found = _scopes.get()
    if not found and not awaited:  # the common case, on each call
        return NO_BATCHES
    own = awaited.get(_running.get() or _NO_CALL, ())
    return NO_BATCHES.union(own, *(scope.batches for scope in found if scope.is_open()))


_NO_CALL: CallKey = None, -1


def to_wire(worker: str) -> tuple[BatchId, ...]:
    """Return the ancestor batches, sorted, with `worker` as the name of this process's worker."""
    if not _scopes.get() and not awaited:  # the common case, on each call
        return ()
    return tuple(sorted((name or worker, number) for name, number in ancestor_batches()))


def from_wire(worker: str, batches: Iterable[BatchId]) -> frozenset[BatchId]:
    """Return the batches that a peer sent; those of `worker`, this process's, are named `HERE`."""
    return frozenset((HERE if name == worker else name, number) for name, number in batches)
