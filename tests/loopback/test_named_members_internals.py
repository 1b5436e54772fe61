"""Maps over named members at the moment in which they end, and what a name keeps."""

import asyncio
import gc
from typing import Any

import pytest

import aiorpc_torch as aiorpc
from aiorpc_torch import (
    NotInWorld,
    WorkerLeft,
    WorkerLost,
    members,
    register,
    remote,
    unregister,
)
from aiorpc_torch._endpoint import entry_points
from aiorpc_torch.testing import drop_connection
from tests.support.registered import NAME, Env
from tests.support.two_ends import until

from .test_named_members import SOON

pytestmark = pytest.mark.usefixtures("world")


async def test_a_member_that_is_lost_after_the_end_of_a_map() -> None:
    """Its item has the error of the map: no member gets it any more."""
    register(NAME, env := Env())
    results: Any = members(NAME).map(Env.stay, [0])
    step = asyncio.create_task(anext(results))
    await until(lambda: env.items)
    results._run._fail(NotInWorld("this worker has left its world"))
    drop_connection("main", WorkerLost("main", "died"))
    async with asyncio.timeout(SOON):
        with pytest.raises(NotInWorld, match="has left its world"):
            await step


async def test_a_member_that_comes_as_a_map_is_ended() -> None:
    """It gets no item that waits, as nobody takes the result."""
    register(NAME, leaving := Env())
    envs: aiorpc.types.NamedMembers[Env] = members(NAME)
    await remote(envs.any()).add(0)  # the connection is open
    results: Any = envs.map(Env.stay, [0])
    step = asyncio.create_task(anext(results))
    await until(lambda: leaving.items)
    drop_connection("main", WorkerLeft("main"))
    ends: list[Any] = []
    envs._watch.listen(lambda: [end() for end in ends])  # after the map was told
    ends.append(results._run.stop)
    unregister(NAME)
    other = register(NAME, Env())
    await until(lambda: [*envs] == [other])
    async with asyncio.timeout(SOON):
        await remote(other).count()  # meanwhile the map hears of the change
        assert await remote(other).count() == 0
    step.cancel()
    await asyncio.wait((step,))


async def test_nothing_is_kept_of_members_that_are_dropped() -> None:
    """The object of a name that is not registered any more is freed, also with members alive."""
    node: Any = entry_points.here
    envs = members(NAME)
    register(NAME, Env())
    await envs.wait()
    assert NAME in node.registry._listeners
    del envs
    gc.collect()
    await until(lambda: NAME not in node.registry._listeners)
    await until(lambda: not node.registry._states)
