"""Tensors of every kind, by every way: each arrives equal, or fails its own call only.

A tensor that torch cannot send would end this process, so these tests see whether one reaches it.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from torch import Tensor

import aiorpc_torch as aiorpc
from aiorpc_torch import Group, RRef, batched, call, create, each, fetch, remote
from aiorpc_torch.autograd import context
from aiorpc_torch.observe import stats
from aiorpc_torch.testing import Gate, connection, settled
from tests.support.tensor_kinds import SENDABLE, UNSENDABLE, WARNINGS, freed, is_alike, make, ramp
from tests.support.tensor_ways import TENSOR_WAYS, set_way

pytestmark = pytest.mark.filterwarnings(WARNINGS)

SOON = 30.0


class Shop:
    """Takes tensors, and makes them."""

    def __init__(self, stock: Any = None) -> None:
        self.stock = stock

    async def take(self, x: Any) -> str:
        """The kind of the argument that arrived, in `last` until the next call."""
        self.last = x
        return type(x).__name__

    async def echo(self, x: Any) -> Any:
        """The argument."""
        return x

    async def give(self, kind: str) -> Any:
        """A tensor of that kind."""
        return make(kind)

    def give_in_thread(self, kind: str) -> Any:
        """The same, in a list, in a thread."""
        return [make(kind)]

    async def items(self, kind: str) -> AsyncIterator[Any]:
        """Two tensors of that kind."""
        yield make(kind)
        yield make(kind)

    async def pass_on(self, xs: Any) -> AsyncIterator[Any]:
        """The argument, as an item."""
        yield xs

    @batched(max_size=2, max_wait=0)
    def weigh(self, xs: list[Any]) -> list[Any]:
        """The arguments."""
        return xs

    @batched(max_size=2, max_wait=0)
    def made(self, kinds: list[str]) -> list[Any]:
        """A tensor of each kind."""
        return [*map(make, kinds)]

    @batched(max_size=2, max_wait=0, key=str)
    def shared(self, kinds: list[str]) -> aiorpc.Broadcast[Any]:
        """One tensor for all."""
        return aiorpc.Broadcast(make(kinds[0]))


def give(kind: str) -> Any:
    """Return a tensor of that kind, made by a function of a module."""
    return make(kind)


async def collect(stream: Any) -> list[Any]:
    return [item async for item in stream]


Way = Callable[[RRef[Shop], str], Awaitable[Any]]


async def in_a_context(rref: RRef[Shop], kind: str) -> Any:
    """The tensor there and back in an autograd context, without a backward."""
    async with context():
        return await remote(rref).echo([make(kind)])


async def as_a_result_in_a_context(rref: RRef[Shop], kind: str) -> Any:
    async with context():
        return await remote(rref).give(kind)


def group_of(rref: RRef[Shop]) -> Any:
    return remote(Group([rref, rref]))


ARGUMENTS: dict[str, Way] = {
    "lone": lambda rref, kind: remote(rref).echo(make(kind)),
    "in a list": lambda rref, kind: remote(rref).echo([make(kind)]),
    "twice": lambda rref, kind: remote(rref).echo([x := make(kind), x]),
    "by keyword": lambda rref, kind: remote(rref).echo(x=make(kind)),
    "with a deadline": lambda rref, kind: remote(rref, timeout=SOON).echo(make(kind)),
    "of a function": lambda rref, kind: call("main", Shop.echo, Shop(), make(kind)),
    "group": lambda rref, kind: group_of(rref).echo(make(kind)),
    "group, pickled": lambda rref, kind: group_of(rref).echo([make(kind)]),
    "group, each": lambda rref, kind: group_of(rref).echo(each([make(kind), make(kind)])),
    "to a stream": lambda rref, kind: collect(remote(rref).pass_on(make(kind))),
    "to a batch": lambda rref, kind: remote(rref).weigh(make(kind)),
    "in a context": in_a_context,
}
"""Ways of a tensor to the callee, which sends it back."""


async def created(rref: RRef[Shop], kind: str) -> Any:
    """The tensor as an argument of `create`, back by `fetch`."""
    return (await fetch(await create("main", Shop, make(kind)))).stock


RESULTS: dict[str, Way] = {
    "result": lambda rref, kind: remote(rref).give(kind),
    "result of a thread": lambda rref, kind: remote(rref).give_in_thread(kind),
    "result of a function": lambda rref, kind: call("main", give, kind),
    "results of a group": lambda rref, kind: group_of(rref).give(kind),
    "items": lambda rref, kind: collect(remote(rref).items(kind)),
    "of a batch": lambda rref, kind: remote(rref).made(kind),
    "broadcast": lambda rref, kind: group_of(rref).shared(kind),
    "created and fetched": created,
    "result in a context": as_a_result_in_a_context,
}
"""Ways of a tensor back to the caller."""

WAYS = {**ARGUMENTS, **RESULTS}


def tensors_of(value: Any) -> list[Tensor]:
    """Return the tensors in the result of one of `WAYS`."""
    if isinstance(value, list):
        return [found for item in value for found in tensors_of(item)]
    return [value]


async def at_rest() -> None:
    """Wait until neither end of the connection keeps anything of a call."""
    async with asyncio.timeout(SOON):
        await settled()
    assert stats().in_flight == 0


async def until(condition: Callable[[], bool]) -> None:
    """Turns of the loop until it is so."""
    async with asyncio.timeout(SOON):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


def is_shared() -> bool:
    """Return whether both ends have agreed on shared memory."""
    found = connection("main")
    return found.carrier == found.result_carrier == "shared memory"


async def new_shop(*, shares: bool) -> RRef[Shop]:
    """Return one whose connection has found whether it may use shared memory."""
    rref = RRef(Shop())
    await remote(rref).echo(0)
    if shares:
        await until(is_shared)
    return rref


async def check(rref: RRef[Shop], way: str, kind: str) -> None:
    """Send a tensor: it arrives as it is, or the call raises an error that names what is wrong."""
    async with asyncio.timeout(SOON):
        if kind in SENDABLE:
            found = tensors_of(await WAYS[way](rref, kind))
            assert found
            assert all(is_alike(each, make(kind)) for each in found), (way, kind, found)
        else:
            with pytest.raises(Exception) as caught:  # noqa: PT011
                await WAYS[way](rref, kind)
            assert_clear(caught.value)


def assert_clear(error: BaseException) -> None:
    """It is the library's refusal: nothing of the messages of torch or pickle."""
    while isinstance(error, aiorpc.GroupError):
        error = error.exceptions[0]
    text = str(error)
    assert isinstance(error, ValueError), repr(error)
    assert "cannot be sent: " in text


@pytest.fixture(params=TENSOR_WAYS)
def shares(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether large tensors travel in shared memory. Request it before the world."""
    set_way(monkeypatch, request.param)
    return bool(request.param == "shared")


@pytest.mark.promise("transport.apart")
@pytest.mark.parametrize("ways", [ARGUMENTS, RESULTS], ids=["arguments", "results"])
async def test_what_cannot_be_sent_fails_alone(
    shares: bool, world: aiorpc.types.Worker, ways: dict[str, Way]
) -> None:
    """By every way, one by one; nothing is left, and the connection goes on."""
    rref = await new_shop(shares=shares)
    for way in ways:
        for kind in UNSENDABLE:
            await check(rref, way, kind)
    assert await remote(rref).echo(7) == 7
    await at_rest()


async def test_what_can_be_sent_arrives_equal(shares: bool, world: aiorpc.types.Worker) -> None:
    """Each kind by some of the ways; the others are left to the property."""
    rref = await new_shop(shares=shares)
    ways = [*WAYS]
    for index, kind in enumerate(SENDABLE):
        for way in ("in a list", "result", ways[index % len(ways)]):
            await check(rref, way, kind)
    await at_rest()


@pytest.mark.promise("transport.apart")
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    kinds=st.lists(
        st.tuples(st.sampled_from([*WAYS]), st.sampled_from([*SENDABLE, *UNSENDABLE])),
        min_size=2,
        max_size=12,
    )
)
def test_tensors_of_many_kinds_at_once(shares: bool, kinds: list[tuple[str, str]]) -> None:
    """In one loop iteration: each call has its own outcome, whatever leaves beside it."""

    async def main() -> None:
        async with aiorpc.testing.world():
            rref = await new_shop(shares=shares)
            await asyncio.gather(*(check(rref, way, kind) for way, kind in kinds))
            assert await remote(rref).echo(7) == 7
            await at_rest()

    asyncio.run(main())


# ── a storage that is freed after the call ──────────────────────────────────────────────────────


class Freeing(Shop):
    """Frees what it has given before it is sent."""

    async def give_and_free(self, kind: str) -> Any:
        """The tensor is freed while its result is on its way to the caller."""
        x = make(kind)
        asyncio.get_running_loop().call_soon(freed, x)
        return x


async def test_freed_between_the_call_and_its_frame(
    shares: bool, world: aiorpc.types.Worker
) -> None:
    """The other calls of that loop iteration are sent."""
    rref, x, y = await new_shop(shares=shares), ramp(), ramp()
    gate = Gate()
    waiting = asyncio.ensure_future(remote(RRef(gate)).passed())
    await gate.entered()  # so that calls are sent at the end of the iteration

    async def free() -> None:
        freed(x)

    calls = remote(rref).echo(x), remote(rref).echo(y), free()
    gone, found, _ = await asyncio.gather(*calls, return_exceptions=True)
    assert isinstance(gone, aiorpc.RemoteError)
    assert "its storage was freed or made smaller" in str(gone)
    assert torch.equal(found, y)
    await gate.open()
    await waiting
    await at_rest()


@pytest.mark.usefixtures("over_torch")
async def test_a_held_result_that_is_freed(world: aiorpc.types.Worker) -> None:
    """Its caller gets the error that says so, when it collects the result."""
    rref: Any = RRef(Freeing())
    with pytest.raises(ValueError, match="its storage was freed or made smaller"):
        await remote(rref).give_and_free("large")
    assert is_alike(await remote(rref).give("large"), make("large"))
    await at_rest()


async def test_the_error_names_the_call(world: aiorpc.types.Worker) -> None:
    """A note does: the tensor may be anywhere in the arguments."""
    rref = RRef(Shop())
    for way in (remote(rref).take, group_of(rref).take):
        with pytest.raises(ValueError, match=r"shape \(3,\) and torch.float32 cannot") as caught:
            await way([freed(ramp(3))])
        note = caught.value.__notes__[-1]  # Python 3.14 adds notes of its own
        assert note.startswith("(while pickling the arguments of Shop.take")
