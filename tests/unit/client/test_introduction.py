"""The handshake at the caller; the test is the callee, and writes to a socket of its own."""

import asyncio
import secrets
from pathlib import Path

import pytest

from aiorpc_torch._client import introduction
from aiorpc_torch._client.connection import Connection
from aiorpc_torch._client.introduction import Introductions, _dial
from aiorpc_torch._peers.peers import Peer, Peers
from aiorpc_torch._port.dialer import Dialer
from aiorpc_torch._torch import rrefs
from aiorpc_torch._torch.agent import PeerInfo
from aiorpc_torch._wire.frames import CLOSE, RETIRE, frame
from aiorpc_torch._wire.handshake import (
    HELLO,
    Addresses,
    Credentials,
    Hello,
    Introduction,
    Party,
    new_nonce,
)
from aiorpc_torch._wire.plain import dump
from aiorpc_torch.errors import RpcError, WorkerLeft, WorkerLost, WorkerUnreachable
from tests.support.certificates import Authority
from tests.support.servers import serving
from tests.unit.client.test_connection import SOON, TARGET, Observed, error_of

CREDENTIALS = Credentials(Party("me", 0), Party("peer", 3))


async def never() -> None:
    """The callee's loop is busy: it answers no introduction."""
    await asyncio.Event().wait()


async def error_and_observed(after: bytes) -> tuple[BaseException, Observed]:
    """Return how a call ends whose callee proves itself, sends `after` and is gone, at once."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonce = new_nonce()
        writer.write(nonce)
        hello = Hello.load(await reader.readexactly(HELLO))
        assert hello.is_proven(CREDENTIALS, nonce)
        writer.write(hello.callee_proof(CREDENTIALS, nonce) + after)
        writer.close()

    observed = Observed()
    introductions, peer = Introductions(Peers("me", [])), Peer(PeerInfo("peer", 1, 3, ""))
    parts = observed, introductions, lambda _: connection
    connection = Connection(CREDENTIALS.caller, peer, 1, *parts)
    future = connection.call(TARGET, ((), {}), None)
    name = f"aiorpc-test-{secrets.token_hex(8)}"
    server = await asyncio.start_unix_server(answer, path=f"\0{name}")
    async with asyncio.timeout(SOON):
        await _dial(name, CREDENTIALS, 1, connection.start_sending, never)
        error = await error_of(future)
        await connection.ended.wait()
    server.close()
    return error, observed


class Held:
    """Peers that attach when the test lets them, and then speak another version."""

    timeout = SOON

    def __init__(self) -> None:
        self.attached = asyncio.Event()

    def is_held(self, peer: str) -> bool:
        return True

    async def wait_until_serving(self, peer: Peer) -> int:
        await self.attached.wait()
        raise RpcError("it speaks another version")

    async def on_refused(self, peer: Peer, epoch: int) -> None: ...


async def test_calls_that_are_held_are_told_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Long before their time limit: `attach` may have been forgotten there."""
    monkeypatch.setattr(introduction, "LOG_DELAY", 0.0)
    me, holding = Peers("me", [PeerInfo("me", 0, 0, ""), PeerInfo("peer", 1, 3, "")]), Held()
    opening = introduction.Introductions(me, holding).connect(me.peers["peer"], 1, lambda *_: None)
    task = asyncio.ensure_future(opening)
    while not caplog.records:  # noqa: ASYNC110 - nothing tells of it
        await asyncio.sleep(0)
    holding.attached.set()
    with pytest.raises(RpcError, match="another version"):
        await task
    [record] = caplog.records
    text = "calls to worker 'peer' wait until it is in attach()"
    assert (record.levelname, record.getMessage()) == ("WARNING", text)


@pytest.mark.promise("worlds.unreached")
async def test_a_peer_that_torch_does_not_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    """The start did not try this pair: its first call names the address and what to do."""

    def refuse(*_: object) -> None:
        raise RuntimeError("ECONNREFUSED: connection refused (tensorpipe/transport/uv/uv.h:297)")

    monkeypatch.setattr(introduction, "send", refuse)
    monkeypatch.setattr(rrefs, "is_adopted", lambda: False)
    every = [PeerInfo(each, rank, rank, f"uv://{each}:7") for rank, each in enumerate("ab")]
    me = Peers("a", every)
    with pytest.raises(WorkerLost, match=r"no connection to uv://b:7: connection refused\. If it "):
        await introduction.Introductions(me).connect(me.peers["b"], 1, lambda *_: None)


@pytest.mark.promise("security.expiry")
async def test_the_own_certificate_has_expired(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A peer that closes the connection for it does not tell why."""
    tls = Authority(tmp_path).expired()
    me = Peers("me", [PeerInfo("me", 0, 0, ""), PeerInfo("peer", 1, 1, "")])
    introductions = introduction.Introductions(me, dialer=Dialer(tls))

    def hang_up(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    async with serving(asyncio.start_server(hang_up, "127.0.0.1", 0)) as server:
        address = server.sockets[0].getsockname()
        party = Party("me", 0)
        found = Credentials(party, party), Addresses("elsewhere", "", address)
        me.peers["peer"].introduction = found

        async def again(_: Peer) -> Introduction:
            return found

        monkeypatch.setattr(introductions, "_introduction", again)
        text = rf"the certificate in {tls.cert} has expired on {tls.expiry}: renew it"
        with pytest.raises(WorkerUnreachable, match=text):
            await introductions.connect(me.peers["peer"], 1, lambda *_: None)


async def test_a_callee_that_is_lost_with_its_proof() -> None:
    """The end of file comes with the last bytes of the handshake."""
    error, observed = await error_and_observed(b"")
    assert isinstance(error, WorkerLost)
    assert observed.told == [("disconnect", "peer", 3)]


@pytest.mark.parametrize("before", [b"", frame(RETIRE, b"")])
async def test_a_callee_that_leaves_with_its_proof(before: bytes) -> None:
    """Frames that come with the last bytes of the handshake are read."""
    goodbye = frame(CLOSE, dump(("left", "it has had enough")))
    error, observed = await error_and_observed(before + goodbye)
    assert isinstance(error, WorkerLeft)
    assert "has had enough" in str(error)
    retires = [("leave", "peer", 3, "retires", "")] if before else []
    assert observed.told == [*retires, ("leave", "peer", 3, "left", "it has had enough")]


@pytest.mark.parametrize("is_busy", [True, False])
async def test_a_listener_that_sends_no_proof(
    monkeypatch: pytest.MonkeyPatch, is_busy: bool
) -> None:
    """A callee that is busy is awaited; a program at the address of one that answers is not."""
    monkeypatch.setattr(introduction, "PROOF_TIMEOUT", 0.001)
    proven: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    asked = asyncio.Event()

    async def introduce() -> None:
        asked.set()
        await (never() if is_busy else asyncio.sleep(0))

    waiting = asyncio.create_task(introduction._wait_for_proof(proven, introduce))
    async with asyncio.timeout(SOON):
        await asked.wait()
        if is_busy:
            proven.set_result(None)
            await waiting
        else:
            with pytest.raises(TimeoutError, match="no proof"):
                await waiting
