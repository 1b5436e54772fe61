"""For which batches something is done: they cannot end before it does.

A body that waits for its own queue would wait for ever. What it calls, and what that calls in turn,
is on an errand for its batch: so batches travel with calls. Knows no queue, no call.
"""

import itertools
from collections.abc import Callable, Iterable
from contextvars import ContextVar

BatchId = tuple[str, int]
"""A batch: the worker that runs it, and its number there. `HERE` is the worker of this process."""

HERE = ""
NONE: frozenset[BatchId] = frozenset()

_numbers = itertools.count()


class Errand:
    """What is done for `batches`, which wait for it while it `is_open`."""

    __slots__ = ("batches", "is_open")

    def __init__(self, batches: frozenset[BatchId], is_open: Callable[[], bool]) -> None:
        self.batches = batches
        self.is_open = is_open

    def __repr__(self) -> str:
        return f"<Errand for {sorted(self.batches)}, {'open' if self.is_open() else 'over'}>"


_errands: ContextVar[frozenset[Errand]] = ContextVar("aiorpc_errands", default=frozenset())


def new_batch() -> BatchId:
    """A batch that this process runs."""
    return HERE, next(_numbers)


def errands() -> frozenset[Errand]:
    """What this context is a part of and somebody still waits for."""
    found = _errands.get()
    return found and frozenset(errand for errand in found if errand.is_open())


def set_out(on: Iterable[Errand]) -> None:
    """From now on, this context is a part of these."""
    _errands.set(frozenset(on))


def waiting() -> frozenset[BatchId]:
    """The batches that cannot end before what this context does."""
    if not (found := _errands.get()):  # almost always, and with each call
        return NONE
    return NONE.union(*(errand.batches for errand in found if errand.is_open()))


def sent_by(worker: str) -> tuple[BatchId, ...]:
    """The same, as worker `worker` names them to others: always in one order."""
    if not _errands.get():  # almost always, and with each call
        return ()
    return tuple(sorted((where or worker, number) for where, number in waiting()))


def received_by(worker: str, batches: Iterable[BatchId]) -> frozenset[BatchId]:
    """How worker `worker` knows those that another has named."""
    return frozenset((HERE if where == worker else where, number) for where, number in batches)
