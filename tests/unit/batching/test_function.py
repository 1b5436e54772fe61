"""Batched functions, called once for all calls of a batch."""

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from aiorpc_torch import batched
from aiorpc_torch._batching import collate, function


@batched(max_size=8, concat=True)
def double(x: Tensor) -> Tensor:
    return 2 * x


@batched(max_size=8, concat=True)
def doubles(x: Tensor) -> Iterator[Tensor]:
    yield 2 * x
    yield 4 * x


@pytest.mark.parametrize("is_generator", [False, True])
async def test_rows_are_counted_in_the_thread_of_a_plain_def(
    monkeypatch: pytest.MonkeyPatch, is_generator: bool
) -> None:
    """Once for a batch, and not on the event loop: that takes milliseconds for many calls."""
    threads: list[threading.Thread] = []

    def counted(*args: Any) -> collate.Rows:
        threads.append(threading.current_thread())
        return collate.rows_of(*args)

    monkeypatch.setattr(function, "rows_of", counted)
    x = torch.ones(3, 2)
    found = [each async for each in doubles(x)] if is_generator else [await double(x)]
    assert [each.shape for each in found] == [x.shape] * len(found)
    assert len(threads) == 1
    assert threads[0] is not threading.current_thread()
