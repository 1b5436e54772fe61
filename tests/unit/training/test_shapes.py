"""The tensors of a tree, by their places."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from aiorpc_torch.training.snapshots import check_shapes, shapes


@dataclass
class Node:
    weight: Tensor
    name: str = ""


def test_places_of_tensors() -> None:
    tree = {"a": [torch.ones(2), {"b": Node(torch.ones(1, 3))}], 7: (1, torch.ones(()))}
    found = {place: tuple(shape) for place, shape in shapes(tree).items()}
    assert found == {"['a'][0]": (2,), "['a'][1]['b'].weight": (1, 3), "[7][1]": ()}
    assert shapes(torch.ones(2)) == {"the tree": torch.Size([2])}
    assert shapes({"kind": Node, "text": "text"}) == {}


def test_later_versions() -> None:
    first = shapes({"a": torch.ones(2), "b": []})
    check_shapes(first, {"a": torch.zeros(2, dtype=torch.half), "b": [torch.ones(1)]})
    with pytest.raises(ValueError, match=r"\['a'\] must be \(2,\), got \(1, 2\)"):
        check_shapes(first, {"a": torch.ones(1, 2), "b": []})
    with pytest.raises(ValueError, match=r"lacks \['a'\]"):
        check_shapes(first, {"b": []})
