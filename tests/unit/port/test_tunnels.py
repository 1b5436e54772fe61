"""A tunnel to a listener that names its own address, as TensorPipe's does."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator

import pytest
from hypothesis import given, strategies as st

from aiorpc_torch._aio.loops import await_on
from aiorpc_torch._port import tunnels as tunnels_module
from aiorpc_torch._port.port import Port
from aiorpc_torch._port.tunnels import (
    MAX_ANSWER,
    Tunnels,
    _Tunnel,
    format_endpoint,
    message_size,
    replace_address,
    split_endpoint,
)
from tests.support.servers import serving

SOON = 30.0


def answer_with(address: str, rest: str = "\xbb\x01") -> bytes:
    """A message of TensorPipe with an address."""
    text = address.encode()
    body = b"\xb9\x07\xbd\x02uv\xbd" + bytes([len(text)]) + text + rest.encode("latin-1")
    return len(body).to_bytes(8, "little") + body


@pytest.mark.parametrize("new", ["127.0.0.1:7", "127.0.0.1:40001", "[::1]:40001"])
def test_an_address_is_replaced(new: str) -> None:
    """With its length, and that of the message."""
    old = "127.0.0.1:34567"
    assert replace_address(answer_with(old), old, new) == answer_with(new)
    other = answer_with("127.0.0.1:345678")
    assert replace_address(other, old, new) == other


@given(st.binary(min_size=8, max_size=40))
def test_the_size_of_a_message(data: bytes) -> None:
    size = int.from_bytes(data[:8], "little")
    assert message_size(data) == (8 + size if size <= MAX_ANSWER else None)
    assert message_size(data[:7]) == 8


@pytest.mark.parametrize("host", ["10.0.0.1", "fd00:9::1"])
def test_endpoints(host: str) -> None:
    assert split_endpoint(format_endpoint(host, 29600)) == (host, 29600)


@contextlib.asynccontextmanager
async def listener() -> AsyncIterator[tuple[str, list[bytes]]]:
    """It answers each connection with its address, and what it has got."""
    received: list[bytes] = []
    writers, tasks = list[asyncio.StreamWriter](), list[asyncio.Task[None]]()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Not a coroutine: what is accepted as the loop ends has an owner at once."""
        writers.append(writer)
        tasks.append(asyncio.create_task(serve(reader, writer)))

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        received.append(await reader.readexactly(5))
        whole = answer_with(address)
        for part in (whole[:3], whole[3:20], whole[20:] + b"rest"):
            writer.write(part)
            await writer.drain()
        writer.close()

    try:
        async with serving(asyncio.start_server(accept, "127.0.0.1", 0)) as server:
            address = format_endpoint(*server.sockets[0].getsockname())
            yield address, received
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for writer in writers:
            writer.transport.abort()


async def ask(address: str) -> bytes:
    host, number = split_endpoint(address.removeprefix("uv://"))
    async with asyncio.timeout(SOON):
        reader, writer = await asyncio.open_connection(host, number)
        writer.write(b"hello")
        found = await reader.read()
        writer.close()
        await writer.wait_closed()
    return found


async def until_refused(address: str) -> None:
    async with asyncio.timeout(SOON):
        with contextlib.suppress(OSError):
            while True:
                await ask(address)


async def test_the_first_connection_is_told_the_tunnel() -> None:
    """The others pass as they are; a tunnel that is closed takes none."""
    near, far = (Port("127.0.0.1", 0, None) for _ in range(2))
    try:
        async with listener() as (address, received):
            far.torch = near.torch = split_endpoint(address)
            tunnels = Tunnels(near)
            own = tunnels.open("w1", far.endpoint, f"uv://{address}")
            assert await ask(own) == answer_with(own.removeprefix("uv://")) + b"rest"
            assert await ask(own) == answer_with(address) + b"rest"
            assert received == [b"hello"] * 2
            tunnels.close("w1")
            await until_refused(own)
    finally:
        for each in (near, far):
            each.close()


async def test_a_tunnel_that_is_closed_ends_its_connections() -> None:
    """A process that is frozen ends none: its system acknowledges what is sent to it."""
    near, far = (Port("127.0.0.1", 0, None) for _ in range(2))
    try:
        with socket.create_server(("127.0.0.1", 0)) as listening:
            listening.settimeout(SOON)
            far.torch = listening.getsockname()
            tunnels, address = Tunnels(near), format_endpoint(*listening.getsockname())
            own = tunnels.open("w1", far.endpoint, f"uv://{address}").removeprefix("uv://")
            ours = socket.create_connection(split_endpoint(own), SOON)
            theirs, _ = await asyncio.to_thread(listening.accept)
        with ours, theirs:
            theirs.settimeout(SOON)
            ours.sendall(b"hello")
            assert await asyncio.to_thread(theirs.recv, 5) == b"hello"
            tunnels.close("w1")
            for each in (ours, theirs):
                assert await asyncio.to_thread(each.recv, 1) == b""
    finally:
        for port in (near, far):
            port.close()


async def test_a_worker_that_is_not_reached(caplog: pytest.LogCaptureFixture) -> None:
    near = Port("127.0.0.1", 0, None)
    try:
        with socket.create_server(("127.0.0.1", 0)) as gone:
            endpoint = format_endpoint(*gone.getsockname())
        tunnels = Tunnels(near)
        with contextlib.suppress(ConnectionResetError):
            assert await ask(tunnels.open("w1", endpoint, "uv://127.0.0.1:1")) == b""
        assert "Connect call failed" in tunnels.failure("w1")
        assert "no connection with worker 'w1'" in caplog.text
    finally:
        near.close()


async def test_a_port_that_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is tried again, and given up: its host may be frozen."""
    monkeypatch.setattr(tunnels_module, "ATTEMPT_TIMEOUT", 0.01)
    monkeypatch.setattr(tunnels_module, "OPENING_TIMEOUT", 0.5)
    near = Port("127.0.0.1", 0, None)
    try:
        with socket.create_server(("127.0.0.1", 0)) as mute:
            mute.settimeout(SOON)
            tunnels = Tunnels(near)
            endpoint = format_endpoint(*mute.getsockname())
            with contextlib.suppress(ConnectionResetError):
                assert await ask(tunnels.open("w1", endpoint, "uv://127.0.0.1:1")) == b""
            for _ in range(2):
                mute.accept()[0].close()
        expected = f"worker 'w1' at {endpoint} has admitted no connection within 0."
        assert tunnels.failure("w1").startswith(expected)
    finally:
        near.close()


async def test_a_connection_that_fails_after_its_tunnel_was_closed() -> None:
    """It is none of the next process of that name, and nothing is kept of it."""
    near = Port("127.0.0.1", 0, None)
    try:
        with socket.create_server(("127.0.0.1", 0)) as old:
            tunnels, endpoint = Tunnels(near), format_endpoint(*old.getsockname())
            asking = asyncio.create_task(ask(tunnels.open("w1", endpoint, "uv://127.0.0.1:1")))
            attempt, _ = await asyncio.to_thread(old.accept)
            tunnels.open("w1", "127.0.0.1:1", "uv://127.0.0.1:1")
        attempt.close()  # the next attempt is refused
        with contextlib.suppress(ConnectionResetError):
            assert await asking == b""
        assert tunnels.failure("w1") == ""
        tunnels.close("w1")
        assert tunnels.failure("w1") == ""
    finally:
        near.close()


def test_a_tunnel_of_a_closed_port() -> None:
    """Nothing is left that torch could wait for."""
    near = Port("127.0.0.1", 0, None)
    near.close()
    tunnels = Tunnels(near)
    own = tunnels.open("w1", "127.0.0.1:1", "uv://127.0.0.1:1")
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(split_endpoint(own.removeprefix("uv://")))
    tunnels.close("w1")


async def test_a_connection_that_is_taken_as_the_port_closes() -> None:
    """It is closed, though nothing of its task has run."""
    near = Port("127.0.0.1", 0, None)
    tunnel = _Tunnel(near, "w1", "127.0.0.1:1", "uv://127.0.0.1:1")
    ours = socket.create_connection(tunnel._listening.getsockname())

    async def take() -> socket.socket:
        accepted = tunnel._listening.accept()[0]
        tunnel._accept(accepted)
        (task,) = near._tasks
        task.cancel()
        await asyncio.wait((task,))
        return accepted

    accepted = await await_on(near._loop, take())
    assert accepted.fileno() < 0
    tunnel.close()
    ours.close()
    near.close()
