"""Servers of gRPC's asyncio API, each in a process that imports torch, for `benchmarks.starts`."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from importlib import import_module
from typing import Any

from torch import Tensor

from ._peers_grpc import UNLIMITED, pack, unpack
from ._starts_work import HOUR, report

grpc: Any = import_module("grpc")


class Counter:
    """An object that holds a number."""

    def __init__(self) -> None:
        self.value = 0


class Server:
    def __init__(self) -> None:
        self.objects: list[Counter] = []

    async def pid(self, request: bytes, _: object) -> bytes:
        return str(os.getpid()).encode()

    async def create(self, request: bytes, _: object) -> bytes:
        self.objects.append(Counter())
        return b""

    async def take(self, request: bytes, _: object) -> bytes:
        return str(float(unpack(request)[0])).encode()

    async def wait(self, request: bytes, _: object) -> bytes:
        await asyncio.sleep(HOUR)
        return b""


async def serve() -> None:
    server, mine = grpc.aio.server(options=UNLIMITED), Server()
    methods = {
        name: grpc.unary_unary_rpc_method_handler(getattr(mine, name))
        for name in ("pid", "create", "take", "wait")
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("Server", methods),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(port, flush=True)
    await asyncio.to_thread(sys.stdin.read)  # until the client closes it
    await server.stop(None)


class Workers:
    def __init__(self, channels: Sequence[Any]) -> None:
        self.channels = channels

    async def pids(self) -> Sequence[int]:
        return [*map(int, await self._all("pid", b""))]

    async def create(self, count: int) -> Any:
        create = [each.unary_unary("/Server/create") for each in self.channels]
        return await asyncio.gather(*(create[at % len(create)](b"") for at in range(count)))

    async def take(self, x: Tensor) -> Any:
        return await self._all("take", pack(x))

    async def wait(self) -> Any:
        return await self.channels[-1].unary_unary("/Server/wait")(b"")

    async def _all(self, method: str, request: bytes) -> list[bytes]:
        calls = (each.unary_unary(f"/Server/{method}")(request) for each in self.channels)
        found: list[bytes] = await asyncio.gather(*calls)
        return found


@asynccontextmanager
async def start(size: int) -> AsyncIterator[Workers]:
    async with AsyncExitStack() as stack:
        pipe = asyncio.subprocess.PIPE
        line = [sys.executable, "-m", __spec__.name, "serve"]
        servers = [
            await asyncio.create_subprocess_exec(*line, stdin=pipe, stdout=pipe)
            for _ in range(size)
        ]
        channels = []
        for server in servers:
            assert server.stdin is not None
            assert server.stdout is not None
            stack.push_async_callback(server.wait)
            stack.callback(server.stdin.close)
            address = f"127.0.0.1:{int(await server.stdout.readline())}"
            channel = grpc.aio.insecure_channel(address, options=UNLIMITED)
            channels.append(await stack.enter_async_context(channel))
        yield Workers(channels)


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        asyncio.run(serve())
    else:
        report(start)
