"""Ports of two workers in this process, and strangers at one of them."""

import asyncio
import contextlib
import logging
import os
import queue
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from aiorpc_torch._aio.loops import await_on
from aiorpc_torch._directory import directory_server
from aiorpc_torch._directory.directory_server import DirectoryServer
from aiorpc_torch._port import port as module
from aiorpc_torch._port.port import Port
from aiorpc_torch._port.purposes import CALLS, DIRECTORY, TENSORS, preface, server_name
from aiorpc_torch._port.streams import PlainStream
from aiorpc_torch._port.tls import Tls, TlsError
from tests.support.certificates import Authority

SOON = 30.0
WORLD = "0" * 32


@contextlib.contextmanager
def ports(*certificates: Tls | None) -> Iterator[list[Port]]:
    with contextlib.ExitStack() as stack:
        found = [Port("127.0.0.1", 0, each) for each in certificates]
        for each in found:
            stack.callback(each.close)
        yield found


@pytest.fixture(params=["clear", "tls"])
def tls(request: pytest.FixtureRequest, tmp_path: Path) -> Tls | None:
    return Authority(tmp_path).tls() if request.param == "tls" else None


def dial(port: Port) -> socket.socket:
    return socket.create_connection((port.host, port.number), SOON)


def is_closed(sock: socket.socket) -> bool:
    """Whether the other end closes it, having sent no more than an alert."""
    try:
        while sock.recv(100):
            pass
    except ConnectionResetError:
        pass
    return True


async def echo_at(port: Port) -> None:
    """Let a port's directory return what it gets."""

    def serve(connected: socket.socket, *_: str) -> None:
        connected.setblocking(False)
        asyncio.get_running_loop().create_task(answer(connected))

    async def answer(connected: socket.socket) -> None:
        with connected:
            loop = asyncio.get_running_loop()
            while data := await loop.sock_recv(connected, 1000):
                await loop.sock_sendall(connected, data)

    port.serve(DIRECTORY, serve)


async def check_echo(near: Port, far: Port) -> None:
    secured = await near.secure(dial(far), DIRECTORY, "far")
    with secured:
        secured.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(secured, b"hello")
        async with asyncio.timeout(SOON):
            assert await loop.sock_recv(secured, 10) == b"hello"


async def test_a_connection_passes(tls: Tls | None) -> None:
    with ports(tls, tls) as (near, far):
        await echo_at(far)
        await check_echo(near, far)


@pytest.mark.parametrize("purpose", [CALLS, TENSORS])
async def test_a_connection_is_handed_over(tls: Tls | None, purpose: str) -> None:
    """Nothing of what its owner has to read is missing. That for calls has done its handshake."""
    with ports(tls) as (port,):
        handed: asyncio.Queue[Any] = asyncio.Queue()
        loop = asyncio.get_running_loop()
        port.serve(purpose, lambda *found: loop.call_soon_threadsafe(handed.put_nowait, found))
        with dial(port) as dialled:
            if tls is None:
                dialled.sendall(preface(purpose) + b"more")
            elif purpose == CALLS:
                name = server_name(purpose)
                with await asyncio.to_thread(tls.client.wrap_socket, dialled, server_hostname=name):
                    async with asyncio.timeout(SOON):
                        found, settings = await handed.get()
                    found.close()
                    assert isinstance(settings, ssl.SSLContext)
                return
            else:
                wrapped = tls.client.wrap_socket(
                    dialled,
                    server_hostname=server_name(purpose),
                    do_handshake_on_connect=False,
                )
                wrapped.setblocking(False)
                with pytest.raises(ssl.SSLWantReadError):
                    wrapped.do_handshake()
            async with asyncio.timeout(SOON):
                (found,) = await handed.get()
            with found:
                first = found.recv(4)
            assert first == (b"more" if tls is None else b"\x16\x03\x01" + first[3:])
            if tls is not None:
                wrapped.close()


@pytest.mark.promise("security.tls")
async def test_strangers_get_nothing(tls: Tls | None, caplog: pytest.LogCaptureFixture) -> None:
    """Garbage, other protocols, ends, and TLS without a certificate: each is closed."""
    plain = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    plain.check_hostname, plain.verify_mode = False, ssl.CERT_NONE
    with ports(tls, tls) as (near, port):
        await echo_at(port)
        for said in (os.urandom(100_000), b"GET / HTTP/1.0\r\n\r\n", b"", preface(CALLS)):
            with dial(port) as dialled, contextlib.suppress(OSError):
                dialled.sendall(said)
                dialled.shutdown(socket.SHUT_WR)
                assert await asyncio.to_thread(is_closed, dialled)
        for name in (DIRECTORY, CALLS, "torch"):
            with dial(port) as dialled, contextlib.suppress(OSError):
                wrapped = await asyncio.to_thread(
                    plain.wrap_socket, dialled, server_hostname=server_name(name)
                )
                with wrapped:
                    assert await asyncio.to_thread(is_closed, wrapped)
        await check_echo(near, port)


@pytest.mark.promise("security.tls")
async def test_there_are_only_so_many_strangers(
    tls: Tls | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Silent ones are closed by those that follow, and a worker still gets in."""
    monkeypatch.setattr(module, "MAX_UNPROVEN", 3)
    monkeypatch.setattr(module, "PROOF_TIMEOUT", SOON)
    with ports(tls, tls) as (near, port):
        await echo_at(port)
        strangers = [dial(port) for _ in range(6)]
        await check_echo(near, port)
        for each in strangers[:3]:
            assert await asyncio.to_thread(is_closed, each)
        for each in strangers:
            each.close()


@pytest.mark.promise("security.directory")
async def test_strangers_who_ask_for_the_directory(
    tls: Tls | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many there are, few descriptors are theirs. They are told apart by their hosts."""
    most, many = 4, 60
    monkeypatch.setattr(directory_server, "MAX_STRANGERS", most)
    server = DirectoryServer(WORLD, [])
    with ports(tls, tls) as (_, far), contextlib.ExitStack() as stack:
        far.serve(DIRECTORY, server.accept)
        strangers = []
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(many):
            each = dial(far)
            if tls is None:
                each.sendall(preface(DIRECTORY))
            else:
                name = server_name(DIRECTORY)
                each = await asyncio.to_thread(tls.client.wrap_socket, each, server_hostname=name)
            strangers.append(stack.enter_context(each))
        for each in strangers[:-most]:
            assert await asyncio.to_thread(is_closed, each)
        most_used = before + many + (1 if tls is None else 3) * most
        async with asyncio.timeout(SOON):  # a client may see the end before all is closed here
            while len(os.listdir("/proc/self/fd")) > most_used:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        hosts = {host for host, _ in server._strangers._all.values()}
        assert hosts == {"127.0.0.1"}
    await asyncio.to_thread(server.close)


async def test_a_stranger_has_only_so_much_time(
    tls: Tls | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that sends byte after byte."""
    monkeypatch.setattr(module, "PROOF_TIMEOUT", 0.2)
    with ports(tls) as (port,), dial(port) as dialled:
        dialled.sendall(b"\x16" if tls else b"a")
        assert await asyncio.to_thread(is_closed, dialled)


@pytest.mark.promise("security.tls")
async def test_certificates_that_are_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Each end tells which one, and why; the log of the other end does too."""
    authority, other = Authority(tmp_path), Authority(tmp_path, "other")
    (cert, key, _), good = other.files(), authority.tls()
    strange = Tls(cert, key, authority.ca)
    for mine, theirs, text in (
        (strange, good, f"far refuses the certificate in {cert}: .*unknown ca"),
        (good, strange, "the certificate of far is refused, by .*: unable to get local issuer"),
        (good, authority.expired(), "the certificate of far is refused, .* has expired"),
        (authority.expired(), good, "far refuses the certificate in .*expired.pem: .*expired"),
    ):
        with ports(mine, theirs) as (near, far):
            await echo_at(far)
            with pytest.raises(TlsError, match=text):
                await near.secure(dial(far), DIRECTORY, "far")
    warned = [each.message for each in caplog.records if each.levelno == logging.WARNING]
    refusals = [each for each in warned if each.startswith("refused a connection from 127.0.0.1: ")]
    assert ["unable to get local issuer" in refusals[0], "expired" in refusals[-1]] == [True, True]


async def test_a_silent_end_is_given_up(tls: Tls | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """At both ends of what passes to the directory.

    Without TLS nothing passes to the directory: it has the socket, and its own limit.
    """
    limits: queue.SimpleQueue[list[int]] = queue.SimpleQueue()
    splice = module.splice

    async def note(one: PlainStream, other: PlainStream, linger: float = 1.0) -> None:
        options = socket.TCP_USER_TIMEOUT, socket.TCP_KEEPIDLE
        limits.put([one.sock.getsockopt(socket.IPPROTO_TCP, each) for each in options])
        await splice(one, other, linger)

    monkeypatch.setattr(module, "splice", note)
    with ports(tls, tls) as (near, far):
        await echo_at(far)
        with await near.secure(dial(far), DIRECTORY, "far"):
            for _ in range(1 if tls is None else 2):
                assert limits.get(timeout=SOON) == [120_000, 60]


async def test_sockets_for_a_port_that_is_closed() -> None:
    """They are closed: whoever connects to them would wait."""
    with ports(None) as (port,):
        late = socket.create_server(("127.0.0.1", 0))

        async def accept_late() -> None:
            port._thread.closing.set()
            port.accept_at(late, print)

        await await_on(port._loop, accept_late())
        assert late.fileno() < 0
    for_directory = socket.create_server(("127.0.0.1", 0))
    port.listen_for_directory([for_directory])
    assert for_directory.fileno() < 0


async def test_another_end_without_tls(tmp_path: Path) -> None:
    with (
        ports(Authority(tmp_path).tls()) as (near,),
        socket.create_server(("127.0.0.1", 0)) as plain,
    ):
        dialled = socket.create_connection(plain.getsockname())
        with plain.accept()[0] as accepted:
            accepted.sendall(b"aiorpc:1 and no TLS")
            with pytest.raises(TlsError, match="rank 0 does not use TLS: give every worker tls="):
                await near.secure(dialled, DIRECTORY, "rank 0")


def test_a_port_in_use() -> None:
    with ports(None) as (port,):
        with pytest.raises(OSError, match=rf"port {port.number} of 127.0.0.1 is in use") as caught:
            Port("127.0.0.1", port.number, None)
        assert "each worker of a host needs a port= of its own" in str(caught.value)
    again = Port("127.0.0.1", port.number, None)
    again.close()
