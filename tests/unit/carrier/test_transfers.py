"""Chunks of transfers: every byte arrives once, in its place, and what is cancelled is freed."""

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from aiorpc_torch._aio.segments import Segment
from aiorpc_torch._carrier import transfers
from aiorpc_torch._carrier.transfers import (
    CHUNK,
    HEADER,
    MAX_PIECES,
    IncomingTransfers,
    OutgoingTransfer,
)
from aiorpc_torch._wire.blocks import place, tensors_at
from aiorpc_torch._wire.frames import ProtocolError

LIMIT = 1 << 25
SOON = 30.0
WHICH = st.integers(0, 1000)


def outgoing(number: int, tensors: list[torch.Tensor]) -> OutgoingTransfer:
    found = place(tensors, in_one_block=True)
    assert found is not None
    return OutgoingTransfer(number, found[0][0])


def allocate(size: int, _: bool) -> tuple[Any, None]:
    return bytearray(size), None


def incoming(limit: int = LIMIT) -> IncomingTransfers:
    return IncomingTransfers(limit, allocate)


def chunks(transfer: OutgoingTransfer) -> list[bytes]:
    """All that are left, as they are sent."""
    found = []
    while (chunk := transfer.take()) is not None:
        found.append(b"".join(bytes(each) for each in chunk))
        transfer.sent()
    return found


def receive(transfers: IncomingTransfers, chunk: bytes) -> bool | None:
    number, size, offset, length, _ = HEADER.unpack(chunk[: HEADER.size])
    assert length == len(chunk) - HEADER.size
    memory = transfers.begin(number, size, offset, length)
    if memory is not None:
        memory[:] = chunk[HEADER.size :]
    return transfers.end(number, length)


@given(
    st.lists(
        st.sampled_from([1, 3, 64, 1000, CHUNK // 4, CHUNK // 4 + 1, CHUNK]), min_size=1, max_size=6
    ),
    st.randoms(use_true_random=False),
)
@settings(max_examples=30)
def test_tensors_arrive_whatever_the_order_of_their_chunks(
    sizes: list[int], chance: random.Random
) -> None:
    """No chunk is much longer than it may be."""
    tensors = [torch.rand(size) for size in sizes]
    blocks, places = place(tensors, in_one_block=True) or ([], [])
    sent = chunks(OutgoingTransfer(5, blocks[0]))
    assert max(map(len, sent)) < CHUNK + HEADER.size + 64
    chance.shuffle(sent)
    found = incoming()
    outcomes = [receive(found, each) for each in sent]
    assert outcomes == [None] * (len(sent) - 1) + [True]
    memory, size = found.take(5)
    assert size == blocks[0].size
    for one, other in zip(tensors, tensors_at(places, [(memory, len(memory))]), strict=True):
        assert torch.equal(one, other)
    assert not len(found)


def test_a_chunk_has_not_too_many_tensors() -> None:
    """The system takes a thousand buffers at a time."""
    transfer = outgoing(1, [torch.ones(3) for _ in range(1000)])
    chunk = transfer.take()
    assert chunk is not None
    assert len(chunk) <= 2 * MAX_PIECES + 2


def test_a_storage_that_is_freed_before_it_is_sent() -> None:
    """No memory that is gone is read."""
    x = torch.ones(CHUNK)
    transfer = outgoing(1, [x])
    transfer.take()
    x.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="freed"):
        transfer.take()
    assert not transfer.cancel()
    assert transfer.sent()


def test_two_threads_need_the_tensors() -> None:
    """Until both have sent their chunk."""
    transfer = outgoing(1, [torch.ones(CHUNK // 2)])
    assert transfer.take()
    assert transfer.take()
    assert transfer.take() is None
    assert transfer.is_complete
    assert not transfer.sent()
    assert transfer.sent()


@pytest.mark.parametrize("error", [MemoryError, OSError, RuntimeError])  # the last one is torch's
def test_a_transfer_without_memory_is_discarded(error: type[Exception]) -> None:
    """Its sender is told at its end, and drops it: once, though it may do so before it is told."""

    def none_left(_: int, __: bool) -> Any:
        raise error

    found = IncomingTransfers(LIMIT, none_left)
    sent = chunks(outgoing(1, [torch.ones(CHUNK // 2)]))
    assert [receive(found, each) for each in sent] == [None, False]
    with pytest.raises(ProtocolError, match="has not come"):
        found.take(1)
    found.drop(1, 2 * CHUNK)
    assert not len(found)


@pytest.mark.parametrize(
    "chunk",
    [(1, 100, 0, 0), (1, 100, 1, 100), (1, 100, 101, 1), (1, 1 << 63, 0, 1), (7, 100, 0, 10)],
    ids=["empty", "too long", "behind its end", "too large", "of another size"],
)
def test_a_malformed_chunk(chunk: tuple[int, int, int, int]) -> None:
    """No memory is reserved or written for it."""
    found = incoming()
    found.begin(7, 50, 0, 10)
    with pytest.raises(ProtocolError):
        found.begin(*chunk)


def test_a_transfer_that_has_not_come_whole_cannot_be_read() -> None:
    """Nor one that does not exist."""
    found = incoming()
    found.begin(1, 100, 0, 10)
    found.end(1, 10)
    for number in (1, 2):
        with pytest.raises(ProtocolError, match="has not come"):
            found.take(number)


def shared() -> tuple[IncomingTransfers, Segment]:
    """A transfer into a segment, which has come whole."""
    segment = Segment(192)

    def allocate_shared(size: int, is_shared: bool) -> tuple[Any, Segment]:
        assert (size, is_shared) == (192, True)
        return segment.buffer(), segment

    found = IncomingTransfers(LIMIT, allocate_shared)
    found.begin(1, 192, 0, 192, True)
    assert found.end(1, 192)
    return found, segment


@pytest.mark.parametrize("is_read_first", [True, False])
def test_a_segment_is_held_until_it_is_read_and_released(is_read_first: bool) -> None:
    """Its bytes count meanwhile."""
    found, segment = shared()
    assert found.segment(1) is segment
    if not is_read_first:
        found.release(1)
    else:
        assert found.take(1) == (segment, 192)
    assert len(found) == 1
    assert found._held == 192
    if is_read_first:
        with pytest.raises(ProtocolError, match="has not come"):
            found.take(1)
        found.release(1)
    else:  # not its memory, which the siblings would see written
        assert found.take(1) == (segment, 192)
    assert not len(found)
    assert not found._held
    assert found.segment(1) is None
    found.release(1)  # of one that was dropped meanwhile


@pytest.mark.parametrize("is_released_first", [True, False])
def test_a_shared_transfer_that_is_dropped(is_released_first: bool) -> None:
    """When it has come whole, and before."""
    found, _ = shared()
    if is_released_first:
        found.release(1)
    found.drop(1, 192)
    assert len(found) == (not is_released_first)
    found.release(1)
    assert not len(found)
    found.begin(2, 192, 0, 64, True)
    found.end(2, 64)
    found.drop(2, 128)
    assert found.segment(2) is None
    found.release(2)
    assert len(found) == 1
    found.begin(2, 192, 64, 64, True)
    assert found.end(2, 64) is None
    assert not len(found)
    assert not found._held


def test_what_was_not_read_counts_beside_what_is_sent() -> None:
    """Up to twice the limit. A chunk may have one byte."""
    found = incoming(100)
    for number in (1, 2):
        assert found.begin(number, 80, 79, 1) is not None
    assert not found.adopt(3, bytearray(80), 80)
    assert found.begin(3, 40, 0, 40) is not None


WAYS_ON: dict[str, tuple[Callable[[IncomingTransfers], object], bool | None]] = {
    "another is read": (lambda found: found.take(1), True),
    "another is dropped": (lambda found: found.drop(2, 80), True),
    "it is dropped": (lambda found: found.drop(3, 80), False),
    "the end": (lambda found: found.close(), None),
}


@pytest.mark.parametrize("way_on", WAYS_ON)
def test_a_transfer_waits_for_space(way_on: str) -> None:
    """The peer cannot know that what it has sent or given up is not read yet."""
    found = incoming(100)
    for number in (1, 2):
        assert found.begin(number, 80, 0, 80) is not None
        assert found.end(number, 80)
    step, has_memory = WAYS_ON[way_on]
    with ThreadPoolExecutor() as threads:
        waiting = threads.submit(found.begin, 3, 80, 0, 80)
        with pytest.raises(TimeoutError):
            waiting.result(0.01)
        step(found)
        if has_memory is None:
            with pytest.raises(ProtocolError, match="; 0 may be under way"):
                waiting.result(SOON)
        else:
            assert (waiting.result(SOON) is not None) is has_memory


def test_what_was_dropped_counts_no_more() -> None:
    """Its bytes that still come may be behind a chunk that would wait for them."""
    found = incoming(100)
    assert found.begin(1, 80, 0, 80) is not None
    assert found.begin(2, 80, 0, 40) is not None
    assert found.end(2, 40) is None
    found.drop(2, 80)
    assert found.begin(3, 80, 0, 80) is not None
    assert found.begin(2, 80, 40, 40) is None
    assert found.end(2, 40) is None
    assert len(found) == 2
    assert found._held == 160


def test_a_peer_makes_so_many_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes a descriptor; further transfers are for one receiver alone."""
    monkeypatch.setattr(transfers, "MAX_SEGMENTS", 2)
    asked: list[bool] = []

    def allocate(size: int, is_shared: bool) -> tuple[Any, Segment | None]:
        asked.append(is_shared)
        segment = Segment(size) if is_shared else None
        return bytearray(size), segment

    found = IncomingTransfers(1 << 20, allocate)
    for number in (1, 2, 3):
        found.begin(number, 64, 0, 64, True)
    found.end(1, 64)
    found.take(1)
    found.release(1)
    found.begin(4, 64, 0, 64, True)
    assert asked == [True, True, False, True]


def test_memory_of_a_sibling() -> None:
    """It counts as a transfer until it is read or dropped."""
    found = incoming(100)
    memory = bytearray(60)
    assert found.adopt(1, memory, 60)
    with pytest.raises(ProtocolError, match="has begun"):
        found.adopt(1, memory, 60)
    found.adopt(2, memory, 60)
    assert found._held == 120
    with pytest.raises(ProtocolError, match="under way"):
        found.adopt(3, bytearray(101), 101)
    assert found.take(1) == (memory, 60)
    found.drop(2, 0)
    assert not len(found)
    assert not found._held


def test_a_transfer_that_is_dropped_before_its_first_chunk() -> None:
    """The chunk is discarded when it comes, and needs no memory."""
    found = incoming(100)
    found.drop(1, 60)
    assert found.begin(1, 60, 0, 60) is None
    assert found.end(1, 60) is None
    assert not len(found)
    assert not found._held


class Transfers(RuleBasedStateMachine):
    """A model of both ends: chunks and cancellations cross; memory is held for what is wanted."""

    def __init__(self) -> None:
        super().__init__()
        self.limit = 64 * 50
        self.ends = IncomingTransfers(self.limit, allocate)
        self.out: dict[int, OutgoingTransfer] = {}
        self.on_their_way: list[bytes] = []
        self.drops: list[tuple[int, int]] = []
        self.arrived: set[int] = set()
        self.last = 0

    @rule(size=st.integers(1, 20))
    def start(self, size: int) -> None:
        if self.reserved() + 64 * size <= self.limit:
            self.last += 1
            tensors = [torch.full((16,), float(self.last)) for _ in range(size)]
            self.out[self.last] = outgoing(self.last, tensors)

    def reserved(self) -> int:
        return sum(each.size for each in self.out.values())

    @rule(which=WHICH)
    def send(self, which: int) -> None:
        if self.out:
            transfer = [*self.out.values()][which % len(self.out)]
            if (chunk := transfer.take()) is not None:
                self.on_their_way.append(b"".join(bytes(each) for each in chunk))
                transfer.sent()

    @rule(which=WHICH)
    def receive(self, which: int) -> None:
        if self.on_their_way:
            chunk = self.on_their_way.pop(which % len(self.on_their_way))
            number = HEADER.unpack(chunk[: HEADER.size])[0]
            if receive(self.ends, chunk):
                assert number not in self.arrived
                self.arrived.add(number)

    @rule(which=WHICH)
    def cancel(self, which: int) -> None:
        if self.out:
            number = [*self.out][which % len(self.out)]
            transfer = self.out.pop(number)
            assert transfer.cancel()
            self.drops.append((number, transfer.started))

    @rule(which=WHICH)
    def drop(self, which: int) -> None:
        if self.drops:
            number, sent = self.drops.pop(which % len(self.drops))
            self.ends.drop(number, sent)
            self.arrived.discard(number)

    @rule(which=WHICH)
    def read(self, which: int) -> None:
        if wanted := sorted(self.arrived & self.out.keys()):
            number = wanted[which % len(wanted)]
            memory, size = self.ends.take(number)
            assert {*memoryview(memory).cast("f")[: size // 4]} == {float(number)}
            self.arrived.remove(number)
            del self.out[number]

    @invariant()
    def nothing_is_held_for_nothing(self) -> None:
        if not (self.out or self.on_their_way or self.drops):
            assert not len(self.ends)
            assert not self.ends._held


Transfers.TestCase.settings = settings(max_examples=30, stateful_step_count=40)


@pytest.fixture
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfers, "CHUNK", 192)


@pytest.mark.usefixtures("_small_chunks")
class TestTransfers(Transfers.TestCase):  # type: ignore[misc, name-defined]
    """The model, with many chunks."""
