"""Tensors in shared memory between processes: values, losses, and what is left behind."""

import asyncio
import gc
import multiprocessing
import os
import signal
import warnings
import weakref
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st

import aiorpc_torch as aiorpc
from aiorpc_torch import WorkerLost, call, create, remote
from aiorpc_torch.observe import stats
from aiorpc_torch.testing import Workers, connection, kill
from aiorpc_torch.testing.limits import COPY_ON_LOOP
from tests.support.segment_files import mapped_segments, open_segments
from tests.support.tensor_shelf import TensorShelf, memory_files

SOON = 30.0
LARGE, HUGE = 50_000, COPY_ON_LOOP // 4 + 1  # elements of float32: copied on the loop, in a thread


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(SOON):
        while not await condition():  # noqa: ASYNC110 - other processes
            await asyncio.sleep(0.01)


async def connected(worker: str) -> None:
    """Wait until tensors travel to that worker in shared memory."""

    async def is_agreed() -> bool:
        await call(worker, int)
        return connection(worker).carrier == "shared memory"

    await until(is_agreed)


def test_tensors_arrive_as_they_were() -> None:
    """Of any dtype, shape and strides, many at once, there and back."""
    dtypes = st.sampled_from(["float32", "float64", "bfloat16", "int8", "int64", "bool"])
    shapes = st.lists(st.sampled_from([3, 16, 20]), min_size=2, max_size=2)
    ways = st.sampled_from(["dense", "transposed", "part", "expanded"])

    async def main() -> None:
        async with aiorpc.testing.world(["a"]):
            shelf = remote(await create("a", TensorShelf))
            await connected("a")
            loop = asyncio.get_running_loop()

            @settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow])
            @given(st.lists(st.tuples(dtypes, shapes, ways), min_size=1, max_size=4))
            def check(specs: list[tuple[str, list[int], str]]) -> None:
                sent = [make(*each) for each in specs]
                echo = asyncio.run_coroutine_threadsafe(echoes(sent), loop)
                for one, other in zip(sent, echo.result(SOON), strict=True):
                    assert one.dtype == other.dtype
                    assert torch.equal(one, other)

            async def echoes(sent: list[torch.Tensor]) -> list[torch.Tensor]:
                return await asyncio.gather(*(shelf.echo(each) for each in sent))

            await asyncio.to_thread(check)
            assert stats().shared_messages > 0

    asyncio.run(main())


def make(name: str, shape: list[int], way: str) -> torch.Tensor:
    """A tensor of over 128 KiB."""
    found = torch.randint(0, 100, (2000, *shape)).to(getattr(torch, name))
    if way == "transposed":
        return found.transpose(0, -1)
    if way == "part":
        return found[10:-10]
    return found.expand(2, *found.shape) if way == "expanded" else found


@pytest.mark.promise("shared.own", "shared.once")
async def test_each_receiver_has_its_own(workers: Workers) -> None:
    """What one of a group writes is seen by no other, nor by the sender, nor by a later message."""
    await workers(["a", "b"])
    members = await create(["a", "b", "a", "main"], TensorShelf)
    for name in ("a", "b", "main"):
        await connected(name)
    before = stats().segments
    for size in (LARGE, HUGE):
        x = torch.ones(size)
        for number in range(3):
            sums = await remote(members).grow(x)
            assert sums == [size * (1.0 + number)] * 4
        assert float(x.sum()) == size
        assert await remote(members).sums() == [[size * (1.0 + n) for n in range(3)]] * 4
        await remote(members).drop()
    assert stats().segments - before <= 6  # one for each of six calls, not for each member


@pytest.mark.promise("shared.own")
async def test_a_tensor_that_is_sent_again_beside_others(tmp_path: Path) -> None:
    """A group call that is made again: what its worker keeps of other calls stays as it is."""
    entered, may_end = tmp_path / "entered", tmp_path / "may end"

    async def have_entered(count: int) -> bool:
        return entered.exists() and len(entered.read_text().split()) == count

    async with aiorpc.local_world(["a"], max_restarts=1), asyncio.timeout(SOON):
        one, other = await aiorpc.supervised(["a", "a"], TensorShelf)
        weigh = remote(aiorpc.Group([one, other]), retries=1).weigh
        weighing = asyncio.ensure_future(weigh(torch.ones(LARGE), entered, may_end))
        await until(lambda: have_entered(2))
        kill("a")
        await until(lambda: have_entered(4))
        shelf = remote(one)
        for number in range(4):
            await shelf.keep(torch.full((LARGE,), float(number)))
        may_end.touch()
        assert await weighing == [LARGE, LARGE]
        del weighing, weigh
        gc.collect()
        await shelf.pid()  # behind the news of what was released
        for number in range(4, 8):
            await shelf.keep(torch.full((LARGE,), float(number)))
        assert await shelf.sums() == [LARGE * float(number) for number in range(8)]


@pytest.mark.promise("shared.bounds")
async def test_nothing_is_left_of_a_killed_receiver(workers: Workers) -> None:
    """Its segments are closed here: descriptors and mappings are as before. No file was made."""
    files = {*os.listdir("/dev/shm")}
    await workers(["a"])
    await connected("main")
    gc.collect()
    before = open_segments(), mapped_segments()
    await connected("a")
    shelf = remote(await create("a", TensorShelf))
    for size in (LARGE, HUGE):
        for _ in range(3):
            await shelf.keep(torch.ones(size))
    kept = await shelf.echo(torch.full((HUGE,), 3.0))
    assert open_segments() >= before[0] + 6
    assert not {*os.listdir("/dev/shm")} - files
    os.kill(await shelf.pid(), signal.SIGKILL)
    with pytest.raises(WorkerLost):
        await shelf.echo(torch.ones(HUGE))

    async def is_as_before() -> bool:
        gc.collect()
        return (open_segments(), mapped_segments()) == (before[0], before[1] + 1)

    await until(is_as_before)  # but for the tensor that is kept
    assert float(kept.sum()) == 3.0 * HUGE


@pytest.mark.promise("shared.bounds")
async def test_nothing_is_left_of_a_killed_sender(workers: Workers) -> None:
    """A worker that it has called keeps none of its memory."""
    await workers(["a", "b"])
    await call("b", int)

    async def counts() -> tuple[int, int]:
        return await call("b", memory_files)

    before = await counts()
    shelf = remote(await create("a", TensorShelf))
    assert await shelf.give("b", HUGE, 5) == 5
    assert (await counts())[1] > before[1]
    pid = await shelf.pid()
    calling = asyncio.ensure_future(shelf.give("b", HUGE, 10_000))
    await asyncio.sleep(0)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(WorkerLost):
        await calling

    async def is_as_before() -> bool:
        return await counts() == before

    await until(is_as_before)


async def test_a_result_in_the_memory_of_a_killed_worker(workers: Workers) -> None:
    """It arrives after its sender has ended, so nothing can map it: the sender is lost."""
    await workers(["a"])
    await connected("a")
    shelf = remote(await create("a", TensorShelf))
    (process,) = multiprocessing.active_children()
    calling = asyncio.ensure_future(shelf.last(LARGE))
    await asyncio.sleep(0)
    process.join()  # this loop reads nothing meanwhile
    with pytest.raises(WorkerLost):
        await calling


async def test_an_item_that_a_killed_worker_was_copying(workers: Workers) -> None:
    """The end of its stream was behind it: the consumer is told."""
    await workers(["a"])
    await connected("a")
    shelf = remote(await create("a", TensorShelf))
    assert len([x async for x in shelf.items(HUGE, 2)]) == 2
    await shelf.stop_copying()
    taking = asyncio.ensure_future(anext(aiter(shelf.items(HUGE, 1))))
    await asyncio.sleep(0)
    await shelf.echo(0)  # started later, and is answered
    assert not taking.done()
    kill("a")
    with pytest.raises(WorkerLost):
        async with asyncio.timeout(SOON):
            await taking


async def test_large_results_at_once(workers: Workers) -> None:
    """Each has a segment of its own."""
    await workers(["a"])
    await connected("a")
    shelf = remote(await create("a", TensorShelf))
    sent = [torch.rand(4 * HUGE) for _ in range(5)]
    found = await asyncio.gather(*map(shelf.echo, sent))
    assert all(map(torch.equal, found, sent))


async def test_memory_is_flat(workers: Workers) -> None:
    """Of many messages of random sizes, some of which are cancelled."""
    await workers(["a"])
    await connected("a")
    shelf = remote(await create("a", TensorShelf))
    generator = torch.Generator().manual_seed(1)

    async def some(count: int) -> None:
        for number in range(count):
            size = int(torch.randint(30_000, 400_000, (1,), generator=generator))
            task = asyncio.ensure_future(shelf.echo(torch.full((size,), float(number))))
            if number % 5 == 0:
                await asyncio.sleep(0)
                task.cancel()
                await asyncio.wait((task,))
            else:
                assert float((await task)[-1]) == number

    await some(60)
    first = stats().segments, open_segments()
    await some(200)
    assert stats().segments <= first[0] + 6
    assert open_segments() <= first[1] + 6
    assert stats().in_flight == 0


async def test_the_loop_of_what_is_kept_is_closed(workers: Workers) -> None:
    """Whoever calls next, on another loop, is not told of it."""
    await workers(["a"])
    shelf = await create("a", TensorShelf)

    async def keep() -> None:
        await connected("a")
        await remote(shelf).keep(torch.ones(HUGE))

    async def sums() -> list[float]:
        return await remote(shelf).sums()

    closed: list[weakref.ref[asyncio.AbstractEventLoop]] = []

    def on_a_loop_of_its_own() -> None:
        loop = asyncio.new_event_loop()
        closed.append(weakref.ref(loop))
        loop.run_until_complete(keep())
        loop.close()

    with warnings.catch_warnings():  # such a loop leaves its sockets to the garbage collector
        warnings.simplefilter("ignore", ResourceWarning)
        await asyncio.to_thread(on_a_loop_of_its_own)
        assert await asyncio.to_thread(lambda: asyncio.run(sums())) == [HUGE]
        async with asyncio.timeout(SOON):
            while closed[0]() is not None:
                gc.collect()
                await asyncio.sleep(0.01)
