"""Names that are not called from outside: refused at both ends, and nothing of them is executed."""

import asyncio
import functools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import aiorpc_torch as aiorpc
from aiorpc_torch import RRef, call, remote
from tests.support.unchecked_calls import call_bound, past_the_caller

ran: list[str] = []


class Lazy:
    """A property of somebody's own."""

    def __init__(self, function: Any) -> None:
        self.function = function

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else self.function(instance)


class Guarded:
    value = 3
    nothing = None

    def __init__(self) -> None:
        self.held = lambda value="held": value
        self.data = [1]

    def __call__(self) -> None:
        ran.append("called")

    def _private(self) -> None:
        ran.append("private")

    def __mangled(self) -> None:
        ran.append("mangled")

    @property
    def computed(self) -> Any:
        ran.append("property")
        return lambda: 1

    @functools.cached_property
    def cached(self) -> Any:
        ran.append("cached")
        return lambda: 1

    @Lazy
    def lazy(self) -> Any:
        ran.append("lazy")
        return lambda: 1

    def public(self) -> str:
        return "public"

    @classmethod
    def of_class(cls) -> str:
        return cls.__name__

    @staticmethod
    def static() -> str:
        return "static"

    part = functools.partialmethod(public)

    @functools.singledispatchmethod
    def by_kind(self, kind: Any) -> str:
        return type(kind).__name__


class Slotted:
    __slots__ = ("__weakref__", "function")

    def __init__(self) -> None:
        self.function = len


PRIVATE = ["_private", "__mangled", "_Guarded__mangled", "__class__", "__reduce__"]
PRIVATE += ["__init__", "__getattribute__", "__dict__", "_private.__call__", "_"]
PARTS = ["data._private", "public.__call__", "data.append", "computed.real", "", " ", "a b", "1"]
DATA = {
    "value": "int",
    "data": "list",
    "nothing": "NoneType",
    "computed": "property",
    "cached": "cached_property",
    "lazy": "Lazy",
}


@pytest.fixture(autouse=True)
def _nothing_ran() -> Any:
    ran.clear()
    yield
    assert not ran, "nothing is executed of what is refused"


@pytest.mark.promise("security.private")
@pytest.mark.parametrize("name", [*PRIVATE, *PARTS])
async def test_names_that_are_not_called(world: aiorpc.types.Worker, name: str) -> None:
    """At the caller with `remote`, and at the callee whatever the caller has sent."""
    guarded = RRef(Guarded())
    if not hasattr(type(remote(guarded)), name):  # `__class__` is that of the proxy itself
        with pytest.raises(AttributeError, match=r"private|not a method name"):
            getattr(remote(guarded), name)
    for _ in range(3):  # as an RRef, as an offer, as a number
        with pytest.raises(AttributeError, match=r"private|not a method name"):
            await past_the_caller(guarded, name)
    assert await remote(guarded).public() == "public"


@pytest.mark.parametrize("name", [5, None, b"public", ("public",)])
async def test_names_that_are_none(world: aiorpc.types.Worker, name: Any) -> None:
    """An error of the callee's, which goes on."""
    guarded = RRef(Guarded())
    with pytest.raises(
        (ValueError, aiorpc.RemoteError), match=r"malformed|cannot read a frame|Expected `str`"
    ):
        await past_the_caller(guarded, name)
    assert await remote(guarded).public() == "public"


@pytest.mark.promise("calls.refusals")
@pytest.mark.parametrize("name", DATA)
async def test_data_is_not_called(world: aiorpc.types.Worker, name: str) -> None:
    """Nor computed: a property is not evaluated to see what it is."""
    guarded = RRef(Guarded())
    with pytest.raises(TypeError, match=rf"Guarded\.{name} is of type {DATA[name]}, not a method"):
        await getattr(remote(guarded), name)()
    with pytest.raises(TypeError, match="not a method"):
        async for _ in getattr(remote(guarded), name)():
            pass


async def test_what_is_not_there(world: aiorpc.types.Worker) -> None:
    """The class and the name are in the error."""
    with pytest.raises(AttributeError, match=r"'Guarded' object has no attribute 'absent'"):
        await remote(RRef(Guarded())).absent()
    with pytest.raises(TypeError, match=r"Slotted\.function is of type member_descriptor"):
        await remote(RRef(Slotted())).function()


async def test_what_is_called(world: aiorpc.types.Worker) -> None:
    """Every way to define a method, and functions that an object holds."""
    guarded = remote(RRef(Guarded()))
    assert await guarded.public() == await guarded.part() == "public"
    assert await guarded.of_class() == "Guarded"
    assert await guarded.static() == "static"
    assert await guarded.by_kind(3) == "int"
    assert await guarded.held() == "held"
    assert await remote(RRef(SimpleNamespace(run=max))).run(1, 2) == 2


async def test_typed_calls_of_private_names(world: aiorpc.types.Worker) -> None:
    """`call(rref, Guarded._private)` is refused as `remote(rref)._private` is."""
    guarded = RRef(Guarded())
    with pytest.raises(AttributeError, match="private"):
        await call(guarded, Guarded._private)
    with pytest.raises(TypeError, match="must be callable"):
        call(guarded, Guarded.value)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="callable"):
        await call_bound(guarded, 5)


async def test_a_name_of_a_subclass_of_str() -> None:
    """Is a name like any other, and does not fail the calls of its frame."""
    async with aiorpc.local_world(0):
        proxy = remote(RRef(Guarded()))
        named = getattr(proxy, np.str_("held"))
        await proxy.public()  # connected: the next calls leave together
        calls = proxy.public(), named(1), proxy.public()
        assert await asyncio.gather(*calls) == ["public", 1, "public"]
