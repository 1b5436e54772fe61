"""`@batched` where users' own values, loops and garbage might bring its queue to a halt."""

import asyncio
import gc
import sys
import weakref
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

import aiorpc_torch as aiorpc
from aiorpc_torch import Broadcast, Fill, Round, batched, call, create, each, remote
from aiorpc_torch.observe import stats
from tests.support.actors import Proxied

PATIENCE = 30.0


async def all_of(*awaitables: Any) -> list[Any]:
    """Their outcomes; no call hangs."""
    async with asyncio.timeout(PATIENCE):
        return await asyncio.gather(*awaitables, return_exceptions=True)


async def asked(function: Any, *args: Any) -> Any:
    """A call whose own errors are its outcome too."""
    return await function(*args)


class Unnamed:
    """A member that cannot be printed."""

    def __str__(self) -> str:
        raise ValueError("no name")


# ── what a policy's functions return ────────────────────────────────────────────────────────────


@pytest.mark.parametrize("who", [[1], {}, torch.tensor(1)])
async def test_a_member_that_is_none(who: Any) -> None:
    """It is its caller's error alone: the round goes on without it."""

    @batched(Round(2, member=lambda item: item))
    async def body(items: list[Any]) -> Any:
        return each(items)

    (refused,) = await all_of(asked(body, who))
    assert isinstance(refused, TypeError)
    assert await all_of(body(1), body(2)) == [1, 2]


async def test_members_that_cannot_be_named() -> None:
    """Their round ends all the same."""

    @batched(Round(3, timeout=0.01, member=lambda item: item))
    async def body(items: list[Any]) -> list[Any]:
        return items

    found = await all_of(body(Unnamed()), body(Unnamed()))
    assert [type(each) for each in found] == [aiorpc.RoundTimeout] * 2


@pytest.mark.parametrize(
    "weight",
    [10**400, float("nan"), -1, "1", None, torch.tensor(1.0)],
    ids=["huge", "nan", "negative", "text", "None", "tensor"],
)
async def test_a_weight_that_is_none(weight: Any) -> None:
    """It is its caller's error alone."""

    @batched(Fill(4, weight=lambda item: weight if item == "bad" else 1, max_weight=2))
    async def body(items: list[Any]) -> list[Any]:
        return items

    found = await all_of(*(asked(body, item) for item in ("a", "bad", "b")))
    assert isinstance(found[1], ValueError | OverflowError)
    assert (found[0], found[2]) == ("a", "b")


class Leaving:
    """Its key ends the process, if it is let."""

    @batched(Fill(4, key=lambda item: sys.exit(3) if item == "bad" else item))
    async def body(self, items: list[Any]) -> list[Any]:
        return items


@pytest.mark.usefixtures("world")
async def test_a_key_that_exits() -> None:
    """Its caller learns it, and the worker serves on."""
    leaving = await create("main", Leaving)
    bad, good = await all_of(remote(leaving).body("bad"), remote(leaving).body("good"))
    assert isinstance(bad, aiorpc.RemoteError)
    assert good == "good"
    assert await remote(leaving).body("again") == "again"


# ── what is stacked ─────────────────────────────────────────────────────────────────────────────


@batched(max_size=8, stack=True)
async def echo(x: Any) -> Any:
    return x


@dataclass(frozen=True)
class Checked:
    """Looks at what it is made of; one field is not for its constructor."""

    value: Tensor
    rank: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        assert self.value.dim() == 1, "made by its user, never of columns"


async def test_values_that_hardly_stack() -> None:
    """A caller that cannot gets the error; the others get their results."""
    found = await all_of(*(asked(echo, value) for value in (1, 2**70, "x", 2)))
    assert [type(each) for each in found] == [Tensor, TypeError, TypeError, Tensor]


async def test_a_dataclass_is_not_made_anew() -> None:
    """Neither for the columns nor for the rows."""
    found = await all_of(*(echo(Checked(torch.full((2,), float(n)))) for n in range(3)))
    assert [each.value.tolist() for each in found] == [[0.0, 0.0], [1.0, 1.0], [2.0, 2.0]]


async def test_who_wants_gradients_stacks_apart() -> None:
    """An answer has a graph only if what its caller gave has."""
    with_graph, without = await all_of(echo(torch.ones(2, requires_grad=True)), echo(torch.ones(2)))
    assert with_graph.requires_grad
    assert not without.requires_grad


async def test_a_stacked_round_of_one_kind() -> None:
    """Who differs from those that wait is told so, and the round comes about."""

    @batched(Round(2), stack=True)
    async def body(x: Any) -> Any:
        return x

    first = body({"a": torch.zeros(2)})
    (refused,) = await all_of(asked(body, {"a": torch.zeros(2), "b": torch.zeros(2)}))
    assert isinstance(refused, ValueError)
    found = await all_of(first, body({"a": torch.ones(2)}))
    assert [tree["a"].tolist() for tree in found] == [[[0.0, 0.0], [1.0, 1.0]]] * 2


# ── loops, proxies, garbage ─────────────────────────────────────────────────────────────────────


@pytest.mark.skipif(sys.version_info < (3, 12), reason="eager tasks came with Python 3.12")
async def test_tasks_that_start_at_once() -> None:
    """A function that never waits has ended before its task is known."""
    asyncio.get_running_loop().set_task_factory(asyncio.eager_task_factory)  # type: ignore[attr-defined]
    for _ in range(3):
        assert await all_of(*(echo(torch.ones(1)) for _ in range(3))) == [torch.ones(1)] * 3


@pytest.mark.usefixtures("world")
async def test_a_method_of_a_proxy() -> None:
    """What has every attribute is no batched function for that."""
    proxied = await create("main", Proxied, 5)
    async with asyncio.timeout(PATIENCE):
        assert await remote(proxied).anything() == 5


@pytest.mark.usefixtures("world")
async def test_a_factory_that_answers_with_one_object_for_all() -> None:
    """The RRef is of that object."""
    rref = await create("main", one_for_all)
    assert await call(rref, Leaving.body, "x") == "x"


@batched(max_size=2)
async def one_for_all() -> Broadcast[Leaving]:
    return Broadcast(Leaving())


class Big:
    """What is passed, and whether it is still there."""


@pytest.mark.parametrize("ends", ["answered", "cancelled", "refused"])
async def test_a_call_that_has_ended_holds_nothing(ends: str) -> None:
    """Its arguments go at once, without the collector of cycles."""

    @batched(Round(1 if ends == "answered" else 2, timeout=0.01))
    async def body(items: list[Any]) -> list[None]:
        return [None for _ in items]

    item = Big()
    gone = weakref.ref(item)
    asked = body(item)
    del item
    gc.disable()
    try:
        if ends == "cancelled":
            asked.cancel()
        await all_of(asked)
        await asyncio.sleep(0)
        assert gone() is None
    finally:
        gc.enable()


async def test_a_chain_of_batches_does_not_grow() -> None:
    """Each call is made by a task that a function started: the batches before it are forgotten."""
    gone: list[weakref.ref[Big]] = []
    ended = asyncio.Event()
    tasks = set()

    @batched(max_size=2)
    async def body(items: list[Big]) -> list[None]:
        if len(gone) < 50:
            task = asyncio.create_task(later())
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        else:
            ended.set()
        return [None for _ in items]

    async def later() -> None:
        while len(gone) == (before := len(gone)) and not ended.is_set():
            await asyncio.sleep(0)  # until the batch that it was started in is over
            item = Big()
            gone.append(weakref.ref(item))
            try:
                await body(item)
            except RuntimeError:
                gone.pop()
            if len(gone) > before:
                break

    first = Big()
    await body(first)
    async with asyncio.timeout(PATIENCE):
        await ended.wait()
        await asyncio.gather(*tasks)
    gc.collect()
    assert sum(ref() is not None for ref in gone) <= 2


async def test_functions_of_one_name() -> None:
    """Their numbers are added up."""

    def made() -> Any:
        @batched(max_size=4)
        async def twin(items: list[int]) -> list[int]:
            return items

        return twin

    one, other = made(), made()
    await all_of(one(1), one(2), other(3))
    found = stats().batches[one.__qualname__]
    assert (found.batches, found.items) == (2, 3)


@pytest.mark.parametrize("step", ["note_call", "enter_scopes", "ask_whether_given_up"])
async def test_a_batch_that_cannot_start(step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its callers get the error, and the next batch runs.

    Python 3.11.9 and 3.12.3 make no weak references to objects of some dataclasses, and a batch
    needed one before its start. (CPython gh-118033)
    """

    @batched(max_size=4)
    async def body(items: list[int]) -> list[int]:
        return items

    def fails(*_: Any) -> None:
        raise LookupError(step)

    with monkeypatch.context() as patches:
        patches.setattr(f"aiorpc_torch._batching.queue.{step}", fails)
        assert [type(each) for each in await all_of(body(1), body(2))] == [LookupError] * 2
    assert await all_of(body(3)) == [3]
