"""What `remote` returns: it calls the object itself, and stands for its object elsewhere."""

import asyncio
import copy
import sys
from collections.abc import AsyncIterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import aiorpc_torch as aiorpc
from aiorpc_torch import Group, RRef, batched, call, create, each, fetch, lookup, remote, supervised
from aiorpc_torch.testing import Gate
from tests.support.slack import BEGUN

pytestmark = pytest.mark.usefixtures("world")


class Node:
    def __init__(self, number: int = 0) -> None:
        self.number = number
        self.seen: list[Any] = []

    async def add(self, amount: int) -> int:
        self.number += amount
        return self.number

    async def items(self, count: int) -> AsyncIterator[int]:
        for item in range(count):
            yield self.number + item

    async def __call__(self, amount: int) -> int:
        return self.number + amount

    async def child(self, number: int) -> "Node":
        made = Node(self.number + number)
        self.seen.append(made)
        return made

    def child_in_a_thread(self, number: int) -> "Node":
        return Node(self.number + number)

    @batched(max_size=8, max_wait=1.0)
    async def children(self, numbers: list[int]) -> list["Node"]:
        return [Node(self.number + number) for number in numbers]

    async def hang(self) -> None:
        await asyncio.Event().wait()

    async def use(self, other: Any, amount: int) -> tuple[str, int, int, int]:
        """Call another object by its handle, in three ways."""
        direct = await other.add(amount)
        again = await remote(other).add(amount)
        return type(other).__name__, direct, again, await call(other, Node.add, amount)


class Other(Node):
    async def child(self, number: int) -> Node:
        return Other(number)


@aiorpc.exclusive
class Alone:
    running = 0

    async def make(self) -> Node:
        self.running += 1
        await asyncio.sleep(0.001)
        self.running -= 1
        return Node(self.running)


# ── the object itself ─────────────────────────────────────────────────────────────────────────────


class Net(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)
        self.hooked = 0
        self.register_forward_hook(self._hook)

    def _hook(self, *_: Any) -> None:
        self.hooked += 1

    def times(self) -> int:
        return self.hooked


@pytest.mark.promise("calls.itself")
async def test_a_module_is_called_with_its_hooks() -> None:
    """As `net(x)` is; `.forward` has none."""
    here = Net()
    net, x = remote(RRef(here)), torch.ones(1, 2)
    assert torch.equal(await net(x), here(x).detach())
    assert await net.times() == 2
    await net.forward(x)
    assert await net.times() == 2
    assert torch.equal(await call(RRef(here), Net.__call__, x), here(x).detach())


def double(x: int) -> int:
    return 2 * x


async def triple(x: int) -> int:
    return 3 * x


async def counted(to: int) -> AsyncIterator[int]:
    for item in range(to):
        yield item


def give(what: Any) -> Any:
    return what


class Summed:
    @batched(aiorpc.Round(2))
    async def __call__(self, numbers: list[int]) -> int:
        return sum(numbers)


@pytest.mark.promise("calls.itself")
async def test_whatever_can_be_called() -> None:
    """Functions, coroutine functions, generators, methods, batched objects; of groups too."""
    assert await remote(RRef(Node(1)))(2) == 3
    assert await remote(RRef(double))(2) == 4
    assert await remote(RRef(triple))(2) == 6
    assert await remote(RRef(Node(1).add))(2) == 3
    assert [item async for item in remote(RRef(counted))(3)] == [0, 1, 2]
    summed = remote(RRef(Summed()))
    assert await asyncio.gather(summed(1), summed(2)) == [3, 3]
    group = Group([RRef(Node(1)), RRef(Node(2))])
    assert await remote(group)(each([10, 20])) == [11, 22]
    assert await remote(group.any())(0) in (1, 2)
    assert await remote(await supervised(0, Node, 5))(1) == 6


async def test_an_object_that_cannot_be_called() -> None:
    """The error is the callee's."""
    with pytest.raises(AttributeError, match="__call__"):
        await remote(RRef([1]))()


@pytest.mark.promise("security.private")
async def test_no_other_name_that_begins_with_an_underscore() -> None:
    """`__call__` is the public interface of an object; nothing else is."""
    for method in (Node.__init__, object.__reduce__):
        with pytest.raises(AttributeError, match="is private"):
            await call(RRef(Node()), method)  # type: ignore[call-overload]


# ── in the place of an RRef ───────────────────────────────────────────────────────────────────────


@pytest.mark.promise("calls.handles")
async def test_a_handle_stands_for_its_object() -> None:
    """In `remote`, `call`, `fetch`, `create`, `Group`, and for `proxy`."""
    handle = remote(RRef(Node(1)))
    assert await remote(handle).add(1) == 2
    assert await call(handle, Node.add, 1) == 3
    assert (await fetch(handle)).number == 3
    assert await aiorpc.proxy(handle).add(1) == 4
    assert await remote(Group([handle, handle])).add(0) == [4, 4]
    assert Group([handle]) == Group([handle._rref])
    assert await remote(await create(handle, Node.child, 1)).add(0) == 5
    assert [item async for item in call(handle, Node.items, 2)] == [4, 5]


@pytest.mark.promise("calls.handles")
async def test_a_handle_is_registered_as_its_object() -> None:
    """Not as itself."""
    node = Node(1)
    assert aiorpc.register("node", remote(RRef(node))).local_value() is node
    assert await remote(await lookup("node")).add(1) == 2
    group = Group([RRef(node)])
    made = await supervised(0, Node)
    for other in (made, group.any(), aiorpc.members("node")):
        for given in (other, remote(other)):
            with pytest.raises(TypeError, match="takes an object of this worker or its RRef"):
                aiorpc.register("other", given)
    aiorpc.register("group", remote(group))  # which others may fetch
    assert await remote(await fetch(await lookup("group"))).add(0) == [2]
    assert len(aiorpc.members("other")) == 0


@pytest.mark.promise("calls.handles")
async def test_a_handle_is_an_argument_and_a_result() -> None:
    """It arrives as a handle, with its timeout and retries."""
    node, other = remote(RRef(Node())), remote(RRef(Node(10)), timeout=60.0, retries=2)
    assert await node.use(other, 1) == ("RemoteProxy", 11, 12, 13)
    back = await call(0, give, {"handle": other})
    assert (back["handle"]._timeout, back["handle"]._retries) == (60.0, 2)
    assert await back["handle"].add(0) == 13
    assert await copy.copy(other).add(0) == 13
    group = Group([RRef(Node(1)), RRef(Node(2))])
    assert await remote(await call(0, give, remote(group))).add(0) == [1, 2]
    assert await (await call(0, give, remote(group.any()))).add(0) in (1, 2)
    for held in (remote(await supervised(0, Node)), remote(aiorpc.members("x").any())):
        with pytest.raises(TypeError, match="belongs to this process"):
            await call(0, give, held)


@pytest.mark.promise("calls.handles")
async def test_the_timeout_of_a_handle_is_that_of_its_calls() -> None:
    """Also where it stands for its object."""
    rref = RRef(Node())
    for asked in (
        lambda: call(remote(rref, timeout=0.02), Node.hang),
        lambda: create(remote(rref, timeout=0.02), Node.hang),
        lambda: call(remote(Group([rref]).any(), timeout=0.02), Node.hang),
    ):
        with pytest.raises(aiorpc.CallTimeout):
            await asked()
    with pytest.raises(aiorpc.GroupError):
        await call(remote(Group([rref]), timeout=BEGUN), Node.hang)
    assert await call(remote(remote(rref, timeout=0.02), timeout=None), Node.add, 1) == 1


async def test_methods_are_made_once_for_a_handle() -> None:
    """And as the handle is: those of another one have its timeout. They are not kept for ever."""
    rref = RRef(Node(1))
    handle, hasty = remote(rref), remote(rref, timeout=0.02)
    assert handle.add is handle.add
    assert await handle.add(1) == 2
    assert await handle.add(1) == 3
    for hang in (hasty.hang, hasty.hang):
        with pytest.raises(aiorpc.CallTimeout):
            await hang()
    named = [getattr(handle, f"name{number}") for number in range(1_000)]
    assert all(str(each) == f"<remote method name{at}>" for at, each in enumerate(named))
    assert sys.getsizeof(handle._methods) < 10_000
    assert await handle.add(1) == 4


@pytest.mark.parametrize("retries", [-1, 1.5, "1", None, True])
async def test_retries_are_a_number(retries: Any) -> None:
    """Anything else is refused where it is written."""
    if retries is None:
        return
    for rref in (RRef(Node()), Group([RRef(Node())])):
        with pytest.raises(ValueError, match="retries must be an int of at least 0"):
            remote(rref, retries=retries)


# ── objects that stay ─────────────────────────────────────────────────────────────────────────────


@pytest.mark.promise("calls.stays")
@pytest.mark.parametrize("method", [Node.child, Node.child_in_a_thread, Node.children])
async def test_a_result_stays_at_its_owner(method: Any) -> None:
    """Of coroutines, plain methods and batched ones; as an RRef of the object itself."""
    node = Node(1)
    rref = await create(RRef(node), method, 2)
    assert isinstance(rref, RRef)
    assert rref.local_value().number == 3
    assert await remote(rref).add(1) == 4
    found = await asyncio.gather(*(create(RRef(node), method, each_) for each_ in range(3)))
    assert [await remote(each_).add(0) for each_ in found] == [1, 2, 3]


@pytest.mark.promise("calls.stays")
async def test_what_it_is_made_from() -> None:
    """An override, a function of the object, members of groups, a supervised object."""
    assert (await create(RRef(Other()), Node.child, 7)).local_value().number == 7
    assert type((await create(RRef(Other()), Node.child, 7)).local_value()) is Other
    assert (await create(RRef(Node(3)), wrap, 1)).local_value().number == 4
    group = Group([RRef(Node(1)), RRef(Node(2))])
    made = await create(group, Node.child, each([10, 20]))
    assert isinstance(made, Group)
    assert await remote(made).add(0) == [11, 22]
    assert await remote(await create(group.any(), Node.child, 0)).add(0) in (1, 2)
    assert await remote(await create(await supervised(0, Node, 5), Node.child, 1)).add(0) == 6


def wrap(node: Node, number: int) -> Any:
    return Node(node.number + number)


async def test_an_exclusive_object_makes_one_at_a_time() -> None:
    """And the result is an RRef as any other."""
    rref = RRef(Alone())
    made = await asyncio.gather(*(create(rref, Alone.make) for _ in range(5)))
    assert [each_.local_value().number for each_ in made] == [0] * 5


@pytest.mark.promise("order.start")
async def test_calls_stay_in_order_around_it() -> None:
    """`create` of an object is one of its calls."""
    rref = RRef(Node())
    adding = remote(rref)
    first = asyncio.ensure_future(adding.add(1))
    second = asyncio.ensure_future(create(rref, Node.child, 0))
    third = asyncio.ensure_future(adding.add(1))
    assert (await second).local_value().number == 1
    assert (await first, await third) == (1, 2)


async def test_an_error_of_the_method() -> None:
    """It is raised at `create`."""
    with pytest.raises(TypeError, match="amount"):
        await create(RRef(Node()), Node.add)  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="must be callable"):
        await create(RRef(Node()), "child")  # type: ignore[call-overload]


class Shop:
    async def open(self) -> Node:
        return Node(1)


class Closed:
    async def open(self) -> Node:
        return Node(1)


class TestExports:
    """A worker that exports a class."""

    @pytest.fixture
    def world(self) -> None:
        """None here."""

    async def test_methods_of_exported_classes_make_objects(self) -> None:
        """And those of others do not, nor do functions."""
        async with aiorpc.local_world(0, exports=[Shop]):
            assert (await create(RRef(Shop()), Shop.open)).local_value().number == 1
            for rref, method in ((RRef(Closed()), Closed.open), (RRef(Shop()), wrap)):
                with pytest.raises(aiorpc.NotExported):
                    await create(rref, method)  # type: ignore[call-overload]
            with pytest.raises(aiorpc.NotExported):
                await remote(RRef(Node()))(1)


async def test_a_tensor_stays() -> None:
    """The activations of a model that is cut across processes."""
    net = RRef(nn.Linear(2, 2))
    hidden: RRef[Tensor] = await create(net, nn.Linear.forward, torch.ones(1, 2))
    assert hidden.local_value().shape == (1, 2)
    assert (await fetch(hidden)).shape == (1, 2)


# ── which of several calls is meant ───────────────────────────────────────────────────────────────


async def scaled(node: Node, amount: int = 2) -> int:
    return node.number * amount


@pytest.mark.parametrize("of", ["rrefs", "handles", "supervised", "one of them"])
async def test_a_list_of_objects_is_no_group(of: str) -> None:
    """The remedy is in the error: nothing is called with the list as an argument."""
    rref = RRef(Node(1))
    lists: dict[str, list[Any]] = {
        "rrefs": [rref, rref],
        "handles": [remote(rref)],
        "supervised": [await supervised(0, Node)],
        "one of them": [0, rref],
    }
    called, created, handle = call, create, remote
    asks: list[Any] = [lambda to: called(to, scaled), lambda to: created(to, scaled), handle]
    for ask in asks:
        with pytest.raises(TypeError, match=r"write Group\(\["):
            await ask(lists[of])


class Base:
    def forward(self) -> str:
        return "base"

    __call__ = forward


class Derived(Base):
    def forward(self) -> str:
        return "derived"


async def test_an_alias_is_called_as_its_own_name() -> None:
    """As `Derived().forward()` does, by whatever name the base class was asked."""
    rref = RRef(Derived())
    assert await call(rref, Base.forward) == "derived"
    assert await remote(rref).forward() == "derived"
    assert await remote(rref)() == "base"
    assert (await create(rref, Base.forward)).local_value() == "derived"


class Scale:
    def __init__(self, factor: int) -> None:
        self.factor = factor

    def __call__(self, number: int) -> int:
        return self.factor * number


async def test_a_class_behind_an_rref_is_called() -> None:
    """It makes an instance."""
    rref: Any = RRef(Scale)
    made = await remote(rref)(3)
    assert made.factor == 3
    assert await remote(RRef(Scale(4)))(3) == 12


@pytest.mark.promise("calls.retries")
async def test_a_handle_of_a_handle_keeps_what_was_set() -> None:
    """Unless it is set again."""
    gate = RRef(Gate())
    bounded: Any = remote(gate, timeout=0.03)
    for handle in (remote(bounded), remote(bounded, retries=1)):
        with pytest.raises(aiorpc.CallTimeout):
            await handle.passed()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
            await remote(bounded, timeout=60.0).passed()
