"""Calls to a worker with `exports=`: refused calls are not even unpickled."""

import asyncio
import functools
import os
import pickle
import sys
from collections.abc import AsyncIterator, Callable
from typing import Any, ClassVar

import pytest
import torch
from actors import Counter
from torch import nn

import aiorpc_torch as aiorpc
from aiorpc_torch import NotExported, RRef, batched, call, create, fetch, remote
from aiorpc_torch._protocol.pickling import pack
from aiorpc_torch._protocol.targets import BoundTarget, CreateTarget, FunctionTarget, MethodTarget
from aiorpc_torch._server.exports import ExportPolicy

ran: list[Any] = []  # by what is not to be run


class Base:
    async def inherited(self) -> str:
        return "inherited"


class Shop(Base):
    secret = "plain data"
    tax: ClassVar[Callable[..., Any]] = functools.partial(max, 2)

    class Shelf:
        def __init__(self) -> None:
            self.items = 3

    async def buy(self, item: Any = None) -> Any:
        return item

    def count(self) -> int:
        return 1

    async def items(self, count: int) -> AsyncIterator[int]:
        for item in range(count):
            yield item

    @batched(max_size=4)
    async def double(self, numbers: list[int]) -> list[int]:
        return [2 * number for number in numbers]

    @staticmethod
    def static() -> str:
        return "static"

    @classmethod
    def by_class(cls) -> str:
        return cls.__name__

    def _private(self) -> None:
        ran.append("private")

    @property
    def computed(self) -> Any:
        ran.append("property")
        return lambda: 1


class Branch(Shop):
    async def local(self) -> str:
        return "local"


class Closed:
    async def open(self) -> None:
        ran.append("closed")


def price(item: Any = None) -> Any:
    return item


def other(item: Any = None) -> None:
    ran.append("other")


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


async def test_exported_functions() -> None:
    """Call own functions and torch's; a factory does not export its class."""
    async with World(price, torch.add, make_closed) as me:
        assert await call(me, price, 3) == 3
        assert await call(me, torch.add, torch.ones(2), 1) == pytest.approx([2, 2])
        assert torch.equal(await call(me, torch.add, torch.ones(2), 1), torch.full((2,), 2.0))
        closed = await create(me, make_closed)
        assert type(await fetch(closed)) is Closed, "who holds an RRef may fetch"
        with pytest.raises(NotExported, match=r"test_exports\.Closed\.open"):
            await remote(closed).open()
        number = await create(me, price, 7)
        assert await call(number, price) == 7


async def test_an_exported_module() -> None:
    """Export the public names defined in a module and its submodules, not its imports."""
    async with World("actors", "torch.nn") as me:
        counter = await create(me, Counter, 5)
        assert await remote(counter).add(1) == 6
        net = await create(me, nn.Linear, 2, 1)
        assert (await call(net, nn.Linear.forward, torch.ones(1, 2))).shape == (1, 1)
        for function in (os.getpid, price, torch.add):
            with pytest.raises(NotExported):
                await call(me, function)


# ── what is refused ─────────────────────────────────────────────────────────────────────────────


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


async def test_private_names_and_data_stay_so() -> None:
    """An export does not open private names, data or properties."""
    async with World(Shop, "test_exports") as me:
        shop = await create(me, Shop)
        with pytest.raises(AttributeError, match="private"):
            await call(shop, Shop._private)
        with pytest.raises(NotExported):
            await call(me, Shop._private, 1)
        with pytest.raises(TypeError, match=r"Shop\.secret is a str"):
            await remote(shop).secret()
        with pytest.raises(TypeError, match=r"Shop\.computed is a property"):
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


# ── pickles made by hand ────────────────────────────────────────────────────────────────────────


def written(*parts: Any) -> bytes:
    """Return a pickle made of opcodes and of short strings."""
    short = pickle.SHORT_BINUNICODE
    texts = (
        short + bytes([len(part)]) + part.encode() if isinstance(part, str) else part
        for part in parts
    )
    return b"\x80\x05" + b"".join(texts) + pickle.STOP


def name(module: str, qualname: str) -> tuple[Any, ...]:
    return module, qualname, pickle.STACK_GLOBAL


WIRE = "aiorpc_torch._protocol.targets"
PICKLING = "aiorpc_torch._protocol.pickling"
FUNCTION = name(WIRE, "FunctionTarget")
ONE = pickle.TUPLE1 + pickle.NEWOBJ
HOSTILE = {
    "system": (*FUNCTION, *name("os", "system"), ONE),
    "through a module that is exported": (*FUNCTION, *name("test_exports", "os.system"), ONE),
    "by getattr": (
        *FUNCTION,
        *name("builtins", "getattr"),
        *name("test_exports", "os"),
        "system",
        pickle.TUPLE2 + pickle.REDUCE + ONE,
    ),
    "called while it is read": (
        *FUNCTION,
        *name("test_exports", "other"),
        pickle.EMPTY_TUPLE + pickle.REDUCE + ONE,
    ),
    "an attribute set": (
        *FUNCTION,
        *name("test_exports", "price"),
        pickle.NONE + pickle.EMPTY_DICT,
        "__name__",
        "hacked",
        pickle.SETITEM + pickle.TUPLE2 + pickle.BUILD + ONE,
    ),
    "our own class changed": (
        *name(WIRE, "MethodTarget"),
        pickle.NONE + pickle.EMPTY_DICT,
        "kind",
        pickle.NONE + pickle.SETITEM + pickle.TUPLE2 + pickle.BUILD,
    ),
    "our own function changed": (
        *name(PICKLING, "read_rref"),
        pickle.EMPTY_DICT,
        "hacked",
        pickle.NONE + pickle.SETITEM + pickle.BUILD,
    ),
    "a module that is not loaded": (*FUNCTION, *name("this", "s"), ONE),
    "no name at all": (pickle.NONE,),
    "a number": (*FUNCTION, pickle.BININT1 + b"\x05", ONE),
    "nothing": (),
    "an extension": (*FUNCTION, pickle.EXT1 + b"\x05", ONE),
    "a persistent id": (pickle.NONE + pickle.BINPERSID,),
    "another word of ours": (*name(PICKLING, "PickledValue"), pickle.EMPTY_TUPLE + pickle.NEWOBJ),
    "an object named by a number": (
        *name(WIRE, "MethodTarget"),
        pickle.BININT1 + b"\x05",
        "m",
        pickle.TUPLE2 + pickle.NEWOBJ,
    ),
    "deep": (pickle.EMPTY_LIST + pickle.TUPLE1 * 10_000,),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_target_made_by_hand(what: str) -> None:
    """A hostile target is refused; reading it runs, imports and changes nothing."""
    exports = ExportPolicy([price, "test_exports"])
    before = {"this" in sys.modules, price.__name__, MethodTarget.bind}
    with pytest.raises(NotExported):
        exports.load_target(written(*HOSTILE[what]), ())
    assert before == {"this" in sys.modules, price.__name__, MethodTarget.bind}
    assert not hasattr(sys.modules[PICKLING].read_rref, "hacked")
    target = MethodTarget((0, 3), "m")
    assert exports.load_target(pack(target).data, ()) == target


@pytest.mark.parametrize(
    "target",
    [
        FunctionTarget(price),
        CreateTarget(Shop),
        BoundTarget((0, 3), Shop.buy),
        MethodTarget((0, 3), "buy"),
    ],
)
def test_what_is_read_is_what_was_packed(target: Any) -> None:
    """`load_target` returns the target that was pickled."""
    exports = ExportPolicy([price, Shop])
    packed = pack(target)
    assert exports.load_target(packed.data, packed.tensors) == target


def test_exports_say_what_they_are() -> None:
    """The repr names classes, functions and modules."""
    assert repr(ExportPolicy([Shop, price, "actors"])) == "<ExportPolicy Shop, price, actors>"


# ── in several processes ────────────────────────────────────────────────────────────────────────


@pytest.mark.worlds
async def test_every_process_of_a_world() -> None:
    """Every process of a world has the same exports."""
    async with aiorpc.local_world(["other"], exports=[Counter, "operator"]):
        counter = await create("other", Counter, 1)
        assert await remote(counter).add(1) == 2
        with pytest.raises(NotExported, match=r"getpid") as caught:
            await call("other", os.getpid)
        assert "on worker 'other'" in str(caught.value.__cause__)
