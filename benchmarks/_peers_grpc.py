"""gRPC's asyncio API, for `benchmarks.peers`.

Its strongest form: the bytes of the tensors behind a small header, without protobuf or pickle; one
insecure channel that is used again; uvloop where it is installed. gRPC has no batching, so the
server has a `Batcher` written by hand.
"""

import asyncio
import importlib
import struct
import warnings
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ._compare import freeze
from ._peers_process import process
from ._peers_work import NAP, Batcher, Peer, answer, uvloop_or_asyncio

grpc: Any = importlib.import_module("grpc")
new_event_loop = uvloop_or_asyncio()
NUMBER = struct.Struct("<q")
UNLIMITED = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]

# Received buffers are read-only; this benchmark does not write to them.
warnings.filterwarnings("ignore", message="The given buffer is not writable")


def pack(x: Tensor) -> bytes:
    return b"".join((NUMBER.pack(x.dim()), *map(NUMBER.pack, x.shape), x.numpy().data))


def unpack(data: bytes) -> Tensor:
    (dim,) = NUMBER.unpack_from(data)
    shape = struct.unpack_from(f"<{dim}q", data, NUMBER.size)
    return torch.frombuffer(data, dtype=torch.float32, offset=(1 + dim) * NUMBER.size).view(shape)


# ── the server ──────────────────────────────────────────────────────────────────────────────────


class Server:
    def __init__(self) -> None:
        self.batcher = Batcher(answer())

    async def echo(self, request: bytes, _: object) -> bytes:
        return pack(unpack(request))

    async def nap(self, request: bytes, _: object) -> bytes:
        await asyncio.sleep(NAP)
        return b""

    async def select(self, request: bytes, _: object) -> bytes:
        return NUMBER.pack(await self.batcher.ask(unpack(request)))

    async def count(self, request: bytes, _: object) -> AsyncIterator[bytes]:
        for item in range(*NUMBER.unpack(request)):
            yield NUMBER.pack(item)

    def handler(self) -> Any:
        unary, stream = grpc.unary_unary_rpc_method_handler, grpc.unary_stream_rpc_method_handler
        methods = {name: unary(getattr(self, name)) for name in ("echo", "nap", "select")}
        return grpc.method_handlers_generic_handler(
            "Server", {**methods, "count": stream(self.count)}
        )


def main(client: Connection) -> None:
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(serve(client))


async def serve(client: Connection) -> None:
    server = grpc.aio.server(options=UNLIMITED)
    server.add_generic_rpc_handlers((Server().handler(),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    freeze()
    client.send(port)
    await asyncio.to_thread(client.poll, None)  # until the client closes it
    await server.stop(None)


# ── the client ──────────────────────────────────────────────────────────────────────────────────


class Grpc(Peer):
    # A server refuses calls when more than 1,000 wait to be accepted. Its max_concurrent_streams,
    # which is to make clients wait, made calls fail (1.85).
    at_once = 900

    def __init__(self, channel: Any) -> None:
        self._echo, self._nap, self._select = map(
            channel.unary_unary, ("/Server/echo", "/Server/nap", "/Server/select")
        )
        self._count = channel.unary_stream("/Server/count")

    async def echo(self, x: Tensor) -> Tensor:
        return unpack(await self._echo(pack(x)))

    def echo_any(self, x: Any) -> None:
        return None  # it carries bytes that its user has made

    async def nap(self) -> None:
        await self._nap(b"")

    async def select(self, state: Tensor) -> int:
        found: int = NUMBER.unpack(await self._select(pack(state)))[0]
        return found

    async def count(self, items: int) -> AsyncIterator[int]:
        async for item in self._count(NUMBER.pack(items)):
            yield NUMBER.unpack(item)[0]


@asynccontextmanager
async def start(scratch: Path) -> AsyncIterator[Peer]:
    with process(main) as server:
        port = await asyncio.to_thread(server.recv)
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=UNLIMITED) as channel:
            yield Grpc(channel)
