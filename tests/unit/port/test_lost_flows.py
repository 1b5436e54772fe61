"""Tunnels between two ports, over flows that a proxy loses: torch's connections go on."""

import asyncio
import contextlib
import gc
import os
import select
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from aiorpc_torch._port import port as port_module, relay as relay_module, tunnels as tunnels_module
from aiorpc_torch._port.port import Port
from aiorpc_torch._port.purposes import TORCH, preface
from aiorpc_torch._port.relay import Relay
from aiorpc_torch._port.sequence import format_opening
from aiorpc_torch._port.streams import LINGER
from aiorpc_torch._port.tls import Tls
from aiorpc_torch._port.tunnels import Tunnels, format_endpoint, split_endpoint
from tests.support.certificates import Authority
from tests.support.servers import serving
from tests.support.slack import SLACK
from tests.unit.port.test_tunnels import answer_with

HEARTBEAT = 0.8
SOON = 30.0
TRIES = 3  # a busy machine may hold an end for longer than its heartbeat, but not each time
LARGE = 20 << 20  # bytes: more than a window


class Proxy:
    """What is between two ports, and loses flows."""

    def __init__(self, target: str) -> None:
        self.target = target
        self.flows: list[tuple[asyncio.StreamWriter, asyncio.StreamWriter]] = []
        self.silent = [set[int](), set[int]()]  # flows whose bytes do not pass, by direction
        self.refuses = False
        self._accepted: list[asyncio.StreamWriter] = []
        self._tasks: list[asyncio.Task[None]] = []

    def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Not a coroutine: what is accepted as the loop ends has an owner at once."""
        self._accepted.append(writer)
        if self.refuses:
            writer.transport.abort()
        else:
            self._tasks.append(asyncio.create_task(self._connect(reader, writer)))

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection(*split_endpoint(self.target))
        number = len(self.flows)
        self.flows.append((writer, far_writer))
        ways = (reader, far_writer, 0), (far_reader, writer, 1)
        self._tasks += [asyncio.create_task(self._copy(number, *way)) for way in ways]

    async def _copy(
        self, number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, way: int
    ) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                if number not in self.silent[way]:
                    writer.write(data)
                    await writer.drain()
        if number not in self.silent[way]:
            writer.close()

    def lose(self, *ways: int) -> None:
        """Let no byte of the flows pass any more."""
        for way in ways:
            self.silent[way] |= {*range(len(self.flows))}

    def reset(self) -> None:
        for flow in self.flows:
            for writer in flow:
                writer.transport.abort()

    def close(self) -> None:
        self.refuses = True
        for task in self._tasks:
            task.cancel()
        for writer in self._accepted:
            writer.transport.abort()
        self.reset()


class Ends:
    """Sockets of torch's at both ends, and what is between."""

    def __init__(
        self, proxy: Proxy, ports: tuple[Port, Port], own: str, listening: socket.socket
    ) -> None:
        self.proxy, self._own, self._listening = proxy, own, listening
        self.near, self.far = ports

    async def connect(self) -> tuple[socket.socket, socket.socket]:
        """Return a new connection's ends, after the first message of the listener."""
        near = await asyncio.to_thread(socket.create_connection, split_endpoint(self._own), SOON)
        far, _ = await asyncio.to_thread(self._listening.accept)
        far.sendall(answer_with("127.0.0.1:1"))
        assert await read(near, len(answer_with("127.0.0.1:1"))) == answer_with("127.0.0.1:1")
        far.settimeout(SOON)
        return near, far


@contextlib.asynccontextmanager
async def ends(
    tls: Tls | None, heartbeats: tuple[float, float] = (HEARTBEAT, HEARTBEAT)
) -> AsyncIterator[Ends]:
    near, far = (Port("127.0.0.1", 0, tls, each) for each in heartbeats)
    proxy = Proxy(far.endpoint)
    try:
        async with serving(asyncio.start_server(proxy.accept, "127.0.0.1", 0)) as server:
            with socket.create_server(("127.0.0.1", 0)) as listening:
                listening.settimeout(SOON)
                far.torch = listening.getsockname()
                endpoint = format_endpoint(*server.sockets[0].getsockname())
                address = format_endpoint(*listening.getsockname())
                own = Tunnels(near).open("w1", endpoint, f"uv://{address}").removeprefix("uv://")
                yield Ends(proxy, (near, far), own, listening)
    finally:
        proxy.close()
        await asyncio.to_thread(near.close)
        await asyncio.to_thread(far.close)


@pytest.fixture(params=["clear", pytest.param("tls", marks=pytest.mark.slow)])
def tls(request: pytest.FixtureRequest, tmp_path: Path) -> Tls | None:
    return Authority(tmp_path).tls() if request.param == "tls" else None


async def read(sock: socket.socket, size: int) -> bytes:
    def receive() -> bytes:
        received = b""
        while len(received) < size and (data := sock.recv(size - len(received))):
            received += data
        return received

    return await asyncio.to_thread(receive)


async def exchange(*socks: socket.socket) -> None:
    """Bytes pass both ways."""
    for one, other in (socks, socks[::-1]):
        one.sendall(b"hello")
        assert await read(other, 5) == b"hello"


LOSSES: dict[str, Callable[[Proxy], object]] = {
    "to the acceptor": lambda proxy: proxy.lose(0),
    "from the acceptor": lambda proxy: proxy.lose(1),
    "both ways": lambda proxy: proxy.lose(0, 1),
    "reset": Proxy.reset,
}


@pytest.mark.promise("worlds.tunnels")
@pytest.mark.parametrize("loss", LOSSES)
async def test_a_flow_that_is_lost(tls: Tls | None, loss: str) -> None:
    """Another one carries what was sent meanwhile, both ways; again and again."""
    async with ends(tls) as made:
        near, far = await made.connect()
        with near, far:
            for _ in range(2):
                await exchange(near, far)
                LOSSES[loss](made.proxy)
                begin = time.monotonic()
                await exchange(near, far)
                assert time.monotonic() - begin < HEARTBEAT + 1.0 + SLACK
            assert len(made.proxy.flows) >= 3


@pytest.mark.slow
@pytest.mark.promise("worlds.tunnels")
@pytest.mark.parametrize("loss", LOSSES)
async def test_large_messages_over_flows_that_are_lost(tls: Tls | None, loss: str) -> None:
    """Every byte arrives once and in order, both ways, and then the end."""
    data = [os.urandom(LARGE) for _ in range(2)]

    async with ends(tls) as made:
        near, far = await made.connect()
        with near, far:
            whole = [asyncio.create_task(read(each, LARGE)) for each in (far, near)]
            sending = [
                asyncio.create_task(asyncio.to_thread(sock.sendall, sent))
                for sock, sent in zip((near, far), data, strict=True)
            ]
            for number in (1, 2):
                async with asyncio.timeout(SOON):
                    while len(made.proxy.flows) < number:  # noqa: ASYNC110
                        await asyncio.sleep(0.01)
                    await asyncio.sleep(0.02)  # some of it has passed
                LOSSES[loss](made.proxy)
            async with asyncio.timeout(SOON):
                found = await asyncio.gather(*whole)
                assert [*map(len, found)] == [LARGE, LARGE]
                assert found == data
                await asyncio.gather(*sending)
                near.shutdown(socket.SHUT_WR)
                assert await read(far, 1) == b""


async def test_a_reader_that_waits_for_long(tls: Tls | None) -> None:
    """What comes meanwhile waits where it is, and no end keeps more than its window."""
    async with ends(tls) as made:
        near, far = await made.connect()
        with near, far:
            data = bytes(4 * LARGE)  # more than the system's buffers on the way
            sending = asyncio.create_task(asyncio.to_thread(near.sendall, data))
            await asyncio.sleep(1.5 * HEARTBEAT)  # what is tested
            assert not sending.done()
            assert len(await read(far, len(data))) == len(data)
            await sending


@pytest.mark.promise("worlds.tunnels")
async def test_a_worker_that_is_dead(tls: Tls | None) -> None:
    """Its port refuses connections: torch learns it at once."""
    near, far = (Port("127.0.0.1", 0, tls, SOON) for _ in range(2))
    try:
        with socket.create_server(("127.0.0.1", 0)) as listening:
            far.torch = listening.getsockname()
            own = Tunnels(near).open("w1", far.endpoint, "uv://127.0.0.1:1")
            ours = socket.create_connection(split_endpoint(own.removeprefix("uv://")), SOON)
            theirs, _ = await asyncio.to_thread(listening.accept)
        with ours, theirs:
            await asyncio.to_thread(far.close)
            assert await read(ours, 1) == b""
    finally:
        near.close()
        far.close()


async def test_another_process_at_the_port(tls: Tls | None) -> None:
    """It does not know the connection, which ends."""
    async with ends(tls) as made:
        near, far = await made.connect()
        other = Port("127.0.0.1", 0, tls, HEARTBEAT)
        try:
            other.torch = made.far.torch
            made.proxy.target = other.endpoint
            with near, far:
                made.proxy.reset()
                assert await read(near, 1) == b""
        finally:
            await asyncio.to_thread(other.close)


async def test_connections_without_a_flow(monkeypatch: pytest.MonkeyPatch) -> None:
    """There are only so many, for so long; the oldest ends first."""
    monkeypatch.setattr(relay_module, "END_SILENCE", 0.0)
    monkeypatch.setattr(tunnels_module, "TORCH_SILENCE", 0.0)
    monkeypatch.setattr(tunnels_module, "REFUSAL_TIMEOUT", 0.0)
    async with ends(None) as made:
        made.far.relays._without_flow._limit = 2
        pairs = [await made.connect() for _ in range(4)]
        made.proxy.refuses = True
        made.proxy.lose(0, 1)  # neither end closes it in order for the other one
        for near, _ in pairs:
            assert await read(near, 1) == b""
        relays = made.far.relays
        async with asyncio.timeout(SOON):
            while len(relays._without_flow) != len(relays._all):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert len(relays._all) == 2
        ended, _, _ = select.select([far for _, far in pairs], [], [], 0.0)
        assert len(ended) == 2
        for far in ended:
            assert await read(far, 1) == b""
        for pair in pairs:
            for each in pair:
                each.close()


async def test_the_end_of_a_process_that_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The acceptor waits for no flow for long, if the last one was closed in order."""
    monkeypatch.setattr(relay_module, "END_SILENCE", 0.0)
    async with ends(None) as made:
        near, far = await made.connect()
        made.proxy.refuses = True
        with near, far:
            for writer in made.proxy.flows[0]:
                writer.close()
            assert await read(far, 1) == b""


def relay_of(sock: socket.socket) -> Relay:
    """The relay that torch's socket is connected to."""
    found = [each for each in gc.get_objects() if type(each) is Relay and each.local.fileno() >= 0]
    return next(each for each in found if each.local.getpeername() == sock.getsockname())


@pytest.mark.slow
@pytest.mark.parametrize("closer", ["dialer", "acceptor"])
async def test_a_reader_that_is_late_for_the_end(tls: Tls | None, closer: str) -> None:
    """It gets all that was sent before the other end closed the connection."""
    async with ends(tls) as made:
        pair = await made.connect()
        one, other = pair if closer == "dialer" else pair[::-1]
        data = bytes(range(256)) * 512
        relay = relay_of(other)
        relay.local.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        with one, other:
            # What is held ends with the connection.
            is_sent = threading.Event()
            relay._loop.call_soon_threadsafe(is_sent.wait, SOON)
            await asyncio.to_thread(one.sendall, data)
            one.close()
            await asyncio.sleep(0.2)  # it has come, mostly
            is_sent.set()
            await asyncio.sleep(2 * LINGER)  # what is tested
            other.settimeout(SOON)
            assert await read(other, len(data) + 1) == data


async def test_the_port_is_closed_while_flows_are_lost(
    tls: Tls | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits for none of them: torch here has ended."""
    monkeypatch.setattr(port_module, "LINGER", SOON)
    async with ends(tls) as made:
        near, far = await made.connect()
        with near, far:
            made.proxy.refuses = True
            made.proxy.reset()
            while not made.near._connecting:  # noqa: ASYNC110
                await asyncio.sleep(0)
            begin = time.monotonic()
            await asyncio.to_thread(made.near.close)
            assert time.monotonic() - begin < SOON / 2


async def test_torch_has_closed_a_connection_without_a_flow(
    tls: Tls | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other host answers nothing: only its last bytes are left, and nobody waits for long."""
    monkeypatch.setattr(tunnels_module, "END_SILENCE", 0.0)
    async with ends(tls) as made:
        near, far = await made.connect()
        with near, far:
            made.proxy.refuses = True
            made.proxy.lose(0, 1)
            near.sendall(b"last")
            async with asyncio.timeout(SOON):
                while not made.near._connecting:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
                near.close()
                while made.near._tasks:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)


async def test_an_opening_that_cannot_be() -> None:
    """A connection that is new has brought nothing: that one reaches no torch, and is closed."""
    async with ends(None) as made:
        stranger = await asyncio.to_thread(
            socket.create_connection, split_endpoint(made.far.endpoint), SOON
        )
        with stranger:
            stranger.sendall(preface(TORCH) + format_opening(bytes(16), 5, is_new=True))
            assert await read(stranger, 1) == b""
        assert not made.far.relays._all
        assert not select.select([made._listening], [], [], 0.0)[0]


async def test_heartbeats_that_differ() -> None:
    """An end that reads nothing now, since torch does not, is not taken for dead."""
    for _ in range(TRIES):
        async with ends(None, (HEARTBEAT, SOON)) as made:
            near, far = await made.connect()
            with near, far:
                data = bytes(LARGE)
                sending = asyncio.create_task(asyncio.to_thread(near.sendall, data))
                await asyncio.sleep(3 * HEARTBEAT)  # what is tested
                flows = len(made.proxy.flows)
                assert len(await read(far, len(data))) == len(data)
                await sending
        if flows == 1:
            return
    pytest.fail(f"{flows} flows, each time")


async def test_connections_from_a_process_that_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """They end once that is known."""
    monkeypatch.setattr(relay_module, "END_SILENCE", 3 * SOON)
    async with ends(None) as made:
        near, far = await made.connect()
        made.proxy.refuses = True
        with near, far:
            tunnels = Tunnels(made.far)
            tunnels.open("w0", made.near.endpoint, "uv://127.0.0.1:1")
            async with asyncio.timeout(SOON):
                made.proxy.reset()
                while not len(made.far.relays._without_flow):  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            tunnels.close("w0")
            assert await read(far, 1) == b""


async def test_nothing_is_left(tls: Tls | None) -> None:
    """Of connections that torch has closed."""
    async with ends(tls) as made:
        near, far = await made.connect()
        with near, far:
            before = len(os.listdir("/proc/self/fd"))
            for _ in range(5):
                for each in await made.connect():
                    each.close()
            async with asyncio.timeout(SOON):
                while len(os.listdir("/proc/self/fd")) > before:
                    gc.collect()
                    await asyncio.sleep(0.05)
            assert len(made.far.relays._all) == 1
