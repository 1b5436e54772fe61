"""Trees of tensors, stacked and split again, as values."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from aiorpc_torch._batching.collate import Collator, collate, collate_key, uncollate
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


def tensors_in(tree: Any) -> list[Tensor]:
    parts = parts_of(tree)
    return [tree] if parts is None else [t for part in parts.values() for t in tensors_in(part)]


def owns(tensor: Tensor) -> bool:
    return tensor.untyped_storage().nbytes() == tensor.nbytes


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
    rows = uncollate(stacked)
    assert rows is not None
    assert len(rows) == size
    for value, row in zip(values, rows, strict=True):
        assert same(value, row)


@given(trees, st.integers(1, 5))
def test_a_row_drags_nothing_along(make: Callable[[int], Any], size: int) -> None:
    """Its tensors own their storage, share none, and can be changed in place."""
    stacked = collate([make(n) for n in range(size)], Collator())
    rows = uncollate(stacked) or []
    tensors = [tensor for row in rows for tensor in tensors_in(row)]
    assert all(map(owns, tensors))
    places = [tensor.data_ptr() for tensor in (*tensors, *tensors_in(stacked)) if tensor.numel()]
    assert len(set(places)) == len(places)
    for tensor in tensors:
        tensor.zero_()


@given(trees, trees)
def test_of_one_key_is_what_collates(a: Callable[[int], Any], b: Callable[[int], Any]) -> None:
    """Equal kinds stack, and come back as they were; a kind says nothing of values."""
    first, second = a(1), b(2)
    assert collate_key(first) == collate_key(a(3))
    assert hash(collate_key(first)) == hash(collate_key(a(3)))
    if collate_key(first) == collate_key(second):
        rows = uncollate(collate([first, second], Collator())) or []
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
    # reads it.
    torch.set_warn_always(True)
    try:
        assert collate([array], Collator()).tolist() == [[1.0] * 3]
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
        np.zeros(2),
    ],
    ids=repr,
)
def test_what_has_no_rows(value: Any) -> None:
    """Not even a number in it, nor columns of different lengths."""
    assert uncollate(value) is None


def test_uncollate_what_torch_returns() -> None:
    """Named results of torch's own functions are tuples of columns."""
    rows = uncollate(torch.tensor([[1.0, 5.0], [7.0, 3.0]]).max(1))
    assert rows is not None
    assert [(row.values.item(), row.indices.item()) for row in rows] == [(5.0, 1), (7.0, 0)]


@pytest.mark.parametrize("inference", [False, True])
def test_a_row_of_a_network_output(inference: bool) -> None:
    """With its gradients, and in place, where autograd forbids to change a view of many."""
    net = torch.nn.Linear(3, 2)
    with torch.inference_mode(inference):
        rows = uncollate(net(torch.ones(4, 3)))
    assert rows is not None
    assert all(map(owns, rows))
    if not inference:
        rows[1].mul_(2).sum().backward()
        assert net.bias.grad is not None
        assert net.bias.grad.tolist() == [2.0, 2.0]
