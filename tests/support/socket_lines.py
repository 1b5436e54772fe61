"""Tensor sockets: chunks that are held back, limits of memory, sockets that fail."""

import asyncio
import socket
import threading
from collections.abc import Callable
from typing import Any, NoReturn

import pytest

from aiorpc_torch import RpcError
from aiorpc_torch._carrier import memory, socket_threads, tensor_sockets
from aiorpc_torch._carrier.socket_threads import SOCKETS as SOCKETS
from aiorpc_torch._carrier.transfers import CHUNK as CHUNK
from aiorpc_torch._client import introduction
from aiorpc_torch._wire.handshake import ARGUMENTS, RESULTS, read_number

SOON = 30.0  # seconds after which something will never happen


class Line:
    """Holds back chunks before they are sent."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.waiting = threading.Semaphore(0)  # counts chunks that a thread holds
        self.may_send = threading.Event()
        send = socket_threads._send_all

        def held(sock: socket.socket, buffers: list[Any]) -> None:
            self.waiting.release()
            assert self.may_send.wait(SOON)
            send(sock, buffers)

        patch.setattr(socket_threads, "_send_all", held)

    async def is_held(self, chunks: int = SOCKETS) -> None:
        for _ in range(chunks):
            assert await asyncio.to_thread(self.waiting.acquire, timeout=SOON)


def limit_memory(patch: pytest.MonkeyPatch, size: int) -> None:
    """Let receivers use at most `size` bytes of memory again."""
    patch.setattr(memory, "memory_limit", lambda: size)


def limit_incoming(patch: pytest.MonkeyPatch, size: int) -> None:
    """Let at most `size` bytes be under way to each end that connects from now on."""
    patch.setattr(tensor_sockets, "incoming_limit", lambda: size)


def none_left(*_: Any) -> NoReturn:
    raise OSError(12, "cannot allocate memory")


def give_no_memory(patch: pytest.MonkeyPatch) -> None:
    """Let receivers have no memory for tensors that arrive."""
    patch.setattr(memory.ReceiveMemory, "take", none_left)


def refuse_sockets(patch: pytest.MonkeyPatch, what: str, is_over: Callable[[], bool]) -> None:
    """Let no socket be opened for "arguments" or "results" until then, as a firewall does.

    The next attempt follows soon.
    """
    patch.setattr(tensor_sockets, "OPEN_PAUSE", 0.01)
    dial, purpose = introduction.Introductions.dial, {"arguments": ARGUMENTS, "results": RESULTS}

    async def fail(self: Any, peer: Any, number: int) -> socket.socket:
        if read_number(number)[1] == purpose[what] and not is_over():
            raise RpcError("a firewall")
        return await dial(self, peer, number)

    patch.setattr(introduction.Introductions, "dial", fail)
