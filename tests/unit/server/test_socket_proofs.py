"""Sockets for tensors at a listener with one port and TLS."""

import asyncio
import contextlib
import socket
import ssl
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from aiorpc_torch._client.introduction import dial_in_thread
from aiorpc_torch._peers.peers import Peer
from aiorpc_torch._port.dialer import Dialer
from aiorpc_torch._port.port import Port
from aiorpc_torch._port.purposes import TENSORS, server_name
from aiorpc_torch._port.tls import Tls, TlsError
from aiorpc_torch._server import listener as module
from aiorpc_torch._server.listener import Listener
from aiorpc_torch._torch.agent import PeerInfo
from aiorpc_torch._wire.handshake import ARGUMENTS, CALLS, Credentials, Party, number_for
from tests.support.certificates import Authority

SOON = 30.0


class Served(NamedTuple):
    listener: Listener
    address: tuple[str, int]
    credentials: Credentials
    accepted: "asyncio.Queue[tuple[Any, ...]]"


@contextlib.asynccontextmanager
async def served(tls: Tls) -> AsyncIterator[Served]:
    accepted: asyncio.Queue[tuple[Any, ...]] = asyncio.Queue()

    def refuse(*what: object) -> Any:
        raise AssertionError(what)

    def accept(*what: Any) -> None:
        accepted.put_nowait(what)

    port = Port("127.0.0.1", 0, tls)
    listener = Listener(Party("w", 0), None, refuse, accept, port)
    credentials, addresses = listener.introduce(Peer(PeerInfo("c", 1, 1, "")))
    assert addresses.tcp is not None
    try:
        yield Served(listener, addresses.tcp, credentials, accepted)
    finally:
        listener.close()
        await asyncio.to_thread(port.close)


@pytest.mark.promise("security.tls")
async def test_a_socket_is_proven(tmp_path: Path) -> None:
    """Both ends by their certificates, then by the secret of the introduction."""
    tls = Authority(tmp_path).tls()
    async with served(tls) as found:
        number = number_for(7, ARGUMENTS)
        dialled = await dial_in_thread(Dialer(tls), found.address, found.credentials, number, SOON)
        async with asyncio.timeout(SOON):
            caller, connection, purpose, sock = await found.accepted.get()
        with dialled, sock:
            assert (caller, connection, purpose) == (Party("c", 1), 7, ARGUMENTS)
            assert isinstance(sock, ssl.SSLSocket)
            dialled.sendall(b"tensor")
            assert await asyncio.to_thread(sock.recv, 10) == b"tensor"


@pytest.mark.promise("security.tls")
async def test_sockets_that_prove_nothing(tmp_path: Path) -> None:
    """Another certificate, another secret, and a purpose that is none."""
    authority, other = Authority(tmp_path), Authority(tmp_path, "other")
    tls, (cert, key, _) = authority.tls(), other.files()
    async with served(tls) as found:
        unknown = Credentials(Party("c", 1), Party("w", 0))
        for dialer, credentials, number, error in (
            (Dialer(Tls(cert, key, authority.ca)), found.credentials, ARGUMENTS, OSError),
            (Dialer(Tls(cert, key, other.ca)), found.credentials, ARGUMENTS, TlsError),
            (Dialer(tls), unknown, ARGUMENTS, ConnectionResetError),
            (Dialer(tls), found.credentials, CALLS, ConnectionResetError),
        ):
            with pytest.raises(error):
                await dial_in_thread(
                    dialer, found.address, credentials, number_for(7, number), SOON
                )
        assert found.accepted.empty()


async def test_strangers_are_bounded_in_number_and_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a certificate, but without a proof."""
    monkeypatch.setattr(module, "MAX_UNPROVEN", 1)
    tls = Authority(tmp_path).tls()
    async with served(tls) as found:

        def connect() -> socket.socket:
            dialled = socket.create_connection(found.address, SOON)
            wrapped = tls.client.wrap_socket(dialled, server_hostname=server_name(TENSORS))
            assert wrapped.recv(1)  # of the nonce
            return wrapped

        def is_closed(sock: socket.socket) -> bool:
            while sock.recv(100):
                pass
            return True

        first = await asyncio.to_thread(connect)
        monkeypatch.setattr(module, "PROOF_TIMEOUT", 0.1)
        with first, await asyncio.to_thread(connect) as second:
            assert await asyncio.to_thread(is_closed, first)
            assert await asyncio.to_thread(is_closed, second)


async def test_no_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The caller is refused at once."""

    def start(_: object) -> None:
        raise RuntimeError("can't start new thread")

    tls = Authority(tmp_path).tls()
    async with served(tls) as found:
        with socket.create_server(("127.0.0.1", 0)) as server:
            near = socket.create_connection(server.getsockname())
            far, _ = server.accept()
        with near, monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", start)
            found.listener._prove_in_thread(tls, far)
            assert near.recv(1) == b""
        assert far.fileno() == -1
        assert "can't start new thread" in caplog.text
