"""One tree for fences and for collation: the tensors of every node that `collate` can split."""

from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from aiorpc_torch._batching.collate import Collator, collate
from aiorpc_torch._torch import cuda
from aiorpc_torch._torch.tree import children, map_tensors, rebuild, tensors_in

X, Y = torch.zeros(2), torch.ones(2)


@dataclass
class Frame:
    image: Any
    rest: Any = None


@dataclass(frozen=True, slots=True)
class Frozen:
    image: Any


@dataclass
class Unset:
    image: Any
    later: Any = field(init=False)


class Pair(NamedTuple):
    left: Any
    right: Any


TREES: dict[str, Any] = {
    "a tensor": X,
    "a dict": {"a": X, "b": Y},
    "an ordered dict": OrderedDict(a=X, b=Y),
    "a tuple and a list": (X, [Y]),
    "a named tuple": Pair(X, Y),
    "a dataclass": Frame(X, {"y": Y}),
    "a frozen dataclass": Frozen(X),
    "a dataclass in a list": [Frame(X, Pair(Y, 1))],
    "a field that is not set": Unset(X),
}


def ids(tensors: list[Tensor]) -> list[int]:
    return sorted(map(id, tensors))


@pytest.mark.parametrize("tree", TREES.values(), ids=TREES)
def test_a_fence_holds_every_tensor_that_collate_stacks(
    tree: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those in a dataclass that is not registered with torch's pytree."""
    stacked: list[Tensor] = []

    class Noting(Collator):
        def join(self, tensors: Any) -> Tensor:
            stacked.extend(tensors)
            return super().join(tensors)

    collate([tree], Noting())
    monkeypatch.setattr(cuda, "fence_tensors", list)
    fenced: Any = cuda.fence_tree(tree)
    assert ids(fenced) == ids(stacked)
    assert fenced


@pytest.mark.parametrize("tree", TREES.values(), ids=TREES)
def test_map_tensors(tree: Any) -> None:
    """Each tensor is replaced in a copy of its type; the tree itself stays as it is."""
    before = ids(tensors_in(tree))
    mapped = map_tensors(lambda tensor: tensor + 1, tree)
    assert type(mapped) is type(tree)
    assert len(tensors_in(mapped)) == len(before)
    assert not set(ids(tensors_in(mapped))) & set(before)
    assert ids(tensors_in(tree)) == before


def test_leaves() -> None:
    """Neither a class nor a set is a node; a number alone is searched in no time."""
    for leaf in (Frame, {1}, "text", 3, None, X):
        assert children(leaf) is None
    assert tensors_in([1.0, "text", None]) == []


def test_a_registered_class_is_searched() -> None:
    """A deque is a node of torch's pytree: fenced, though it cannot be collated."""
    assert ids(tensors_in({"last": deque([X, Frame(Y)])})) == ids([X, Y])


def test_cycles_end() -> None:
    """A dataclass may refer to its parent."""
    parent = Frame(X)
    parent.rest = [Frame(Y, parent), parent]
    assert ids(tensors_in(parent)) == ids([X, Y])


def test_rebuild_keeps_what_did_not_change() -> None:
    """Children that are not named stay, and `__post_init__` does not run again."""
    assert rebuild(Pair(1, 2), {0: 3}) == Pair(3, 2)
    assert rebuild(Frozen(1), {"image": 2}) == Frozen(2)
    assert rebuild({"a": 1, "b": 2}, {"b": 3}) == {"a": 1, "b": 3}
