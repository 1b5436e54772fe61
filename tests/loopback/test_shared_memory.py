"""Tensors in shared memory, in a world of one: a worker's connection to itself uses it, too."""

import asyncio
import gc
import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from torch import Tensor

import aiorpc_torch as aiorpc
from aiorpc_torch import RRef, batched, create, remote
from aiorpc_torch.observe import stats
from aiorpc_torch.testing import connection, settled
from aiorpc_torch.testing.limits import COPY_ON_LOOP, INLINE_BYTES
from tests.support.actors import Notes
from tests.support.copies_inside import (
    fail_writes,
    hold_copies,
    limit_memory,
    read_no_probe,
    start_no_thread,
)
from tests.support.raw_connections import Stranger, Tap
from tests.support.segment_files import mapped_segments, open_segments
from tests.support.tensor_shelf import TensorShelf
from tests.support.tensor_ways import TENSOR_WAYS, set_way

LARGE = INLINE_BYTES // 4 + 1  # elements of float32
HUGE = COPY_ON_LOOP // 4 + 1  # those that a thread copies
SOON = 30.0


class Shelf(TensorShelf):
    """Also changes tensors, and gives them back in batches and streams."""

    async def add(self, x: Tensor, y: Tensor) -> float:
        """Change the first argument; return a sum of the second."""
        x.add_(1)
        return float(y.sum())

    async def get(self, index: int) -> Any:
        """What is kept."""
        return self.kept[index]

    async def keep_changed(self, x: Tensor) -> float:
        """Change the argument and keep it."""
        x.add_(1)
        self.kept.append(x)
        return float(x.sum())

    async def items(self, sizes: list[int]) -> Any:
        """A tensor of each size, filled with its number."""
        for number, size in enumerate(sizes):
            yield torch.full((size,), float(number))

    def plain_items(self, sizes: list[int]) -> Iterator[Tensor]:
        """The same, in a thread, from one buffer."""
        buffer = torch.zeros(max(sizes))
        for number, size in enumerate(sizes):
            yield buffer[:size].fill_(number)

    @batched(max_size=3, max_wait=1.0)
    def weights(self, xs: list[int]) -> Any:
        """The same large tensor for all."""
        return aiorpc.Broadcast(torch.full((HUGE,), float(len(xs))))


async def until(condition: Callable[[], bool]) -> None:
    """Turns of the loop until it is so."""
    async with asyncio.timeout(SOON):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


def sent_apart() -> int:
    """The messages of this process whose tensors did not travel by torch RPC."""
    return stats().shared_messages + stats().socket_messages


def is_given_back() -> bool:
    """Whether neither end holds memory of the other."""
    gc.collect()
    return not connection("main").holds_memory


@pytest.fixture
async def shelf(world: aiorpc.types.Worker) -> Shelf:
    """One in this world, whose connection has found that it may use shared memory."""
    return await new_shelf()


@pytest.fixture(params=["shared", "sockets"])
async def any_shelf(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, world: aiorpc.types.Worker
) -> Shelf:
    """One whose tensors travel in shared memory or on sockets."""
    set_way(monkeypatch, request.param)
    return await new_shelf(request.param)


async def new_shelf(way: str = "shared") -> Shelf:
    """One in the current world, whose connection knows the way of its tensors."""
    found = Shelf()
    await remote(RRef(found)).echo(0)
    if way == "sockets":
        await until(lambda: connection("main").carrier == "sockets")
    if way == "shared":
        await until(is_shared)
    return found


def is_shared() -> bool:
    """Whether arguments and results travel in shared memory."""
    found = connection("main")
    return found.carrier == found.result_carrier == "shared memory"


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[], None]]:
    """Copies of large tensors that wait until the test makes them."""
    return hold_copies(monkeypatch)


# ── values ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.usefixtures("shelf")
async def test_many_small_arguments_are_large_together() -> None:
    """Calls of the same object that follow them do not overtake them."""
    notes = remote(RRef(Notes()))
    many = [1.5] * 150_000
    await asyncio.gather(
        *(notes.note(number, *(many if number % 3 == 1 else ())) for number in range(9))
    )
    assert await notes.noted() == [*range(9)]


@pytest.mark.promise("shared.values")
async def test_many_copied_calls_at_once(any_shelf: Shelf) -> None:
    """More than Python calls itself: each copy ends inside the loop that sends it."""
    before, rref = sent_apart(), RRef(any_shelf)
    async with asyncio.timeout(SOON):
        sums = await asyncio.gather(
            *(remote(rref).keep_changed(torch.full((LARGE,), float(n))) for n in range(300))
        )
    assert sums == [(n + 1.0) * LARGE for n in range(300)]
    assert [float(tensor[0]) - 1 for tensor in any_shelf.kept] == [*range(300)]
    assert sent_apart() - before > 250


@pytest.mark.promise("shared.values")
@pytest.mark.parametrize("size", [LARGE, HUGE])
async def test_tensors_travel_in_shared_memory(
    shelf: Shelf, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There and back, and nothing of them by torch, nor of the next call."""
    tap = Tap(monkeypatch)
    x, before = torch.rand(size), stats().shared_messages
    assert torch.equal(await remote(RRef(shelf)).echo(x), x)
    assert stats().shared_messages == before + 1
    assert tap.count("shared") == 2
    assert stats().segments == 2
    assert stats().segment_bytes >= 2 * x.nbytes
    assert stats().held_bytes == 0
    assert await remote(RRef(shelf)).echo(1) == 1
    assert (tap.count("slot"), tap.count("calls")) == (0, 1)


VALUES: dict[str, Callable[[], Any]] = {
    "bytes": lambda: b"x" * 4 * LARGE,
    "many bytes": lambda: b"x" * (3 << 20),
    "nested": lambda: {"a": [torch.rand(LARGE), torch.rand(3)], "b": torch.rand(HUGE)},
    "transposed": lambda: torch.rand(LARGE, 2).t(),
    "expanded": lambda: torch.rand(LARGE).expand(3, LARGE),
    "part": lambda: torch.rand(4 * LARGE)[LARGE : 3 * LARGE],
    "strided": lambda: torch.rand(4 * LARGE)[::2],
    "half": lambda: torch.rand(2 * LARGE).bfloat16(),
    "complex": lambda: torch.rand(LARGE, dtype=torch.complex64),
    "bool": lambda: torch.rand(5 * LARGE) > 0.5,
    "graded": lambda: torch.rand(LARGE, requires_grad=True),
    "small and graded": lambda: torch.rand(3, requires_grad=True),
    "parameter": lambda: torch.nn.Parameter(torch.rand(LARGE)),
    "empty": lambda: (torch.rand(LARGE), torch.rand(0, 3), torch.rand(0)),
    "sparse": lambda: torch.eye(LARGE // 100).to_sparse(),
    "conjugated": lambda: torch.rand(LARGE, dtype=torch.complex64).conj(),
    "inference": lambda: torch.inference_mode()(torch.rand)(LARGE),
}


def tensors_in(value: Any) -> list[Tensor]:
    """Those in a value of `VALUES`."""
    if isinstance(value, Tensor):
        return [value]
    values = value.values() if isinstance(value, dict) else value
    return (
        [] if isinstance(value, bytes) else [found for each in values for found in tensors_in(each)]
    )


@pytest.mark.promise("shared.values")
@pytest.mark.parametrize("way", TENSOR_WAYS)
@pytest.mark.parametrize("name", VALUES)
async def test_values_arrive_alike_by_either_way(
    monkeypatch: pytest.MonkeyPatch, world: aiorpc.types.Worker, name: str, way: str
) -> None:
    """With dtype, shape and gradient, whether torch carries them or not."""
    set_way(monkeypatch, way)
    shelf = await new_shelf(way)
    value = VALUES[name]()
    for _ in range(2):
        found = await remote(RRef(shelf)).echo(value)
        assert type(found) is type(value)
        if isinstance(value, bytes):
            assert found == value
        for one, other in zip(tensors_in(value), tensors_in(found), strict=True):
            assert (one.dtype, one.shape, one.layout) == (other.dtype, other.shape, other.layout)
            assert one.requires_grad == other.requires_grad
            assert torch.equal(one.to_dense(), other.to_dense())
            assert other.is_leaf


@pytest.mark.promise("shared.values")
async def test_views_share_their_storage_in_a_message(any_shelf: Shelf) -> None:
    """And one tensor that is passed twice arrives as one object."""
    x = torch.zeros(LARGE)
    one, other, view = await remote(RRef(any_shelf)).echo((x, x, x.view(1, -1)))
    assert one is other
    one.fill_(5)
    assert bool((view == 5).all())
    assert not x.any()


# ── aliasing and reuse ──────────────────────────────────────────────────────────────────────────


@pytest.mark.promise("shared.own")
@pytest.mark.parametrize("size", [LARGE, HUGE])
async def test_a_received_tensor_is_its_own(any_shelf: Shelf, size: int) -> None:
    """Neither the sender, nor another call, nor a later message changes it, or sees a change."""
    proxy, x = remote(RRef(any_shelf)), torch.zeros(size)
    for number in range(4):
        await proxy.keep(x.fill_(number))
    assert [float(each.max()) for each in any_shelf.kept] == [0, 1, 2, 3]
    any_shelf.kept[1].fill_(7)
    assert float(x.max()) == 3
    any_shelf.kept.clear()
    for _ in range(4):
        await proxy.keep(x)
    assert [float(each.max()) for each in any_shelf.kept] == [3] * 4


@pytest.mark.promise("shared.reuse")
async def test_segments_are_used_again(shelf: Shelf) -> None:
    """Once the receiver has freed its tensors: their number does not grow."""
    gc.collect()
    before = mapped_segments()
    proxy, x = remote(RRef(shelf)), torch.rand(HUGE)
    for number in range(20):
        x[0] = number
        assert (await proxy.echo(x))[0] == number
    await until(is_given_back)
    assert stats().segments <= 6
    assert mapped_segments() <= before + 2 * 6


@pytest.mark.promise("shared.reuse")
async def test_a_part_keeps_its_message(shelf: Shelf) -> None:
    """A view, a storage or another thread may be the last to hold a received tensor."""
    (x,) = await remote(RRef(shelf)).echo([torch.ones(HUGE)])
    part, storage = x[5:7], x.untyped_storage()
    del x
    for _ in range(3):
        await remote(RRef(shelf)).echo(torch.zeros(HUGE))
    assert part.tolist() == [1, 1]
    del part
    assert not is_given_back()
    held = [storage]
    del storage
    thread = threading.Thread(target=held.clear)
    thread.start()
    thread.join()
    await until(is_given_back)


@pytest.mark.promise("shared.bounds")
async def test_no_room_is_no_failure(
    monkeypatch: pytest.MonkeyPatch, world: aiorpc.types.Worker
) -> None:
    """Torch carries what does not fit; there is room again once tensors are freed."""
    limit_memory(monkeypatch, 3 * 4 * HUGE)
    shelf = await new_shelf()
    proxy, x = remote(RRef(shelf)), torch.rand(HUGE)
    for number in range(1, 6):
        assert await proxy.keep(x) == number
        assert stats().segment_bytes <= 3 * 4 * HUGE
    assert torch.equal(await proxy.echo(x), x)
    shelf.kept.clear()
    await until(is_given_back)
    before = stats().shared_messages
    for _ in range(3):
        assert torch.equal(await proxy.echo(x), x)
    assert stats().shared_messages > before


async def test_nothing_is_left_of_a_world() -> None:
    """Neither descriptors nor mappings; tensors that were received can be read as before."""
    gc.collect()
    before = open_segments(), mapped_segments()
    async with aiorpc.testing.world():
        proxy = remote(RRef(Shelf()))
        await proxy.echo(0)
        await until(lambda: connection("main").result_carrier == "shared memory")
        x = await proxy.echo(torch.ones(HUGE))
    assert float(x.sum()) == HUGE
    x.fill_(2)
    await until(lambda: open_segments() <= before[0])
    del x
    await until(lambda: mapped_segments() <= before[1])


# ── many receivers ──────────────────────────────────────────────────────────────────────────────


@pytest.mark.promise("shared.once")
@pytest.mark.parametrize("size", [LARGE, HUGE])
@pytest.mark.parametrize("nested", [False, True])
async def test_a_group_argument_is_written_once(shelf: Shelf, size: int, nested: bool) -> None:
    """Each member's tensor is its own, and later calls have the later content."""
    members = await create(["main"] * 3, Shelf)
    x = torch.zeros(size)
    for number in range(3):
        x.fill_(number)
        if nested:
            found = await remote(members).echo({"x": x, "y": x[:2]})
            assert [float(each["x"].max()) for each in found] == [number] * 3
            continue
        assert await remote(members).keep_changed(x) == [size * (number + 1)] * 3
        assert float(x.max()) == number
    if not nested:
        assert stats().shared_messages == 9
        assert stats().segments == 3  # held by the members' tensors, one for each call


@pytest.mark.promise("shared.once")
async def test_values_of_each_go_beside_what_is_shared(any_shelf: Shelf) -> None:
    """A member's own tensors are in a segment of its own."""
    members = await create(["main"] * 3, Shelf)
    own, alike = [torch.full((LARGE,), float(n)) for n in range(3)], torch.ones(LARGE)
    found = await remote(members).add(alike, aiorpc.each(own))
    assert found == [n * LARGE for n in range(3)]
    assert float(alike.max()) == 1


@pytest.mark.promise("shared.once")
async def test_a_broadcast_result_is_written_once(shelf: Shelf) -> None:
    """And is each caller's own."""
    proxy = remote(RRef(shelf))
    found = await asyncio.gather(*(proxy.weights(n) for n in range(3)))
    assert stats().segments == 1
    found[0].fill_(9)
    assert [float(each.max()) for each in found] == [9, 3, 3]
    del found
    await until(is_given_back)


@pytest.mark.promise("shared.once")
async def test_a_tensor_of_several_calls_is_copied_once(
    shelf: Shelf, copies: list[Callable[[], None]]
) -> None:
    """Calls that are made while it is copied map that copy; each has a tensor of its own."""
    proxies, x = [remote(RRef(shelf)), remote(RRef(other := Shelf()))], torch.zeros(HUGE)
    calls = [asyncio.ensure_future(proxies[number % 2].keep(x)) for number in range(4)]
    await until(lambda: bool(copies) and connection("main").pending == 4)
    (copy,) = copies
    copies.clear()
    copy()
    assert sorted(await asyncio.gather(*calls)) == [1, 1, 2, 2]
    assert stats().segments == 1
    found = [*shelf.kept, *other.kept]
    found[0].fill_(5)
    assert [float(each.max()) for each in (*found, x)] == [5, 0, 0, 0, 0]
    later = asyncio.ensure_future(proxies[0].keep(x))  # nothing of it is being copied
    await until(lambda: bool(copies))
    copies.pop()()
    await later
    assert stats().segments == 2


async def test_a_tensor_that_is_freed_before_it_is_copied(
    shelf: Shelf, copies: list[Callable[[], None]]
) -> None:
    """Its call fails; the thread reads no memory that is gone."""
    x = torch.zeros(HUGE)
    sent = asyncio.ensure_future(remote(RRef(shelf)).keep(x))
    await until(lambda: bool(copies))
    x.untyped_storage().resize_(0)
    copies.pop()()
    with pytest.raises(aiorpc.RemoteError, match="its storage was freed or made smaller"):
        await sent
    assert await remote(RRef(shelf)).echo(7) == 7
    await until(is_given_back)


@pytest.mark.promise("shared.once")
@pytest.mark.parametrize("ends", ["cancelled", "late", "changed", "another part"])
async def test_a_copy_is_not_shared_with_a_changed_tensor(
    shelf: Shelf, copies: list[Callable[[], None]], ends: str
) -> None:
    """A call that has ended lets its caller change the tensor, although it is being copied."""
    proxy, x = remote(RRef(shelf)), torch.zeros(HUGE + 1)
    deadline = 0.01 if ends == "late" else None
    first = asyncio.ensure_future(remote(RRef(shelf), timeout=deadline).keep(x))
    await until(lambda: bool(copies))
    if ends == "cancelled":
        first.cancel()
    if ends in ("cancelled", "late"):
        await asyncio.gather(first, return_exceptions=True)
        x.numpy().fill(3)  # torch does not count this change
    elif ends == "changed":
        x.fill_(3)
    second = asyncio.ensure_future(proxy.keep(x[1:] if ends == "another part" else x))
    await until(lambda: len(copies) == 2)
    for copy in [*copies]:
        copy()
    await asyncio.gather(first, second, return_exceptions=True)
    assert float(shelf.kept[-1].max()) == (0 if ends == "another part" else 3)


@pytest.mark.promise("shared.once")
async def test_a_result_of_several_calls_is_copied_once(
    shelf: Shelf, copies: list[Callable[[], None]]
) -> None:
    """Such as the weights that many trainers ask for."""
    shelf.kept.append(torch.ones(HUGE))
    proxy = remote(RRef(shelf))
    calls = [asyncio.ensure_future(proxy.get(0)) for _ in range(3)]
    await until(lambda: bool(copies) and stats().running == 0)
    copies.pop()()
    found = await asyncio.gather(*calls)
    assert not copies
    found[0].fill_(2)
    assert [float(each.max()) for each in (*found, *shelf.kept)] == [2, 1, 1, 1]


@pytest.mark.promise("shared.values")
@pytest.mark.parametrize("way", TENSOR_WAYS)
async def test_a_part_is_cut_out_when_it_is_sent(
    monkeypatch: pytest.MonkeyPatch, world: aiorpc.types.Worker, way: str
) -> None:
    """Not on the event loop when the call is made; the rest of its storage does not travel."""
    set_way(monkeypatch, way)
    shelf = await new_shelf(way)
    proxy, whole = remote(RRef(shelf)), torch.arange(6.0 * HUGE).reshape(6, HUGE)
    await proxy.keep(whole[2])
    await proxy.keep({"part": whole[4]})
    kept = [shelf.kept[0], shelf.kept[1]["part"]]
    assert [each.untyped_storage().nbytes() for each in kept] == [4 * HUGE] * 2
    assert torch.equal(kept[0], whole[2])
    assert torch.equal(kept[1], whole[4])
    assert stats().shared_messages == (2 if way == "shared" else 0)
    assert stats().socket_messages == (2 if way == "sockets" else 0)


# ── order, streams, cancellation ────────────────────────────────────────────────────────────────


@pytest.mark.promise("shared.order")
async def test_a_copy_delays_its_own_object_only(
    shelf: Shelf, copies: list[Callable[[], None]]
) -> None:
    """Later calls of the object wait for it; calls of others do not."""
    proxy, other = remote(RRef(shelf)), remote(RRef(Shelf()))
    first = asyncio.ensure_future(proxy.keep(torch.ones(HUGE)))
    await until(lambda: bool(copies))
    second = asyncio.ensure_future(proxy.keep(1))
    assert await other.echo(2) == 2
    assert not shelf.kept
    copies.pop()()
    assert [await first, await second] == [1, 2]
    assert shelf.kept[1] == 1


@pytest.mark.promise("shared.cancelled")
async def test_a_call_that_is_cancelled_while_it_is_copied(
    shelf: Shelf, copies: list[Callable[[], None]]
) -> None:
    """It does not run, nothing waits for it, and its memory is given back."""
    proxy = remote(RRef(shelf))
    call = asyncio.ensure_future(proxy.keep(torch.ones(HUGE)))
    await until(lambda: bool(copies))
    call.cancel()
    await asyncio.wait((call,))
    assert await proxy.keep(1) == 1
    copies.pop()()
    async with asyncio.timeout(SOON):
        await settled()
    assert shelf.kept == [1]
    await until(is_given_back)


@pytest.mark.promise("shared.cancelled")
async def test_a_result_that_is_cancelled_while_it_is_copied(
    shelf: Shelf, copies: list[Callable[[], None]]
) -> None:
    """It is dropped where it arrives."""
    x = torch.ones(HUGE)
    call = asyncio.ensure_future(remote(RRef(shelf)).echo([x]))
    await until(lambda: bool(copies))
    copies.pop()()
    await until(lambda: bool(copies))  # the result's
    call.cancel()
    await asyncio.wait((call,))
    late = stats().late
    copies.pop()()
    await until(lambda: stats().late > late)
    await until(is_given_back)


@pytest.mark.promise("shared.deadlines")
async def test_a_call_that_times_out_while_it_is_copied(
    shelf: Shelf, copies: list[Callable[[], None]]
) -> None:
    """As one whose payload torch carries."""
    proxy = remote(RRef(shelf))
    with pytest.raises(aiorpc.CallTimeout):
        with aiorpc.timeout(0.05):
            await proxy.keep(torch.ones(HUGE))
    copies.pop()()
    assert await proxy.keep(1) == 1
    await until(is_given_back)


@pytest.mark.promise("shared.order")
@pytest.mark.parametrize("name", ["items", "plain_items"])
async def test_items_of_streams_stay_in_order(
    any_shelf: Shelf, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever way each of them takes."""
    tap = Tap(monkeypatch)
    sizes = [3, HUGE, LARGE, 1, HUGE, HUGE, 2, LARGE]
    found = [item async for item in getattr(remote(RRef(any_shelf)), name)(sizes)]
    assert [len(item) for item in found] == sizes
    assert [float(item.max()) for item in found] == [*range(8)]
    assert tap.count("shared") + tap.count("transferred") >= 5
    del found
    await until(is_given_back)


async def test_a_copy_that_fails_goes_by_torch(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the call nor its result nor an item of a stream is lost."""
    fail_writes(monkeypatch)
    proxy = remote(RRef(shelf))
    for size in (LARGE, HUGE):
        x = torch.rand(size)
        assert torch.equal(await proxy.echo(x), x)
        assert [len(item) async for item in proxy.items([size, 1, size])] == [size, 1, size]
    assert stats().shared_messages == 0
    monkeypatch.undo()


async def test_no_thread_for_a_copy(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is made on the event loop then."""
    start_no_thread(monkeypatch)
    x = torch.rand(HUGE)
    assert torch.equal(await remote(RRef(shelf)).echo(x), x)
    assert stats().shared_messages == 1


@settings(max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.sampled_from([1, LARGE, HUGE]), st.booleans()), max_size=12))
@pytest.mark.parametrize("way", ["shared", "sockets"])
def test_calls_of_one_object_start_as_sent(
    monkeypatch: pytest.MonkeyPatch, way: str, calls: list[tuple[int, bool]]
) -> None:
    """Whatever their sizes, and whichever of them are cancelled."""
    set_way(monkeypatch, way)

    async def main() -> None:
        async with aiorpc.testing.world():
            shelf = await new_shelf(way)
            proxy = remote(RRef(shelf))
            tasks = [
                asyncio.ensure_future(proxy.keep((number, torch.full((size,), float(number)))))
                for number, (size, _) in enumerate(calls)
            ]
            await asyncio.sleep(0)
            for task, (_, is_cancelled) in zip(tasks, calls, strict=True):
                if is_cancelled:
                    task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await proxy.echo(0)
            found = [number for number, _ in shelf.kept]
            assert found == sorted(found)
            assert {*found} >= {n for n, (_, cancelled) in enumerate(calls) if not cancelled}
            assert all(bool((x == number).all()) for number, x in shelf.kept)
            shelf.kept.clear()
            await until(is_given_back)

    asyncio.run(main())


# ── negotiation ─────────────────────────────────────────────────────────────────────────────────


async def test_without_memfd_torch_carries_all(
    over_torch: None, world: aiorpc.types.Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a word but in the counters."""
    proxy, x = remote(RRef(Shelf())), torch.rand(HUGE)
    for _ in range(2):
        assert torch.equal(await proxy.echo(x), x)
    assert (stats().shared_messages, stats().segments) == (0, 0)


async def test_a_process_that_may_not_make_segments(
    monkeypatch: pytest.MonkeyPatch, world: aiorpc.types.Worker
) -> None:
    """As in a sandbox."""

    def forbidden(*_: Any) -> int:
        raise PermissionError("memfd_create")

    monkeypatch.setattr(os, "memfd_create", forbidden)
    proxy, x = remote(RRef(Shelf())), torch.rand(HUGE)
    for _ in range(2):
        assert torch.equal(await proxy.echo(x), x)
    assert stats().shared_messages == 0


async def test_a_peer_that_cannot_read_the_probe(
    monkeypatch: pytest.MonkeyPatch, world: aiorpc.types.Worker
) -> None:
    """Of another process namespace, for one."""
    read_no_probe(monkeypatch)
    proxy, x = remote(RRef(Shelf())), torch.rand(HUGE)
    for _ in range(2):
        assert torch.equal(await proxy.echo(x), x)
    assert stats().shared_messages == 0


async def test_segments_that_cannot_be_made_later(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No descriptor or no memory is left: torch carries the tensors."""

    def full(*_: Any) -> int:
        raise OSError(24, "too many open files")

    monkeypatch.setattr(os, "memfd_create", full)
    proxy, x = remote(RRef(shelf)), torch.rand(HUGE)
    for _ in range(2):
        assert torch.equal(await proxy.echo(x), x)
    assert (stats().shared_messages, stats().segments) == (0, 0)


async def test_frames_of_a_large_call(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    """The call and the result, each with its tensor, and no call by torch."""
    tap = Tap(monkeypatch)
    await remote(RRef(shelf)).echo(torch.rand(LARGE))
    assert (tap.count("slot"), tap.count("shared"), tap.count("calls")) == (0, 2, 0)


SEGMENTS, SHARED = 8, 9  # kinds of frames
NEWS = ((), (), ())


MALFORMED: dict[str, tuple[int, Any]] = {
    "news of what is not held": (SEGMENTS, (None, None, (7,), (), ())),
    "opened what is not held": (SEGMENTS, (None, None, (), (), (7,))),
    "an offer of nothing": (SEGMENTS, ((), None, *NEWS)),
    "an offer of text": (SEGMENTS, (("a", "b", "c", "d"), None, *NEWS)),
    "too many fields": (SEGMENTS, (None, None, *NEWS, ())),
    "no fields": (SEGMENTS, 5),
    "a segment before any offer": (SHARED, (((1, 3, 5, 4096, False),), (), b"")),
    "no segment": (SHARED, ((), (), b"")),
    "a place without a segment": (
        SHARED,
        ((), ((0, 0, 4, "float32", 0, (1,), (1,), False),), b""),
    ),
    "text": (SHARED, "text"),
}


@pytest.mark.promise("shared.malformed")
@pytest.mark.parametrize("name", MALFORMED)
async def test_a_malformed_frame_ends_its_connection(world: aiorpc.types.Worker, name: str) -> None:
    """And nothing else."""
    stranger = await Stranger.proven()
    kind, fields = MALFORMED[name]
    stranger.send(kind, fields)
    async with asyncio.timeout(SOON):
        await stranger.session.ended.wait()
    await stranger.leave()
    assert await remote(RRef(Shelf())).echo(1) == 1


@pytest.mark.promise("shared.malformed")
@pytest.mark.parametrize("what", ["size", "inode", "descriptor"])
async def test_a_segment_that_is_another_file(world: aiorpc.types.Worker, what: str) -> None:
    """No memory is read that the caller did not offer."""
    stranger = await Stranger.proven()
    with tempfile.TemporaryFile() as file:
        inode = os.fstat(file.fileno()).st_ino
        offer = (os.getpid(), file.fileno(), inode, 4096)
        stranger.send(SEGMENTS, (offer, None, *NEWS))
        found = await stranger.frame()
        assert found is not None
        kind, (_, proof, *_) = found
        assert (kind, proof) == (SEGMENTS, b"")
        name = {
            "size": (1, file.fileno(), inode, 1 << 40, False),
            "inode": (1, file.fileno(), inode + 1, 4096, False),
            "descriptor": (1, 1 << 20, inode, 4096, True),
        }[what]
        stranger.send(SHARED, ((name,), (), b""))
        async with asyncio.timeout(SOON):
            await stranger.session.ended.wait()
    await stranger.leave()
