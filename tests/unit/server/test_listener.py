"""The listening sockets of a worker, without a world."""

import asyncio
import logging
import os
import resource
import select
import socket
import ssl
import struct
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from aiorpc_torch._aio import sockets
from aiorpc_torch._peers.peers import Peer
from aiorpc_torch._port.port import Port
from aiorpc_torch._port.purposes import CALLS, preface, server_name
from aiorpc_torch._server import listener as module
from aiorpc_torch._server.listener import Listener
from aiorpc_torch._torch.agent import PeerInfo
from aiorpc_torch._wire.handshake import (
    ARGUMENTS,
    NONCE,
    Hello,
    Party,
    encode_hello,
    new_nonce,
    number_for,
)
from tests.support.certificates import Authority
from tests.support.logs import logged


def listen(host: str | None = None, port: Port | None = None) -> Listener:
    """A listener on whose connections nobody proves who it is."""

    def refuse_to_accept(caller: Party, *_: object) -> Any:
        raise AssertionError(f"{caller} was accepted")

    return Listener(Party("w", 0), host, refuse_to_accept, refuse_to_accept, port)


def dial(listening: Listener, source: str | None = None) -> socket.socket:
    """A connection to the TCP port if there is one, from that address, else to the Unix socket."""
    where = listening.addresses
    family, address = (
        (socket.AF_UNIX, f"\0{where.unix}") if where.tcp is None else (socket.AF_INET, where.tcp)
    )
    dialled = socket.socket(family, socket.SOCK_STREAM)
    dialled.settimeout(10.0)
    if source is not None:
        dialled.bind((source, 0))
    dialled.connect(address)
    return dialled


async def passes(number: int) -> None:
    for _ in range(number):
        await asyncio.sleep(0)


def is_ended(dialled: socket.socket) -> bool:
    """Whether the other end is closed: nothing follows what it had sent. Else it times out."""
    with dialled:
        try:
            while dialled.recv(64):
                pass
        except ConnectionResetError:
            pass
    return True


@pytest.mark.parametrize("host", [None, "127.0.0.1"])
@pytest.mark.parametrize("steps", range(7))
def test_closed_while_a_connection_opens(host: str | None, steps: int) -> None:
    """Its other end is told so, at whichever step of its opening the listener is closed."""

    async def main() -> socket.socket:
        listening = listen(host)
        dialled = dial(listening)
        await passes(steps)
        listening.close()
        return dialled

    assert is_ended(asyncio.run(main()))


async def test_a_closed_listener_refuses_what_it_had_accepted() -> None:
    """At once, as the loop goes on, and not when the time for the proof is over."""
    listening = listen()
    dialled = dial(listening)
    await passes(2)  # accepted, and no transport yet
    listening.close()
    assert await asyncio.to_thread(is_ended, dialled)


async def test_closed_twice() -> None:
    listening = listen()
    listening.close()
    listening.close()


def test_a_port_that_cannot_be_had() -> None:
    """The error is the caller's, and the other socket is closed."""

    async def main() -> None:
        with pytest.raises(OSError, match="assign"):
            listen("192.0.2.1")  # an address of no machine

    asyncio.run(main())


@contextmanager
def without_descriptors() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_accepted_once_there_are_descriptors_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The loop is not kept busy meanwhile: one line tells of it for each try."""
    monkeypatch.setattr(sockets, "ACCEPT_RETRY", 0.5)  # longer than 20 iterations of the loop
    listening = listen()
    dialled = dial(listening)
    with without_descriptors():
        await passes(20)
    assert len(caplog.records) == 1
    assert "cannot accept" in caplog.text
    nonce = await asyncio.to_thread(dialled.recv, 64)
    assert len(nonce) == NONCE
    listening.close()
    assert await asyncio.to_thread(is_ended, dialled)


async def test_a_stranger_is_refused() -> None:
    listening = listen()
    dialled = dial(listening)
    dialled.sendall(struct.pack("<200x"))
    assert await asyncio.to_thread(is_ended, dialled)
    listening.close()


@pytest.mark.promise("security.users")
@pytest.mark.skipif(os.geteuid() != 0, reason="only root connects as other users")
@pytest.mark.parametrize("user", [1, 65534])
async def test_other_users_are_refused(user: int) -> None:
    """Also the one whose id stands for users that a user namespace does not map."""
    listening = listen()
    os.seteuid(user)
    try:
        dialled = dial(listening)
    finally:
        os.seteuid(0)
    with dialled:
        received = await asyncio.to_thread(dialled.recv, 64)
    listening.close()
    assert received == b""


@pytest.mark.promise("security.strangers")
async def test_strangers_of_one_host_close_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """A caller at another host stays, though it came before all of them."""
    monkeypatch.setattr(module, "MAX_UNPROVEN", 4)
    listening = listen("127.0.0.1")
    caller, *strangers = [dial(listening, f"127.0.0.{host}") for host in (2, 3, 3, 3, 3, 3)]
    for dialled in (caller, *strangers):
        assert len(await asyncio.to_thread(dialled.recv, 64)) == NONCE
    for closed in strangers[:2]:
        assert await asyncio.to_thread(is_ended, closed)
    for kept in (caller, *strangers[2:]):
        kept.setblocking(False)
        with kept, pytest.raises(BlockingIOError):
            kept.recv(1)
    listening.close()


async def test_a_refusal_tells_its_reason(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Too many strangers are not the end of the worker."""
    caplog.set_level(logging.DEBUG, "aiorpc_torch")
    monkeypatch.setattr(module, "MAX_UNPROVEN", 1)
    listening = listen()
    first, second = dial(listening), dial(listening)
    assert await asyncio.to_thread(is_ended, first)
    assert caplog.messages[-1].endswith(": too many unauthenticated connections")
    listening.close()
    assert caplog.messages[-1].endswith(": this worker has left")
    assert await asyncio.to_thread(is_ended, second)


async def test_the_port_closes_the_last_connection_as_the_loop_takes_it() -> None:
    """Between the look at the queue and the taking."""
    listening = listen()

    class Handed(deque[Any]):
        def popleft(self) -> Any:
            self.clear()  # as the thread of the port does
            return super().popleft()

    listening._handed = Handed([(print, None)])
    listening._take_handed()
    assert not len(listening._handed)
    listening.close()


async def test_the_port_hands_over_what_came_as_the_listener_closed() -> None:
    """It is closed at once: the loop may run no more."""
    listening = listen()
    listening.close()
    near, far = socket.socketpair()
    with near:
        listening._hand_over(print, far)
        assert far.fileno() == -1


async def test_a_caller_that_is_gone_as_its_socket_is_proven(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The socket for tensors is closed, and no error of the loop."""
    caplog.set_level(logging.DEBUG)
    listening = listen()
    credentials, _ = listening.introduce(Peer(PeerInfo("c", 1, 1, "")))
    theirs, mine = new_nonce(), new_nonce()
    hello = Hello.load(encode_hello(credentials, number_for(7, ARGUMENTS), mine, theirs))
    near, far = socket.socketpair()
    near.close()
    listening._on_tensor_socket(far, hello, mine)
    assert far.fileno() == -1
    assert "lost a socket for tensors: BrokenPipeError" in caplog.messages[-1]
    listening.close()


async def test_a_caller_that_is_gone_before_it_is_accepted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Its connection has no address any more, and disturbs no other."""
    listening = listen("127.0.0.1")
    with dial(listening) as gone:
        gone.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # resets
    with dial(listening) as dialled:
        assert len(await asyncio.to_thread(dialled.recv, 64)) == NONCE
    listening.close()
    assert not logged(caplog)


@pytest.mark.promise("security.tls")
async def test_handshakes_of_strangers_while_the_loop_is_blocked(tmp_path: Path) -> None:
    """The port does them: without a certificate nothing reaches the loop."""
    tls = Authority(tmp_path).tls()
    port = Port("127.0.0.1", 0, tls)
    listening = listen(port=port)
    plain = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    plain.check_hostname, plain.verify_mode = False, ssl.CERT_NONE
    name = server_name(CALLS)
    for _ in range(3):  # all of this blocks the loop
        with plain.wrap_socket(dial(listening), server_hostname=name) as stranger:
            with pytest.raises(ssl.SSLError, match="certificate required"):
                stranger.recv(1)
    assert not listening._handed
    with tls.client.wrap_socket(dial(listening), server_hostname=name) as member:
        assert len(await asyncio.to_thread(member.recv, 64)) == NONCE
    listening.close()
    await asyncio.to_thread(port.close)


@pytest.mark.promise("security.strangers")
async def test_strangers_while_the_loop_is_blocked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The port hands over so many connections, and closes the oldest ones."""
    monkeypatch.setattr(module, "MAX_UNPROVEN", 2)
    port = Port("127.0.0.1", 0, None)
    listening = listen(port=port)
    strangers = [dial(listening) for _ in range(5)]
    for each in strangers:  # this blocks the loop, until the port has closed three
        each.sendall(preface(CALLS))
        each.setblocking(False)
    selector = select.poll()
    for each in strangers:
        selector.register(each, select.POLLIN)
    closed: set[int] = set()
    while len(closed) < 3:
        closed |= {descriptor for descriptor, _ in selector.poll(10_000)}
    for each in strangers:
        each.settimeout(10.0)
        received = await asyncio.to_thread(each.recv, 64)
        assert received == b"" if each.fileno() in closed else len(received) == NONCE
        each.close()
    listening.close()
    await asyncio.to_thread(port.close)
