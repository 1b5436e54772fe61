"""Trees of tensors, stacked and split again, as values."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from aiorpc_torch._batching.collate import (
    Collation,
    Collator,
    Rows,
    collate,
    collate_key,
    row_count,
    rows_of,
    uncollate,
    with_rows,
)
from aiorpc_torch._torch.tree import children


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
    if isinstance(tree, Seen):
        return vars(tree)
    return dict(enumerate(tree)) if isinstance(tree, tuple | list) else None


def same(a: Any, b: Any) -> bool:
    """Whether two trees have equal structure and numbers, be these tensors or not."""
    mine, theirs = parts_of(a), parts_of(b)
    if mine is None or theirs is None:
        return bool(torch.equal(torch.as_tensor(a), torch.as_tensor(b)))
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
    """`uncollate(collate(values))` equals the values, structure and all."""
    values = [make(n) for n in range(size)]
    assert len({collate_key(value) for value in values}) == 1
    stacked = collate(values, Collator(device))
    assert (children(stacked) is None) == (children(values[0]) is None)
    for tensor in tensors_in(stacked):
        assert len(tensor) == size
    assert row_count(stacked) == size
    rows = uncollate(stacked)
    assert len(rows) == size
    for value, row in zip(values, rows, strict=True):
        assert same(value, row)


@given(trees, st.integers(1, 5))
def test_a_row_drags_nothing_along(make: Callable[[int], Any], size: int) -> None:
    """Its tensors own their storage, share none, and can be changed in place."""
    stacked = collate([make(n) for n in range(size)], Collator())
    leaves = [leaf for row in uncollate(stacked) for leaf in tensors_in(row)]
    assert all(map(owns, leaves))
    kept = [leaf for leaf in leaves if not isinstance(leaf, np.generic)]
    places = [place(leaf) for leaf in (*kept, *tensors_in(stacked)) if leaf.nbytes]
    assert len(set(places)) == len(places)
    for leaf in kept:
        leaf[...] = 0


@given(trees, trees)
def test_of_one_key_is_what_collates(a: Callable[[int], Any], b: Callable[[int], Any]) -> None:
    """Equal kinds stack, and come back as they were; a kind says nothing of values."""
    first, second = a(1), b(2)
    assert collate_key(first) == collate_key(a(3))
    assert hash(collate_key(first)) == hash(collate_key(a(3)))
    if collate_key(first) == collate_key(second):
        rows = uncollate(collate([first, second], Collator()))
        assert same(first, rows[0])
        assert same(second, rows[1])


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


def test_keys_that_differ() -> None:
    """No two of these stack."""
    assert len({collate_key(value) for value in DIFFERENT}) == len(DIFFERENT)


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
    with pytest.raises(TypeError, match=f"^{what} cannot be stacked"):
        collate_key(value)


# Each with what it must not be in one batch with, if it does not stack itself.
HALF_WAY: dict[str, tuple[Any, Any]] = {
    "an int beyond 64 bits": (2**70, 1),
    "an array read backwards": (np.arange(3.0)[::-1], np.arange(3.0)),
    "an array of objects": (np.array(["x", None], object), np.array(["y", None], object)),
    "a dataclass with a field that is not passed in": (Derived(X), Derived(X)),
}


@pytest.mark.parametrize(("odd", "usual"), HALF_WAY.values(), ids=HALF_WAY)
def test_what_has_a_key_can_be_stacked(odd: Any, usual: Any) -> None:
    """Or it has none, or another than those that can."""
    try:
        kind = collate_key(odd)
    except TypeError:
        return
    if kind == collate_key(usual):
        collate([usual, odd], Collator())


def test_an_array_that_cannot_be_written() -> None:
    """Is stacked as any other: with a copy, and without a warning."""
    array = np.ones(3)
    array.flags.writeable = False
    torch.set_warn_always(True)
    try:
        assert collate([array], Collator()).tolist() == [[1.0] * 3]
        assert collate([array], Collator("cpu")).tolist() == [[1.0] * 3]
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
    assert row_count(value) is None


def test_uncollate_what_torch_returns() -> None:
    """Named results of torch's own functions are tuples of columns."""
    rows = uncollate(torch.tensor([[1.0, 5.0], [7.0, 3.0]]).max(1))
    assert [(row.values.item(), row.indices.item()) for row in rows] == [(5.0, 1), (7.0, 0)]


@pytest.mark.parametrize("inference", [False, True])
def test_a_row_of_a_network_output(inference: bool) -> None:
    """With its gradients, and in place, where autograd forbids to change a view of many."""
    net = torch.nn.Linear(3, 2)
    with torch.inference_mode(inference):
        rows = uncollate(net(torch.ones(4, 3)))
    assert all(map(owns, rows))
    if not inference:
        rows[1].mul_(2).sum().backward()
        assert net.bias.grad is not None
        assert net.bias.grad.tolist() == [2.0, 2.0]


# ── arrays ──────────────────────────────────────────────────────────────────────────────────────


def test_arrays_become_a_tensor() -> None:
    """Also those that are read backwards. Of what torch has no dtype for there is no key."""
    stacked = collate([np.ones(2), np.zeros(4)[::-2]], Collator())
    assert isinstance(stacked, Tensor)
    assert stacked.tolist() == [[1.0, 1.0], [0.0, 0.0]]
    for value in (np.array(["x"]), np.array("x"), np.array(["2020-02-01"], "datetime64[D]")):
        with pytest.raises(TypeError):
            collate_key(value)
    with pytest.raises(TypeError, match=r"^an array of objects cannot be stacked"):
        collate_key(np.array([None]))


def test_rows_of_arrays() -> None:
    """Arrays of their own, also of what torch has no dtype for."""
    days = np.array([["2020-02-01", "2021-03-04"], ["2022-01-01", "2022-01-02"]], "datetime64[D]")
    rows = uncollate({"day": days, "count": np.arange(2)})
    assert [row["day"].tolist() for row in rows] == days.tolist()
    assert [row["count"] for row in rows] == [0, 1]
    assert all(row["day"].base is None for row in rows)
    assert [each.tolist() for each in uncollate(days, 2, [2, 0])] == [days.tolist(), []]


# ── rows ────────────────────────────────────────────────────────────────────────────────────────

CONCAT = Collation(concat=True)
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
    assert len({collate_key(value, CONCAT) for value in values}) == 1
    joined = collate(values, Collator(device, concat=True))
    assert same(joined, make(range(sum(counts))))
    found = uncollate(joined, len(counts), counts)
    for value, mine in zip(values, found, strict=True):
        assert same(value, mine)
        assert all(map(owns, tensors_in(mine)))


@pytest.mark.promise("batching.padded")
@given(trees_of_rows(), counts_of_rows, st.sets(st.integers(1, 30), min_size=1))
def test_padding_repeats_the_last_row(
    make: Callable[[range], Any], counts: list[int], sizes: set[int]
) -> None:
    """To the next size, and the runs of the callers are the same as without; zeros without rows."""
    collation = Collation(concat=True, pad_to=tuple(sorted(sizes)))
    calls = [(make(rows),) for rows in ranges(counts)]
    rows = sum(counts)
    if rows > max(sizes):
        with pytest.raises(ValueError, match=f"^{rows} rows are more than the largest of pad_to="):
            rows_of(calls, collation)
        return
    found = rows_of(calls, collation)
    assert found == Rows(min(size for size in sizes if size >= rows), counts)
    padded = with_rows(calls, found)
    joined = collate([tree for (tree,) in padded], Collator(concat=True))
    assert row_count(joined) == found.total
    last = max(rows - 1, 0)  # of no rows: those of number 0 are zeros
    wanted = [make(range(rows)), *[make(range(last, last + 1))] * (found.total - rows)]
    assert same(joined, collate(wanted, Collator(concat=True)))
    for (value,), mine in zip(calls, uncollate(joined, len(calls), counts), strict=True):
        assert same(value, mine)


@given(trees, st.integers(1, 6))
def test_padding_of_what_is_stacked(make: Callable[[int], Any], size: int) -> None:
    """The last call's argument comes once more for each row that is lacking."""
    calls = [(make(n),) for n in range(size)]
    rows = rows_of(calls, Collation(pad_to=(2, 5, 8)))
    assert rows == Rows(2 if size <= 2 else 5 if size <= 5 else 8, None)
    stacked = collate([tree for (tree,) in with_rows(calls, rows)], Collator())
    assert row_count(stacked) == rows.total
    everything = uncollate(stacked)
    assert all(same(row, make(size - 1)) for row in everything[size:])
    kept = uncollate(stacked, size)
    assert len(kept) == size
    assert all(same(row, value) for row, (value,) in zip(kept, calls, strict=True))


def test_padding_leaves_gradients_alone() -> None:
    """Of rows whose results are dropped none comes back."""
    mine = torch.ones(2, 3, requires_grad=True)
    calls = with_rows([(mine,)], rows_of([(mine,)], Collation(concat=True, pad_to=(4,))))
    joined = collate([tree for (tree,) in calls], Collator(concat=True))
    assert joined.shape == (4, 3)
    uncollate(joined * 2, 1, [2])[0].sum().backward()
    assert mine.grad is not None
    assert mine.grad.tolist() == [[2.0] * 3] * 2


def test_a_number_is_in_each_row_of_its_call() -> None:
    """Of the dtype that torch gives it; padding has that of the last row."""
    calls: list[Any] = [(rows_of_x(2), {"n": 1, "s": 0.5}), (rows_of_x(1), {"n": 7, "s": 1.5})]
    assert len({collate_key(call, CONCAT) for call in calls}) == 1
    padded = with_rows(calls, rows_of(calls, Collation(concat=True, pad_to=(5,))))
    x, numbers = collate(padded, Collator(concat=True))
    assert (numbers["n"].dtype, numbers["s"].dtype) == (torch.int64, torch.float32)
    assert numbers["n"].tolist() == [1, 1, 7, 7, 7]
    assert numbers["s"].tolist() == [0.5, 0.5, 1.5, 1.5, 1.5]
    assert len(x) == 5


def rows_of_x(count: int) -> Tensor:
    return X.expand(count, 2)
