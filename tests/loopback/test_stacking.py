"""`@batched(..., stack=True)` from end to end."""

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import aiorpc_torch as aiorpc
from tests.support.gated_batches import arrived, asks, new_gated, settled
from tests.unit.batching.test_collate import Seen, same, tensors_in

# ── through a queue ─────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def gated(world: aiorpc.types.Worker) -> Callable[..., tuple[Any, Any]]:
    """`new_gated`, in a world of one."""
    return new_gated


TREES: dict[str, Callable[[int], Any]] = {
    "tensors": lambda n: torch.full((2, 3), n),
    "large tensors": lambda n: torch.full((300, 300), float(n)),
    "arrays": lambda n: np.full((3,), n, "float32"),
    "scalars of numpy": lambda n: np.float64(n),
    "numbers": lambda n: n / 2,
    "bools": lambda n: n > 1,
    "a dict": lambda n: {"x": torch.full((2,), n), "y": {"z": float(n)}},
    "a tuple": lambda n: (torch.full((2,), n), n),
    "a list": lambda n: [n, np.full((2, 2), n)],
    "a dataclass": lambda n: Seen(torch.full((2, 2), float(n)), n / 4),
}


@pytest.mark.promise("batching.stacked")
@pytest.mark.parametrize("make", TREES.values(), ids=TREES)
@pytest.mark.parametrize("device", [None, "cpu"])
async def test_a_stacked_function_gets_and_returns_trees(
    gated: Any, make: Callable[[int], Any], device: str | None
) -> None:
    """One tree with the batch as first dimension; what it returns is split in the same way."""
    made, far = gated(
        max_size=3, max_wait=1000.0, stack=True, device=device, answer=lambda tree: tree
    )
    if isinstance(make(0), list):  # of a body's, one result for each
        made.answer = tuple
    got = await settled(*asks(far, *map(make, range(3))))
    (batch,) = made.batches
    is_leaf = isinstance(make(0), np.ndarray | np.generic | float | bool)
    assert type(batch) is (Tensor if is_leaf else type(make(0)))
    for n, each in enumerate(got):
        assert same(tuple(make(n)) if isinstance(make(n), list) else make(n), each)
    local = await asyncio.gather(*map(made.ask, map(make, range(3))))
    assert all(same(a, b) for a, b in zip(got, local, strict=True))


RESULTS: dict[str, Callable[[Tensor], Any]] = {
    "a tensor": lambda x: x,
    "views": lambda x: {"t": x.transpose(1, 2), "s": x[:, ::2], "e": x[:, :1].expand(-1, 5, -1)},
    "a tree": lambda x: {"a": {"b": x}, "c": x.sum((1, 2))},
    "a dataclass": lambda x: Seen(x, x[:, 0, 0]),
}


@pytest.mark.promise("batching.results")
@pytest.mark.parametrize("answer", RESULTS.values(), ids=RESULTS)
@pytest.mark.parametrize("size", [3, 200])
@pytest.mark.parametrize("stacked", [True, False])
async def test_each_callers_row_is_its_own(
    gated: Any, answer: Callable[[Tensor], Any], size: int, stacked: bool
) -> None:
    """Of tensors and trees of them: a row keeps no batch alive, and may be changed in place."""
    made, far = gated(
        max_size=4,
        stack=stacked,
        answer=lambda items: answer(items if stacked else torch.stack(items)),
    )
    values = [torch.full((size, size), float(n)) for n in range(4)]
    wanted = answer(torch.stack(values))
    for got in (await settled(*asks(far, *values)), await asyncio.gather(*map(made.ask, values))):
        for n, each in enumerate(got):
            for row, column in zip(tensors_in(each), tensors_in(wanted), strict=True):
                assert torch.equal(row, column[n])
                assert row.untyped_storage().nbytes() == row.nbytes
                row.add_(1)


@pytest.mark.promise("batching.stacked_apart")
async def test_shapes_that_differ_are_batches_of_their_own(gated: Any) -> None:
    """They do not hold each other up, whatever it is that differs."""
    made, far = gated(max_size=2, max_wait=1000.0, stack=True)
    x = torch.zeros(2)
    kinds: list[Any] = [x, torch.zeros(3), x.int(), {"a": x}, {"b": x}, (x,), [x], 1, 1.0, True]
    lonely = asks(far, *kinds[:-1])
    await arrived(far)
    assert made.batches == []
    assert await settled(*asks(far, True, False)) == [True, False]
    await settled(*lonely, *asks(far, *kinds[:-1]))
    assert len(made.batches) == len(kinds)


@pytest.mark.promise("batching.unstackable")
@pytest.mark.parametrize("bad", ["text", None, {1, 2}, {"x": [torch.zeros(1), "text"]}], ids=repr)
async def test_what_cannot_be_stacked_is_its_callers_alone(gated: Any, bad: Any) -> None:
    """A TypeError at the call."""
    _, far = gated(max_size=3, max_wait=0.01, stack=True)
    got = await settled(*asks(far, torch.zeros(2), bad, torch.ones(2)))
    assert type(got[1]) is TypeError
    assert "cannot be stacked" in str(got[1])
    assert [each.tolist() for each in (got[0], got[2])] == [[0.0, 0.0], [1.0, 1.0]]


async def test_a_number_that_no_tensor_holds_is_its_callers_alone(gated: Any) -> None:
    """As with anything else that cannot be stacked."""
    _, far = gated(max_size=2, max_wait=0.01, stack=True)
    got = await settled(*asks(far, 1, 2**70))
    assert type(got[1]) is TypeError
    assert got[0] == 1
