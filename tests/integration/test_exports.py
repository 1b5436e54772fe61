"""`exports=` in a world of several processes."""

import os

import pytest

from aiorpc_torch import NotExported, call, create, remote
from aiorpc_torch.testing import world
from tests.support.actors import Counter

# ── in several processes ────────────────────────────────────────────────────────────────────────


@pytest.mark.promise("security.exports")
async def test_every_process_of_a_world() -> None:
    """Every process of a world has the same exports."""
    async with world(["other"], exports=[Counter, "operator"]):
        counter = await create("other", Counter, 1)
        assert await remote(counter).add(1) == 2
        with pytest.raises(NotExported, match=r"getpid") as caught:
            await call("other", os.getpid)
        assert "on worker 'other'" in str(caught.value.__cause__)
