"""Calls to a worker with `exports=`: refused calls are not even unpickled."""

import asyncio
import functools
import os
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import aiorpc_torch as aiorpc
from aiorpc_torch import NotExported, RRef, call, create, fetch, remote
from tests.support.actors import Counter
from tests.support.exported_shop import Shop, other, price, ran


class Branch(Shop):
    async def local(self) -> str:
        return "local"


class Closed:
    async def open(self) -> None:
        ran.append("closed")


@functools.lru_cache
def cached_price(item: int) -> int:
    return item


def make_closed() -> Closed:
    return Closed()


class Mine:
    """An argument that records its unpickling."""

    def __reduce__(self) -> Any:
        return ran.append, ("unpickled",)


@pytest.fixture(autouse=True)
def _nothing_ran() -> Any:
    ran.clear()
    yield
    assert not ran


class World:
    def __init__(self, *exports: Any) -> None:
        self.world = aiorpc.local_world(0, exports=exports)

    async def __aenter__(self) -> str:
        return (await self.world.__aenter__()).name

    async def __aexit__(self, *exc: Any) -> None:
        await self.world.__aexit__(*exc)


# ── what is answered ────────────────────────────────────────────────────────────────────────────


@pytest.mark.promise("security.exports")
async def test_an_exported_class() -> None:
    """Create an object; call every kind of public method, by name and typed."""
    async with World(Shop) as me:
        shop = await create(me, Shop)
        assert await remote(shop).buy([1]) == [1]
        assert await remote(shop).buy(item=2) == 2
        assert await remote(shop).count() == 1
        assert await remote(shop).inherited() == "inherited"
        assert await asyncio.gather(*(remote(shop).double(n) for n in range(3))) == [0, 2, 4]
        assert [item async for item in remote(shop).items(3)] == [0, 1, 2]
        for _ in range(3):
            assert await call(shop, Shop.buy, 3) == 3
        assert await call(shop, Shop.inherited) == "inherited"
        assert await call(shop, Shop.double, 4) == 8
        assert await call(me, Shop.static) == "static"
        assert await call(me, Shop.by_class) == "Shop"
        assert await remote(shop).by_class() == "Shop"
        assert await remote(shop).tax(1) == 2
        assert isinstance(await fetch(shop), Shop)


async def test_an_object_of_a_subclass() -> None:
    """Allow the public methods of the subclass, but not its creation."""
    async with World(Shop) as me:
        branch = RRef(Branch())
        assert await remote(branch).local() == "local"
        assert await call(branch, Branch.local) == "local"
        assert await call(branch, Shop.buy, 1) == 1
        with pytest.raises(NotExported, match=r"test_exports\.Branch"):
            await create(me, Branch)


async def test_the_error_names_the_worker_and_the_class() -> None:
    """A class of the program's main module has one name, also in a child of a local world."""
    async with World(price) as me:
        foreign = RRef(Closed())
        with pytest.raises(NotExported, match=r"worker 'main' does not export .*\.Closed\.open;"):
            await remote(foreign).open()
        with pytest.raises(NotExported, match=r"worker 'main' has exports="):
            await call(me, Closed().open)
        Closed.__module__, module = "__mp_main__", Closed.__module__
        try:
            with pytest.raises(NotExported, match=r" __main__\.Closed\.open; add"):
                await remote(foreign).open()
        finally:
            Closed.__module__ = module


@pytest.mark.promise("security.exports")
async def test_exported_functions() -> None:
    """Call own functions, torch's and NumPy's; a factory does not export its class."""
    async with World(price, torch.add, make_closed, np.add, cached_price) as me:
        assert await call(me, price, 3) == 3
        assert await call(me, cached_price, 3) == 3, "of C, and has a name"
        assert await call(me, np.add, 3, 1) == 4
        assert await call(me, torch.add, torch.ones(2), 1) == pytest.approx([2, 2])
        assert torch.equal(await call(me, torch.add, torch.ones(2), 1), torch.full((2,), 2.0))
        closed = await create(me, make_closed)
        assert type(await fetch(closed)) is Closed, "who holds an RRef may fetch"
        with pytest.raises(NotExported, match=r"test_exports\.Closed\.open"):
            await remote(closed).open()
        number = await create(me, price, 7)
        assert await call(number, price) == 7


@pytest.mark.promise("security.exports")
async def test_an_exported_module() -> None:
    """Export the public names defined in a module and its submodules, not its imports."""
    async with World("tests.support.actors", "torch.nn") as me:
        counter = await create(me, Counter, 5)
        assert await remote(counter).add(1) == 6
        net = await create(me, nn.Linear, 2, 1)
        assert (await call(net, nn.Linear.forward, torch.ones(1, 2))).shape == (1, 1)
        for function in (os.getpid, price, torch.add):
            with pytest.raises(NotExported):
                await call(me, function)


# ── what is refused ─────────────────────────────────────────────────────────────────────────────


@pytest.mark.promise("security.exports", "security.exports_unread")
@pytest.mark.parametrize("target", [Closed, other, os.getpid, torch.sub, Shop, Shop.static])
async def test_what_is_not_exported(target: Any) -> None:
    """Neither call nor create it, and do not unpickle its arguments; the error names it."""
    async with World(price) as me:
        for asked in (call(me, target, Mine()), create(me, target, Mine())):
            with pytest.raises(NotExported, match=target.__qualname__) as caught:
                await asked
            assert isinstance(caught.value, PermissionError)
        assert await call(me, price, 1) == 1


async def test_methods_of_what_is_not_exported() -> None:
    """Refuse them by name, typed and as a stream, at the first call and later."""
    async with World(Shop, price) as me:
        closed = RRef(Closed())
        for _ in range(3):
            with pytest.raises(NotExported):
                await remote(closed).open(Mine())
            with pytest.raises(NotExported):
                await call(closed, Closed.open, Mine())
            with pytest.raises(NotExported):
                await call(closed, Shop.buy, Mine())
        with pytest.raises(NotExported):
            async for _ in remote(closed).open(Mine()):
                pass
        with pytest.raises(NotExported, match="builtins"):
            await remote(RRef([1])).append(Mine())
        assert await call(me, price, 1) == 1


async def test_refused_beside_answered() -> None:
    """Calls of the same message keep their own arguments, large tensors too."""
    async with World(Shop) as me:
        shop, closed = await create(me, Shop), RRef(Closed())
        large = [torch.full((20_000,), float(n)) for n in range(6)]
        calls = [
            remote(closed if n % 2 else shop).open([large[n], n])
            if n % 2
            else remote(shop).buy(large[n] if n else [large[n]])
            for n in range(6)
        ]
        found = await asyncio.gather(*calls, return_exceptions=True)
        assert [type(each) for each in found[1::2]] == [NotExported] * 3
        assert torch.equal(found[0][0], large[0])
        assert torch.equal(found[2], large[2])
        assert torch.equal(found[4], large[4])


@pytest.mark.promise("security.private")
async def test_private_names_and_data_stay_so() -> None:
    """An export does not open private names, data or properties."""
    async with World(Shop, "tests.support.exported_shop") as me:
        shop = await create(me, Shop)
        with pytest.raises(AttributeError, match="private"):
            await call(shop, Shop._private)
        with pytest.raises(NotExported):
            await call(me, Shop._private, 1)
        with pytest.raises(TypeError, match=r"Shop\.secret is of type str"):
            await remote(shop).secret()
        with pytest.raises(TypeError, match=r"Shop\.computed is of type property"):
            await remote(shop).computed()


async def test_more_than_a_name() -> None:
    """A target that is not pickled by name is refused without unpickling."""
    async with World(price, Shop) as me:
        for target in (functools.partial(price, Mine()), Shop().buy, [].append):
            with pytest.raises(NotExported):
                await call(me, target)


@pytest.mark.parametrize("exports", [Shop, "actors", [3], [functools.partial(price)]])
async def test_invalid_exports(exports: Any) -> None:
    """Invalid exports raise before anything is started."""
    with pytest.raises(TypeError, match="exports"):
        async with aiorpc.local_world(0, exports=exports):
            pass


async def test_a_missing_module() -> None:
    """A missing module raises before anything is started."""
    with pytest.raises(ImportError, match="no_such_module"):
        async with aiorpc.local_world(["never"], exports=["no_such_module"]):
            pass
