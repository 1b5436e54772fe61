"""TLS over a socket pair, and the way between two sockets."""

import asyncio
import concurrent.futures
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from aiorpc_torch._port.streams import PlainStream, TlsStream, splice
from aiorpc_torch._port.tls import Tls
from tests.support.certificates import Authority


def pair() -> tuple[socket.socket, socket.socket]:
    ends = socket.socketpair()
    for each in ends:
        each.setblocking(False)
    return ends


@contextlib.asynccontextmanager
async def streams(client: Tls, server: Tls) -> AsyncIterator[tuple[TlsStream, TlsStream]]:
    one, other = pair()
    with one, other:
        yield TlsStream(one, client.client, "calls.aiorpc"), TlsStream(other, server.server)


async def test_bytes_arrive(tmp_path: Path) -> None:
    """Both ways at once, more than the sockets hold."""
    tls = Authority(tmp_path).tls()
    data = bytes(range(256)) * 16384
    async with streams(tls, tls) as ends:
        await asyncio.gather(*(each.handshake() for each in ends))

        async def receive(end: TlsStream) -> bytes:
            received = bytearray()
            while part := await end.receive():
                received += part
            return bytes(received)

        async def send(end: TlsStream) -> None:
            await end.send(data)
            end.sock.shutdown(socket.SHUT_WR)

        one, other, *_ = await asyncio.gather(*map(receive, ends), *map(send, ends))
        assert one == other == data


@pytest.mark.promise("security.tls")
async def test_the_other_end_is_told_why_it_is_refused(tmp_path: Path) -> None:
    """A client whose certificate is refused learns it with the first bytes."""
    authority, other = Authority(tmp_path), Authority(tmp_path, "other")
    cert, key, _ = other.files()
    client = Tls(cert, key, authority.ca)
    async with streams(client, authority.tls()) as (near, far):
        found = await asyncio.gather(near.handshake(), far.handshake(), return_exceptions=True)
        assert found[0] is None
        assert isinstance(found[1], ssl.SSLCertVerificationError)
        with pytest.raises(ssl.SSLError, match=r"(?i)alert unknown ca"):
            await near.receive()


@pytest.mark.parametrize("module", ["asyncio", "uvloop"])
def test_an_event_loop_goes_on(tmp_path: Path, module: str) -> None:
    """Another one than that of the handshake: all that is sent arrives, both ways, and the end."""
    tls = Authority(tmp_path).tls()
    data = bytes(range(256)) * 16384
    near, far = pair()

    async def handshake() -> ssl.SSLContext:
        stream = TlsStream(far, tls.server)
        await stream.handshake()
        return stream.settings()

    async def echo(settings: ssl.SSLContext) -> None:
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader()
        protocol = asyncio.StreamReaderProtocol(reader)
        transport, _ = await loop.connect_accepted_socket(lambda: protocol, far, ssl=settings)
        writer = asyncio.StreamWriter(transport, protocol, reader, loop)
        assert transport.get_extra_info("peercert")
        received = b""
        while len(received) < len(data):
            received += await reader.read(1 << 18)
            await asyncio.sleep(0)
        writer.write(received)
        await writer.drain()
        writer.close()
        await writer.wait_closed()

    def be_client() -> bytes:
        near.setblocking(True)
        with tls.client.wrap_socket(near, server_hostname="calls.aiorpc") as wrapped:
            wrapped.sendall(data)
            received = b""
            while part := wrapped.recv(1 << 18):
                received += part
            return received

    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        client = thread.submit(be_client)
        settings = asyncio.run(handshake())
        with asyncio.Runner(loop_factory=pytest.importorskip(module).new_event_loop) as runner:
            runner.run(echo(settings))
        assert client.result(30.0) == data


async def test_splice() -> None:
    """What one end sent before it ended arrives; then both sockets are closed."""
    (near, one), (other, far) = pair(), pair()
    with near, far:
        splicing = asyncio.create_task(splice(PlainStream(one), PlainStream(other)))
        near.send(b"hello")
        near.shutdown(socket.SHUT_WR)
        loop = asyncio.get_running_loop()
        assert await loop.sock_recv(far, 10) == b"hello"
        assert await loop.sock_recv(far, 10) == b""
        far.send(b"and back")
        far.close()
        assert await loop.sock_recv(near, 10) == b"and back"
        await splicing
        assert one.fileno() == other.fileno() == -1
