"""`exports=` in a world of several processes."""

import os

import pytest

import aiorpc_torch as aiorpc
from aiorpc_torch import NotExported, call, create, remote
from tests.support.actors import Counter

# ── in several processes ────────────────────────────────────────────────────────────────────────


async def test_every_process_of_a_world() -> None:
    """Every process of a world has the same exports."""
    async with aiorpc.local_world(["other"], exports=[Counter, "operator"]):
        counter = await create("other", Counter, 1)
        assert await remote(counter).add(1) == 2
        with pytest.raises(NotExported, match=r"getpid") as caught:
            await call("other", os.getpid)
        assert "on worker 'other'" in str(caught.value.__cause__)
