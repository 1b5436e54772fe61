"""Names of objects outside of a world."""

import pytest

import aiorpc_torch as aiorpc
from aiorpc_torch import NotInWorld


def test_outside_a_world() -> None:
    """Nothing can be registered, and nothing is there to unregister."""
    with pytest.raises(NotInWorld, match="in no world"):
        aiorpc.register("ps", object())
    with pytest.raises(ValueError, match="'ps' is not registered; registered names: none"):
        aiorpc.unregister("ps")
