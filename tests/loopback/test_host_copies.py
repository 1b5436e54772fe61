"""One transfer for several receivers of one host, in a world of one that is its own remote host."""

import asyncio
import gc
import socket
import threading
import warnings
import weakref
from collections.abc import Iterable
from typing import Any

import pytest
import torch

import aiorpc_torch as aiorpc
from aiorpc_torch import Group, Round, RRef, batched, remote
from aiorpc_torch._aio.segments import SegmentName
from aiorpc_torch._carrier import socket_threads, tensor_sockets, transfers
from aiorpc_torch._client.pending import expire
from tests.support.segment_files import mapped_segments, open_segments

from .test_tensor_sockets import LARGE, SOON, Line, Shelf, is_at_rest, line, small, until
from .test_tensor_sockets_internals import (
    end_calls,
    far,
    memory_in_use,
    near,
    own_connection,
)

__all__ = ["line"]

BYTES = 4 * LARGE
pytestmark = pytest.mark.usefixtures("over_sockets")


class Crowd(Shelf):
    """Gives one tensor to several callers."""

    @batched(Round(3))
    async def gather(self, values: list[int]) -> Any:
        return torch.full((LARGE,), float(sum(values)))


class Shelves(list[Shelf]):
    """Shelves of one peer."""

    def __init__(self, shelves: Iterable[Shelf]) -> None:
        super().__init__(shelves)
        self._open_before = open_segments()  # of other worlds in this process

    def nothing_is_held(self) -> bool:
        return is_at_rest() and not near()._exported and open_segments() <= self._open_before


@pytest.fixture
async def sent(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of each chunk that is sent."""
    found: list[int] = []
    send = socket_threads._send_all

    def counted(sock: socket.socket, buffers: list[Any]) -> None:
        found.append(sum(map(len, buffers[1:])))
        send(sock, buffers)

    monkeypatch.setattr(socket_threads, "_send_all", counted)
    return found


@pytest.fixture
async def shelves(
    over_sockets: None, monkeypatch: pytest.MonkeyPatch, sent: list[int], world: aiorpc.types.Worker
) -> Shelves:
    """Four, of a peer that says that its siblings can map its memory."""
    monkeypatch.setattr(tensor_sockets, "sharing_group", lambda: "another host")
    found = Shelves(Crowd() for _ in range(4))
    await remote(RRef(found[0])).echo(0)
    await until(lambda: near().can_send and far().can_send)
    return found


def group(shelves: Shelves) -> "Group[Any]":
    return Group([RRef(each) for each in shelves])


# ── values ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.promise("sockets.hosts")
async def test_the_members_of_a_host_get_one_transfer(shelves: Shelves, sent: list[int]) -> None:
    """Each has its own tensor: the others do not see what it writes."""
    x, before = torch.ones(LARGE), mapped_segments()
    assert await remote(group(shelves)).keep(x) == [1] * 4
    assert sum(sent) == BYTES
    assert near().sent == 4
    shelves[0].kept[0].add_(1)
    shelves[1].kept[0].mul_(5)
    assert [float(each.kept[0].mean()) for each in shelves] == [2, 5, 1, 1]
    assert float(x.mean()) == 1
    await until(shelves.nothing_is_held)
    for each in shelves:  # in a later world of a process torch may keep what had an RRef
        each.kept.clear()
    await until(lambda: is_at_rest() and mapped_segments() <= before)


@pytest.mark.promise("sockets.hosts")
async def test_a_broadcast_result_is_one_transfer(shelves: Shelves, sent: list[int]) -> None:
    proxy = remote(RRef(shelves[0]))
    found = await asyncio.gather(*(proxy.gather(each) for each in range(3)))
    assert sum(sent) == BYTES
    assert far().sent == 3
    found[0].zero_()
    assert [float(each.mean()) for each in found] == [0, 3, 3]
    await until(shelves.nothing_is_held)


@pytest.mark.promise("sockets.hosts")
async def test_lone_calls_with_one_tensor_are_one_transfer(
    shelves: Shelves, sent: list[int]
) -> None:
    """Also one that is made while the tensor is sent; a changed tensor is another."""
    x = torch.ones(LARGE)
    assert await asyncio.gather(*(remote(RRef(each)).keep(x) for each in shelves)) == [1] * 4
    assert sum(sent) == BYTES
    x.add_(1)
    assert await remote(RRef(shelves[0])).keep(x) == 2
    assert float(shelves[0].kept[1].mean()) == 2
    assert sum(sent) == 2 * BYTES


async def test_tensors_that_differ_have_their_own_transfers(
    shelves: Shelves, sent: list[int]
) -> None:
    values = [torch.full((LARGE,), float(each)) for each in range(4)]
    await remote(group(shelves)).keep(aiorpc.each(values))
    assert sum(sent) == 4 * BYTES
    assert [float(each.kept[0].mean()) for each in shelves] == [0, 1, 2, 3]


@pytest.mark.promise("sockets.order")
async def test_calls_of_a_member_stay_in_order(shelves: Shelves, line: Line) -> None:
    """Those behind a call that waits for the transfer of another."""
    rrefs = [RRef(each) for each in shelves]
    first = asyncio.ensure_future(remote(Group(rrefs[:2])).keep(torch.ones(LARGE)))
    await line.is_held()
    later = [asyncio.ensure_future(remote(each).keep(2)) for each in rrefs]
    assert await asyncio.gather(*later[2:]) == [1, 1]
    assert not later[0].done()
    assert not later[1].done()
    line.may_send.set()
    assert await first == [1, 1]
    assert await asyncio.gather(*later[:2]) == [2, 2]


# ── failures ────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.promise("sockets.hosts")
async def test_the_call_whose_transfer_others_wait_for_is_cancelled(
    shelves: Shelves, line: Line
) -> None:
    """They get another one."""
    x = torch.ones(LARGE)
    calls = [asyncio.ensure_future(remote(RRef(each)).keep(x)) for each in shelves]
    await line.is_held()
    calls[0].cancel()
    await asyncio.wait(calls[:1])
    line.may_send.set()
    assert await asyncio.gather(*calls[1:]) == [1] * 3
    assert not shelves[0].kept
    await until(shelves.nothing_is_held)


@pytest.mark.promise("sockets.cancelled")
@pytest.mark.parametrize("is_late", [False, True], ids=["cancelled", "late"])
async def test_a_group_call_that_ends_while_it_is_sent(
    shelves: Shelves, line: Line, is_late: bool
) -> None:
    """Nothing is left of it at either end."""
    running = asyncio.ensure_future(remote(group(shelves)).keep(torch.ones(LARGE)))
    await line.is_held()
    end_calls(running, is_late=is_late)
    await asyncio.wait((running,))
    assert running.cancelled() or isinstance(running.exception(), aiorpc.GroupError)
    line.may_send.set()
    del running
    await until(shelves.nothing_is_held)
    assert await remote(group(shelves)).keep(torch.ones(LARGE)) == [1] * 4


@pytest.mark.promise("sockets.cancelled")
@pytest.mark.parametrize("is_late", [False, True], ids=["cancelled", "late"])
@pytest.mark.parametrize("ended", [2, 3])
async def test_receivers_of_a_broadcast_that_end_while_it_is_sent(
    shelves: Shelves, line: Line, ended: int, is_late: bool
) -> None:
    """Nothing is left of them at either end; another one gets its result."""
    proxy = remote(RRef(shelves[0]))
    calls = [asyncio.ensure_future(proxy.gather(each)) for each in range(3)]
    await line.is_held()
    for call, number in zip(calls[:ended], [*own_connection().pending], strict=False):
        if is_late:
            expire(own_connection().pending[number], 0.05)
        else:
            call.cancel()
    await asyncio.wait(calls[:ended])
    line.may_send.set()
    assert [float((await each).mean()) for each in calls[ended:]] == [3] * (3 - ended)
    assert all(each.cancelled() or each.exception() for each in calls[:ended])
    del call, calls
    await until(shelves.nothing_is_held)
    await until(lambda: not (own_connection().state.window or memory_in_use()))


@pytest.mark.promise("sockets.cancelled")
async def test_a_call_is_cancelled_as_the_transfer_it_waits_for_arrives(
    shelves: Shelves, line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The peer is told of both at once, and frees what it maps."""
    x = torch.ones(LARGE)
    calls = [asyncio.ensure_future(remote(RRef(each)).keep(x)) for each in shelves[:2]]
    adopt = tensor_sockets._Job.adopt

    def cancel_and_adopt(self: Any, name: SegmentName) -> None:
        own_connection().cancel(max(own_connection().pending))
        adopt(self, name)

    monkeypatch.setattr(tensor_sockets._Job, "adopt", cancel_and_adopt)
    await line.is_held()
    line.may_send.set()
    assert await calls[0] == 1
    calls[1].cancel()
    await until(shelves.nothing_is_held)


@pytest.mark.promise("sockets.cancelled")
async def test_the_call_whose_transfer_others_wait_for_is_cancelled_as_it_arrives(
    shelves: Shelves, line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its peer confirms it before a thread here has noted that it is sent."""
    may_note = threading.Event()
    sent = transfers.OutgoingTransfer.sent

    def note_late(self: Any) -> bool:
        if self.is_cancelled:
            assert may_note.wait(SOON)
        return sent(self)

    monkeypatch.setattr(transfers.OutgoingTransfer, "sent", note_late)
    x = torch.ones(LARGE // 4)  # one chunk
    calls = [asyncio.ensure_future(remote(RRef(each)).keep(x)) for each in shelves[:2]]
    await line.is_held(1)
    [lead] = [each for each in near()._jobs.values() if each.is_complete]
    calls[0].cancel()
    await until(lambda: lead.is_cancelled)
    line.may_send.set()
    await until(lambda: lead.number not in near()._jobs)
    may_note.set()
    assert await calls[1] == 1
    await until(shelves.nothing_is_held)


@pytest.mark.promise("sockets.hosts")
@pytest.mark.parametrize("wrong", [{"inode": 1}, {"pid": 1 << 40}, {"size": -1}])
async def test_memory_that_cannot_be_mapped(
    shelves: Shelves,
    sent: list[int],
    monkeypatch: pytest.MonkeyPatch,
    wrong: dict[str, int],
) -> None:
    """Each has its own transfer."""
    adopt = tensor_sockets._Job.adopt

    def adopt_another(self: Any, name: SegmentName) -> None:
        adopt(self, name._replace(**wrong))

    monkeypatch.setattr(tensor_sockets._Job, "adopt", adopt_another)
    for number in (1, 2):
        assert await remote(group(shelves)).keep(torch.ones(LARGE)) == [number] * 4
    assert sum(sent) == 8 * BYTES
    assert not near()._peer_host  # its memory is not offered again
    await until(shelves.nothing_is_held)


@pytest.mark.promise("sockets.hosts")
async def test_a_receiver_that_makes_no_segment(
    shelves: Shelves, sent: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has its own transfer."""

    class NoneLeft(tensor_sockets.Segment):
        def __init__(self, size: int) -> None:
            raise OSError(24, "too many open files")

    monkeypatch.setattr(tensor_sockets, "Segment", NoneLeft)
    assert await remote(group(shelves)).keep(torch.ones(LARGE)) == [1] * 4
    assert sum(sent) == 4 * BYTES
    await until(is_at_rest)


async def test_the_tensor_that_others_wait_for_is_freed(shelves: Shelves, line: Line) -> None:
    """All their calls fail, as one alone would."""
    first = asyncio.ensure_future(remote(RRef(shelves[3])).keep(torch.ones(LARGE)))
    await line.is_held()  # all threads are busy
    x = torch.zeros(LARGE)
    others = [asyncio.ensure_future(remote(RRef(each)).keep(x)) for each in shelves[:3]]
    await until(lambda: any(each.is_shared for each in near()._jobs.values()))
    x.untyped_storage().resize_(0)
    line.may_send.set()
    async with asyncio.timeout(SOON):
        for each in others:
            with pytest.raises((aiorpc.RemoteError, ValueError), match="its storage was freed"):
                await each
    assert await first == 1
    await until(shelves.nothing_is_held)


async def test_a_loop_that_is_closed_while_others_wait(shelves: Shelves, line: Line) -> None:
    """It is garbage when another loop has noticed."""
    closed: list[weakref.ref[asyncio.AbstractEventLoop]] = []
    rrefs = [RRef(each) for each in shelves]

    async def begin() -> None:
        await remote(rrefs[0]).echo(0)
        await until(lambda: near().can_send)
        x = torch.zeros(LARGE)
        begun.extend(asyncio.ensure_future(remote(each).keep(x)) for each in rrefs)
        await until(lambda: any(each.is_shared for each in near()._jobs.values()))

    def run() -> None:
        loop = asyncio.new_event_loop()
        closed.append(weakref.ref(loop))
        loop.run_until_complete(begin())
        loop.close()
        begun.clear()

    def is_over() -> bool:
        gc.collect()
        return closed[0]() is None

    begun: list[asyncio.Future[int]] = []
    with warnings.catch_warnings():  # such a loop leaves its sockets to the garbage collector
        warnings.simplefilter("ignore", ResourceWarning)
        await asyncio.to_thread(run)
        await asyncio.to_thread(lambda: asyncio.run(small(rrefs[0])))  # a loop that sees it closed
        line.may_send.set()
        await until(is_over)
    await until(lambda: is_at_rest())


@pytest.mark.promise("sockets.lost")
async def test_the_connection_ends_while_others_wait(shelves: Shelves, line: Line) -> None:
    """All calls fail, and nothing is left."""
    running = asyncio.ensure_future(remote(group(shelves)).keep(torch.ones(LARGE)))
    await line.is_held()
    copies = tensor_sockets._copies[asyncio.get_running_loop()]
    own_connection().abort()
    line.may_send.set()
    with pytest.raises(aiorpc.GroupError):
        await asyncio.wait_for(running, SOON)
    await until(lambda: not copies)


async def test_limits_hold_for_what_is_shared(
    monkeypatch: pytest.MonkeyPatch, shelves: Shelves, sent: list[int]
) -> None:
    """Transfers of equal tensors wait for memory as others do."""
    near()._peer_limit = BYTES
    x = torch.ones(LARGE)
    assert await remote(group(shelves)).keep(x) == [1] * 4
    assert sum(sent) == 4 * BYTES  # one at a time
    await until(shelves.nothing_is_held)
