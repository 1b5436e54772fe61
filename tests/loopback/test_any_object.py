"""Any object stands behind an RRef and stays itself."""

import asyncio
import gc
import inspect
import threading
import weakref
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from torch import nn
from torch.distributed import rpc

import aiorpc_torch as aiorpc
from aiorpc_torch import (
    Group,
    NotInWorld,
    RRef,
    call,
    create,
    fetch,
    lookup,
    members,
    register,
    remote,
)
from tests.support.kinds_of_objects import MAKERS, Agent, Pair, Shop, amake, is_made, make


async def by_create(kind: str) -> Any:
    return await create("main", make, kind)


async def by_create_of_a_coroutine(kind: str) -> Any:
    return await create("main", amake, kind)


async def by_create_of_many(kind: str) -> Any:
    return (await create(["main", "main"], make, kind))[1]


async def by_a_method(kind: str) -> Any:
    return await create(RRef(Shop()), Shop.make, kind)


async def by_a_coroutine_method(kind: str) -> Any:
    return await create(await create("main", Shop), Shop.amake, kind)


async def by_methods_of_a_group(kind: str) -> Any:
    return (await create(Group([RRef(Shop()), RRef(Shop())]), Shop.make, kind))[1]


async def by_constructor(kind: str) -> Any:
    return RRef(make(kind))


async def by_register(kind: str) -> Any:
    return register(kind, make(kind))


async def by_lookup(kind: str) -> Any:
    register(kind, make(kind))
    return await lookup(kind, on="main")


async def by_members(kind: str) -> Any:
    register(kind, make(kind))
    found = members(kind)
    await found.wait(1)
    return next(iter(found))


WAYS = [found for name, found in sorted(globals().items()) if name.startswith("by_")]


@pytest.mark.promise("calls.any_object")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.usefixtures("world")
async def test_objects_stay_themselves(way: Callable[[str], Any]) -> None:
    """Each kind, by every way that makes an RRef: for calls, at the owner, for plain torch RPC."""
    for kind in MAKERS:
        rref = await way(kind)
        assert is_made(await fetch(rref), kind), kind
        assert isinstance(rref, RRef)
        assert await call(rref, is_made, kind), kind
        assert is_made(rref.local_value(), kind), kind
        assert is_made(rref.to_here(), kind), kind
        assert rpc.rpc_sync("main", is_behind, (rref, kind)), kind


def is_behind(rref: Any, kind: str) -> bool:
    return is_made(rref.local_value(), kind)


@pytest.mark.promise("calls.any_object")
@pytest.mark.usefixtures("world")
async def test_calls_change_the_object_itself() -> None:
    """Through this library and through torch's own proxies."""
    state = await create("main", make, "dict")
    await remote(state).update(steps=5)
    state.rpc_sync().update(more=6)
    assert await fetch(state) == {"steps": 5, "more": 6}
    replay = RRef([{"state": torch.zeros(1)}])
    await remote(replay).append({"state": torch.ones(1)})
    assert len(replay.local_value()) == 2
    ordered = RRef(MAKERS["OrderedDict"]())
    await remote(ordered).move_to_end("a")
    assert [*ordered.local_value()] == ["b", "a"]


@pytest.mark.usefixtures("world")
async def test_a_function_that_returns_two_values() -> None:
    """`return X, y` is a tuple, whose type torch read from freed memory."""
    data = await create("main", split)
    inputs, targets = await fetch(data)
    assert inputs.shape == (4, 2)
    assert targets.shape == (4,)
    assert await call(data, len) == 2
    assert await call(data, rows_of) == 4


def split() -> Any:
    return torch.zeros(4, 2), torch.zeros(4)


def rows_of(data: Any) -> int:
    return len(data[0])


@pytest.mark.usefixtures("world")
async def test_callable_objects_are_called() -> None:
    """Functions, classes and script modules behind RRefs, by their own `__call__`."""
    x = torch.ones(1, 2)
    assert await remote(await create("main", make, "function"))(1, 2) == 3
    count = await create("main", make, "closure")
    assert [await remote(count)(2), await remote(count)(2)] == [2, 4]
    assert torch.equal(await remote(RRef(make("script function")))(x), x + 1)
    for kind in ("script module", "traced module", "module"):
        net = await create("main", make, kind)
        assert torch.equal(await remote(net)(x), net.local_value()(x))
        assert torch.equal(await remote(net).forward(x), net.local_value()(x))


@pytest.mark.usefixtures("world")
async def test_torch_keeps_the_type_of_tensors() -> None:
    """torch's optimizers and TorchScript need it; no other object has a TorchScript type."""
    for value, expected in (
        (torch.ones(1), "Tensor"),
        (nn.Parameter(torch.ones(1)), "Tensor"),
        (Pair(1, 2), "PyObject"),
        ([1, 2], "PyObject"),
    ):
        data = RRef(value)._serialize()
        rpc.PyRRef._deserialize(data)
        assert data[-1] == expected


@pytest.mark.usefixtures("world")
async def test_rrefs_are_torchs() -> None:
    """`RRef` makes torch's class; torch's own constructor and TorchScript are as they were."""
    ours = RRef({"a": 1})
    assert type(ours) is rpc.RRef
    assert isinstance(rpc.RRef(Agent()), RRef)
    assert isinstance(rpc.remote("main", Agent), RRef)
    assert not isinstance(ours.local_value(), RRef)
    assert issubclass(RRef, rpc.RRef)
    assert type(rpc.RRef(b"bytes").local_value()) is str  # torch's own constructor converts
    assert isinstance(make("script module"), torch.jit.ScriptModule)
    with pytest.raises(RuntimeError, match="ModuleInterface"):
        rpc.RRef(make("script module"))
    assert RRef[int] is not None
    assert "value" in inspect.signature(RRef).parameters


@pytest.mark.usefixtures("world")
async def test_rrefs_are_made_in_many_threads() -> None:
    """An RRef made in one thread hides no type from another one."""
    module, failed = make("script module"), []

    def work(number: int) -> None:
        for _ in range(300):
            if number % 2:
                if RRef(module).local_value() is not module:
                    failed.append("not itself")
            elif not isinstance(module, torch.jit.ScriptModule):
                failed.append("no script module")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed


def test_an_rref_outside_a_world() -> None:
    """Is refused with the remedy; the next RRef is not affected."""
    for value in ({"a": 1}, torch.ones(1)):
        with pytest.raises(NotInWorld, match="an RRef is of a world: enter one first"):
            RRef(value)
    assert isinstance(make("script module"), torch.jit.ScriptModule)


@pytest.mark.promise("calls.lifetime")
@pytest.mark.usefixtures("world")
async def test_the_last_rref_frees_the_object() -> None:
    """Of a kind that torch would have converted."""
    kept = Agent()
    alive, rref = weakref.ref(kept), RRef([kept])
    del kept
    assert await call(rref, len) == 1
    del rref
    for _ in range(500):
        gc.collect()
        if alive() is None:
            return
        await asyncio.sleep(0.01)
    pytest.fail("the object is still alive")


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(max_size=3)
    | st.binary(max_size=3)
    | st.just(torch.ones(2)),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=2) | st.integers(), inner, max_size=3)
        | st.tuples(inner, inner)
        | st.builds(Pair, inner, inner)
    ),
    max_leaves=8,
)


@pytest.mark.promise("calls.any_object")
@pytest.mark.usefixtures("world")
@given(value=VALUES)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
async def test_any_nested_value_stays_itself(value: Any) -> None:
    """Lists, dicts, tuples and named tuples of anything."""
    rref = aiorpc.RRef(value)
    assert rref.local_value() is value
    assert rref.to_here() is value
