"""Inserts and samples of coroutines: the ratio holds, and everyone is served in order."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st

import aiorpc_torch as aiorpc
from aiorpc_torch import CallTimeout
from aiorpc_torch.training import Replay, SampleLimit, StalenessLimit, Ticket, Uniform


async def steps(count: int = 10) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_without_a_limit_a_sample_waits_for_the_first_item() -> None:
    replay = Replay()
    sampling = asyncio.create_task(replay.sample(3))
    await steps()
    assert not sampling.done()
    await replay.insert("a", Ticket(4, 1))
    assert await sampling == ["a"] * 3
    await replay.insert("b", Ticket(3, 2))
    assert replay.version == 4
    assert (replay.inserted, replay.sampled) == (2, 3)
    assert repr(replay) == "<Replay 2 in, 3 out, 0 inserts and 0 samples waiting>"


@pytest.mark.promise("training.ratio")
async def test_inserts_and_samples_wait_for_each_other() -> None:
    replay = Replay(limit=SampleLimit(2, min_size=2, slack=4))
    inserting = [asyncio.create_task(replay.insert(number)) for number in range(6)]
    await steps()
    assert replay.inserted == 4
    assert len(await replay.sample(2)) == 2
    await steps()
    assert replay.inserted == 5
    inserting[5].cancel()
    sampling = [asyncio.create_task(replay.sample(size)) for size in (6, 1)]
    await steps()
    assert [each.done() for each in sampling] == [True, True]
    late = [asyncio.create_task(replay.sample(size)) for size in (3, 1)]
    await steps()
    assert not late[1].done()  # it would be possible, but waits behind the other
    await replay.insert("more")
    await steps()
    assert late[0].done()
    for each in (*inserting, *late):
        each.cancel()
    await asyncio.wait([*inserting, *late])


@pytest.mark.promise("training.deadlines")
async def test_deadlines_and_mistakes() -> None:
    replay = Replay(limit=SampleLimit(1, min_size=1, slack=2))
    with (
        aiorpc.timeout(0.01),
        pytest.raises(
            CallTimeout, match=r"the sample timed out.*: <Replay 0 in, 0 out, .*min_size=1,"
        ),
    ):
        await replay.sample(1)
    for size in (0, None, 1.5):
        with pytest.raises(ValueError, match="at least 1 item"):
            await replay.sample(size)  # type: ignore[arg-type]
    for item in range(3):
        await replay.insert(item)
    with (
        aiorpc.timeout(0.01),
        pytest.raises(CallTimeout, match=r"the insert timed out.*: <Replay 3 in"),
    ):
        await replay.insert(3)
    assert replay.inserted == 3


@pytest.mark.promise("training.waits")
async def test_an_insert_that_waits_keeps_no_version_back() -> None:
    """Else the insert would wait for the learner's sample, and the learner for the rollout."""
    limit, replay = StalenessLimit(0, 1), Replay(limit=SampleLimit(1, min_size=1, slack=1))
    for _ in range(2):
        await replay.insert("before")

    async def roll_out() -> None:
        async with limit.ticket() as ticket:
            await replay.insert("item", ticket)

    rollout = asyncio.create_task(roll_out())
    await steps()
    assert limit.in_flight == 1
    assert await asyncio.wait_for(limit.advance(1), 30) == 1
    await replay.sample(1)
    await rollout
    assert limit.in_flight == 0


async def test_a_storage_that_fails_fails_its_own_call() -> None:
    class Broken(Uniform):
        is_broken = True

        def extend(self, items: Any, /) -> None:
            if self.is_broken:
                raise OSError("disk full")
            super().extend(items)

    storage = Broken()
    replay = Replay(storage, SampleLimit(1, min_size=1, slack=2))
    with pytest.raises(OSError, match="disk full"):
        await replay.insert(1)
    storage.is_broken = False
    await replay.insert(2)
    assert await replay.sample(1) == [2]


def test_the_uniform_storage() -> None:
    storage = Uniform(3, seed=0)
    storage.extend(range(2))
    assert len(storage) == 2
    storage.extend(range(2, 5))
    assert len(storage) == 3
    assert set(storage.sample(100)) == {2, 3, 4}
    for capacity in (0, None):
        with pytest.raises(ValueError, match="capacity must be at least 1"):
            Uniform(capacity)  # type: ignore[arg-type]


@pytest.mark.promise("training.ratio")
@settings(max_examples=50)
@given(st.data())
def test_any_order_of_calls_and_cancellations(data: st.DataObject) -> None:
    """At the end, enough of the one side serves all of the other."""
    asyncio.run(_run(data))


async def _run(data: st.DataObject) -> None:
    ratio, slack = data.draw(st.sampled_from([(0.5, 3), (1, 4), (4, 5)]))
    replay = Replay(limit=SampleLimit(ratio, min_size=2, slack=slack))
    inserting, sampling = list[asyncio.Task[None]](), list[asyncio.Task[Any]]()
    for _ in range(data.draw(st.integers(1, 30))):
        kind = data.draw(st.sampled_from(["insert", "sample", "cancel", "step"]))
        if kind == "insert":
            inserting.append(asyncio.create_task(replay.insert(0)))
        elif kind == "sample":
            size = data.draw(st.integers(1, 5))
            sampling.append(asyncio.create_task(replay.sample(size)))
        elif kind == "step":
            await asyncio.sleep(0)
        elif inserting or sampling:
            data.draw(st.sampled_from([*inserting, *sampling])).cancel()
        if replay.inserted >= 2:
            assert abs(replay.sampled - ratio * (replay.inserted - 2)) <= slack
    others = [asyncio.create_task(for_ever(call)) for call in (one_in(replay), one_out(replay))]
    async with asyncio.timeout(30):
        await asyncio.gather(*inserting, *sampling, return_exceptions=True)
    for each in others:
        each.cancel()


def one_in(replay: Replay) -> Callable[[], Awaitable[Any]]:
    return lambda: replay.insert(0)


def one_out(replay: Replay) -> Callable[[], Awaitable[Any]]:
    return lambda: replay.sample(1)


async def for_ever(call: Callable[[], Awaitable[Any]]) -> None:
    while True:
        await call()
        await asyncio.sleep(0)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torchrl's import
@pytest.mark.parametrize("kind", ["ReplayBuffer", "TensorDictReplayBuffer"])
async def test_a_buffer_of_torchrl_as_the_storage(kind: str) -> None:
    """It takes items one by one, and its samples are returned as they are."""
    data = pytest.importorskip("torchrl.data")
    from tensordict import TensorDict

    storage = getattr(data, kind)(storage=data.LazyTensorStorage(10))
    replay = Replay(storage, SampleLimit(4, min_size=3, slack=8))
    sampling = asyncio.create_task(replay.sample(8))
    for number in range(3):
        assert not sampling.done()
        await replay.insert(TensorDict({"state": torch.full((4,), float(number))}))
    sample = await sampling
    assert sample["state"].shape == (8, 4)
    assert set(sample["state"].flatten().tolist()) <= {0.0, 1.0, 2.0}
    assert (len(storage), replay.inserted, replay.sampled) == (3, 3, 8)


def test_what_is_no_storage_or_limit_is_refused() -> None:
    with pytest.raises(TypeError, match=r"storage must have .*, got \[\]"):
        Replay([])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"storage must have .* got <SampleLimit"):
        Replay(SampleLimit(8, min_size=1, slack=64))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="limit must be a SampleLimit, got 8"):
        Replay(Uniform(), 8)  # type: ignore[arg-type]
