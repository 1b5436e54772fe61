"""Trees of tensors, stacked and split again, as values; without a world.

A function that `batched` stacks for gets what its callers pass, and gives it back to them.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from aiorpc_torch import BatchContractError, batched


@dataclass
class Seen:
    frame: Any
    reward: Any


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclass
class Derived:
    """A field that is not passed in."""

    frame: Any
    size: float = field(default=1.0, init=False)


def parts_of(tree: Any) -> dict[Any, Any] | None:
    if isinstance(tree, dict):
        return tree
    if isinstance(tree, Seen | Derived):
        return {each.name: getattr(tree, each.name) for each in fields(tree)}
    return dict(enumerate(tree)) if isinstance(tree, tuple | list) else None


def as_tensor(leaf: Any) -> Tensor:
    """Return a leaf as a tensor; torch reads no array backwards."""
    return torch.as_tensor(leaf.copy() if isinstance(leaf, np.ndarray) else leaf)


def same(a: Any, b: Any) -> bool:
    """Whether two trees have equal structure and numbers, be these tensors or not."""
    mine, theirs = parts_of(a), parts_of(b)
    if mine is None or theirs is None:
        return bool(torch.equal(as_tensor(a), as_tensor(b)))
    return (
        type(a) is type(b) and [*mine] == [*theirs] and all(same(mine[k], theirs[k]) for k in mine)
    )


def tensors_in(tree: Any) -> list[Any]:
    """Its tensors, arrays and numbers."""
    parts = parts_of(tree)
    return [tree] if parts is None else [t for part in parts.values() for t in tensors_in(part)]


def owns(leaf: Any) -> bool:
    if isinstance(leaf, Tensor):
        return leaf.untyped_storage().nbytes() == leaf.nbytes
    return isinstance(leaf, np.generic) or leaf.base is None


def place(leaf: Any) -> Any:
    return leaf.data_ptr() if isinstance(leaf, Tensor) else leaf.__array_interface__["data"][0]


def back(tree: Any) -> Any:
    """Return what a function got. A list would be one result for each caller."""
    return {"it": tree}


def through(
    values: Sequence[Any], compute: Callable[[Any], Any] = back, **options: Any
) -> tuple[list[Any], list[Any]]:
    """Call a function with all values at once; return the trees that it gets, and the results.

    A result may be an exception.
    """
    trees: list[Any] = []

    @batched(**({} if "pad_to" in options else {"max_size": 100}) | options)
    async def function(tree: Any) -> Any:
        trees.append(tree)
        return compute(tree)

    async def call(value: Any) -> Any:
        return await function(value)

    async def main() -> list[Any]:
        return await asyncio.gather(*map(call, values), return_exceptions=True)

    return trees, asyncio.run(main())


def stacked(values: Sequence[Any], **options: Any) -> Any:
    """Return the one tree that a function gets for values of one kind."""
    (tree,), _ = through(values, stack=True, **options)
    return tree


def rows_of(tree: Any, calls: int = 2) -> list[Any]:
    """Return what the callers get of a tree that a stacked function returns."""
    _, results = through([X] * calls, lambda _: tree, stack=True)
    return results


# ── as values ───────────────────────────────────────────────────────────────────────────────────

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.uint8]
shapes = st.lists(st.integers(0, 3), max_size=3).map(tuple)


@st.composite
def leaves(draw: st.DrawFn) -> Callable[[int], Any]:
    """A function of a number, whose results are of one kind."""
    shape, number = draw(shapes), draw(st.integers(0, 100))
    dtype = draw(st.sampled_from([*DTYPES, torch.bool, torch.complex64]))
    array = draw(st.sampled_from(["float32", "int64", "uint8", "bool"]))
    return draw(
        st.sampled_from(
            [
                lambda n: torch.full(shape, n + number).to(dtype),
                lambda n: torch.full((3, *shape), n + number).to(dtype).transpose(0, -1),
                lambda n: torch.full((2, *shape), n).to(dtype)[:1].expand(4, *shape),
                lambda n: np.full(shape, n + number, array),
                lambda n: np.float32(n),
                lambda n: n + number,
                lambda n: n / 7,
                lambda n: n % 2 == 0,
                lambda n: complex(n, number),
            ]
        )
    )


def grown(
    inner: st.SearchStrategy[Callable[[int], Any]],
) -> st.SearchStrategy[Callable[[int], Any]]:
    several = st.lists(inner, min_size=1, max_size=3)
    return st.one_of(
        st.dictionaries(st.sampled_from(["a", "b", 3]), inner, min_size=1).map(
            lambda made: lambda n: {name: make(n) for name, make in made.items()}
        ),
        several.map(lambda made: lambda n: tuple(make(n) for make in made)),
        several.map(lambda made: lambda n: [make(n) for make in made]),
        st.builds(lambda a, b: lambda n: Seen(a(n), b(n)), inner, inner),
        st.builds(lambda a, b: lambda n: Pair(a(n), b(n)), inner, inner),
    )


trees = st.recursive(leaves(), grown, max_leaves=6)


@pytest.mark.promise("batching.stacked")
@given(trees, st.integers(1, 5), st.sampled_from([None, "cpu", torch.device("cpu")]))
def test_rows_are_what_was_stacked(make: Callable[[int], Any], size: int, device: Any) -> None:
    """What a function gives back equals what was passed, structure and all."""
    values = [make(n) for n in range(size)]
    (tree,), rows = through(values, stack=True, device=device)
    assert (parts_of(tree) is None) == (parts_of(values[0]) is None)
    for tensor in tensors_in(tree):
        assert isinstance(tensor, Tensor)
        assert len(tensor) == size
    assert len(rows) == size
    for value, row in zip(values, rows, strict=True):
        assert same(value, row["it"])


@given(trees, st.integers(1, 5))
def test_a_row_drags_nothing_along(make: Callable[[int], Any], size: int) -> None:
    """Its tensors own their storage, share none, and can be changed in place."""
    (tree,), rows = through([make(n) for n in range(size)], stack=True)
    leaves = [leaf for row in rows for leaf in tensors_in(row)]
    assert all(map(owns, leaves))
    kept = [leaf for leaf in leaves if not isinstance(leaf, np.generic)]
    places = [place(leaf) for leaf in (*kept, *tensors_in(tree)) if leaf.nbytes]
    assert len(set(places)) == len(places)
    for leaf in kept:
        leaf[...] = 0


@given(trees, trees)
def test_of_one_kind_is_what_stacks(a: Callable[[int], Any], b: Callable[[int], Any]) -> None:
    """Equal kinds stack, others come alone, and both as they were; a kind says no values."""
    stacked([a(1), a(3)])
    first, second = a(1), b(2)
    _, rows = through([first, second], stack=True)
    assert same(first, rows[0]["it"])
    assert same(second, rows[1]["it"])


X = torch.zeros(2)
DIFFERENT: list[Any] = [
    X,
    X.double(),
    X.int(),
    torch.zeros(3),
    torch.zeros(2, 1),
    X.to_sparse(),
    np.zeros(2),
    np.zeros(2, "float32"),
    np.zeros(3),
    1,
    1.0,
    True,
    1j,
    np.float64(1),
    {"a": X},
    {"b": X},
    {"a": X, "b": X},
    {"a": 1},
    (X,),
    (X, X),
    ((X,), X),
    [X],
    Pair(X, X),
    Seen(X, X),
    Seen(X, 1),
]


def test_kinds_that_differ() -> None:
    """No two of these stack."""
    trees, results = through(DIFFERENT, lambda _: [3], stack=True)
    assert results == [3] * len(trees) == [3] * len(DIFFERENT)


@pytest.mark.parametrize(
    ("value", "what"),
    [
        ("text", "a str"),
        (b"text", "a bytes"),
        (None, "a NoneType"),
        ({1, 2}, "a set"),
        (Seen, "a type"),
        pytest.param(iter([]), "a list_iterator", id="an iterator"),
        (range(3), "a range"),
        ({"a": [X, "text"]}, "a str"),
        (Seen(X, None), "a NoneType"),
    ],
    ids=repr,
)
def test_what_cannot_be_stacked(value: Any, what: str) -> None:
    """The error names the class of what is in the way, however deep it is."""
    (error,) = refused(value)
    assert str(error).startswith(f"{what} cannot be stacked")


def refused(*values: Any) -> list[TypeError]:
    """Return the errors of values that reach no function."""
    trees, errors = through(values, stack=True)
    assert not trees
    assert {*map(type, errors)} == {TypeError}
    return errors


# Each with what it must not be in one batch with, if it does not stack itself.
HALF_WAY: dict[str, tuple[Any, Any]] = {
    "an int beyond 64 bits": (2**70, 1),
    "an array read backwards": (np.arange(3.0)[::-1], np.arange(3.0)),
    "an array of objects": (np.array(["x", None], object), np.array(["y", None], object)),
    "a dataclass with a field that is not passed in": (Derived(X), Derived(X)),
}


@pytest.mark.parametrize(("odd", "usual"), HALF_WAY.values(), ids=HALF_WAY)
def test_what_is_half_way_to_a_tensor(odd: Any, usual: Any) -> None:
    """It is refused, or stacked with others or alone."""
    _, results = through([usual, odd], stack=True)
    for value, result in zip((usual, odd), results, strict=True):
        if isinstance(result, Exception):
            assert isinstance(result, TypeError)
            assert "cannot be stacked" in str(result)
        else:
            assert same(value, result["it"])


def test_an_array_that_cannot_be_written() -> None:
    """Is stacked as any other: with a copy, and without a warning."""
    array = np.ones(3)
    array.flags.writeable = False
    torch.set_warn_always(True)
    try:
        assert stacked([array]).tolist() == [[1.0] * 3]
        assert stacked([array], device="cpu").tolist() == [[1.0] * 3]
    finally:
        torch.set_warn_always(False)


@pytest.mark.parametrize(
    "value",
    [
        torch.tensor(1.0),
        {"a": torch.zeros(2), "b": torch.zeros(3)},
        {"a": torch.zeros(2), "b": torch.tensor(1.0)},
        {"a": torch.zeros(2), "b": 1},
        {"a": [1, 2], "b": [3, 4]},
        (torch.zeros(2), None),
        {},
        (),
        None,
        "no",
        3,
        np.float64(2),
        np.array(2),
        {"a": torch.zeros(2), "b": np.zeros(3)},
    ],
    ids=repr,
)
def test_what_has_no_rows(value: Any) -> None:
    """Not even a number in it, nor columns of different lengths."""
    assert {*map(type, rows_of(value))} == {BatchContractError}


def test_what_torch_returns() -> None:
    """Named results of torch's own functions are tuples of columns."""
    rows = rows_of(torch.tensor([[1.0, 5.0], [7.0, 3.0]]).max(1))
    assert [(row.values.item(), row.indices.item()) for row in rows] == [(5.0, 1), (7.0, 0)]


@pytest.mark.parametrize("inference", [False, True])
def test_a_row_of_a_network_output(inference: bool) -> None:
    """With its gradients, and in place, where autograd forbids to change a view of many."""
    net = torch.nn.Linear(3, 2)
    with torch.inference_mode(inference):
        rows = rows_of(net(torch.ones(4, 3)), 4)
    assert all(map(owns, rows))
    if not inference:
        rows[1].mul_(2).sum().backward()
        assert net.bias.grad is not None
        assert net.bias.grad.tolist() == [2.0, 2.0]


# ── arrays ──────────────────────────────────────────────────────────────────────────────────────


def test_arrays_become_a_tensor() -> None:
    """Also those that are read backwards. What torch has no dtype for is refused."""
    tree = stacked([np.ones(2), np.zeros(4)[::-2]])
    assert isinstance(tree, Tensor)
    assert tree.tolist() == [[1.0, 1.0], [0.0, 0.0]]
    refused(np.array(["x"]), np.array("x"), np.array(["2020-02-01"], "datetime64[D]"))
    (error,) = refused(np.array([None]))
    assert str(error).startswith("an array of objects cannot be stacked")


def test_rows_of_arrays() -> None:
    """Arrays of their own, also of what torch has no dtype for."""
    days = np.array([["2020-02-01", "2021-03-04"], ["2022-01-01", "2022-01-02"]], "datetime64[D]")
    rows = rows_of({"day": days, "count": np.arange(2)})
    assert [row["day"].tolist() for row in rows] == days.tolist()
    assert [row["count"] for row in rows] == [0, 1]
    assert all(row["day"].base is None for row in rows)
    _, runs = through([torch.zeros(2), torch.zeros(0)], lambda _: days, concat=True)
    assert [each.tolist() for each in runs] == [days.tolist(), []]


# ── rows ────────────────────────────────────────────────────────────────────────────────────────

counts_of_rows = st.lists(st.integers(0, 4), min_size=1, max_size=5)


@st.composite
def trees_of_rows(draw: st.DrawFn) -> Callable[[range], Any]:
    """A function of row numbers, which makes a tree with such rows."""
    shape, dtype = draw(shapes), draw(st.sampled_from(DTYPES))

    def tensor(rows: range) -> Tensor:
        made = [torch.full(shape, float(n)).to(dtype) for n in rows]
        return torch.stack(made or [torch.zeros(shape, dtype=dtype)])[: len(rows)]

    def array(rows: range) -> Any:
        return tensor(rows).float().numpy()

    made: Callable[[range], Any] = draw(
        st.sampled_from(
            [
                tensor,
                array,
                lambda rows: {"a": tensor(rows), "b": {"c": array(rows)}},
                lambda rows: (tensor(rows), Seen(array(rows), [tensor(rows)])),
            ]
        )
    )
    return made


def ranges(counts: list[int]) -> list[range]:
    return [range(sum(counts[:n]), sum(counts[: n + 1])) for n in range(len(counts))]


@pytest.mark.promise("batching.joined")
@given(trees_of_rows(), counts_of_rows, st.sampled_from([None, "cpu"]))
def test_runs_of_rows_are_what_was_joined(
    make: Callable[[range], Any], counts: list[int], device: Any
) -> None:
    """In the order of the calls, with none left out, also of a call without rows."""
    values = [make(rows) for rows in ranges(counts)]
    (joined,), found = through(values, concat=True, device=device)
    assert same(joined, make(range(sum(counts))))
    for value, mine in zip(values, found, strict=True):
        assert same(value, mine["it"])
        assert all(map(owns, tensors_in(mine["it"])))


@pytest.mark.promise("batching.padded")
@given(trees_of_rows(), counts_of_rows, st.sets(st.integers(1, 30), min_size=1))
def test_padding_repeats_the_last_row(
    make: Callable[[range], Any], counts: list[int], sizes: set[int]
) -> None:
    """To the next size, and the runs of the callers are the same as without; zeros without rows."""
    values = [make(rows) for rows in ranges(counts)]
    rows, most = sum(counts), 5 * 4
    (joined,), found = through(values, concat=True, pad_to=sorted({*sizes, most}))
    total = min(size for size in {*sizes, most} if size >= rows)
    last = max(rows - 1, 0)  # of no rows: those of number 0 are zeros
    (wanted,), _ = through(
        [make(range(rows)), *[make(range(last, last + 1))] * (total - rows)], concat=True
    )
    assert same(joined, wanted)
    for value, mine in zip(values, found, strict=True):
        assert same(value, mine["it"])


def test_more_rows_than_there_is_padding_for() -> None:
    """A call of them is refused."""
    trees, (error,) = through([X.expand(9, 2)], concat=True, pad_to=(4, 8))
    assert not trees
    assert isinstance(error, ValueError)
    assert str(error).startswith("9 rows are more than the largest of pad_to=")


@given(trees, st.integers(1, 6))
def test_padding_of_what_is_stacked(make: Callable[[int], Any], size: int) -> None:
    """The last call's argument comes once more for each row that is lacking."""
    values = [make(n) for n in range(size)]
    (tree,), kept = through(values, stack=True, pad_to=(2, 5, 8))
    total = 2 if size <= 2 else 5 if size <= 5 else 8
    assert {len(each) for each in tensors_in(tree)} == {total}
    everything = rows_of(back(tree), total)
    assert all(same(row["it"], make(size - 1)) for row in everything[size:])
    assert all(same(row["it"], value) for row, value in zip(kept, values, strict=True))


def test_padding_leaves_gradients_alone() -> None:
    """Of rows whose results are dropped none comes back."""
    mine = torch.ones(2, 3, requires_grad=True)
    (joined,), (result,) = through([mine], lambda x: x * 2, concat=True, pad_to=(4,))
    assert joined.shape == (4, 3)
    result.sum().backward()
    assert mine.grad is not None
    assert mine.grad.tolist() == [[2.0] * 3] * 2


def test_a_number_is_in_each_row_of_its_call() -> None:
    """Of the dtype that torch gives it; padding has that of the last row."""
    values: list[Any] = [(x_rows(2), {"n": 1, "s": 0.5}), (x_rows(1), {"n": 7, "s": 1.5})]
    ((x, numbers),), _ = through(values, concat=True, pad_to=(5,))
    assert (numbers["n"].dtype, numbers["s"].dtype) == (torch.int64, torch.float32)
    assert numbers["n"].tolist() == [1, 1, 7, 7, 7]
    assert numbers["s"].tolist() == [0.5, 0.5, 1.5, 1.5, 1.5]
    assert len(x) == 5


def x_rows(count: int) -> Tensor:
    return X.expand(count, 2)
