"""Connections of our own, in a world of one: what shares a frame, what waits, and how they end."""

import asyncio
import contextlib
import gc
import socket
import threading
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

import aiorpc_torch as aiorpc
from aiorpc_torch import RemoteError, RRef, WorkerLost, call, remote
from aiorpc_torch.autograd import context
from aiorpc_torch.observe import stats
from aiorpc_torch.testing import Gate, connection, connections, drop_connection, stalled
from aiorpc_torch.testing.limits import FRAME_CALLS, INLINE_BYTES, MAX_FRAME
from tests.support.actors import Counter, Notes
from tests.support.raw_connections import (
    SOON,
    Tap,
    call_on_a_loop,
    child,
    ends,
    introduction,
    server,
    start,
)

LARGE = 2 * INLINE_BYTES


@pytest.fixture
def tap(world: aiorpc.types.Worker, monkeypatch: pytest.MonkeyPatch) -> Tap:
    """The frames that leave from now on."""
    return Tap(monkeypatch)


async def until(condition: Callable[[], bool]) -> None:
    """Turns of the loop until it is so."""
    async with asyncio.timeout(SOON):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0)


async def work() -> None:
    """Ordinary calls are answered."""
    async with asyncio.timeout(SOON):
        assert await call("main", int, "7") == 7
        assert await call("main", torch.add, torch.ones(LARGE), 1) is not None


# ── what shares a frame ─────────────────────────────────────────────────────────────────────────


@pytest.mark.promise("order.lone")
async def test_a_lone_call_is_one_frame_and_one_result(tap: Tap) -> None:
    """Nothing more is sent to get its answer, or because it came."""
    counter = remote(RRef(Counter()))
    await counter.aadd()
    tap.frames.clear()
    for number in range(5):
        assert await counter.aadd() == number + 2
    assert tap.names == ["calls", "results"] * 5


@pytest.mark.promise("order.one_message")
async def test_calls_of_one_iteration_share_a_frame(tap: Tap) -> None:
    """All that are made before the connection is there, or while none is idle, leave together."""
    notes = remote(RRef(Notes()))
    await asyncio.gather(*(notes.note(number) for number in range(100)))
    assert tap.count("calls") == tap.count("results") == 1
    await asyncio.gather(*(notes.note(number) for number in range(100, 200)))
    assert tap.count("calls") == tap.count("results") == 2
    assert await notes.noted() == [*range(200)]


@pytest.mark.promise("order.woken")
@pytest.mark.parametrize("callers", [2, 7, 40])
async def test_callers_resumed_together_share_frames(tap: Tap, callers: int) -> None:
    """Callers that one frame has woken make one frame again, iteration after iteration."""
    counter, turns = remote(RRef(Counter())), 20

    async def caller() -> None:
        for _ in range(turns):
            await counter.aadd()

    await asyncio.gather(*(caller() for _ in range(callers)))
    assert tap.count("calls") <= turns + 2
    assert tap.count("results") <= turns + 2
    assert await counter.aadd() == callers * turns + 1


@pytest.mark.promise("order.slow")
async def test_a_slow_call_delays_no_other_call_of_its_frame(tap: Tap) -> None:
    """The rest of its frame is answered while it waits."""
    gate, counter = Gate(), remote(RRef(Counter()))
    slow = remote(RRef(gate))
    first, waiting, last = start(counter.aadd(), slow.passed(), counter.aadd())
    assert await ends(first, last) == [1, 2]
    assert not waiting.done()
    assert tap.count("calls") == 1
    await gate.open()
    assert await ends(waiting) == [None]


async def test_many_calls_leave_others_their_turns(world: aiorpc.types.Worker) -> None:
    """Of calls and results that are there, no more than two frames are handled in an iteration."""
    await work()
    iteration, begun, ended = 0, list[int](), list[int]()
    is_over = False

    def tick() -> None:
        nonlocal iteration
        iteration += 1
        if not is_over:
            asyncio.get_running_loop().call_soon(tick)

    class Noting:
        async def note(self) -> None:
            begun.append(iteration)

    noting = remote(RRef(Noting()))

    async def one() -> None:
        await noting.note()
        ended.append(iteration)

    tick()
    await asyncio.gather(*(one() for _ in range(20 * FRAME_CALLS)))
    is_over = True
    for seen in (begun, ended):
        assert len(seen) == 20 * FRAME_CALLS
        assert max(map(seen.count, {*seen})) < 2 * FRAME_CALLS


# ── who fails alone ─────────────────────────────────────────────────────────────────────────────


@pytest.mark.promise("transport.apart")
@pytest.mark.parametrize(
    ("bad", "error"),
    [
        (threading.Lock(), TypeError),
        (torch.empty(1, device="meta"), ValueError),
        ([torch.empty(1, device="meta")], ValueError),
    ],
)
async def test_an_argument_that_cannot_be_sent_fails_alone(
    tap: Tap, bad: Any, error: type[Exception]
) -> None:
    """What was to leave with it leaves without it, in order."""
    notes = remote(RRef(Notes()))
    await notes.note(0)
    found = await ends(*start(notes.note(1), notes.note(bad), notes.note(2)))
    assert [found[0], found[2]] == [None, None]
    assert isinstance(found[1], error | RemoteError)
    assert await notes.noted() == [0, 1, 2]
    assert stats().in_flight == 0


class Results:
    """Returns what it is asked for, good or bad."""

    async def elsewhere(self) -> Any:
        return torch.empty(1, device="meta")

    def elsewhere_in_thread(self) -> Any:
        return [torch.empty(1, device="meta")]

    async def lock(self) -> Any:
        return threading.Lock()

    async def number(self) -> int:
        return 7

    async def number_once(self, is_open: asyncio.Event) -> int:
        await is_open.wait()
        return 7

    async def large(self, size: int = LARGE) -> bytes:
        return bytes(size)

    async def tensor(self) -> torch.Tensor:
        return torch.ones(LARGE)

    async def huge_number(self) -> int:
        return 1 << (8 * MAX_FRAME + 8)

    async def items(self) -> Any:
        for _ in range(3):
            yield bytes(LARGE)
        await asyncio.Event().wait()


@pytest.mark.promise("transport.apart")
@pytest.mark.parametrize("bad", ["elsewhere", "elsewhere_in_thread", "lock"])
async def test_a_result_that_cannot_be_sent_fails_alone(
    world: aiorpc.types.Worker, bad: str
) -> None:
    """Results of the same frame are not lost, and nor is the peer."""
    results = remote(RRef(Results()))
    tasks = start(results.number(), getattr(results, bad)(), results.number())
    first, failed, last = await ends(*tasks)
    assert (first, last) == (7, 7)
    assert isinstance(failed, ValueError | TypeError)
    await work()


# ── what travels by torch ───────────────────────────────────────────────────────────────────────


@pytest.mark.usefixtures("over_torch")
@pytest.mark.promise("transport.large_results")
async def test_a_large_result_is_held_and_collected_then_goes_by_torch(tap: Tap) -> None:
    """Later calls of the method are a slot each, until a result of it is small again."""
    results = remote(RRef(Results()))
    assert len(await results.large()) == LARGE
    assert tap.names == ["calls", "results"]
    assert len(await results.large()) == LARGE
    assert tap.count("slot") == 1
    assert tap.count("results") == 1
    assert await results.large(1) == b"\0"
    assert tap.count("slot") == 2
    assert await results.large(1) == b"\0"
    assert tap.count("slot") == 2
    assert stats().held_bytes == 0


async def test_a_large_call_that_never_left_is_forgotten(world: aiorpc.types.Worker) -> None:
    """Cancelled in the queue, nothing is kept of it."""
    notes = remote(RRef(Notes()))
    await notes.note(0)
    with stalled("main"):
        tasks = start(*(notes.note(bytes(LARGE)) for _ in range(3)))
        await until(lambda: stats().unsent == 3)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
    await notes.note(1)
    assert await notes.noted() == [0, 1]


async def test_a_call_in_a_context_keeps_its_place(tap: Tap) -> None:
    """A recorded call goes by torch, but not before those that were made before it."""
    notes = Notes()
    mine = remote(RRef(notes))
    await mine.note(0)
    async with context():
        recorded = start(*(mine.note(number) for number in (1, 2)))
        await asyncio.sleep(0)
    plain = start(*(mine.note(number) for number in (3, 4)))
    assert await ends(*recorded, *plain) == [None] * 4
    assert notes.order == [*range(5)]
    assert tap.count("slot") == 2


# ── how a connection ends ───────────────────────────────────────────────────────────────────────


@pytest.mark.promise("transport.loops")
async def test_loops_of_threads_leave_nothing(tap: Tap) -> None:
    """A loop that ends says so with a last frame; neither side keeps anything of it."""
    await work()
    mine = [*server().sessions]
    tap.frames.clear()
    for number in range(50):
        assert await asyncio.to_thread(call_on_a_loop, number) == number
    assert [*server().sessions] == mine
    assert len(connections()) == 1
    assert len(tap.closes()) == 50
    assert all(b"ended" in data for data in tap.closes())
    assert stats().calls >= 50
    assert stats().in_flight == 0


@pytest.mark.promise("transport.loops")
async def test_the_end_of_a_loop_cancels_its_calls(world: aiorpc.types.Worker) -> None:
    """Nobody waits for that any more."""
    gate = Gate()
    rref = RRef(gate)
    entered = threading.Event()

    def leave() -> None:
        async def ask() -> None:
            task = asyncio.ensure_future(remote(rref).passed())
            await asyncio.to_thread(entered.wait)
            assert not task.done()

        asyncio.run(ask())

    leaving = asyncio.ensure_future(asyncio.to_thread(leave))
    async with asyncio.timeout(SOON):
        await gate.entered()
        entered.set()
        await leaving
        assert await gate.cancelled() == 1
    assert stats().in_flight == stats().running == 0


@pytest.mark.promise("lost.connection")
async def test_an_aborted_connection(world: aiorpc.types.Worker) -> None:
    """Who waits is told, what runs is cancelled, and the next call makes another connection."""
    gate = Gate()
    (waiting,) = start(remote(RRef(gate)).passed())
    await gate.entered()
    former = connection("main").number
    drop_connection("main")
    (lost,) = await ends(waiting)
    assert isinstance(lost, WorkerLost)
    async with asyncio.timeout(SOON):
        assert await gate.cancelled() == 1
    await work()
    number = connection("main").number
    assert number != former
    assert [key[-1] for key in server().sessions] == [number]


@pytest.mark.promise("transport.fork")
async def test_a_forked_child_does_not_listen() -> None:
    """The addresses of a world that is over are free, though a child lives."""
    async with aiorpc.local_world(0):
        _, addresses = introduction()
        held = contextlib.ExitStack()
        held.enter_context(child())
    with held, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as unix:
        with pytest.raises(ConnectionRefusedError):
            unix.connect(f"\0{addresses.unix}")


async def test_a_loop_that_is_closed_while_a_call_waits(world: aiorpc.types.Worker) -> None:
    """Its calls are in no count any more, though the loop has not said that it ends."""
    gate = RRef(Gate())
    closed: list[weakref.ref[asyncio.AbstractEventLoop]] = []

    def run() -> None:
        loop = asyncio.new_event_loop()
        closed.append(weakref.ref(loop))
        waiting = loop.create_task(remote(gate).passed())  # type: ignore[arg-type]
        loop.run_until_complete(remote(gate).entered())
        del waiting
        loop.close()

    with warnings.catch_warnings():  # such a loop leaves its sockets to the garbage collector
        warnings.simplefilter("ignore", ResourceWarning)
        await asyncio.to_thread(run)
        await asyncio.to_thread(lambda: asyncio.run(_entered(gate)))  # a loop that sees it closed
        assert stats().in_flight == 0
        async with asyncio.timeout(SOON):
            while closed[0]() is not None:
                gc.collect()
                await asyncio.sleep(0.01)


async def _entered(gate: "aiorpc.RRef[Gate]") -> None:
    await remote(gate).entered(1)
