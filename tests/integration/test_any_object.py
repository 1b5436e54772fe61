"""Any object behind an RRef of another worker stays itself."""

import asyncio
from typing import Any

import pytest

from aiorpc_torch import Group, call, create, fetch, lookup, members, remote, supervised
from aiorpc_torch.testing import world
from tests.support.kinds_of_objects import MAKERS, Shop, is_made, make, register_made

UNPICKLED = {
    *("Python module", "lambda", "closure", "bound method"),
    *("traced module", "instance of a script class"),  # a copy is a RecursiveScriptModule
}
"""Kinds that pickle refuses, or whose copies are of another class."""


@pytest.mark.promise("calls.any_object")
async def test_objects_of_another_worker_stay_themselves() -> None:
    """By every way that makes an RRef from afar; what `fetch` gives is of the same class."""
    async with world(["a", "b"], max_restarts=1), asyncio.timeout(120.0):
        shop = await create("a", Shop)
        for kind, maker in MAKERS.items():
            await call("a", register_made, kind)
            found = members(kind)
            await found.wait(1)
            ways: list[Any] = [
                await create("a", make, kind),
                await create(shop, Shop.make, kind),
                await supervised("a", make, kind),
                await lookup(kind, on="a"),
                next(iter(found)),
            ]
            for rref in ways:
                assert await call(rref, is_made, kind), kind
            group = Group([*await create(["a", "b"], make, kind), *ways])
            assert all(await call(group, is_made, kind)), kind
            if kind not in UNPICKLED:
                assert type(await fetch(ways[0])) is type(maker()), kind


@pytest.mark.promise("calls.any_object")
async def test_calls_from_afar_change_the_object() -> None:
    """Of a dict, a list and a supervised dict; a third worker sees the changes."""
    async with world(["a", "b"], max_restarts=1), asyncio.timeout(60.0):
        state, replay = await create("a", dict), await create("a", list)
        kept = await supervised("a", make, "dict")
        await remote(state).update(steps=5)
        await remote(kept).update(steps=6)
        for number in range(3):
            await remote(replay).append({"state": number})
        assert await fetch(state) == {"steps": 5}
        assert await fetch(kept) == {"steps": 6}
        assert await call("b", look, state, replay) == (5, 3)


async def look(state: Any, replay: Any) -> tuple[int, int]:
    return (await fetch(state))["steps"], await call(replay, len)
