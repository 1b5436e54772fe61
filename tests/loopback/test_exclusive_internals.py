"""A copy of an exclusive object that is taken between its calls."""

import asyncio
from typing import Any

import pytest

from aiorpc_torch import remote
from aiorpc_torch._client.call import RemoteCall
from aiorpc_torch._wire.targets import FetchTarget

from .test_exclusive import new

pytestmark = pytest.mark.usefixtures("world")


async def test_a_copy_is_taken_between_calls() -> None:
    actor, rref = new()
    await asyncio.gather(remote(rref).work(1), _fetched(rref), remote(rref).work(2))
    assert actor.most == 1


async def _fetched(rref: Any) -> Any:
    """What `fetch` does elsewhere; on the owner it returns the object itself."""
    return await RemoteCall(rref, FetchTarget(rref), None)
