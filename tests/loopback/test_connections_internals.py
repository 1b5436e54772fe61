"""Connections of our own, seen from inside: lack of memory, payloads on their way, strangers."""

import asyncio
import functools
import secrets
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from typing import Any, NoReturn

import pytest
import torch
from torch.futures import Future

import aiorpc_torch as aiorpc
from aiorpc_torch import RemoteError, RpcError, RRef, WorkerLost, call, remote
from aiorpc_torch._client import (
    connection as client_connection,
    introduction as introductions,
    pool,
    sender as call_sender,
    torch_transfers,
)
from aiorpc_torch._endpoint import entry_points
from aiorpc_torch._server import listener, result_sender, session
from aiorpc_torch._wire.frames import (
    CALLS,
    CLOSE,
    HEADER,
    MAX_FRAME,
    RESULTS,
)
from aiorpc_torch._wire.handshake import (
    HELLO,
    NONCE,
    PROOF,
    Credentials,
    encode_hello,
    new_nonce,
)
from aiorpc_torch._wire.pickling import pack
from aiorpc_torch._wire.targets import FunctionTarget
from aiorpc_torch._world import worker
from aiorpc_torch.observe import stats
from aiorpc_torch.testing import Gate
from tests.support.actors import Counter, Notes
from tests.support.logs import logged
from tests.support.malformed import group
from tests.support.raw_connections import (
    CONNECTION,
    SOON,
    Stranger,
    child,
    ends,
    introduction,
    server,
    start,
)

from .test_connections import LARGE, Results, until, work


def own_connection() -> client_connection.Connection:
    """The connection of this loop to this worker itself."""
    return pool.current().connection("main")


def fail_once(
    patch: pytest.MonkeyPatch, module: Any, name: str, error: Exception
) -> Callable[..., Any]:
    """That function raises once, and then does what it did."""
    function, errors = getattr(module, name), [error]

    def failing(*args: Any, **kwargs: Any) -> Any:
        if errors:
            raise errors.pop()
        return function(*args, **kwargs)

    patch.setattr(module, name, failing)
    return failing


@pytest.mark.usefixtures("over_torch")
@pytest.mark.promise("transport.memory")
@pytest.mark.parametrize("size", [0, LARGE])
async def test_no_memory_for_a_frame_loses_no_call(
    world: aiorpc.types.Worker, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    """Its calls fail, those that come later are answered, and no caller waits for ever."""
    notes = remote(RRef(Notes()))
    await asyncio.gather(notes.note(0), notes.note(0))  # after a lone call the next leaves at once
    module = torch_transfers if size else call_sender
    fail_once(monkeypatch, module, "encode_calls", MemoryError("no memory"))
    found = await ends(*start(*(notes.note(bytes(size)) for _ in range(1 if size else 5))))
    assert all(isinstance(each, RpcError) and "no memory" in str(each) for each in found), found
    assert await notes.note(1) is None
    assert await notes.noted() == [0, 0, 1]
    assert len(own_connection().state.window) == stats().in_flight == stats().unsent == 0


def no_memory(*_: Any) -> NoReturn:
    raise MemoryError("no memory")


@pytest.mark.promise("transport.memory")
@pytest.mark.parametrize("calls", [1, 5])
async def test_no_memory_for_results_loses_no_call(
    world: aiorpc.types.Worker, monkeypatch: pytest.MonkeyPatch, calls: int
) -> None:
    """Results are packed one by one then; a single one fails."""
    results = Results()
    is_open = asyncio.Event()
    monkeypatch.setattr(results, "number", functools.partial(results.number_once, is_open))
    number = remote(RRef(results)).number
    fail_once(monkeypatch, result_sender, "encode_reply", MemoryError("no memory"))
    monkeypatch.setattr(session, "dump", no_memory)
    calling = start(*(number() for _ in range(calls)))
    while stats().running < calls:  # noqa: ASYNC110 - the event would be set in the worker
        await asyncio.sleep(0)
    is_open.set()
    found = await ends(*calling)
    if calls == 1:
        assert isinstance(found[0], MemoryError)
    else:
        assert found == [7] * calls
    await work()


async def test_nothing_is_sent_to_a_transport_that_has_failed(world: aiorpc.types.Worker) -> None:
    """Its connection learns of it later; until then, calls are known to be unsent."""
    await work()
    transport = own_connection().transport
    assert transport is not None
    calling = start(*(call("main", torch.add, torch.ones(LARGE), n) for n in range(9)))
    transport.abort()  # the connection is told after the calls have begun
    found = await ends(*calling)
    assert all(isinstance(each, RpcError) and not each.may_have_run for each in found), found
    await work()


async def test_no_lone_call_is_sent_to_a_transport_that_has_failed(
    world: aiorpc.types.Worker,
) -> None:
    counter = remote(RRef(Counter()))
    assert await counter.aadd(1) == 1
    transport = own_connection().transport
    assert transport is not None
    transport.abort()  # in the step of the task that calls
    with pytest.raises(RpcError) as caught:
        await counter.aadd(1)
    assert not caught.value.may_have_run
    assert await counter.aadd(1) == 2


@pytest.mark.promise("transport.memory")
async def test_no_memory_for_a_failure_ends_the_connection(
    world: aiorpc.types.Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its caller would wait for ever; the next call has another connection."""
    number = remote(RRef(Results())).number
    assert await number() == 7
    with monkeypatch.context() as patch:
        patch.setattr(session, "dump", no_memory)
        for _ in range(2):
            fail_once(patch, result_sender, "encode_reply", MemoryError("no memory"))
        (found,) = await ends(*start(number()))
    assert isinstance(found, RpcError)
    await work()


class Sending:
    """`send` of a connection: messages to one endpoint leave when the test says so."""

    def __init__(self, patch: pytest.MonkeyPatch, endpoint: Any) -> None:
        self.gated: list[Callable[[], None]] = []
        self._send = torch_transfers.send
        self._endpoint = endpoint
        patch.setattr(torch_transfers, "send", self.send)

    def send(self, peer: Any, endpoint: Any, *args: Any) -> "Future[Any]":
        if endpoint is not self._endpoint:
            return self._send(peer, endpoint, *args)
        answer: Future[Any] = Future()

        def leave() -> None:
            sent = self._send(peer, endpoint, *args)
            sent.add_done_callback(lambda done: answer.set_result(done.wait()))

        self.gated.append(leave)
        return answer

    def let(self) -> None:
        """All of them leave."""
        while self.gated:
            self.gated.pop(0)()


@pytest.mark.promise("transport.held")
@pytest.mark.parametrize("name", ["large", "tensor", "huge_number"])
async def test_nothing_of_a_collected_result_is_held(world: aiorpc.types.Worker, name: str) -> None:
    """Whatever it was that did not go on the connection."""
    results = remote(RRef(Results()))
    for _ in range(3):
        assert await getattr(results, name)() is not None
        assert stats().held_bytes == 0
        own_connection().transfers.large_results.clear()


@pytest.mark.promise("transport.held")
@pytest.mark.parametrize("kind", ["call", "stream"])
async def test_a_held_result_is_released_when_its_caller_leaves(
    world: aiorpc.types.Worker, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Cancelled before it was collected, the callee does not keep it."""
    results = remote(RRef(Results()))
    sending = Sending(monkeypatch, entry_points.collect)

    async def take() -> Any:
        return await results.large() if kind == "call" else [each async for each in results.items()]

    (taking,) = start(take())
    await until(lambda: len(sending.gated) == (1 if kind == "call" else 3))
    assert stats().held_bytes == len(sending.gated) * pack(bytes(LARGE)).size
    taking.cancel()
    await asyncio.wait((taking,))
    await results.number()  # behind the cancellation
    assert stats().held_bytes == 0
    sending.let()
    await until(lambda: not own_connection().state.window)  # also of what was on its way
    await work()
    assert stats().in_flight == 0


class Late:
    """Its results are large, and made when the test opens the gate."""

    def __init__(self) -> None:
        self.gate = Gate()

    def result(self) -> bytes:
        self.gate.passed_in_thread()
        return bytes(LARGE)

    def items(self) -> Iterator[bytes]:
        yield self.result()


@pytest.mark.usefixtures("over_torch")
@pytest.mark.promise("transport.held")
@pytest.mark.parametrize("kind", ["result", "items"])
async def test_a_result_made_after_the_cancellation_is_not_held(
    world: aiorpc.types.Worker, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Nobody would collect it."""
    held: list[Any] = []
    hold = result_sender.ResultSender._hold
    monkeypatch.setattr(
        result_sender.ResultSender, "_hold", lambda *of: held.append(of) or hold(*of)
    )
    late = Late()
    calls = remote(RRef(late))

    async def take() -> Any:
        return await calls.result() if kind == "result" else [x async for x in calls.items()]

    (taking,) = start(take())
    await late.gate.entered()
    running = [*server_session().calls.values()]
    taking.cancel()
    await asyncio.wait((taking,))
    await until(lambda: all(each.is_cancelled for each in running))
    await late.gate.open()
    await until(lambda: not server_session().calls)
    await call("main", int)  # behind what that thread has sent
    assert not held


@pytest.mark.usefixtures("over_torch")
@pytest.mark.promise("order.payload")
async def test_a_payload_on_its_way_delays_its_own_object_only(
    world: aiorpc.types.Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hundred calls of another object are answered before, and later ones of its own wait."""
    own, other = Notes(), Notes()
    mine, others = remote(RRef(own)), remote(RRef(other))
    await asyncio.gather(mine.note(0), others.note(0))
    sending = Sending(monkeypatch, entry_points.payload)
    large, small = start(mine.note(bytes(LARGE)), mine.note(2))
    async with asyncio.timeout(SOON):
        for number in range(1, 101):
            await others.note(number)
    assert other.order == [*range(101)]
    assert own.order == [0]
    assert not large.done()
    assert not small.done()
    sending.let()
    assert await ends(large, small) == [None, None]
    assert own.order == [0, bytes(LARGE), 2]


@pytest.mark.usefixtures("over_torch")
@pytest.mark.promise("order.payload_released")
async def test_a_cancelled_payload_releases_later_calls(
    world: aiorpc.types.Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its object's other calls go on, and the payload that comes after all is not taken."""
    notes = Notes()
    mine = remote(RRef(notes))
    await mine.note(0)
    sending = Sending(monkeypatch, entry_points.payload)
    large, small = start(mine.note(bytes(LARGE)), mine.note(2))
    await until(lambda: bool(server_session().dispatcher.slots))
    large.cancel()
    assert (await ends(large, small))[1] is None
    sending.let()
    await mine.note(3)
    assert notes.order == [0, 2, 3]
    assert not server_session().dispatcher.slots
    assert (stats().in_flight, stats().running) == (0, 0)


def server_session() -> session.Session:
    """Of the connection of this loop."""
    return server().sessions[own_connection().key]


@pytest.mark.usefixtures("over_torch")
@pytest.mark.promise("order.payload_released")
async def test_a_payload_that_torch_refuses_withdraws_its_slot(
    world: aiorpc.types.Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It fails with torch's error, and what is behind it goes on."""
    notes = Notes()
    mine = remote(RRef(notes))
    await mine.note(0)
    fail_once(monkeypatch, torch_transfers, "send", RuntimeError("torch refuses"))
    failed, small = await ends(*start(mine.note(bytes(LARGE)), mine.note(2)))
    assert isinstance(failed, RemoteError)
    assert "torch refuses" in str(failed)
    assert small is None
    assert notes.order == [0, 2]
    assert not server_session().dispatcher.slots
    assert len(own_connection().state.window) == 0


@pytest.fixture
async def listening(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[aiorpc.types.Worker]:
    """A world that listens on a Unix socket and on TCP; strangers have a fifth of a second."""
    monkeypatch.setattr(worker, "host_for", lambda *_: "127.0.0.1")
    monkeypatch.setattr(listener, "PROOF_TIMEOUT", 0.2)
    async with aiorpc.local_world(0) as me:
        yield me


def unproven() -> set[Any]:
    """Connections whose callers have proven nothing."""
    found = server()._listener
    assert found is not None
    return found._unproven


async def lie(stranger: Stranger, what: str) -> None:
    """Prove nothing, in that way."""
    credentials, _ = introduction()
    theirs = await stranger.nonce()
    mine = new_nonce()
    good = encode_hello(credentials, CONNECTION, theirs, mine)
    other = Credentials(credentials.caller, credentials.callee, credentials.key)
    unknown = replace(credentials, key=secrets.token_bytes(16))
    said = {
        "nothing": b"",
        "garbage": secrets.token_bytes(1000),
        "half a hello": good[: HELLO // 2],
        "a wrong proof": encode_hello(other, CONNECTION, theirs, mine),
        "a wrong key": encode_hello(unknown, CONNECTION, theirs, mine),
        "another connection's proof": good[:40] + (5).to_bytes(8, "little") + good[48:],
        "a hello sent elsewhere": encode_hello(credentials, CONNECTION, new_nonce(), mine),
        "a long frame": HEADER.pack(1 << 31, CALLS) + bytes(HELLO),
        "a proof with one bit changed": good[:-1] + bytes([good[-1] ^ 1]),
    }
    stranger.writer.write(said[what])


LIES = [
    "nothing", "garbage", "half a hello", "a wrong proof", "a wrong key",
    "another connection's proof", "a hello sent elsewhere", "a long frame",
    "a proof with one bit changed",
]  # fmt: skip


@pytest.mark.promise("security.proof")
@pytest.mark.parametrize("kind", ["unix", "tcp"])
@pytest.mark.parametrize("what", LIES)
async def test_wrong_proofs_are_refused(
    listening: aiorpc.types.Worker, kind: str, what: str
) -> None:
    """The connection is closed without a session, and other callers are served."""
    strangers = [await Stranger.come(kind) for _ in range(20)]
    for stranger in strangers:
        await lie(stranger, what)
    await work()
    sessions = {*server().sessions}
    for stranger in strangers:
        await stranger.is_refused()
    assert not unproven()
    assert {*server().sessions} == sessions == {own_connection().key}
    await work()


@pytest.mark.promise("security.replay")
@pytest.mark.parametrize("kind", ["unix", "tcp"])
async def test_a_hello_is_good_once(listening: aiorpc.types.Worker, kind: str) -> None:
    """What an honest caller said on its connection proves nothing on another."""
    credentials, _ = introduction()
    honest, thief = await Stranger.come(kind), await Stranger.come(kind)
    theirs = await honest.nonce()
    await thief.nonce()
    said = encode_hello(credentials, CONNECTION, theirs, new_nonce())
    thief.writer.write(said)
    await thief.is_refused()
    honest.writer.write(said)
    await honest.reader.readexactly(PROOF)
    assert [*server().sessions] == [("stranger", credentials.caller.worker_id, CONNECTION)]
    await honest.leave()
    assert not unproven()


@pytest.mark.promise("security.strangers")
@pytest.mark.parametrize("kind", ["unix", "tcp"])
async def test_there_are_only_so_many_strangers(
    listening: aiorpc.types.Worker, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Of two hundred at once the oldest are closed."""
    monkeypatch.setattr(listener, "PROOF_TIMEOUT", SOON)
    strangers = [await Stranger.come(kind) for _ in range(200)]
    await asyncio.gather(*(each.reader.read(NONCE) for each in strangers))

    def closed() -> list[bool]:
        return [each.reader.at_eof() or bool(each.reader.exception()) for each in strangers]

    oldest = 200 - listener.MAX_UNPROVEN
    await until(lambda: sum(closed()) >= oldest)
    assert closed()[:oldest] == [True] * oldest
    assert len(unproven()) <= listener.MAX_UNPROVEN
    for stranger in strangers:
        await stranger.leave()
    await until(lambda: not unproven())
    await work()


@pytest.mark.promise("security.strangers")
async def test_an_honest_caller_among_strangers(listening: aiorpc.types.Worker) -> None:
    """It replaces the oldest stranger, and need not wait until they have gone."""
    strangers = [await Stranger.come() for _ in range(listener.MAX_UNPROVEN)]
    await until(lambda: len(unproven()) == listener.MAX_UNPROVEN)
    await work()
    await strangers[0].reader.read(NONCE)
    assert await strangers[0].reader.read(1) == b""
    for stranger in strangers:
        await stranger.leave()
    await until(lambda: not unproven())


@pytest.mark.promise("security.long")
@pytest.mark.parametrize("kind", ["unix", "tcp"])
@pytest.mark.parametrize("count", [1, 300_000])
async def test_a_frame_that_is_too_long(
    listening: aiorpc.types.Worker, caplog: pytest.LogCaptureFixture, kind: str, count: int
) -> None:
    """Who has proven itself is told, once; no memory is allocated for what it announces."""
    stranger = await Stranger.proven(kind)
    stranger.writer.write(HEADER.pack(1 << 31, CALLS) + bytes(count))
    ((kind_, said),) = await stranger.frames()
    assert (kind_, said[0]) == (CLOSE, "broken")
    assert len(stranger.session._reader._view) <= MAX_FRAME + HEADER.size
    await stranger.leave()
    assert len([each for each in caplog.records if "unreadable frame" in each.message]) == 1
    assert not server().sessions
    await work()


async def test_calls_over_tcp(
    listening: aiorpc.types.Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A peer of another network namespace is reached by its address and port.

    Neither end holds back a small frame for the acknowledgement of an earlier one.
    """
    monkeypatch.setattr(introductions, "network_namespace", lambda: "elsewhere")
    found = pool.current()
    monkeypatch.setattr(found, "_introductions", introductions.Introductions(found._members))
    await work()
    for end in (own_connection(), server().sessions[own_connection().key]):
        sock = end.transport.get_extra_info("socket")
        assert sock.family == socket.AF_INET
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1
    x = torch.rand(1 << 20)
    assert torch.equal(await call("main", torch.clone, x), x)  # neither do tensor sockets
    await until(lambda: own_connection().carriers.chosen)
    x += 1
    assert torch.equal(await call("main", torch.clone, x), x)
    assert stats().socket_messages > 0


async def test_one_connection_number_twice(listening: aiorpc.types.Worker) -> None:
    """The end of the former connection, which its caller gave up, is not that of the latter."""
    first = await Stranger.proven()
    second = await Stranger.proven()
    assert second.session is not first.session
    await first.is_refused()
    assert second.session in server().sessions.values()
    second.send(CALLS, [group(target=(pack(FunctionTarget(int)).data, 0))])
    assert await second.frame() == (RESULTS, [["plain", [0], [0]]])
    await second.leave()


async def test_a_payload_whose_connection_has_ended(
    world: aiorpc.types.Worker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is answered, nothing of it runs, and nothing is said of it in the log."""
    notes = Notes()
    sending = Sending(monkeypatch, entry_points.payload)
    (large,) = start(remote(RRef(notes)).note(bytes(LARGE)))
    await until(lambda: bool(sending.gated))
    own_connection().abort()
    (lost,) = await ends(large)
    assert isinstance(lost, WorkerLost)
    await until(lambda: not server().sessions)
    sending.let()
    monkeypatch.setattr(torch_transfers, "send", sending._send)
    await work()
    assert notes.order == []
    assert not logged(caplog)


@pytest.mark.promise("transport.fork")
async def test_a_forked_child_keeps_no_connection_open(listening: aiorpc.types.Worker) -> None:
    """While it lives each end sees the other's end, and strangers see theirs."""
    for end in range(2):
        await work()
        both = own_connection(), server_session()
        with child():
            both[end].abort()
            async with asyncio.timeout(SOON):
                await both[1 - end].ended.wait()
            await work()
    stranger = await Stranger.come()
    await stranger.nonce()
    with child():
        await stranger.is_refused()
        await work()


@pytest.mark.promise("transport.reader")
async def test_a_peer_that_does_not_read_is_not_read_from(world: aiorpc.types.Worker) -> None:
    """Only while more than 8 MiB of results wait for it; afterwards everything arrives."""
    echoed: list[int] = []

    class Echo:
        async def echo(self, number: int, data: bytes) -> bytes:
            echoed.append(number)
            return data

    stranger = await Stranger.proven()
    end = stranger.session
    count, data = 500, bytes(60_000)
    target = pack(FunctionTarget(functools.partial(echo, len(echoes))))
    echoes.append(Echo().echo)
    for number in range(count):
        columns = [("plain", [number]), ("plain", [data])]
        stranger.send(CALLS, [group(*columns, numbers=(number,), target=(target.data, 0))])
    await until(lambda: "full" in end._paused)
    waiting = end.transport.get_write_buffer_size()
    high = 8 << 20
    # asyncio pauses the writer in the write itself, uvloop at the end of the iteration.
    assert high < waiting <= high + 4 * len(data) + 1000
    assert high // len(data) < len(echoed) < count
    await work()
    assert "full" in end._paused
    answered: list[int] = []
    while len(answered) < count:  # on uvloop the results of several calls share a frame
        kind, [(cells, numbers, values)] = await stranger.frame()  # type: ignore[misc]
        assert (kind, cells, values) == (RESULTS, "plain", [data] * len(numbers))
        answered += numbers
    assert answered == echoed == [*range(count)]
    assert not end._paused
    await stranger.leave()
    echoes.clear()


echoes: list[Callable[[int, bytes], Any]] = []


async def echo(index: int, number: int, data: bytes) -> bytes:
    return bytes(await echoes[index](number, data))
