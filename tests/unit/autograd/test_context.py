"""Autograd contexts without a world."""

import pytest
import torch

from aiorpc_torch import NotInWorld
from aiorpc_torch.autograd import context, parameter_rrefs


async def test_outside_a_world() -> None:
    with pytest.raises(NotInWorld):
        async with context():
            pass
    with pytest.raises(NotInWorld):
        await parameter_rrefs(torch.nn.Linear(1, 1))
