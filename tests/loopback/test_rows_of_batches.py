"""Batches of arrays, of rows and with padding, from end to end."""

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import aiorpc_torch as aiorpc
from aiorpc_torch import BatchContractError, Broadcast, Fill, Round, batched, each, remote
from aiorpc_torch.observe import stats
from tests.support.gated_batches import arrived, asks, cancel, new_gated, settled


@pytest.fixture
def gated(world: aiorpc.types.Worker) -> Callable[..., tuple[Any, Any]]:
    """`new_gated`, in a world of one."""
    return new_gated


def rows(count: int, first: float = 0.0) -> Tensor:
    """So many rows of two numbers, which are first, first + 1, ..."""
    return torch.arange(first, first + count)[:, None].expand(count, 2).clone()


def lengths(made: Any) -> list[int]:
    """How many rows each batch had."""
    return [len(batch) for batch in made.batches]


# ── arrays ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.promise("batching.arrays")
async def test_arrays_in_and_arrays_out(gated: Any) -> None:
    """One tensor in, of numbers too. An array that is returned gives each caller one of its own."""
    made, far = gated(
        max_size=3, max_wait=1000.0, stack=True, answer=lambda x: {**x, "y": (2 * x["x"]).numpy()}
    )
    values = [{"x": np.full(2, n, "int16"), "n": n} for n in range(3)]
    got = await settled(*asks(far, *values))
    (batch,) = made.batches
    assert (batch["x"].shape, batch["x"].dtype) == ((3, 2), torch.int16)
    assert batch["n"].dtype == torch.int64
    for n, found in enumerate(got):
        assert (type(found["y"]), found["y"].dtype) == (np.ndarray, "int16")
        assert found["y"].tolist() == [2 * n] * 2
        found["y"] += 1  # its own


@pytest.mark.promise("batching.stacked_apart")
async def test_an_array_and_a_tensor_are_in_batches_of_their_own(gated: Any) -> None:
    """In a round they cannot be: the later caller is told, and the round comes about."""
    made, far = gated(max_size=2, stack=True, answer=lambda x: x)
    got = await settled(*asks(far, torch.zeros(2), np.zeros(2, "float32")))
    assert [len(batch) for batch in made.batches] == [1, 1]
    assert [found.tolist() for found in got] == [[0.0, 0.0]] * 2

    _, meet = gated(Round(2), stack=True, answer=lambda x: x)
    (first,) = asks(meet, torch.zeros(2))
    await arrived(meet)
    (refused,) = await settled(*asks(meet, np.zeros(2, "float32")))
    assert isinstance(refused, ValueError)
    assert "differs in structure, dtypes or shapes" in str(refused)
    assert [len(found) for found in await settled(first, *asks(meet, torch.ones(2)))] == [2, 2]


# ── rows ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.promise("batching.joined")
@pytest.mark.parametrize("device", [None, "cpu"])
@pytest.mark.parametrize("array", [False, True])
async def test_rows_are_joined_and_cut(gated: Any, device: str | None, array: bool) -> None:
    """In order of arrival, also no rows; each caller gets what it would get alone."""
    made, far = gated(
        max_size=4,
        max_wait=1000.0,
        concat=True,
        device=device,
        answer=lambda x: (2 * x, {"sums": x.sum(1)}),
    )
    values: list[Any] = [rows(3), rows(0), rows(1, 5.0), rows(4, 9.0)]
    values = [value.numpy() for value in values] if array else values
    for got in (await settled(*asks(far, *values)), await asyncio.gather(*map(made.ask, values))):
        for value, (twice, more) in zip(values, got, strict=True):
            assert type(twice) is type(more["sums"]) is Tensor
            assert twice.tolist() == (2 * value).tolist()
            assert more["sums"].tolist() == value.sum(1).tolist()
            twice += 1  # its own
    assert lengths(made) == [8, 8]
    assert made.batches[0].tolist() == [[n] * 2 for n in (0, 1, 2, 5, 9, 10, 11, 12)]


@pytest.mark.promise("batching.joined_weight")
async def test_rows_weigh(gated: Any) -> None:
    """A batch is the longest start of the queue that fits; a heavier call goes alone."""
    made, far = gated(max_weight=8, concat=True, answer=lambda x: x)  # max_size is 8, too
    made.gate.clear()
    calls = asks(far, *map(rows, (1, 3, 5, 3, 0, 20, 1)))
    await arrived(far)
    made.gate.set()
    assert [*map(len, await settled(*calls))] == [1, 3, 5, 3, 0, 20, 1]
    assert lengths(made) == [4, 8, 0, 20, 1]


@pytest.mark.promise("batching.unstackable")
@pytest.mark.parametrize(
    ("bad", "error", "text"),
    [
        (torch.tensor(1.0), ValueError, "has no rows, or an argument without"),
        (np.array(1.0), ValueError, "has no rows, or an argument without"),
        ({}, ValueError, "has no rows, or an argument without"),
        ({"a": rows(2), "b": rows(3)}, ValueError, "have 2 and 3 rows"),
        (2.0, ValueError, "has no rows"),
        ("text", TypeError, "a str cannot be stacked"),
        (rows(9), ValueError, "9 rows are more than the largest of pad_to=(4, 8)"),
    ],
    ids=str,
)
async def test_what_has_no_rows_is_its_callers_alone(
    gated: Any, bad: Any, error: type[Exception], text: str
) -> None:
    """It is told at the call what to pass."""
    _, far = gated(max_size=4, concat=True, pad_to=(4, 8), answer=lambda x: x)
    got = await settled(*asks(far, rows(2), bad, rows(1)))
    assert type(got[1]) is error
    assert text in str(got[1])
    assert [*map(len, (got[0], got[2]))] == [2, 1]


async def test_all_arguments_have_as_many_rows(gated: Any) -> None:
    _, far = gated(max_size=4, concat=True, answer=lambda x: x)
    (refused,) = await settled(far.ask(rows(2), rows(3)))
    assert "the arguments of a call of" in str(refused)
    assert "have 2 and 3 rows" in str(refused)
    assert (await far.ask(rows(2), scale=rows(2))).tolist() == rows(2).tolist()


@pytest.mark.promise("batching.stacked_apart")
async def test_rows_that_differ_are_joined_apart(gated: Any) -> None:
    """Whatever differs but their number."""
    made, far = gated(max_size=8, concat=True, answer=lambda x: x)
    kinds: list[Any] = [rows(2), rows(2).double(), rows(2)[:, :1], rows(2)[:, 0], rows(2).numpy()]
    got = await settled(*asks(far, *kinds, rows(3)))
    assert sorted(lengths(made)) == [2, 2, 2, 2, 5]
    assert [*map(len, got)] == [2] * 5 + [3]


@pytest.mark.promise("batching.contract")
@pytest.mark.parametrize(
    "answer",
    [lambda x: x[1:], lambda x: [*x, 1], lambda x: [1, 2], lambda x: x.sum(), lambda x: (x, x[1:])],
)
async def test_another_number_of_rows(gated: Any, answer: Any) -> None:
    """Fails every caller."""
    _, far = gated(max_size=2, concat=True, answer=answer)
    got = await settled(*asks(far, rows(2), rows(3)))
    assert [type(found) for found in got] == [BatchContractError] * 2
    assert all("Made.ask got a batch of 2" in str(found) for found in got)


@pytest.mark.promise("batching.own_exception")
async def test_a_list_of_rows(gated: Any) -> None:
    """Each caller gets a list of its rows' results, or the first exception among them."""
    made, far = gated(max_size=3, concat=True)
    made.answer = lambda x: [LookupError(n) if n == 3 else n for n in x[:, 0].int().tolist()]
    got = await settled(*asks(far, rows(2), rows(3, 2.0), rows(0)))
    assert (got[0], got[2]) == ([0, 1], [])
    assert isinstance(got[1], LookupError)
    made.answer = Broadcast
    assert [len(found) for found in await settled(*asks(far, rows(2), rows(1)))] == [3, 3]


async def test_a_round_of_rows(gated: Any) -> None:
    """Its result is for all; of `each` the values of its rows."""
    made, far = gated(Round(2), concat=True, answer=lambda x: x.mean())
    assert await settled(*asks(far, rows(1, 3.0), rows(3))) == [1.5, 1.5]
    made.answer = lambda x: each(x[:, 0].tolist())
    assert await settled(*asks(far, rows(1, 3.0), rows(2))) == [[3.0], [0.0, 1.0]]


async def test_a_call_that_is_cancelled_takes_its_rows_along(gated: Any) -> None:
    """In the queue they are not joined; in a batch they are cut off from the others'."""
    made, far = gated(max_size=3, concat=True, answer=lambda x: x)
    made.gate.clear()
    first, second = asks(far, rows(1), rows(2, 1.0))
    await arrived(far)
    third, fourth = asks(far, rows(3), rows(4))
    await arrived(far)
    await cancel(far, first, third)
    made.gate.set()
    assert (await settled(second, fourth))[0].tolist() == rows(2, 1.0).tolist()
    assert lengths(made) == [3, 4]


# ── padding ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.promise("batching.padded")
@pytest.mark.parametrize("device", [None, "cpu"])
@pytest.mark.parametrize("kind", ["tensor", "array", "number", "list"])
async def test_a_stack_is_padded(gated: Any, kind: str, device: str | None) -> None:
    """To one of the sizes with its last row; each caller gets its own result, and no other."""
    made, far = gated(max_size=4, stack=True, pad_to=[2, 4], device=device)
    make = {"tensor": lambda n: torch.full((2,), n), "array": lambda n: np.full(2, n)}.get(
        kind, int
    )
    made.answer = (lambda x: x.tolist()) if kind == "list" else lambda x: x
    for size in (1, 2, 3, 4, 7):
        got = await settled(*asks(far, *map(make, range(size))))
        assert [np.asarray(found).max() for found in got] == [*range(size)]
    assert lengths(made) == [2, 2, 4, 4, 4, 4]
    assert np.asarray(made.batches[2]).reshape(4, -1)[:, 0].tolist() == [0, 1, 2, 2]


@pytest.mark.promise("batching.padded")
async def test_rows_are_padded(gated: Any) -> None:
    """No batch has more than the largest size; zeros are the padding of no rows."""
    made, far = gated(max_size=64, concat=True, pad_to=(4, 8), answer=lambda x: x)
    values = [rows(n, 1.0) for n in (1, 0, 2, 4, 6, 1)]
    got = await settled(*asks(far, *values))
    assert [found.tolist() for found in got] == [value.tolist() for value in values]
    assert lengths(made) == [8, 8]
    assert made.batches[0][:, 0].tolist() == [1, 1, 2, 1, 2, 3, 4, 4]
    assert made.batches[1][:, 0].tolist() == [1, 2, 3, 4, 5, 6, 1, 1]
    (none,) = await settled(*asks(far, rows(0)))
    assert none.shape == (0, 2)
    assert made.batches[2].tolist() == [[0.0, 0.0]] * 4


@pytest.mark.promise("batching.contract")
async def test_rows_that_are_no_rows(gated: Any) -> None:
    """The error speaks of rows, and not of lists with an entry for each caller."""
    made, far = gated(max_size=2, concat=True, answer=lambda x: x[:1])
    found = await settled(*asks(far, rows(2), rows(3)))
    for each_error in found:
        assert type(each_error) is BatchContractError
        assert str(each_error).endswith(
            "got a batch of 2 with 5 rows and returned 1 results: return one row for each row of "
            "its arguments"
        )
    made.answer = lambda x: None
    text = str((await settled(*asks(far, rows(2), rows(3))))[0])
    assert "returned None: return a tensor or an array (or a tree of them) with one row for" in text


class Joined:
    limit = 8

    @batched(max_weight=8, concat=True)
    def bounded(self, x: Tensor) -> Tensor:
        return x

    @batched(max_weight=lambda self: self.limit, concat=True)
    def bounded_by_the_object(self, x: Tensor) -> Tensor:
        return x

    @batched(max_size=4, concat=True)
    def unbounded(self, x: Tensor) -> Tensor:
        return x


@pytest.mark.usefixtures("world")
async def test_fill_is_that_of_rows() -> None:
    """A larger call fills one batch; without a bound of the rows the calls count."""
    far = remote(aiorpc.RRef(Joined()))
    for method in (far.bounded, far.bounded_by_the_object, far.unbounded):
        for count in (4, 12):
            await method(rows(count))
    found = stats().batches
    for name in ("bounded", "bounded_by_the_object"):
        of_rows = found[f"Joined.{name}"]
        assert (of_rows.rows, of_rows.max_rows, of_rows.fill) == (12.0, 8, 0.75)
    of_calls = found["Joined.unbounded"]
    assert (of_calls.rows, of_calls.max_rows, of_calls.fill) == (None, None, 0.25)


@pytest.mark.promise("batching.contract")
async def test_padding_is_a_part_of_the_contract(gated: Any) -> None:
    """The function answers for what it got; an exception of padding is nobody's."""
    made, far = gated(max_size=4, stack=True, pad_to=(4,), answer=lambda x: x[:3])
    got = await settled(*asks(far, 1, 2, 3))
    assert [type(found) for found in got] == [BatchContractError] * 3
    assert "got a batch of 3 with 4 rows and returned 3 results: return one row for" in str(got[0])
    made.answer = lambda x: [*x.tolist()[:3], LookupError("of padding")]
    assert await settled(*asks(far, 1, 2, 3)) == [1, 2, 3]


async def test_sizes_that_are_functions(gated: Any) -> None:
    """They are checked as a batch starts: its callers learn what does not fit."""
    _, far = gated(Fill(lambda self: 3), stack=True, pad_to=(2,), answer=lambda x: x)
    assert await settled(*asks(far, 1, 2)) == [1, 2]
    got = await settled(*asks(far, 1, 2, 3))
    assert [type(found) for found in got] == [ValueError] * 3
    assert "3 rows are more than the largest of pad_to=(2,)" in str(got[0])
    assert await settled(*asks(far, 4)) == [4]


class Layer(torch.nn.Module):
    """Its sizes are noted as the one that compiles it would see them."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(2, 3)
        self.sizes: set[int] = set()

    @batched(max_size=16, concat=True, pad_to=(4, 16))
    def infer(self, x: Tensor) -> Tensor:
        self.sizes.add(len(x))
        found: Tensor = self.net(x)
        return found


@pytest.mark.usefixtures("world")
async def test_gradients_of_rows_are_their_callers() -> None:
    """Also in a thread and with padding; a caller's rows get those of its own result."""
    layer = Layer()
    mine, others = rows(3).requires_grad_(), rows(2, 7.0).requires_grad_()
    found, _ = await asyncio.gather(layer.infer(mine), layer.infer(others))
    torch.autograd.backward(found.sum())
    assert mine.grad is not None
    torch.testing.assert_close(mine.grad, layer.net.weight.sum(0).expand(3, 2))
    assert others.grad is None or not others.grad.any()
    assert layer.sizes == {16}
    assert (await remote(aiorpc.RRef(layer)).infer(rows(1))).shape == (1, 3)
    assert layer.sizes == {4, 16}


async def test_as_many_calls_as_rows(gated: Any) -> None:
    """Where rows are bounded, `max_size` may be left out."""
    made, far = gated(stack=True, pad_to=(1, 3), answer=lambda x: x)
    await settled(*asks(far, *(torch.ones(1) for _ in range(4))))
    assert lengths(made) == [3, 1]
