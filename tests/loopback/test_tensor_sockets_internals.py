"""Tensors on sockets of their own: what both ends of a transfer hold; malformed frames."""

import asyncio
import socket
import threading
from typing import Any

import pytest
import torch

import aiorpc_torch as aiorpc
from aiorpc_torch import RRef, remote
from aiorpc_torch._carrier import socket_threads, tensor_sockets
from aiorpc_torch._carrier.memory import ReceiveMemory, receive_memory_of
from aiorpc_torch._carrier.transfers import CHUNK, HEADER
from aiorpc_torch._client import connection, pool
from aiorpc_torch._client.pending import expire
from aiorpc_torch._wire.connection_state import Phase
from aiorpc_torch._wire.frames import TRANSFERRED, TRANSFERS
from aiorpc_torch._wire.handshake import ARGUMENTS
from aiorpc_torch._wire.targets import MethodTarget
from tests.support.raw_connections import Stranger, server
from tests.support.socket_lines import SOCKETS, Line, none_left

from .test_tensor_sockets import LARGE, SOON, Shelf, is_at_rest, line, shelf, until

__all__ = ["line", "shelf"]

pytestmark = pytest.mark.usefixtures("over_sockets")

TARGET = MethodTarget((0, 1), "method")


def own_connection() -> connection.Connection:
    return pool.current().connection("main")


def near() -> tensor_sockets.TensorSockets:
    """The caller's end."""
    return own_connection().carriers.sockets


def far() -> tensor_sockets.TensorSockets:
    """The callee's end."""
    return server().sessions[own_connection().key].carriers.sockets


# ── values ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.promise("sockets.memory")
async def test_memory_is_used_again(shelf: Shelf) -> None:
    """Once all tensors, views and storages in it are freed."""
    x = await remote(RRef(shelf)).echo(torch.rand(LARGE))
    before = x[3:5].tolist()
    part, address = x[3:5], x.data_ptr()
    del x
    await until(is_at_rest)
    other = await remote(RRef(shelf)).echo(torch.zeros(LARGE))
    assert part.tolist() == before
    assert other.data_ptr() != address
    del part, other
    memory = receive_memory_of(asyncio.get_running_loop())
    await until(lambda: not memory.used)
    again = await remote(RRef(shelf)).echo(torch.ones(LARGE))
    assert memory.pool.total == 3 * 4 * LARGE  # of two arguments at a time, and a result
    assert float(again.sum()) == LARGE


# ── bounds ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.promise("sockets.bounds")
async def test_a_peer_that_exceeds_the_limit(shelf: Shelf) -> None:
    """Its connection ends with an error that says so; no memory is reserved."""
    near()._open(ARGUMENTS)
    await until(lambda: near()._sender is not None and len(near()._sender) == SOCKETS)
    await until(lambda: far()._receiver is not None)
    size = far()._limit + 1
    near()._sender._sockets[0].sendall(HEADER.pack(1, size, 0, CHUNK, False))  # type: ignore[union-attr]
    with pytest.raises(aiorpc.RpcError, match="may be under way"):
        await asyncio.wait_for(remote(RRef(shelf)).never(), SOON)
    assert not far_memory()


def far_memory() -> int:
    return receive_memory_of(asyncio.get_running_loop()).pool.total


def news(**fields: Any) -> tuple[int, Any]:
    return TRANSFERS, tensor_sockets._News(**fields)


MALFORMED: dict[str, tuple[int, Any]] = {
    "news that are none": (TRANSFERS, 5),
    "a transfer that there was not": news(confirmed=[(7, True, None)]),
    "drops that are none": news(dropped=[7]),
    "a caller that asks for sockets": news(wants_sockets=True),
    "a name that is none": news(adopted=[(7, (1, 2))]),
    "a message before its transfer": (TRANSFERRED, (7, (), b"")),
    "no message": (TRANSFERRED, 5),
}


@pytest.mark.promise("sockets.bounds")
@pytest.mark.parametrize("name", MALFORMED)
async def test_a_malformed_frame_ends_its_connection(world: aiorpc.types.Worker, name: str) -> None:
    """And nothing else."""
    stranger = await Stranger.proven()
    stranger.send(*MALFORMED[name])
    async with asyncio.timeout(SOON):
        await stranger.session.ended.wait()
    await stranger.leave()
    assert await remote(RRef(Shelf())).echo(3) == 3


# ── failures ────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.promise("sockets.cancelled")
async def test_a_call_that_is_cancelled_before_it_is_begun(shelf: Shelf, line: Line) -> None:
    """It waits for the memory of others."""
    near()._peer_limit = 4 * LARGE
    calls = [asyncio.ensure_future(remote(RRef(shelf)).keep(torch.ones(LARGE))) for _ in range(2)]
    await line.is_held()
    await until(lambda: len(near()._waiting) == 1)
    calls[1].cancel()
    await asyncio.wait(calls[1:])
    await until(lambda: not near()._waiting)
    line.may_send.set()
    assert await calls[0] == 1
    await until(is_at_rest)


@pytest.mark.promise("sockets.cancelled")
async def test_a_message_that_is_cancelled_behind_another(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its tensors have arrived; their memory is freed."""
    send, held = socket_threads._send_all, threading.Event()

    def slow(sock: socket.socket, buffers: list[Any]) -> None:
        if HEADER.unpack(buffers[0])[0] == 1:
            assert held.wait(SOON)
        send(sock, buffers)

    monkeypatch.setattr(socket_threads, "_send_all", slow)
    monkeypatch.setattr(socket_threads, "SOCKETS", 3)
    monkeypatch.setattr(tensor_sockets, "SOCKETS", 3)
    proxy = remote(RRef(shelf))
    calls = [asyncio.ensure_future(proxy.keep(torch.ones(LARGE // 4 - each))) for each in range(2)]
    await until(lambda: [*near()._jobs] == [1])  # of the second one, all has arrived
    calls[1].cancel()
    await asyncio.wait(calls[1:])
    held.set()
    assert await calls[0] == 1
    await until(is_at_rest)
    assert near().sent == 1


@pytest.mark.promise("sockets.cancelled")
async def test_a_call_that_is_cancelled_while_its_receiver_tells_that_it_has_no_memory(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The receiver does not wait for a transfer that it has refused."""
    told: list[tuple[int, bool]] = []
    arrived = far()._arrived
    tell = arrived._handle
    monkeypatch.setattr(ReceiveMemory, "take", none_left)
    monkeypatch.setattr(arrived, "_handle", told.append)
    call = asyncio.ensure_future(remote(RRef(shelf)).keep(torch.ones(LARGE)))
    await until(lambda: told == [(1, False)])
    call.cancel()
    await asyncio.wait((call,))
    await until(lambda: not near()._jobs)
    tell(told.pop())
    assert await remote(RRef(shelf)).echo(1) == 1  # behind all that the ends tell each other
    await until(is_at_rest)


def end_calls(running: "asyncio.Future[Any]", *, is_late: bool) -> None:
    """Cancel a task, or let all its calls time out."""
    if not is_late:
        running.cancel()
        return
    for pending in [*own_connection().pending.values()]:
        expire(pending, 0.05)


def memory_in_use() -> int:
    """Number of pieces that arriving tensors, or those that have arrived, are in."""
    return len(receive_memory_of(asyncio.get_running_loop()).used)


@pytest.mark.promise("sockets.lost")
async def test_a_socket_that_fails_ends_the_connection(shelf: Shelf, line: Line) -> None:
    """No call waits for ever, and the next one has another connection."""
    former = own_connection()
    call = asyncio.ensure_future(remote(RRef(shelf)).keep(torch.ones(4 * LARGE)))
    await line.is_held()
    for sock in near()._sender._sockets:  # type: ignore[union-attr]
        sock.shutdown(socket.SHUT_RDWR)
    line.may_send.set()
    with pytest.raises(aiorpc.RpcError, match="connection"):
        await asyncio.wait_for(call, SOON)
    assert former.phase >= Phase.RETIRING
    assert torch.equal(await remote(RRef(shelf)).echo(torch.ones(LARGE)), torch.ones(LARGE))


async def test_idle_sockets_end(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    """At both ends, for arguments and results; the next tensors open others."""
    monkeypatch.setattr(tensor_sockets, "IDLE_SECONDS", 0.01)
    x = torch.rand(LARGE)
    for _ in range(3):
        assert torch.equal(await remote(RRef(shelf)).echo(x), x)
        await until(lambda: near()._sender is far()._sender is None)
        await until(lambda: not (len(receiver_of(near())) or len(receiver_of(far()))))
    assert near().sent == far().sent == 3


async def test_a_stream_that_is_lost_before_its_first_item(
    shelf: Shelf, line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's reply to its arguments has come before: the generator has run."""
    answered = asyncio.Event()
    reply = connection.Connection.on_payload_reply

    def on_payload_reply(self: connection.Connection, *args: Any) -> None:
        reply(self, *args)
        answered.set()

    monkeypatch.setattr(connection.Connection, "on_payload_reply", on_payload_reply)
    items = remote(RRef(shelf)).ones(torch.eye(3).to_sparse())
    waiting = asyncio.ensure_future(anext(aiter(items)))
    await line.is_held(1)
    await asyncio.wait_for(answered.wait(), SOON)
    own_connection().abort()
    line.may_send.set()
    with pytest.raises(aiorpc.WorkerLost) as raised:
        await waiting
    assert raised.value.may_have_run


def receiver_of(link: tensor_sockets.TensorSockets) -> socket_threads.SocketReceiver:
    assert link._receiver is not None
    return link._receiver
