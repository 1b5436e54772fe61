"""The server of a directory: strangers, connections that must be closed, a loop that is blocked."""

import asyncio
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from msgspec import msgpack

from aiorpc_torch._aio import sockets
from aiorpc_torch._aio.sockets import listen_unix
from aiorpc_torch._directory import directory_server
from aiorpc_torch._directory.directory_messages import (
    AskMissing,
    Failed,
    GiveUp,
    Missing,
    Register,
    Registered,
    ToWorker,
    read_to_worker,
)
from aiorpc_torch._directory.directory_server import MAX_REQUEST, MAX_STRANGERS, DirectoryServer
from aiorpc_torch._directory.directory_stream import Stream, encode, greeting, open_stream
from aiorpc_torch._directory.record import Claim, Record
from aiorpc_torch._directory.registration import Registration
from tests.support.other_users import first_byte
from tests.support.two_ends import until

SOON = 30.0
WORLD = "0" * 32


class Place:
    """A directory at a TCP address, and streams to it."""

    def __init__(self) -> None:
        listening = socket.create_server(("127.0.0.1", 0))
        self.address = listening.getsockname()
        self.server = DirectoryServer(WORLD, [listening])
        self.streams: list[Stream[ToWorker]] = []

    async def open(self, connected: socket.socket | None = None) -> Stream[ToWorker]:
        """Return a stream to the directory, which has greeted."""
        connected = connected or socket.create_connection(self.address)
        stream = await open_stream(connected, read_to_worker, 1 << 20)
        self.streams.append(stream)
        assert await stream.read_greeting() == WORLD
        return stream

    async def register(self, rank: int) -> Stream[ToWorker]:
        """Return the stream of a worker of three, which has registered."""
        stream = await self.open()
        stream.write(greeting())
        stream.send(Register(Registration(f"w{rank}", rank, 3, "1.0")))
        stream.send(AskMissing())
        assert isinstance(await stream.receive(), Missing)
        return stream

    async def close(self) -> None:
        self.server.close()
        for each in self.streams:
            await each.close()


@pytest.fixture
async def place() -> AsyncIterator[Place]:
    found = Place()
    async with asyncio.timeout(SOON):
        yield found
    await found.close()


async def closed(stream: Stream[Any]) -> bool:
    """Wait until the directory has closed a stream; it may tell why."""
    try:
        while isinstance(await stream.receive(), Failed):
            pass
    except (EOFError, OSError):
        return True
    return False


STRANGERS: dict[str, bytes] = {
    "another program": b"GET / HTTP/1.1\r\n\r\n",
    "another version": b"aiorpc:9",
    "another message": greeting() + encode(AskMissing()),
    "no message": greeting() + b"\x03\0\0\0\xc1\xc1\xc1",
    "a long message": greeting() + (MAX_REQUEST + 1).to_bytes(4, "little"),
    "another world": greeting("1" * 32) + encode(Register(Registration("w9", 9, 10, "1.0"))),
    "no rank": greeting() + encode(Register(Registration("w9", 9, 3, "1.0"))),
    "deep": greeting() + (100_000).to_bytes(4, "little") + b"\x91" * 100_000,
}


@pytest.mark.promise("security.directory")
async def test_a_worker_that_does_not_read(
    place: Place, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The directory keeps so many bytes for it, and closes the connection. Others go on."""
    monkeypatch.setattr(directory_server, "MAX_UNSENT", 1 << 16)
    member = await place.register(0)
    with place.server.connect() as deaf:  # of TCP the system ends one sooner or later
        registered = encode(Register(Registration("w1", 1, 3, "1.0")))
        deaf.settimeout(SOON)

        def ask() -> None:
            deaf.sendall(greeting() + registered)
            while True:
                deaf.sendall(encode(AskMissing()) * 1000)

        with pytest.raises(ConnectionError):
            await asyncio.to_thread(ask)
    assert "reads nothing" in caplog.text
    member.send(AskMissing())
    assert isinstance(await member.receive(), Missing)


@pytest.mark.promise("security.directory")
@pytest.mark.parametrize("what", STRANGERS)
async def test_strangers(place: Place, what: str) -> None:
    """Their connections are closed, and the world goes on."""
    stream = await place.open()
    stream.write(STRANGERS[what])
    assert await closed(stream)
    member = await place.register(0)
    member.send(GiveUp("now"))
    assert await member.receive() == Failed(
        "2 of 3 workers did not register now: rank 1, 2", [1, 2]
    )


@pytest.mark.parametrize("start", [b"", greeting()[:3], greeting() + b"\x09\0\0\0"])
async def test_a_stranger_that_says_nothing(
    place: Place, start: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has a time limit; a worker that has registered has none."""
    member = await place.register(1)
    monkeypatch.setattr(directory_server, "REGISTER_TIMEOUT", 0.01)
    stream = await place.open()
    stream.write(start)
    assert await closed(stream)
    member.send(AskMissing())
    assert await member.receive() == Missing([0, 2], "register")


@pytest.mark.promise("security.directory")
async def test_many_strangers(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond a limit the oldest connection is closed, but no member's."""
    monkeypatch.setattr(directory_server, "REGISTER_TIMEOUT", 10 * SOON)
    member = await place.register(0)
    streams = [await place.open() for _ in range(MAX_STRANGERS + 1)]
    assert await closed(streams[0])
    await place.register(1)
    member.send(AskMissing())
    assert await member.receive() == Missing([2], "register")


@pytest.mark.promise("security.directory")
async def test_many_that_register(place: Place) -> None:
    """They do not enter: no member's connection is closed for them, and theirs are limited."""
    member = await place.register(0)
    streams = []
    for number in range(MAX_STRANGERS + 1):
        stream = await place.open()
        own = Registration(f"a{number}", -1, -1, "1.0", joined=True)
        stream.write(greeting() + encode(Register(own)))
        streams.append(stream)
    assert await closed(streams[0])
    member.send(AskMissing())
    assert await member.receive() == Missing([1, 2], "register")


async def test_strangers_do_not_fill_the_log(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    """There is one warning for many that come at once."""
    for what in ("another program", "another world", "deep"):
        stream = await place.open()
        stream.write(STRANGERS[what])
        assert await closed(stream)
    warnings = [each for each in caplog.records if each.levelno >= logging.WARNING]
    assert len(warnings) == 1, warnings


async def test_a_message_that_a_worker_must_not_send(place: Place) -> None:
    """Its own connection is closed: as if it had died, for the others."""
    first, second = await place.register(0), await place.register(1)
    second.send(Register(Registration("w0", 0, 3, "1.0")))
    assert await closed(second)
    first.send(AskMissing())
    missing = await first.receive()
    assert isinstance(missing, Missing)
    assert missing.ranks == [1, 2]
    assert missing.ended.startswith("'w1' (rank 1, process ")


async def test_a_blocked_loop_delays_no_other_worker(place: Place) -> None:
    """The directory has a thread of its own; here another loop registers while this one blocks."""
    done = threading.Event()

    async def register() -> None:
        stream = await place.register(2)
        place.streams.remove(stream)
        await stream.close()
        done.set()

    thread = threading.Thread(target=lambda: asyncio.run(register()))
    thread.start()
    assert done.wait(SOON), "this blocks the loop"
    thread.join()


async def test_the_own_worker_of_rank_0(place: Place) -> None:
    """Its connection is like the others'."""
    stream = await place.open(place.server.connect())
    stream.write(greeting())
    stream.send(Register(Registration("w0", 0, 3, "1.0")))
    stream.send(AskMissing())
    assert await stream.receive() == Missing([1, 2], "register")


async def test_the_end_of_the_server(place: Place) -> None:
    """All connections end, and nothing listens."""
    streams = [await place.register(0), await place.open()]
    place.server.close()
    assert all([await closed(each) for each in streams])
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(place.address)


async def test_a_failure_reaches_who_sends_meanwhile(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 closes the directory at once; what another worker sends then takes nothing away."""
    monkeypatch.setattr(directory_server, "LINGER", SOON)
    streams = [await place.register(rank) for rank in range(2)]
    last = await place.open()
    last.write(greeting() + encode(Register(Registration("w2", 2, 3, "1.0"))))
    assert isinstance(await last.receive(), Registered)
    await last.close()
    for each in streams:
        assert isinstance(await each.receive(), Registered)
    assert isinstance(await streams[0].receive(), Failed)
    closing = asyncio.ensure_future(asyncio.to_thread(place.server.close))
    await asyncio.wait((closing,), timeout=0.2)  # a server that does not wait has closed
    for _ in range(2):
        streams[1].send(AskMissing())
        await asyncio.sleep(0)
    failed = await streams[1].receive()
    assert isinstance(failed, Failed)
    assert failed.missing == [2]
    for each in streams:
        await each.close()
    await closing


class SlowValue:
    """A value whose first swap answers when it is told to."""

    def __init__(self) -> None:
        self.is_asked, self.may_answer = threading.Event(), threading.Event()

    def read(self) -> bytes | None:
        return None

    def swap(self, old: bytes | None, new: bytes) -> bool:
        self.is_asked.set()
        self.may_answer.wait(SOON)
        return True

    def clear(self, old: bytes) -> None:
        pass

    def close(self) -> None:
        pass


@pytest.mark.promise("succession.never_two")
async def test_a_renewal_that_is_answered_after_the_lease(caplog: pytest.LogCaptureFixture) -> None:
    """No process enters: another worker may have claimed the place meanwhile."""
    value, steps = SlowValue(), list[str]()
    record = Record(WORLD, "w0", lease=1.0)
    claim = Claim(value, record, b"written", time.monotonic())
    server = DirectoryServer(WORLD, [], claim)
    server._loop.call_soon_threadsafe(server.record, lambda: steps.append("entered"))
    await asyncio.to_thread(value.is_asked.wait, SOON)
    end = time.monotonic() + claim.lease
    await until(lambda: time.monotonic() > end)
    value.may_answer.set()
    await until(lambda: "the directory ends" in caplog.text)
    server.close()
    assert steps == []
    assert "it does not reach its place" in caplog.text


def test_a_connection_that_is_not_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    """For lack of descriptors, say: it waits, and is accepted later."""
    monkeypatch.setattr(sockets, "ACCEPT_RETRY", 0.01)
    accept: Callable[..., Any] = socket.socket.accept
    failures = [OSError(24, "Too many open files")]

    def fail(self: socket.socket) -> Any:
        if failures:
            raise failures.pop()
        return accept(self)

    monkeypatch.setattr(socket.socket, "accept", fail)

    async def live() -> None:
        place = Place()
        await place.register(0)
        await place.close()

    asyncio.run(asyncio.wait_for(live(), SOON))
    assert not failures


@pytest.mark.promise("security.users")
@pytest.mark.skipif(os.geteuid() != 0, reason="only root connects as other users")
async def test_other_users_are_refused() -> None:
    """They get no greeting."""
    name = f"aiorpc-test-{secrets.token_hex(8)}"
    server = DirectoryServer(WORLD, [listen_unix(name)])
    try:
        assert await asyncio.to_thread(first_byte, name) == "b''\n"
    finally:
        server.close()


@pytest.mark.promise("security.text")
async def test_a_stranger_forges_no_line_of_the_log(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    """It is told why it is refused; the log of its host and its name is printable."""
    evil = "\x1b[2J\nINFO forged"
    with caplog.at_level(logging.DEBUG, "aiorpc_torch"):
        for field, value in (("name", evil), ("host", evil)):
            registered: Any = msgpack.decode(msgpack.encode(Register(Registration("w", 0, 3, "1"))))
            registered[1][field] = value
            stream = await place.open()
            stream.write(greeting() + encode(registered))
            stream.send(AskMissing())
            answer = await stream.receive()
    assert isinstance(answer, Missing)
    assert any(
        each.endswith(r"on \x1b[2J\nINFO forged) has registered") for each in caplog.messages
    )
    assert all(each.isprintable() for each in caplog.messages)
