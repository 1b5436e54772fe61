"""Worlds that are entered without a block, as by cells of a notebook."""

import asyncio
import contextlib
import gc
import re

import pytest

import aiorpc_torch as aiorpc
from tests.support.fork_servers import torch_runs


async def collected() -> None:
    """Collect garbage, and let the event loop close asynchronous generators that were dropped."""
    for _ in range(3):
        gc.collect()
        await asyncio.sleep(0)


async def open_world() -> aiorpc.types.Worker:
    """Enter a world as the cell of a notebook does that keeps no name of it."""
    return await aiorpc.local_world(0).__aenter__()


@pytest.mark.promise("worlds.open")
async def test_a_world_without_a_name_lives_until_it_is_left() -> None:
    me = await open_world()
    await collected()
    assert await aiorpc.call(me.name, abs, -1) == 1
    await me.world.__aexit__(None, None, None)
    assert not torch_runs()
    await me.world.__aexit__(None, None, None)  # it has been left
    async with aiorpc.local_world(0) as again:
        assert await aiorpc.call(again.name, abs, -1) == 1


@pytest.mark.promise("worlds.open")
async def test_the_cell_that_opens_a_world_runs_twice() -> None:
    """The first world lives, and the error says how to leave it."""
    world = aiorpc.local_world(0)
    me = await world.__aenter__()
    for _ in range(2):
        world = aiorpc.local_world(0)
        text = re.escape(
            "(in a notebook: `await me.world.__aexit__(None, None, None)`, where `me` is"
        )
        with pytest.raises(RuntimeError, match=text):
            await world.__aenter__()
        await collected()
        assert await aiorpc.call(me.name, abs, -1) == 1
    await me.world.__aexit__(None, None, None)
    async with aiorpc.local_world(0) as me:
        assert await aiorpc.call(me.name, abs, -1) == 1


@pytest.mark.promise("worlds.open")
def test_the_cell_that_opens_a_world_in_a_thread_runs_twice() -> None:
    world = aiorpc.in_thread(aiorpc.local_world(0))
    me = world.__enter__()
    world = aiorpc.in_thread(aiorpc.local_world(0))
    text = re.escape("(in a notebook: `me.world.__exit__(None, None, None)`, where `me` is")
    with pytest.raises(RuntimeError, match=text):
        world.__enter__()
    del world
    gc.collect()
    assert me.run(aiorpc.call(me.name, abs, -1)) == 1
    me.world.__exit__(None, None, None)
    assert not torch_runs()


@pytest.mark.parametrize("is_dropped", [True, False])
@pytest.mark.promise("worlds.open")
def test_the_end_of_an_event_loop_ends_its_world(
    is_dropped: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """`asyncio.run` has cancelled all tasks before. Nothing is logged, and the next one works."""
    kept = []

    async def main() -> None:
        world = aiorpc.local_world(0)
        me = await world.__aenter__()
        assert await aiorpc.call(me.name, abs, -1) == 1
        if not is_dropped:
            kept.append(world)

    for _ in range(2):
        asyncio.run(main(), debug=True)
        assert not torch_runs()
    assert not [each for each in caplog.records if each.levelname == "ERROR"], caplog.text


@aiorpc.local_world(0)
async def decorated() -> int:
    return await aiorpc.call("main", abs, -1)


async def test_a_world_decorates_a_function() -> None:
    """Each call of the function has a world of its own, as with `asynccontextmanager`."""
    assert [await decorated(), await decorated()] == [1, 1]


async def test_a_world_that_cannot_be_entered_leaves_nothing() -> None:
    """As its entry is cancelled."""
    world = aiorpc.local_world(0)
    entering = asyncio.create_task(world.__aenter__())
    await asyncio.sleep(0)
    entering.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await entering
        await world.__aexit__(None, None, None)
    assert not torch_runs()
