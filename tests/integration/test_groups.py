"""Groups over processes: what several workers, losses and replacement processes add."""

import asyncio
import gc
import os
import subprocess
import sys
import weakref
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import aiorpc_torch as aiorpc
from aiorpc_torch import (
    CallTimeout,
    Group,
    GroupError,
    RRef,
    WorkerLeft,
    WorkerLost,
    call,
    create,
    each,
    lookup,
    register,
    remote,
    timeout,
)
from aiorpc_torch.autograd import context
from aiorpc_torch.observe import stats
from aiorpc_torch.testing import Gate, frozen, kill, world
from aiorpc_torch.testing.limits import INLINE_BYTES
from aiorpc_torch.types import RemoteTraceback
from tests.support.slack import SLACK

pytestmark = pytest.mark.worlds

NAMES = ["a", "b", "c"]
PATIENCE = 30.0  # seconds for what must come, whatever the machine does beside


class Node:
    def __init__(self, number: int = 0) -> None:
        self.number = number

    async def add(self, amount: int) -> int:
        self.number += amount
        return self.number

    async def pid(self) -> int:
        return os.getpid()

    async def add_to(self, others: Any) -> list[int]:
        return [await remote(other).add(1) for other in others]

    async def square(self, x: int) -> int:
        await asyncio.sleep(0)
        return x * x

    async def exit_at(self, x: int, last: int) -> int:
        if x == last and self.number == 1:
            os._exit(1)
        return x

    async def sum(self, x: Any) -> Tensor:
        return x["x"].sum() + self.number

    async def scale(self, x: Tensor) -> Tensor:
        return x * self.number

    async def follow(self) -> AsyncIterator[int]:
        yield 0
        await asyncio.Event().wait()

    async def fail(self) -> None:
        raise LookupError(self.number)


async def use_group(group: Group[Node]) -> list[Any]:
    """On a child: every way to use a group that came as an argument."""
    asynchronous = [result async for _, result in remote(group).add(0)]
    mapped = [x async for x in group.map(Node.square, range(5))]
    return [await remote(group).add(0), sorted(asynchronous), mapped]


async def test_a_group_of_processes() -> None:
    """Calls, arguments, failures and choices, from here and from a child."""
    async with world([*NAMES]) as me:
        group = await create(NAMES, Node, each([1, 2, 3]))
        await check_calls(group)
        await check_arguments(group)
        await check_failures(group)
        await check_any(group)
        await check_map(group)
        assert await call("b", use_group, group) == [[1, 2, 3], [1, 2, 3], [0, 1, 4, 9, 16]]
        assert me.peers == ("a", "b", "c")
        assert stats().in_flight == 0


async def check_calls(group: Group[Node]) -> None:
    assert len({*await remote(group).pid(), os.getpid()}) == 4
    before = stats().calls
    assert await remote(group).add(0) == [1, 2, 3]
    assert stats().calls - before == 3
    assert await asyncio.gather(*(remote(group).add(0) for _ in range(50))) == [[1, 2, 3]] * 50


async def check_arguments(group: Group[Node]) -> None:
    """Large tensors, and RRefs that each member holds on its own."""
    x = torch.ones(2 * INLINE_BYTES)
    sums = await remote(group).sum({"x": x})
    assert [float(found) for found in sums] == [x.numel() + n for n in (1, 2, 3)]
    ours = aiorpc.RRef(Node(100))
    assert sorted(await remote(group).add_to([ours])) == [[101], [102], [103]]
    theirs = await create("a", Node, 10)
    assert sorted(await remote(group).add_to(each([[theirs]] * 3))) == [[11], [12], [13]]


async def check_failures(group: Group[Node]) -> None:
    """The note names the member's worker; the traceback is the member's."""
    with pytest.raises(GroupError) as raised:
        await remote(group).fail()
    for exc, number, name in zip(raised.value.exceptions, (1, 2, 3), NAMES, strict=True):
        assert isinstance(exc, LookupError)
        assert exc.__notes__ == [f"member {number} of 3, on worker '{name}'"]
        assert isinstance(exc.__cause__, RemoteTraceback)
        assert exc.__cause__.worker == name
    with pytest.raises(GroupError) as crossed:
        await call("a", fail_there, group)
    assert [type(exc) for exc in crossed.value.exceptions] == [LookupError] * 3


async def fail_there(group: Group[Node]) -> None:
    await remote(group).fail()


async def check_any(group: Group[Node]) -> None:
    """Unanswered calls and open streams of this process make a member busy."""
    gate = await create("a", Gate)
    waiting = asyncio.create_task(remote(gate).passed())
    await remote(gate).entered()
    stream = aiter(remote(group[1]).follow())
    assert await anext(stream) == 0
    assert [await remote(group.any()).add(0) for _ in range(4)] == [3] * 4
    await stream.aclose()
    assert {await remote(group.any()).add(0) for _ in range(4)} == {2, 3}
    await remote(gate).open()
    await waiting
    assert {await remote(group.any()).add(0) for _ in range(3)} == {1, 2, 3}


async def check_map(group: Group[Node]) -> None:
    results = [x async for x in group.map(Node.square, range(500), in_flight=3)]
    assert results == [x * x for x in range(500)]


async def test_losses() -> None:
    """A frozen member is late, a killed one is lost; `any` and `map` go on with the others."""
    async with world([*NAMES], heartbeat=60.0) as me:
        group = await create(NAMES, Node, each([1, 2, 3]))
        with frozen("b"):
            with pytest.raises(GroupError) as raised:
                await remote(group, timeout=SLACK / 4).add(0)
            assert [type(exc) for exc in raised.value.exceptions] == [CallTimeout]
            assert raised.value.results[::2] == [1, 3]
        await check_loss_in_a_call()
        assert await remote(group[:2]).add(0) == [1, 2]
        with pytest.raises(GroupError) as raised:
            await remote(group).add(0)
        (exc,) = raised.value.exceptions
        assert isinstance(exc, WorkerLost)
        assert exc.worker == "c"
        assert exc.__notes__ == ["member 3 of 3, on worker 'c'"]
        assert {await remote(group.any()).add(0) for _ in range(4)} == {1, 2}
        assert [x async for x in group.map(Node.square, range(20))] == [x * x for x in range(20)]
        with pytest.raises(WorkerLost) as lost:
            await remote(group[2:].any()).add(0)
        assert lost.value.worker == "c"
        with pytest.raises(WorkerLost):
            await anext(group[2:].map(Node.square, [1]))
        with pytest.raises(WorkerLost):  # no replacement process will come
            async with asyncio.timeout(PATIENCE):
                await lookup("anything", on="c")
        with pytest.raises(GroupError) as raised:
            await create(NAMES, Node, each([1, 2, 3]))
        made: Group[Any] = Group(raised.value.results[:2])
        assert await remote(made).add(0) == [1, 2]
        assert me.rank == 0


class Held:
    """What the caller of a failed call holds."""


async def test_an_error_of_any_keeps_nothing() -> None:
    """What its caller holds goes at once, without the collector of cycles."""

    async def fail(_: Held) -> str:
        try:
            await remote(group.any()).add(0)
        except WorkerLost as exc:
            return exc.reason
        return ""

    async with world(["a"]):
        group = await create(["a"], Node)
        kill("a")
        assert "SIGKILL" in await fail(Held())
        held = Held()
        gone = weakref.ref(held)
        gc.disable()
        try:
            assert await fail(held) == "no member of the group is left"
            del held
            await asyncio.sleep(0)
            assert gone() is None
        finally:
            gc.enable()


async def check_loss_in_a_call() -> None:
    """c is killed while all members wait."""
    gates = await create(NAMES, Gate)
    calling = asyncio.create_task(call(gates, Gate.passed))
    iterating = asyncio.create_task(collect(remote(gates).passed()))
    async with asyncio.timeout(PATIENCE):
        for gate in gates:
            await remote(gate).entered(2)
        kill("c")
        for gate in gates[:2]:
            await remote(gate).open()
        for task in (calling, iterating):
            with pytest.raises(GroupError) as raised:
                await task
            assert [type(each_) for each_ in raised.value.results] == [type(None)] * 2 + [
                WorkerLost
            ]


async def collect(call_: Any) -> list[Any]:
    return [pair async for pair in call_]


@pytest.mark.parametrize("retries", [0, 1])
async def test_a_map_with_a_member_killed_in_the_middle(retries: int) -> None:
    """Every item is once in the results, in order; without retries it ends at the lost item."""
    async with world(["a", "b"]):
        group = await create(["a", "b"], Node, each([1, 2]))
        found: list[int] = []

        async def consume() -> None:
            items = range(1000)
            async for x in group.map(Node.square, items, in_flight=4, retries=retries):
                found.append(x)
                if len(found) == 300:
                    kill("a")

        if retries:
            await consume()
            assert found == [x * x for x in range(1000)]
        else:
            with pytest.raises(WorkerLost, match="'a' is lost"):
                await consume()
            assert found == [x * x for x in range(len(found))]
        assert stats().in_flight == 0


async def test_a_map_whose_item_kills() -> None:
    """One item ends each process that gets it: it fails with WorkerLost after its retries."""
    async with world(["a", "b"]):
        group = await create(["a", "b"], Node, 1)
        found = []
        with pytest.raises(WorkerLost):  # noqa: PT012
            async for x in group.map(Node.exit_at, range(10), [5] * 10, in_flight=1, retries=5):
                found.append(x)  # noqa: PERF401
        assert found == [0, 1, 2, 3, 4]


async def register_node(name: str, number: int) -> RRef[Node]:
    return register(name, Node(number))


async def test_replacement_processes() -> None:
    """A replaced member stays lost; a lookup goes on with the replacement process."""
    async with world(["a", "b"], max_restarts=1) as me:
        group = await create(["a", "b"], Node, each([1, 2]))
        await call("a", register_node, "old", 5)
        old = await lookup("old", on="a")
        assert await remote(old).add(1) == 6
        with pytest.raises(ValueError, match="the object is on worker 'a'"):
            register("theirs", old)
        looking = asyncio.create_task(lookup("new", on="a"))
        far = asyncio.create_task(call("b", look_there, "new", "a"))
        async with asyncio.timeout(PATIENCE):
            while not (await call("a", running_there)) >= 3:  # both lookups, and this call  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            kill("a")
            await asyncio.wait([looking], timeout=0.05)
            await me.wait_for("a")
            assert not looking.done()
            with pytest.raises(CallTimeout, match="registered there: nothing"), timeout(SLACK / 4):
                await lookup("old", on="a")
            await call("a", register_node, "new", 7)
            assert {await remote(await looking).add(1), await far} == {8, 9}
            await check_replaced(group)


async def running_there() -> int:
    return stats().running


async def look_there(name: str, worker: str) -> int:
    return await remote(await lookup(name, on=worker)).add(1)


async def check_replaced(group: Group[Node]) -> None:
    with pytest.raises(GroupError, match="1 of 2 members failed") as raised:
        await remote(group).add(0)
    (exc,) = raised.value.exceptions
    assert isinstance(exc, WorkerLost)
    assert "belongs to its old process" in str(exc)
    assert "may have run" not in str(exc)
    assert exc.worker == "a"
    assert exc.__notes__ == ["member 1 of 2, on worker 'a'"]
    assert raised.value.results == [exc, 2]
    assert [await remote(group.any()).add(0) for _ in range(3)] == [2, 2, 2]
    assert [x async for x in group.map(Node.square, range(9))] == [x * x for x in range(9)]
    with pytest.raises(WorkerLost):
        await remote(group[:1].any()).add(0)
    again = await create(["a", "b"], Node, each([3, 4]))
    assert await remote(again).add(0) == [3, 4]


async def test_gradients_through_a_group() -> None:
    """The calls of all members are in the context; gradients come from every process."""
    async with world([*NAMES]):
        group = await create(NAMES, Node, each([1, 2, 3]))
        x = torch.ones(3, requires_grad=True)
        async with context() as ctx:
            total = torch.stack(await remote(group).scale(x)).sum()
            async for _, scaled in call(group, Node.scale, x):
                total = total + scaled.sum()
            await ctx.backward([total])
            assert (await ctx.gradients())[x].tolist() == [12.0] * 3


@pytest.mark.slow
async def test_a_peer_that_leaves() -> None:
    """Its lookup ends with WorkerLeft: it will register nothing."""
    async with world(["a"]) as me:
        looking = asyncio.create_task(lookup("x", on="a"))
        await asyncio.wait([looking], timeout=0.05)
        assert not looking.done()
        await me.stop("a")
        with pytest.raises(WorkerLeft, match="worker 'a' has left its world"):
            await looking


PROGRAM = """
import asyncio
from aiorpc_torch import Group, call, create, each, lookup, register, remote, worker

class Node:
    def __init__(self, number):
        self.number = number
    def add(self, amount):
        return self.number + amount

async def main():
    async with worker() as me:
        if me.rank:
            register("node", Node(me.rank))
        else:
            group = Group([await lookup("node", on=name) for name in me.peers])
            print(await remote(group).add(each([10, 20])), flush=True)
            made = await create(me.peers, Node, 5)
            print([x async for x in made.map(Node.add, range(4))], flush=True)

asyncio.run(main())
"""


@pytest.mark.slow
def test_under_torchrun(tmp_path: Path) -> None:
    """Names, groups and maps between processes that torchrun started."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3"]
    ended = subprocess.run(
        [*command, str(program)], capture_output=True, text=True, timeout=55, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert "[11, 22]" in ended.stdout
    assert "[5, 6, 7, 8]" in ended.stdout
