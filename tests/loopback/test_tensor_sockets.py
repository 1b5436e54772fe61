"""Tensors on sockets of their own, in a world of one that may not share memory."""

import asyncio
import gc
import sys
import threading
import warnings
import weakref
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import aiorpc_torch as aiorpc
from aiorpc_torch import RRef, autograd, batched, remote
from aiorpc_torch.observe import stats
from aiorpc_torch.testing import connection, drop_connection, settled
from tests.support.raw_connections import Tap
from tests.support.slack import BEGUN
from tests.support.socket_lines import (
    CHUNK,
    Line,
    give_no_memory,
    limit_incoming,
    limit_memory,
    refuse_sockets,
)
from tests.support.tensor_shelf import TensorShelf

pytestmark = pytest.mark.usefixtures("over_sockets")

LARGE = CHUNK  # elements of float32: four chunks
SOON = 30.0


class Shelf(TensorShelf):
    """Also gives tensors back."""

    async def get(self, index: int) -> Any:
        """What is kept."""
        return self.kept[index]

    @batched(max_size=3)
    async def join(self, values: list[Tensor]) -> list[int]:
        """How long they are."""
        return [len(each) for each in values]

    @batched(max_size=3)
    async def split(self, indexes: list[int]) -> list[Tensor]:
        """What is kept, for each caller."""
        return [self.kept[each] + 1 for each in indexes]

    async def ones(self, x: Tensor) -> AsyncIterator[Tensor]:
        """An item that is sent while the generator goes on."""
        yield torch.ones(LARGE // 4)

    async def never(self) -> None:
        """Does not return."""
        await asyncio.Event().wait()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(SOON):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


def is_offered() -> bool:
    """Whether arguments and results travel on sockets."""
    found = connection("main")
    return found.carrier == found.result_carrier == "sockets"


def is_at_rest() -> bool:
    """Whether neither end holds anything of a transfer."""
    gc.collect()
    return not connection("main").holds_memory


@pytest.fixture
async def shelf(over_sockets: None, world: aiorpc.types.Worker) -> Shelf:
    """One whose connection knows that it may use sockets."""
    found = Shelf()
    await remote(RRef(found)).echo(0)
    await until(is_offered)
    return found


@pytest.fixture
def line(monkeypatch: pytest.MonkeyPatch) -> Iterator[Line]:
    found = Line(monkeypatch)
    yield found
    found.may_send.set()


# ── values ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.promise("sockets.values")
async def test_tensors_travel_on_sockets(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    """There and back, and nothing of them by torch, nor of the next call."""
    tap = Tap(monkeypatch)
    x = torch.rand(LARGE)
    for number in range(1, 4):
        assert torch.equal(await remote(RRef(shelf)).echo(x), x)
        assert (stats().socket_messages, tap.count("transferred")) == (number, 2 * number)
    assert stats().socket_messages == 3
    assert stats().shared_messages == stats().held_bytes == 0
    tap.frames.clear()
    assert await remote(RRef(shelf)).echo(1) == 1
    assert (tap.count("slot"), tap.count("calls")) == (0, 1)
    await until(is_at_rest)


@pytest.mark.promise("sockets.values")
async def test_recorded_tensors_travel_by_torch(shelf: Shelf) -> None:
    """And so does what is more than its bytes."""
    x = torch.rand(LARGE, requires_grad=True)
    async with autograd.context() as context:
        y = await remote(RRef(shelf)).echo(x)
        await context.backward([y.sum()])
    sparse = torch.eye(300).to_sparse()
    assert torch.equal((await remote(RRef(shelf)).echo(sparse)).to_dense(), torch.eye(300))
    assert stats().socket_messages == 0


@pytest.mark.promise("sockets.memory")
async def test_kept_tensors_exceed_the_memory(
    monkeypatch: pytest.MonkeyPatch, world: aiorpc.types.Worker
) -> None:
    """More than is used again is memory of torch."""
    limit_memory(monkeypatch, 2 * 4 * LARGE)
    shelf = Shelf()
    await remote(RRef(Shelf())).keep(0)
    await until(is_offered)  # until the callee offers it, torch carries tensors
    for number in range(5):
        await remote(RRef(shelf)).keep(torch.full((LARGE,), float(number)))
    assert [float(each.max()) for each in shelf.kept] == [0, 1, 2, 3, 4]
    assert stats().socket_messages >= 4


# ── order and bounds ────────────────────────────────────────────────────────────────────────────


@pytest.mark.promise("sockets.order")
async def test_a_transfer_delays_its_own_object_only(shelf: Shelf, line: Line) -> None:
    """Later calls of the object wait for it; calls of others do not."""
    mine, other = remote(RRef(shelf)), remote(RRef(Shelf()))
    first = asyncio.ensure_future(mine.keep(torch.ones(LARGE)))
    await line.is_held()
    second = asyncio.ensure_future(mine.keep(2))
    assert await other.keep(3) == 1
    assert not second.done()
    line.may_send.set()
    assert await asyncio.gather(first, second) == [1, 2]


@pytest.mark.promise("sockets.bounds")
async def test_a_sender_keeps_the_limit_of_its_receiver(
    monkeypatch: pytest.MonkeyPatch, world: aiorpc.types.Worker
) -> None:
    """Transfers wait for others to end; one that is larger goes by torch."""
    limit_incoming(monkeypatch, 3 * 4 * LARGE)
    shelf = Shelf()
    proxy = remote(RRef(shelf))
    await proxy.echo(0)
    await until(is_offered)
    calls = [proxy.keep(torch.full((LARGE,), float(number))) for number in range(10)]
    await asyncio.gather(*calls)
    assert [float(each.max()) for each in shelf.kept] == [*range(10)]
    assert stats().socket_messages == 10
    await proxy.keep(torch.ones(4 * LARGE))
    assert stats().socket_messages == 10
    await until(is_at_rest)


# ── failures ────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.promise("sockets.cancelled")
async def test_a_stream_that_is_left_while_an_item_is_sent(shelf: Shelf, line: Line) -> None:
    """Its items are dropped."""
    line.may_send.set()
    async for item in remote(RRef(shelf)).items(LARGE, 20):
        assert float(item.max()) == 0
        break
    del item
    await until(is_at_rest)
    async with asyncio.timeout(SOON):
        await settled()


@pytest.mark.promise("sockets.lost")
async def test_the_connection_ends_while_tensors_are_sent(shelf: Shelf, line: Line) -> None:
    """The threads end, and hold no tensor."""
    x = torch.ones(4 * LARGE)
    freed = weakref.ref(x.untyped_storage())
    call = asyncio.ensure_future(remote(RRef(shelf)).keep(x))
    del x
    await line.is_held()
    drop_connection("main")
    line.may_send.set()
    with pytest.raises(aiorpc.RpcError):
        await asyncio.wait_for(call, SOON)
    del call
    await until(lambda: gc.collect() >= 0 and freed() is None)


@pytest.mark.promise("sockets.values")
@pytest.mark.parametrize("what", ["arguments", "results"])
async def test_sockets_that_cannot_be_opened(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """Torch carries the tensors, until they are opened: the peer was frozen, say."""
    is_over: list[bool] = []
    refuse_sockets(monkeypatch, what, lambda: bool(is_over))
    shelf.kept.append(torch.ones(LARGE))
    for _ in range(2):
        found = await remote(RRef(shelf)).echo(torch.ones(LARGE))
        assert torch.equal(found, torch.ones(LARGE))
        assert torch.equal(await remote(RRef(shelf)).get(0), torch.ones(LARGE))

    def carrier() -> str:
        found = connection("main")
        return found.carrier if what == "arguments" else found.result_carrier

    assert carrier() == "torch"
    is_over.append(True)
    await until(lambda: carrier() == "sockets")
    assert torch.equal(await remote(RRef(shelf)).echo(torch.ones(LARGE)), torch.ones(LARGE))


@pytest.mark.promise("sockets.values")
async def test_a_receiver_without_memory(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch carries the tensors, or tells why it cannot."""
    tap = Tap(monkeypatch)
    give_no_memory(monkeypatch)
    x = torch.rand(LARGE)
    assert torch.equal(await remote(RRef(shelf)).echo(x), x)
    assert stats().socket_messages == tap.count("transferred") == 0
    await until(is_at_rest)


async def test_a_loop_that_is_closed_without_a_word(shelf: Shelf) -> None:
    """Its threads end when another loop has noticed, and the garbage collector finds the rest."""
    before = Counter(each.name for each in threading.enumerate())
    closed: list[weakref.ref[asyncio.AbstractEventLoop]] = []
    rref = RRef(shelf)

    async def echo(x: Any) -> None:
        await remote(rref).echo(0)
        await until(lambda: connection("main").carrier == "sockets")
        assert torch.equal(await remote(rref).echo(x), x)

    def run() -> None:
        loop = asyncio.new_event_loop()
        closed.append(weakref.ref(loop))
        loop.run_until_complete(echo(torch.rand(LARGE)))
        loop.close()

    def is_over() -> bool:
        gc.collect()
        names = Counter(each.name for each in threading.enumerate())
        return closed[0]() is None and names["aiorpc-send"] <= before["aiorpc-send"]

    with warnings.catch_warnings():  # such a loop leaves its sockets to the garbage collector
        warnings.simplefilter("ignore", ResourceWarning)
        await asyncio.to_thread(run)
        await asyncio.to_thread(lambda: asyncio.run(small(rref)))  # a loop that sees it closed
        await until(is_over)


async def test_a_loop_that_is_closed_while_it_opens_sockets(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What opened them ends with the loop, and does not go on with another way for tensors."""
    unraisable: list[Any] = []
    rref, loops = RRef(shelf), [asyncio.new_event_loop()]

    async def connect() -> None:
        await remote(rref).echo(0)
        await until(lambda: connection("main").carrier == "sockets")

    async def begin() -> None:
        begun.append(asyncio.ensure_future(remote(rref).keep(torch.ones(LARGE))))
        for _ in range(100):  # it has dialed, and waits for the proof of the listener
            await asyncio.sleep(0)

    def close() -> None:
        loops[0].run_until_complete(begin())
        loops[0].close()

    begun: list[asyncio.Future[int]] = []
    closing = threading.Thread(target=close)
    await asyncio.to_thread(loops[0].run_until_complete, connect())
    monkeypatch.setattr(sys, "unraisablehook", unraisable.append)
    with warnings.catch_warnings():  # such a loop leaves its sockets to the garbage collector
        warnings.simplefilter("ignore", ResourceWarning)
        closing.start()
        closing.join()  # this loop, which would prove itself, is busy
        freed = weakref.ref(loops.pop())
        begun.clear()
        await asyncio.to_thread(lambda: asyncio.run(small(rref)))  # a loop that sees it closed
        await until(lambda: gc.collect() >= 0 and freed() is None)
    assert not unraisable
    assert "no tensor sockets" not in caplog.text


async def small(rref: RRef[Shelf]) -> None:
    await remote(rref).echo(0)


def test_nothing_is_left_of_a_world() -> None:
    """Neither threads nor sockets; tensors that were received can be read as before."""

    async def main() -> Tensor:
        async with aiorpc.testing.world():
            return await remote(RRef(Shelf())).echo(torch.ones(LARGE))  # type: ignore[no-any-return]

    assert float(asyncio.run(main()).sum()) == LARGE


async def test_transfers_share_the_sockets(shelf: Shelf, line: Line) -> None:
    """A small one does not wait for the end of a large one."""
    first = asyncio.ensure_future(remote(RRef(shelf)).keep(torch.ones(16 * LARGE)))
    await line.is_held()
    second = asyncio.ensure_future(remote(RRef(Shelf())).keep(torch.ones(LARGE // 8)))
    await until(lambda: connection("main").pending == 2)
    line.may_send.set()
    assert await second == 1
    assert await first == 1
    await until(is_at_rest)


@pytest.mark.promise("sockets.cancelled")
@pytest.mark.parametrize("is_late", [False, True], ids=["cancelled", "late"])
async def test_a_call_that_ends_while_it_is_sent(shelf: Shelf, line: Line, is_late: bool) -> None:
    """Its tensor and the memory for it are freed; a late one is known not to have run."""
    x = torch.ones(4 * LARGE)
    freed = weakref.ref(x.untyped_storage())
    timeout = BEGUN if is_late else None
    call = asyncio.ensure_future(remote(RRef(shelf), timeout=timeout).keep(x))
    del x
    await line.is_held()
    if not is_late:
        call.cancel()
    outcome = (await asyncio.gather(call, return_exceptions=True))[0]
    assert isinstance(outcome, aiorpc.CallTimeout if is_late else asyncio.CancelledError)
    if isinstance(outcome, aiorpc.CallTimeout):
        assert not outcome.may_have_run
    del call, outcome
    line.may_send.set()
    await until(is_at_rest)
    assert freed() is None
    assert await remote(RRef(shelf)).keep(torch.ones(LARGE)) == 1


@pytest.mark.promise("sockets.cancelled")
async def test_a_result_that_is_cancelled_while_it_is_sent(
    shelf: Shelf, line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its memory is freed, and its call leaves the window."""
    tap = Tap(monkeypatch)
    shelf.kept.append(torch.ones(4 * LARGE))
    call = asyncio.ensure_future(remote(RRef(shelf)).get(0))
    await line.is_held()
    call.cancel()
    await asyncio.wait((call,))
    await remote(RRef(shelf)).echo(0)  # behind the cancellation
    line.may_send.set()
    await until(is_at_rest)
    await settled()
    assert tap.count("transferred") == 0
    assert await remote(RRef(shelf)).echo(7) == 7


async def drained(items: Any) -> list[Tensor]:
    return [each async for each in items]


OPERATIONS: dict[str, Callable[[Any, Tensor], Any]] = {
    "result": lambda proxy, _: proxy.get(0),
    "results": lambda proxy, _: asyncio.gather(proxy.get(0), proxy.get(0)),
    "items": lambda proxy, _: drained(proxy.items(LARGE, 3)),
    "arguments of a batch": lambda proxy, x: asyncio.gather(*(proxy.join(x) for _ in range(3))),
    "results of a batch": lambda proxy, _: asyncio.gather(*(proxy.split(0) for _ in range(3))),
}


@pytest.mark.promise("sockets.cancelled")
@pytest.mark.parametrize("is_late", [False, True], ids=["cancelled", "late"])
@pytest.mark.parametrize("name", OPERATIONS)
async def test_calls_that_end_while_tensors_are_sent(
    shelf: Shelf, line: Line, monkeypatch: pytest.MonkeyPatch, name: str, is_late: bool
) -> None:
    """Both ends free what they hold, and the memory of the receiver may be used again."""
    tap = Tap(monkeypatch)
    shelf.kept.append(torch.ones(4 * LARGE))
    proxy = remote(RRef(shelf), timeout=BEGUN if is_late else None)
    running = asyncio.ensure_future(OPERATIONS[name](proxy, torch.ones(LARGE)))
    await line.is_held()
    if not is_late:
        running.cancel()
    outcome = (await asyncio.gather(running, return_exceptions=True))[0]
    assert isinstance(outcome, aiorpc.CallTimeout if is_late else asyncio.CancelledError)
    del running, outcome
    line.may_send.set()
    await until(is_at_rest)
    await settled()
    assert tap.count("transferred") == 0
    assert await remote(RRef(shelf)).keep(torch.ones(LARGE)) == 2


async def test_a_tensor_that_is_freed_before_it_is_sent(shelf: Shelf, line: Line) -> None:
    """Its call fails; no thread reads memory that is gone."""
    first = asyncio.ensure_future(remote(RRef(shelf)).keep(torch.ones(LARGE)))
    await line.is_held()  # all threads are busy
    x = torch.zeros(LARGE)
    second = asyncio.ensure_future(remote(RRef(Shelf())).keep(x))
    await until(lambda: connection("main").pending == 2)
    x.untyped_storage().resize_(0)
    line.may_send.set()
    with pytest.raises((aiorpc.RemoteError, ValueError), match="its storage was freed"):
        await second
    assert await first == 1
    await until(is_at_rest)
