"""Versioned weights and their followers, in a world of one."""

import asyncio
import contextlib
import gc
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
import torch

import aiorpc_torch as aiorpc
from aiorpc_torch import CallTimeout, RRef, WorkerLost, register, remote, timeout
from aiorpc_torch.training import Follower, Weights, follow, recover, relays, snapshots
from tests.support.copies_inside import count_copies
from tests.support.followers import Counting, Net

SOON = 30.0


def published(value: float = 0.0, **options: int) -> Weights:
    """Return weights that are registered as "policy"."""
    weights = Weights(Net(value).state_dict(), **options)
    register("policy", weights)
    return weights


async def publish(weights: Weights, value: float | None = None) -> int:
    return await weights.publish(Net(weights.version + 1 if value is None else value).state_dict())


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(SOON):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


Following = Callable[..., Awaitable[Follower]]


@pytest.fixture
async def following(world: aiorpc.types.Worker) -> AsyncIterator[Following]:
    """Return a function that follows "policy"; what it returns is closed after the test."""
    async with contextlib.AsyncExitStack() as stack:

        async def start(**options: Any) -> Follower:
            policy = await follow("policy", on="main", **options)
            return await stack.enter_async_context(policy)

        yield start


@pytest.mark.promise("training.follow")
async def test_versions_arrive(following: Following) -> None:
    weights, net = published(), Net(-1)
    policy = await following(into=net)
    assert (policy.version, net.values()) == (0, {0.0})
    assert await publish(weights) == 1
    assert net.values() == {0.0}  # until it asks
    assert await policy.update() == 1
    assert net.values() == {1.0}
    assert await policy.update() == 1
    waiting = asyncio.create_task(policy.wait(3))
    await publish(weights)
    assert await publish(weights) == 3
    assert await waiting == 3
    assert net.values() == {3.0}
    assert policy.pause > 0
    late = await following()
    assert late.version == 3
    assert late.state["layers.0.bias"].tolist() == [3.0] * 8


@pytest.mark.promise("training.in_place")
async def test_versions_are_copied_into_the_memory_that_is_there(following: Following) -> None:
    weights, net = published(), Net(-1)
    parameters = {name: each.detach() for name, each in net.named_parameters()}
    policy = await following(into=net, copy=True)
    for version in range(2):
        assert await policy.wait(version) == version
        assert all((each == version).all() for each in parameters.values())
        await publish(weights)
    for into in (None, print):
        with pytest.raises(ValueError, match="copy=True needs a module or a dict"):
            await following(into=into, copy=True)


@pytest.mark.promise("training.follow")
async def test_iterating_skips_versions_and_ends_with_the_world() -> None:
    seen = list[int]()
    async with aiorpc.local_world(0):
        weights = published()
        policy = await follow("policy", on="main")

        async def watch() -> None:
            async for version in policy:
                seen.append(version)

        watching = asyncio.create_task(watch())
        for _ in range(20):
            await publish(weights)
        assert await policy.update() == 20
        await publish(weights)
        assert await policy.wait(21) == 21
    await asyncio.wait_for(watching, SOON)
    assert seen == sorted(set(seen))
    assert seen[-1] in (20, 21)


@pytest.mark.promise("training.snapshot")
async def test_a_version_is_as_it_was_published(following: Following) -> None:
    """Whatever the learner, or another follower, writes into its tensors."""
    net = Net(5)
    weights = Weights(net.state_dict())
    register("policy", weights)
    net.fill(6)
    one, other = Net(), Net()
    await following(into=one)
    one.fill(7)
    await following(into=other)
    assert other.values() == {5.0}
    assert set(weights.state(0)["layers.0.bias"].tolist()) == {5.0}


@pytest.mark.promise("training.keep")
async def test_versions_that_are_kept(world: aiorpc.types.Worker) -> None:
    weights = published(keep=2, version=10)
    assert weights.version == 10
    await publish(weights)
    await publish(weights)
    assert set(weights.state(11)["layers.0.bias"].tolist()) == {11.0}
    assert set(weights.state()["layers.0.bias"].tolist()) == {12.0}
    with pytest.raises(LookupError, match="version 10 is not kept"):
        weights.state(10)


@pytest.mark.promise("training.publish")
async def test_publications_that_are_cancelled_or_fail(
    world: aiorpc.types.Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of them is announced, and others go on in their order."""
    weights, entered, leave = published(), asyncio.Event(), asyncio.Event()

    async def gated(function: Callable[[], object]) -> object:
        entered.set()
        await leave.wait()
        return function()

    monkeypatch.setattr(snapshots, "COPY_ON_LOOP", 0)
    monkeypatch.setattr(asyncio, "to_thread", gated)
    first = asyncio.create_task(publish(weights, 1))
    await entered.wait()
    others = [asyncio.create_task(publish(weights, value)) for value in (2, 3)]
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.wait([first])
    leave.set()
    with pytest.raises(TypeError, match="pickle"):
        await weights.publish({**Net().state_dict(), "a": threading.Lock()})
    assert await asyncio.gather(*others) == [1, 2]
    assert set(weights.state(2)["layers.0.bias"].tolist()) == {3.0}


@pytest.mark.promise("training.whole")
async def test_a_version_does_not_change_inside_of_hold(following: Following) -> None:
    weights, net = published(), Net()
    policy = await following(into=net)
    async with policy.hold() as version:
        await publish(weights)
        updating = asyncio.create_task(remote(RRef(policy)).update())
        await remote(RRef(weights)).kept(0)
        assert (version, net.values()) == (0, {0.0})
        with pytest.raises(RuntimeError, match="inside of hold"):
            await policy.update()
        with pytest.raises(RuntimeError, match="is for threads"):
            policy.hold().__enter__()
    assert await updating == 1
    assert net.values() == {1.0}


@pytest.mark.promise("training.unchanged")
async def test_tensors_that_have_not_changed(following: Following) -> None:
    """They are not sent again, unless this process has written into them."""
    base, adapter = torch.arange(300_000.0), torch.zeros(30_000)
    weights = Counting({"base": base, "adapter": adapter})
    register("policy", weights)
    into = {"base": torch.zeros(300_000), "adapter": torch.zeros(30_000)}
    policy = await following(into=into)
    assert weights.sent[-1] >= base.nbytes + adapter.nbytes
    for version in range(1, 5):
        await weights.publish({"base": base.clone(), "adapter": adapter + version})
        assert await policy.wait(version) == version
        assert weights.sent[-1] < adapter.nbytes + 100
        assert into["adapter"].eq(version).all()
        assert torch.equal(into["base"], base)
    into["base"].data[7] = -1.0  # as an optimizer of this process would
    await weights.publish({"base": base, "adapter": adapter})
    assert await policy.wait(5) == 5
    assert torch.equal(into["base"], base)
    assert torch.equal(weights.state()["base"], base)
    base[299_999] += 1
    await weights.publish({"base": base, "adapter": adapter})
    assert await policy.wait(6) == 6
    assert torch.equal(into["base"], base)


WRITES: dict[str, tuple[torch.dtype, Callable[[torch.Tensor], object]]] = {
    "one element": (torch.float32, lambda x: x.data[7:8].fill_(-1.0)),
    "signs of float64": (torch.float64, torch.Tensor.neg_),
    "conjugates": (torch.complex128, torch.Tensor.conj_physical_),
    "zeros": (torch.float64, torch.Tensor.zero_),
    "two swapped": (torch.float32, lambda x: x.copy_(x.flip(0))),
}


@pytest.mark.promise("training.unchanged")
@pytest.mark.parametrize("on", ["main", ["main"]], ids=["one publisher", "joined"])
@pytest.mark.parametrize("way", WRITES)
async def test_writes_into_what_is_not_sent_again(
    world: aiorpc.types.Worker, way: str, on: Any
) -> None:
    """Before the next version is published, and while it waits to be put in."""
    dtype, write = WRITES[way]
    base = torch.full((40_000,), 2.0, dtype=dtype)
    base.real[1::2] = -1.0
    if dtype.is_complex:
        base.imag[:] = 3.0
    weights = Weights({"base": base, "step": torch.zeros(1)})
    register("policy", weights)
    async with await follow("policy", on=on) as policy:
        for version in (1, 2, 3):
            if version != 2:
                write(policy.state["base"])
            await weights.publish({"base": base, "step": torch.ones(1)})
            await until(lambda wanted=version: policy._receiver.version == wanted)
            if version == 2:
                write(policy.state["base"])
            assert await policy.wait(version) == version
            assert torch.equal(policy.state["base"], base), version


@pytest.mark.promise("training.unchanged", "training.whole")
async def test_writes_inside_of_a_hold_that_is_waited_for(following: Following) -> None:
    base = torch.ones(100_000)
    weights = Weights({"base": base, "step": torch.zeros(1)})
    register("policy", weights)
    policy = await following()
    waiting = asyncio.create_task(policy.wait(1))
    await asyncio.sleep(0)
    async with policy.hold():
        await weights.publish({"base": base, "step": torch.ones(1)})
        await until(lambda: policy._receiver.version == 1)
        await until(lambda: policy._holds._is_writing)
        policy.state["base"].add_(1)
    assert await waiting == 1
    assert torch.equal(policy.state["base"], base)


async def test_a_learner_that_cannot_send_a_version_again(following: Following) -> None:
    """The version that is in stays, and waits go on with the next one of the next learner."""
    base = torch.ones(100_000)
    weights = Weights({"base": base, "step": torch.zeros(1)})
    register("policy", weights)
    policy = await following()
    await weights.publish({"base": base, "step": torch.ones(1)})
    await until(lambda: policy._receiver.version == 1)
    policy.state["base"].add_(1)
    aiorpc.unregister("policy")
    other = Weights({"base": base, "step": torch.ones(1)})
    register("policy", other)
    await policy._receiver._find()
    assert await policy.update() == 0
    waiting = asyncio.create_task(policy.wait(1))
    await until(lambda: aiorpc.observe.stats().in_flight > 0)
    await other.publish({"base": base, "step": torch.ones(1)})
    await policy._receiver._receive(1)
    assert await waiting == 2
    assert torch.equal(policy.state["base"], base)


async def test_a_follower_that_polls_survives_what_fails(
    following: Following, caplog: pytest.LogCaptureFixture
) -> None:
    weights, got = published(), list[float]()

    def put_in(tree: Any) -> None:
        got.append(float(tree["layers.0.bias"][0]))
        if got[-1] == 1.0:
            raise OSError("no space left")

    await following(into=put_in, poll=0.001)
    for version in (1, 2):
        await publish(weights)
        await until(lambda wanted=float(version): got[-1] == wanted)
    (record,) = caplog.records
    assert "version 1 of 'policy' was not put in; the next one is awaited" in record.getMessage()
    caplog.clear()


@pytest.mark.promise("training.recover")
async def test_what_a_follower_has_written_into_is_not_recovered(following: Following) -> None:
    """As long as another one has it: an actor's batch norm, in train mode, say."""
    weights = published(1.0)
    net = Net()
    await following(into=net)
    net.fill(7.0)
    found = await recover("policy")
    assert found is not None
    assert found.tree["layers.0.bias"][0] == 7.0  # better than nothing; the log says so
    await following()
    found = await recover("policy")
    assert found is not None
    assert found.tree["layers.0.bias"][0] == 1.0
    assert weights.version == 0


@pytest.mark.promise("training.deadlines")
async def test_deadlines(following: Following) -> None:
    published()
    with timeout(SOON):  # does not bound what the follower does later
        policy = await following()
    with timeout(0.01):
        with pytest.raises(CallTimeout, match="the wait for version 5 of 'policy' timed out"):
            await policy.wait(5)
    with timeout(0.01), pytest.raises(CallTimeout):
        await follow("nothing", on="main")
    assert await policy.update() == 0


async def test_poll(following: Following) -> None:
    """The follower puts versions in by itself, and hurries for whoever waits."""
    weights, net = published(), Net()
    policy = await following(into=net, poll=0.001)
    await publish(weights)
    await until(lambda: policy.version == 1)
    assert net.values() == {1.0}
    slow = await following(poll=3600.0)
    for _ in range(3):
        await publish(weights)
        assert await asyncio.wait_for(slow.update(), SOON) == weights.version
    with pytest.raises(ValueError, match="poll must be a positive number"):
        await following(poll=0)


async def test_a_version_that_does_not_fit(following: Following) -> None:
    weights, net = published(), Net()
    policy = await following(into=net)
    await weights.publish({**Net().state_dict(), "other": torch.ones(1)})
    for _ in range(2):
        with pytest.raises(ValueError, match="different names"):
            await policy.update()
    assert (policy.version, net.values()) == (0, {0.0})
    with pytest.raises(ValueError, match="different names"):
        await following(into=net)
    await publish(weights)
    assert await policy.update() == 2


@pytest.mark.promise("training.shapes")
async def test_a_version_of_other_shapes_is_not_published(following: Following) -> None:
    weights = published()
    policy = await following()
    state = Net().state_dict()
    other = {**state, "layers.0.bias": torch.ones(9)}
    with pytest.raises(ValueError, match=r"\['layers.0.bias'\] must be \(8,\), got \(9,\)"):
        await weights.publish(other)
    del state["layers.3.weight"]
    with pytest.raises(ValueError, match=r"lacks \['layers.3.weight'\]"):
        await weights.publish(state)
    assert weights.version == 0
    assert await publish(weights) == await policy.update() == 1
    with pytest.raises(ValueError, match="version must be a number"):
        await policy.wait(None)  # type: ignore[arg-type]


async def test_what_is_no_tree_no_place_and_no_publisher(following: Following) -> None:
    optimizer = torch.optim.SGD(Net().parameters())
    for tree, what in (
        (Net(), "Net"),
        (optimizer, "SGD"),
        (Net().parameters(), "generator"),
        ({"model": {"parts": [Net()]}}, r"Net at \['model'\]\['parts'\]\[0\]"),
    ):
        with pytest.raises(TypeError, match=rf"such as `model.state_dict\(\)`; got {what}$"):
            Weights(tree)
    weights = published()
    with pytest.raises(TypeError, match="got Net"):
        await weights.publish(Net())
    register("all", Weights({"model": Net().state_dict(), "step": 1}))
    remedy = r"step; for a part, into=lambda tree: model.load_state_dict\(tree\['model'\]\)"
    with pytest.raises(ValueError, match=remedy):
        await follow("all", into=Net())
    assert weights.version == 0
    with pytest.raises(TypeError, match="into must be a module, a dict of tensors or a function"):
        await following(into=[])
    register("model", Net())
    with pytest.raises(TypeError, match="'model' on worker 'main' is no Weights: register one"):
        await follow("model", on="main")


async def test_the_end_of_a_follower(following: Following) -> None:
    weights, net = published(), Net()
    policy = await following(into=net)
    waiting = asyncio.create_task(policy.wait(5))
    await asyncio.sleep(0)
    await policy.aclose()
    with pytest.raises(RuntimeError, match="is closed"):
        await waiting
    await publish(weights)
    with pytest.raises(RuntimeError, match="is closed"):
        await policy.update()
    assert not net._forward_hooks
    assert isinstance(policy, Follower)
    await policy.aclose()


@pytest.mark.promise("training.replaced")
async def test_a_follower_tells_what_it_has(world: aiorpc.types.Worker) -> None:
    """A publisher that begins again goes on with higher numbers."""
    weights = published(3.0)
    assert await remote(RRef(weights)).kept(57) == (0, 0)
    assert await publish(weights) == 58
    register("replacement", other := Weights(Net().state_dict()))
    await publish(other)
    number, *_ = await remote(RRef(other)).after(57)
    assert number == other.version == 58


async def test_a_follower_that_is_dropped(world: aiorpc.types.Worker) -> None:
    published()
    policy = await follow("policy", on="main")
    await until(lambda: aiorpc.observe.stats().in_flight == 1)
    del policy
    gc.collect()
    await until(lambda: aiorpc.observe.stats().in_flight == 0)


@pytest.mark.promise("training.once")
async def test_followers_that_wait_share_one_copy(
    following: Following, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies = count_copies(monkeypatch)
    weights = Weights(Net(0, size=512).state_dict())
    register("policy", weights)
    policies = [await following() for _ in range(3)]
    await weights.publish(Net(1, size=512).state_dict())
    await asyncio.gather(*(policy.wait(1) for policy in policies))
    copies.clear()
    await until(lambda: aiorpc.observe.stats().in_flight == 3)
    await weights.publish(Net(2, size=512).state_dict())
    await asyncio.gather(*(policy.wait(2) for policy in policies))
    assert len(copies) == 1
    assert all(policy.state["layers.3.bias"].sum() == 1024 for policy in policies)


class Failing(Weights):
    """Weights of a process that dies as soon as it is found: `losses` times."""

    losses = 1

    async def source(
        self, host: str, worker: str, lost: str | None = None
    ) -> tuple[str | None, str]:
        if self.losses:
            self.losses -= 1
            raise WorkerLost("main", "its process has died")
        return await super().source(host, worker, lost)


async def test_a_publisher_that_is_lost_once_more(following: Following) -> None:
    """Its next replacement process is found: a follower that polls has no other chance."""
    weights = Failing(Net(0.0).state_dict())
    register("policy", weights)
    policy = await following()
    assert (policy.version, weights.losses) == (0, 0)
    weights.losses = 2
    await policy._receiver._find_again(WorkerLost("main", "its process has died"))
    assert weights.losses == 0


@pytest.mark.promise("training.relays")
async def test_a_relay_that_left_before_this_worker_came(world: aiorpc.types.Worker) -> None:
    """Its name is unknown here: the follower is the relay of its host from now on."""
    weights = published()
    assert (await weights.source("other", "gone"))[0] == "gone"
    policy = Follower("policy", "main", None, host="other")
    async with asyncio.timeout(SOON), policy:
        await policy._begin()
        assert policy.version == 0
        assert (await weights.source("other", "late"))[0] == "main"


async def test_a_relay_drops_what_is_not_asked_for(
    following: Following, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A follower that comes later receives it again."""
    monkeypatch.setattr(relays, "IDLE", 0.0)
    weights = published(2.0)
    first = Follower("policy", "main", None, host="other")
    await first._begin()
    _, name = await weights.source("other", "main")
    relay = (await aiorpc.lookup(name)).local_value()
    assert relay._held
    await first.aclose()
    await until(lambda: not relay._held)
    async with Follower("policy", "main", None, host="other") as late:
        await late._begin()
        assert late.state["layers.0.bias"].tolist() == [2.0] * 8
