"""The caller's end of a connection over a socket pair; tests write the callee's end by hand."""

import asyncio
import socket
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any, NoReturn, cast

import pytest
import torch

from aiorpc_torch._client import connection, sender
from aiorpc_torch._client.connection import Connection
from aiorpc_torch._client.introduction import Introductions
from aiorpc_torch._client.pending import InlineFuture, cancel, expire
from aiorpc_torch._client.stream_reader import StreamReader
from aiorpc_torch._peers.peers import Peer, State
from aiorpc_torch._torch.agent import PeerInfo
from aiorpc_torch._wire.columns import HELD, encode_cell
from aiorpc_torch._wire.connection_state import Phase
from aiorpc_torch._wire.frames import (
    CALLS,
    CLOSE,
    CONTROL,
    HEADER,
    RESULTS,
    RETIRE,
    frame,
)
from aiorpc_torch._wire.handshake import ARGUMENTS, Party, number_for
from aiorpc_torch._wire.messages import encode_reply, numbers_of
from aiorpc_torch._wire.plain import dump
from aiorpc_torch._wire.targets import MethodTarget
from aiorpc_torch.errors import (
    CallTimeout,
    NotInWorld,
    RemoteError,
    WorkerLeft,
    WorkerLost,
    WorkerUnreachable,
)
from tests.support.raw_connections import read
from tests.support.received_calls import load_calls

TARGET = MethodTarget((0, 1), "method")
SOON = 30.0  # seconds after which something will never happen


class Observed:
    """What a connection tells of its peer, in order."""

    def __init__(self) -> None:
        self.told: list[Any] = []
        self.is_exiting = False
        self.probed = asyncio.Event()

    def on_message(self, peer: Peer) -> None:
        self.told.append("message")

    def on_proof(self, peer: Peer) -> None:
        self.told.append("proof")
        self.probed.set()

    def on_disconnect(self, peer: str, number: int, error: Any) -> Any:
        self.told.append(("disconnect", peer, number))
        return None if self.is_exiting else error

    async def wait_until_probed(self, _: str) -> None:
        await self.probed.wait()

    def on_leave_message(self, peer: str, number: int, what: str, text: str) -> None:
        self.told.append(("leave", peer, number, what, text))


class Pair:
    """A connection that is not open yet, and the other end of its socket."""

    def __init__(self) -> None:
        self.observed = Observed()
        self.peer = Peer(PeerInfo("peer", 1, 3, ""))
        self.introductions = cast(Introductions, SimpleNamespace(holding=None))
        parts = self.observed, self.introductions, self.succeed
        self.connection = Connection(Party("me", 0), self.peer, 1, *parts)
        self._near, self._far = socket.socketpair()

    def succeed(self, _: str) -> Connection:
        raise NotImplementedError

    async def connect(self) -> None:
        loop = asyncio.get_running_loop()
        self.reader, self.writer = await asyncio.open_connection(sock=self._far)
        transport, _ = await loop.create_connection(asyncio.Protocol, sock=self._near)
        self.connection.start_sending(transport)

    async def connect_and_call(self) -> None:
        """Connect; the first call is answered."""
        await self.connect()
        number, future = self.call("first")
        assert (await self.frame())[0] == CALLS
        self.answer(number, "done")
        async with asyncio.timeout(SOON):
            assert await future == "done"

    def answer(self, *results: Any) -> None:
        """Send results, each a number and its value, in a frame for each."""
        for number, value in zip(results[::2], results[1::2], strict=True):
            self.reply((number, *encode_cell(value)))

    def reply(self, *results: Any) -> None:
        """Send results with their kinds, in one frame."""
        self.writer.write(frame(RESULTS, encode_reply(results)[0]))

    async def close(self) -> None:
        self.writer.close()
        async with asyncio.timeout(SOON):
            await self.connection.ended.wait()

    async def frame(self) -> tuple[int, bytes]:
        async with asyncio.timeout(SOON):
            length, kind = HEADER.unpack(await self.reader.readexactly(HEADER.size))
            return kind, await self.reader.readexactly(length)

    def call(self, *args: Any) -> tuple[int, InlineFuture]:
        future = self.connection.call(TARGET, (args, {}), None)
        return future.number, future

    def stream(self) -> tuple[int, StreamReader]:
        reader = self.connection.stream(TARGET, ((), {}), None)
        return reader.number, reader


async def error_of(future: InlineFuture) -> BaseException:
    """The error with which a call ends."""
    async with asyncio.timeout(SOON):
        with pytest.raises(Exception) as raised:  # noqa: PT011
            (await future).raise_()
    return raised.value


@pytest.fixture
async def pair(over_torch: None) -> AsyncIterator[Pair]:
    pair = Pair()
    yield pair
    await pair.close()


async def test_calls_made_before_it_is_open_share_a_frame(pair: Pair) -> None:
    """In the order in which they were made."""
    numbers = [pair.call(value)[0] for value in range(5)]
    await pair.connect()
    kind, data = await pair.frame()
    assert kind == CALLS
    assert numbers_of(load_calls(data)) == numbers == [0, 1, 2, 3, 4]
    assert pair.connection.counters()["in_flight"] == 5
    assert pair.connection.counters()["messages"] == 1


async def test_a_lone_call_leaves_at_once(pair: Pair) -> None:
    """In the iteration that makes it; its result resolves its future, and the peer was heard."""
    await pair.connect_and_call()
    before = pair.connection.counters()["messages"]
    number, future = pair.call(7)
    assert pair.connection.counters()["messages"] == before + 1
    assert (await pair.frame())[0] == CALLS
    pair.answer(number, "seven")
    async with asyncio.timeout(SOON):
        assert await future == "seven"
    assert pair.connection.waiting == 0
    assert pair.peer.last_heard > 0
    assert pair.observed.told == []


async def test_a_lost_peer_that_is_heard_is_told(pair: Pair) -> None:
    """Once for each read, until the observer has found it."""
    await pair.connect_and_call()
    pair.peer.state = State.LOST
    number, future = pair.call(7)
    pair.answer(number, "seven")
    async with asyncio.timeout(SOON):
        assert await future == "seven"
    assert pair.observed.told == ["message"]


async def test_a_retired_connection_sends_what_it_has_and_says_so(pair: Pair) -> None:
    """Its calls are answered; the next call needs another connection."""
    await pair.connect_and_call()
    _, first = pair.call("first")
    assert (await pair.frame())[0] == CALLS
    pair.connection.pause_writing()
    number, second = pair.call("second")
    pair.writer.write(frame(RETIRE, b""))
    pair.answer(number - 1, "1")
    async with asyncio.timeout(SOON):
        assert await first == "1"
    assert pair.connection.phase >= Phase.RETIRING
    pair.connection.resume_writing()
    assert (await pair.frame())[0] == CALLS
    assert await pair.frame() == (RETIRE, b"")
    pair.answer(number, "2")
    async with asyncio.timeout(SOON):
        assert await second == "2"


async def test_a_call_cancelled_before_it_is_sent_never_is(pair: Pair) -> None:
    """The others of its iteration are, and no word of it."""
    (first, _), (second, _), (third, _) = (pair.call(value) for value in range(3))
    pair.connection.cancel(second)
    await pair.connect()
    kind, data = await pair.frame()
    assert (kind, numbers_of(load_calls(data))) == (CALLS, [first, third])


async def test_a_call_cancelled_after_it_was_sent_is_withdrawn(pair: Pair) -> None:
    """The callee is told its number; a result that comes all the same is dropped."""
    await pair.connect_and_call()
    number, _ = pair.call(1)
    await pair.frame()
    pair.connection.cancel(number)
    kind, data = await pair.frame()
    assert kind == CONTROL
    assert number in read(data)[0]
    other, future = pair.call(2)
    pair.answer(number, 1, other, 2)
    async with asyncio.timeout(SOON):
        assert await future == 2
    assert pair.connection.counters()["late"] == 1


@pytest.mark.promise("transport.held")
@pytest.mark.parametrize("key", ["a call", "an item", "the end of a stream"])
async def test_a_held_result_that_comes_too_late_is_released(pair: Pair, key: str) -> None:
    """The callee learns that it will not be collected; its call has left the window."""
    await pair.connect_and_call()
    number, _ = pair.call(1) if key == "a call" else pair.stream()
    await pair.frame()
    pair.connection.cancel(number)
    await pair.frame()  # it has crossed the result
    cost = 0 if key == "the end of a stream" else 2
    pair.reply((number if key == "a call" else (number, 0, cost), HELD, 1 << 20))
    kind, data = await pair.frame()
    assert (kind, read(data)[0]) == (CONTROL, [number])
    assert (number in pair.connection.state.window) == (key == "an item")


async def test_a_call_that_expires(pair: Pair) -> None:
    """Its error names worker and method, and the callee is told."""
    await pair.connect()
    _, future = pair.call(1)
    await pair.frame()
    expire(future, 0.25)
    error = await error_of(future)
    assert isinstance(error, CallTimeout)
    assert (error.worker, error.method) == ("peer", "method")
    assert "0.25 s" in str(error)
    assert (await pair.frame())[0] == CONTROL


async def test_a_peer_that_leaves(pair: Pair) -> None:
    """Pending calls fail with its reason, the observer is told, and no call is taken any more."""
    await pair.connect()
    _, future = pair.call(1)
    pair.writer.write(frame(CLOSE, dump(("left", "it is done"))))
    assert "it is done" in str(await error_of(future))
    assert ("leave", "peer", 3, "left", "it is done") in pair.observed.told
    assert pair.connection.phase >= Phase.RETIRING


async def test_a_peer_that_vanishes(pair: Pair) -> None:
    """An end of the socket without a word is a lost worker."""
    await pair.connect()
    _, future = pair.call(1)
    await pair.frame()
    pair.writer.transport.abort()
    error = await error_of(future)
    assert isinstance(error, WorkerLost)
    assert error.worker == "peer"
    assert ("disconnect", "peer", 3) in pair.observed.told


async def test_a_process_that_ends(pair: Pair) -> None:
    """The calls wait for the reason; until then the connection takes none, and is not over."""
    pair.observed.is_exiting = True
    await pair.connect()
    _, future = pair.call(1)
    await pair.frame()
    pair.writer.transport.abort()
    await pair.connection.ended.wait()
    assert pair.connection.phase >= Phase.RETIRING
    assert not pair.connection.is_over
    assert pair.connection.waiting
    pair.connection.on_peer_lost(WorkerLost("peer", "it was killed"))
    assert "it was killed" in str(await error_of(future))
    assert pair.connection.is_over


async def test_a_payload_for_a_process_that_ends(pair: Pair) -> None:
    """Its call waits for the reason too, unless it was not sent."""
    pair.observed.is_exiting = True
    await pair.connect()
    (sent, future), (unsent, other) = pair.call(1), pair.call(2)
    lost = WorkerLost("peer", "end of file", may_have_run=False)
    pair.connection.on_payload_failed(unsent, lost)
    assert "end of file" in str(await error_of(other))
    pair.connection.on_payload_failed(sent, WorkerLost("peer", "end of file"))
    assert pair.connection.waiting == 1
    pair.connection.on_peer_lost(WorkerLost("peer", "it was killed"))
    assert "it was killed" in str(await error_of(future))


@pytest.mark.parametrize(("kind", "data"), [(CALLS, b""), (RESULTS, b"no message"), (99, b"")])
async def test_a_frame_that_makes_no_sense(pair: Pair, kind: int, data: bytes) -> None:
    """Every pending call fails, and the peer is told why the connection ends."""
    await pair.connect()
    _, future = pair.call(1)
    await pair.frame()
    pair.writer.write(HEADER.pack(len(data), kind) + data)
    assert isinstance(await error_of(future), RemoteError)
    kind, data = await pair.frame()
    assert kind == CLOSE
    assert read(data)[0] == "broken"
    assert pair.connection.phase >= Phase.RETIRING


async def test_when_this_process_leaves(pair: Pair) -> None:
    """Pending calls get the error that it gives, and the peer gets the reason."""
    await pair.connect()
    _, future = pair.call(1)
    await pair.frame()
    pair.connection.leave("left", "we are done", NotInWorld("over"))
    assert str(await error_of(future)) == "over"
    kind, data = await pair.frame()
    while kind != CLOSE:  # the cancellation goes first
        kind, data = await pair.frame()
    assert read(data) == ["left", "we are done"]


# ── to a peer on another machine, which lives ───────────────────────────────────────────────────


class FarPair(Pair):
    """A connection between two machines. The peer is judged alive once `probed` is set."""

    def __init__(self, successors: "list[FarPair]") -> None:
        super().__init__()
        self.successors = successors

    def succeed(self, _: str) -> Connection:
        self.successors.append(new := FarPair(self.successors))
        new.connection._peer = new.peer = self.peer
        return new.connection

    async def connect(self) -> None:
        await super().connect()
        self.connection.is_local = False

    def release(self) -> None:
        """Close its sockets, and let it be judged."""
        self.observed.probed.set()
        self.connection.abort()
        if hasattr(self, "writer"):
            self.writer.transport.abort()
        self._near.close()
        self._far.close()

    async def cut(self) -> None:
        """End the connection, as what is between the machines may."""
        self.writer.transport.abort()
        async with asyncio.timeout(SOON):
            await self.connection.ended.wait()

    async def judge(self) -> "FarPair":
        """Find the peer alive; return what takes its calls now, connected."""
        self.observed.probed.set()
        async with asyncio.timeout(SOON):
            while not self.connection.is_over:  # noqa: ASYNC110
                await asyncio.sleep(0)
        assert self.connection.phase >= Phase.RETIRING
        await self.successors[-1].connect()
        return self.successors[-1]


@pytest.fixture
async def far(over_torch: None) -> AsyncIterator[FarPair]:
    pair = FarPair([])
    yield pair
    for each in [pair, *pair.successors]:
        each.release()
    for _ in range(5):
        await asyncio.sleep(0)


@pytest.mark.promise("worlds.closed")
async def test_calls_that_were_not_sent_go_over_the_next_connection(far: FarPair) -> None:
    """In the order in which they were made, those that were made meanwhile last."""
    await far.connect_and_call()
    _, sent = far.call("sent")
    assert (await far.frame())[0] == CALLS
    far.connection.pause_writing()  # as a full socket does
    futures = [far.call("unsent")[1]]
    _, items = far.stream()
    _, cancelled = far.call("cancelled")
    _, expired = far.call("late")
    assert far.connection.waiting == 5
    await far.cut()
    assert far.connection.phase is Phase.JUDGED
    futures.append(far.call("made meanwhile")[1])
    assert sent._state == "waiting"
    next_one = await far.judge()
    error = await error_of(sent)
    assert isinstance(error, WorkerUnreachable)
    assert (sent.answer.was_sent, error.may_have_run, error.may_return) == (True, True, True)
    cancel(cancelled)
    expire(expired, 1.0)
    error = await error_of(expired)
    assert isinstance(error, CallTimeout)
    _, data = await next_one.frame()
    assert numbers_of(load_calls(data)) == [0, 2, 3, 4, 1]  # in a frame streams come last
    next_one.answer(0, "first", 4, "last")
    async with asyncio.timeout(SOON):
        assert [await each for each in futures] == ["first", "last"]
        next_one.reply(((1, 0, 1), *encode_cell("item")))
        assert await items.next() == "item"
    kind, data = await next_one.frame()
    assert kind == CONTROL
    assert dump(([2, 3], [])) == data
    cancel(items)
    kind, data = await next_one.frame()
    assert (kind, data) == (CONTROL, dump(([1], [])))
    assert next_one.connection.waiting == 0
    assert far.connection.counters()["calls"] == 2


@pytest.mark.promise("worlds.closed")
async def test_a_path_that_carries_no_call(far: FarPair) -> None:
    """It opens and ends, and the peer lives: calls that were not sent wait for it once."""
    await far.connect_and_call()
    far.connection.pause_writing()
    _, future = far.call("unsent")
    await far.cut()
    next_one = far.successors
    far.observed.probed.set()
    async with asyncio.timeout(SOON):
        while not next_one:  # noqa: ASYNC110
            await asyncio.sleep(0)
    second = next_one[0]
    second.observed.probed.set()
    second.connection.start_sending = _end_at_once  # type: ignore[method-assign]
    await second.connect()
    second.connection.on_end(ConnectionResetError("end of file"))
    error = await error_of(future)
    assert isinstance(error, WorkerUnreachable)
    assert (future.answer.was_sent, error.may_return) == (False, True)
    assert len(next_one) == 1


def _end_at_once(transport: asyncio.Transport) -> None:
    transport.abort()


@pytest.mark.promise("worlds.closed")
async def test_a_connection_that_ends_as_it_opens(far: FarPair) -> None:
    """Its end is judged like any other."""

    class Opening:
        holding = None

        async def connect(self, _: Peer, __: int, start: Any) -> None:
            loop = asyncio.get_running_loop()
            transport, _ = await loop.create_connection(asyncio.Protocol, sock=far._near)
            transport.abort()  # it was reset since its handshake
            start(transport)
            far.connection.is_local = False

    _, future = far.call("unsent")
    far.connection._introductions = cast(Any, Opening())
    far.connection.open()
    async with asyncio.timeout(SOON):
        await far.connection.ended.wait()
    assert future._state == "waiting"
    next_one = await far.judge()
    number = numbers_of(load_calls((await next_one.frame())[1]))[0]
    next_one.answer(number, "done")
    async with asyncio.timeout(SOON):
        assert await future == "done"


async def test_the_peer_leaves_while_it_is_judged(far: FarPair) -> None:
    """Nothing is passed on: the calls say that they were not sent."""
    await far.connect_and_call()
    far.connection.pause_writing()
    _, future = far.call("unsent")
    await far.cut()

    def refuse(_: str) -> Connection:
        raise WorkerLeft("peer", may_have_run=False)

    far.connection._succeed = refuse
    far.observed.probed.set()
    error = await error_of(future)
    assert isinstance(error, WorkerUnreachable)
    assert not future.answer.was_sent


@pytest.mark.promise("worlds.path")
async def test_a_ping_that_is_not_answered_and_a_proof_that_is(
    far: FarPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A router has forgotten torch's connection too: the peer is alive as it answers otherwise."""
    await far.connect_and_call()
    far.connection.pause_writing()
    far.call("unsent")
    near, other = socket.socketpair()

    class Introducer:
        async def dial(self, peer: Peer, number: int) -> socket.socket:
            assert (peer, number) == (far.peer, number_for(1, ARGUMENTS))
            return near

    monkeypatch.setattr(far.connection, "_introductions", Introducer())
    await far.cut()
    with other:
        async with asyncio.timeout(SOON):
            while not far.successors:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
    assert far.observed.told[-1] == "proof"
    assert near.fileno() == -1


@pytest.mark.promise("worlds.path")
async def test_a_silent_peer_proves_itself_in_time(
    far: FarPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A ping asks at a new socket too, unless the peer is heard: all paths may be forgotten."""
    await far.connect_and_call()
    dialled: list[int] = []

    class Introducer:
        async def dial(self, peer: Peer, number: int) -> socket.socket:
            dialled.append(number)
            return socket.socket()

    monkeypatch.setattr(far.connection, "_introductions", Introducer())
    monkeypatch.setattr(connection, "KNOCK_DELAY", 0.0)
    for _ in range(2):
        far.connection.ping()
    async with asyncio.timeout(SOON):
        await far.observed.probed.wait()
    assert dialled == [number_for(1, ARGUMENTS)]
    far.connection.ping()
    far.peer.last_heard += 1.0
    knocking: Any = far.connection._knocking
    async with asyncio.timeout(SOON):
        await knocking
    assert len(dialled) == 1


@pytest.mark.promise("worlds.closed")
async def test_the_loop_ends_while_the_peer_is_judged(far: FarPair) -> None:
    """Whatever cancels the tasks of a loop ends the calls, and later ones take another connection.

    So do calls that a task makes while it is cancelled.
    """
    await far.connect_and_call()
    _, sent = far.call("sent")
    await far.frame()
    far.connection.pause_writing()
    _, unsent = far.call("unsent")
    await far.cut()
    judging: Any = far.connection._judging
    judging.cancel()
    _, last = far.call("in a finally")
    found = [(await error_of(each), each.answer.was_sent) for each in (sent, unsent, last)]
    assert [was_sent for _, was_sent in found] == [True, False, False]
    assert all(isinstance(error, WorkerUnreachable) for error, _ in found)
    assert far.connection.phase >= Phase.RETIRING
    assert far.connection.is_over


@pytest.mark.promise("worlds.closed")
async def test_calls_that_are_passed_on_are_sent_or_held_like_others(far: FarPair) -> None:
    """Over a connection that is open already at once, and while the peer does not serve, for a
    while."""
    await far.connect_and_call()
    far.connection.pause_writing()
    _, future = far.call("unsent")
    far.succeed("peer")
    newer = far.successors[0]
    await newer.connect()
    far.connection._succeed = lambda _: newer.connection
    await far.cut()
    far.observed.probed.set()
    _, data = await newer.frame()
    newer.answer(*numbers_of(load_calls(data)), "done")
    async with asyncio.timeout(SOON):
        assert await future == "done"

    class Holding:
        timeout = 0.01

        def is_held(self, _: str) -> bool:
            return True

    newer.connection.pause_writing()
    _, held = newer.call("held")
    newer.succeed("peer")
    last = newer.successors[-1]
    last.introductions.holding = cast(Any, Holding())
    newer.connection._succeed = lambda _: last.connection
    await newer.cut()
    newer.observed.probed.set()
    error = await error_of(held)
    assert "it is not attached after 0.01 s" in str(error)


async def test_what_is_written_after_an_abort_is_not_sent(far: FarPair) -> None:
    """Its end is known an iteration later: until then calls wait, as those of a full socket."""
    await far.connect_and_call()
    far.connection.abort()
    _, future = far.call("unsent")
    far.observed.probed.set()
    async with asyncio.timeout(SOON):
        await far.connection.ended.wait()
    next_one = await far.judge()
    number = numbers_of(load_calls((await next_one.frame())[1]))[0]
    next_one.answer(number, "done")
    async with asyncio.timeout(SOON):
        assert await future == "done"


async def test_a_large_call_of_a_world_that_was_left(
    far: FarPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was made before, and the connection opens later: the call fails, and nothing else does."""

    def left(_: object) -> NoReturn:
        raise ReferenceError("this RRef is of a world that this process has left")

    with monkeypatch.context() as patch:
        patch.setattr(sender, "slot_key", left)
        _, large = far.call(torch.ones(1 << 18))
        number, small = far.call("small")
        await far.connect()
        assert isinstance(await error_of(large), NotInWorld)
    assert (await far.frame())[0] == CALLS
    far.answer(number, "done")
    async with asyncio.timeout(SOON):
        assert await small == "done"
