"""What a batched function does on the event loop, and what in the thread of its batch."""

import threading
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from aiorpc_torch._batching import function
from aiorpc_torch._batching.collate import Collation
from aiorpc_torch._batching.function import BatchFunction

_rows_of = function.rows_of


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the threads in which rows are counted, filled from now on."""
    found: list[int] = []

    def rows_of(*args: object) -> object:
        found.append(threading.get_ident())
        return _rows_of(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(function, "rows_of", rows_of)
    return found


def new(run: object) -> BatchFunction:
    assert callable(run)
    return BatchFunction(run, is_method=False, collation=Collation(concat=True, pad_to=(8,)))


CALLS = [(torch.ones(2),), (torch.ones(3),)]


async def test_rows_are_counted_once_in_the_thread_of_the_batch(threads: list[int]) -> None:
    """The event loop serves others meanwhile: arguments may be trees of many tensors."""
    used: list[int] = []

    def double(x: Tensor) -> Tensor:
        used.append(threading.get_ident())
        return 2 * x

    results = await new(double).run(None, CALLS)
    assert [*map(len, results)] == [2, 3]
    assert threads == used
    assert threads != [threading.get_ident()]


async def test_so_they_are_for_a_generator(threads: list[int]) -> None:
    used: list[int] = []

    def steps(x: Tensor) -> Iterator[Tensor]:
        used.append(threading.get_ident())
        yield x
        yield 2 * x

    lengths = [[*map(len, each)] async for each in new(steps).iterate(None, CALLS)]
    assert lengths == [[2, 3]] * 2
    assert threads == used
    assert threads != [threading.get_ident()]
