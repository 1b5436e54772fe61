"""Connections for calls to a listener with one port, on both event loops."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import pytest

from aiorpc_torch._channel import Channel
from aiorpc_torch._client.introduction import _dial
from aiorpc_torch._peers.observer import PeerObserver
from aiorpc_torch._peers.peers import Peer, State
from aiorpc_torch._port.dialer import Dialer
from aiorpc_torch._port.port import Port
from aiorpc_torch._port.tls import Tls, TlsError
from aiorpc_torch._server.listener import Listener
from aiorpc_torch._torch.agent import PeerInfo
from aiorpc_torch._wire.frames import CALLS
from aiorpc_torch._wire.handshake import Party
from tests.support.certificates import Authority

SOON = 30.0


class Echo(Channel):
    """Sends back the frames that it gets; or notes them."""

    def __init__(self, answers: bool) -> None:
        peer = Peer(PeerInfo("peer", 1, 1, ""))
        peer.state = State.ALIVE
        super().__init__(peer, cast(PeerObserver, None))
        self.answers = answers
        self.got: asyncio.Queue[tuple[int, bytes]] = asyncio.Queue()
        self.handlers[CALLS] = self.on_calls

    def on_calls(self, data: bytes) -> int:
        if self.answers:
            self.send(CALLS, data)
        self.got.put_nowait((CALLS, bytes(data)))
        return 1

    def on_close(self, reason: str, detail: str) -> None: ...
    def on_end(self, error: Exception | None) -> None: ...
    def flush(self) -> None: ...
    def has_work(self) -> bool:
        return True

    def pause_writing(self) -> None: ...
    def resume_writing(self) -> None: ...


async def never() -> None:
    await asyncio.Event().wait()


@contextlib.asynccontextmanager
async def connected(mine: Tls | None, theirs: Tls | None) -> AsyncIterator[tuple[Echo, Echo]]:
    """Connect both ends."""
    port = Port("127.0.0.1", 0, theirs)
    sessions: list[Echo] = []

    def accept(*_: object) -> Any:
        sessions.append(Echo(answers=True))
        return sessions[-1]

    listener = Listener(Party("w", 0), None, accept, lambda *_: None, port)
    credentials, addresses = listener.introduce(Peer(PeerInfo("c", 1, 1, "")))
    assert addresses.tcp is not None
    near = Echo(answers=False)

    def start(transport: asyncio.Transport, received: bytes) -> None:
        near.start(transport)
        near.feed(received)

    try:
        await _dial(addresses.tcp, credentials, 1, start, never, Dialer(mine))
        yield near, sessions[0]
    finally:
        listener.close()
        await asyncio.to_thread(port.close)


async def exchange(mine: Tls | None, theirs: Tls | None) -> None:
    """Connect, send frames both ways, and close."""
    async with connected(mine, theirs) as (near, far):
        frames = [(CALLS, bytes([size % 256]) * size) for size in (0, 1, 70_000, 1_000_000)]
        for kind, data in frames:
            near.send(kind, data)
        async with asyncio.timeout(SOON):
            assert [await near.got.get() for _ in frames] == frames
            near.close("left")
            await near.ended.wait()
            await far.ended.wait()


async def test_frames_in_clear_text() -> None:
    await exchange(None, None)


@pytest.mark.promise("security.tls")
async def test_frames_by_tls(tmp_path: Path) -> None:
    tls = Authority(tmp_path).tls()
    await exchange(tls, tls)


@pytest.mark.promise("security.tls")
async def test_a_certificate_of_another_authority(tmp_path: Path) -> None:
    """Whichever end has it."""
    authority, other = Authority(tmp_path), Authority(tmp_path, "other")
    (cert, key, _), good = other.files(), authority.tls()
    strange = Tls(cert, key, authority.ca)
    with pytest.raises(TlsError, match=r"the certificate of the worker at .*, port \d+ is"):
        await exchange(good, strange)
    with pytest.raises(TlsError, match=r"the worker at .* refuses the certificate .* unknown ca"):
        await exchange(strange, good)


@pytest.mark.promise("security.expiry")
async def test_a_certificate_that_has_expired(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The log of the end that refuses it names the other one."""
    authority = Authority(tmp_path)
    with pytest.raises(TlsError, match=r"the certificate of the worker at .* has expired"):
        await exchange(authority.tls(), authority.expired())
    with pytest.raises(TlsError, match=r"the worker at .* refuses the certificate .* expired"):
        await exchange(authority.expired(), authority.tls())
    records = [each for each in caplog.records if each.levelno == logging.WARNING]
    [warned] = [each.message for each in records if each.message.startswith("refused")]
    start = "refused a connection from 127.0.0.1: the certificate of the other end is refused, by "
    assert warned.startswith(start)
    assert warned.endswith("certificate has expired")


@pytest.mark.promise("security.tls")
async def test_clear_text_where_tls_is_used(tmp_path: Path) -> None:
    with pytest.raises(ConnectionError):
        await exchange(None, Authority(tmp_path).tls())


@pytest.mark.parametrize("has_tls", [False, True])
async def test_a_look_at_the_path_of_a_connection_that_ends(tmp_path: Path, has_tls: bool) -> None:
    """At any moment: asyncio's TLS has no socket any more before it tells of the end."""
    tls = Authority(tmp_path).tls() if has_tls else None
    async with connected(tls, tls) as (near, far), asyncio.timeout(SOON):
        far.abort()
        while not near.ended.is_set():
            near.check_path(SOON)
            await asyncio.sleep(0)
