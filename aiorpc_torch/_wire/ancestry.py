"""Ancestor batches: the batches that cannot end before the current code does.

A batch function that waits for its own queue would wait for ever. So the ids of ancestor batches
travel with each call that the function makes, directly or through other workers.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
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


def new_batch() -> BatchId:
    """Return the id of a new batch of this process."""
    return HERE, next(_numbers)


def current_scopes() -> frozenset[BatchScope]:
    """Return the open scopes of this context."""
    found = _scopes.get()
    return found and frozenset(scope for scope in found if scope.is_open())


def enter_scopes(scopes: Iterable[BatchScope]) -> None:
    """Make this context a part of these scopes and of no others."""
    _scopes.set(frozenset(scopes))


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
    if not (found := _scopes.get()):  # the common case, on each call
        return NO_BATCHES
    return NO_BATCHES.union(*(scope.batches for scope in found if scope.is_open()))


def to_wire(worker: str) -> tuple[BatchId, ...]:
    """Return the ancestor batches, sorted, with `worker` as the name of this process's worker."""
    if not _scopes.get():  # the common case, on each call
        return ()
    return tuple(sorted((name or worker, number) for name, number in ancestor_batches()))


def from_wire(worker: str, batches: Iterable[BatchId]) -> frozenset[BatchId]:
    """Return the batches that a peer sent; those of `worker`, this process's, are named `HERE`."""
    return frozenset((HERE if name == worker else name, number) for name, number in batches)
