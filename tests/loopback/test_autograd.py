"""Autograd contexts in a world of one: bad input, and torch without its symbols."""

from typing import Any

import pytest
import torch

from aiorpc_torch.autograd import context
from tests.support.autograd_graphs import vector


async def test_bad_input(world: Any) -> None:
    """It raises where it is given."""
    with pytest.raises(RuntimeError, match="is not open"):
        _ = context().id
    async with context() as ctx:
        for roots, error in [
            ([], ValueError),
            (3, TypeError),
            ([3.0], TypeError),
            (vector(), ValueError),
            (torch.tensor(1.0), ValueError),
        ]:
            with pytest.raises(error):
                await ctx.backward(roots)  # type: ignore[arg-type]
        with pytest.raises(RuntimeError, match="opened once"):
            await ctx.__aenter__()
        x = vector()
        await ctx.backward([(x * x).sum()])
        torch.testing.assert_close((await ctx.gradients())[x], 2 * x.detach())
        assert x.grad is None
        # torch's own functions take the context for its number.
        found: Any = torch.distributed.autograd.get_gradients(ctx)  # type: ignore[arg-type]
        torch.testing.assert_close(found[x], 2 * x.detach())
