"""A xoscar actor, for `benchmarks.peers`.

Its strongest form: a stateless actor, which takes calls while others wait, in a process of the
client's own pool, and uvloop where it is installed. Tensors are sent unchanged. xoscar's own
`batch` sends calls that the client has gathered. For calls that are batched on the server there is
a `Batcher` written by hand.
"""

import asyncio
import importlib
import warnings
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from ._compare import freeze
from ._peers_work import NAP, Batcher, Peer, Sizes, answer, live, uvloop_or_asyncio

xo: Any = importlib.import_module("xoscar")
Actor: Any = xo.StatelessActor
new_event_loop = uvloop_or_asyncio()

# Received arrays are read-only; this benchmark does not write to them.
warnings.filterwarnings("ignore", message="The given NumPy array is not writable")


class Server(Actor):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.answer = answer()
        self.batcher = Batcher(self.answer)
        freeze()

    async def echo(self, x: Tensor) -> Tensor:
        return x

    async def nap(self) -> None:
        await asyncio.sleep(NAP)

    async def select(self, state: Tensor) -> int:
        return await self.batcher.ask(state)

    @xo.extensible  # type: ignore[untyped-decorator]
    async def act(self, state: Tensor) -> int:
        return (await self.answer([state]))[0]

    @act.batch  # type: ignore[untyped-decorator]
    async def act_for_all(self, args: list[tuple[Tensor]], _: list[dict[str, Any]]) -> list[int]:
        return await self.answer([state for (state,) in args])

    @xo.generator  # type: ignore[untyped-decorator]
    async def count(self, items: int) -> AsyncIterator[int]:
        async def numbers() -> AsyncIterator[int]:
            for item in range(items):
                yield item

        return numbers()


class Xoscar(Peer):
    def __init__(self, server: Any) -> None:
        self.server = server

    def echo(self, x: Tensor) -> Awaitable[Tensor]:
        echoed: Awaitable[Tensor] = self.server.echo(x)
        return echoed

    def nap(self) -> Awaitable[object]:
        napping: Awaitable[object] = self.server.nap()
        return napping

    def select(self, state: Tensor) -> Awaitable[int]:
        action: Awaitable[int] = self.server.select(state)
        return action

    async def count(self, items: int) -> AsyncIterator[int]:
        async for item in await self.server.count(items):
            yield item

    async def gathered(self, sizes: Sizes) -> float:
        return await live(Batcher(self._act_for_all).ask, sizes.steps)

    async def _act_for_all(self, states: list[Tensor]) -> list[int]:
        act = self.server.act
        found: list[int] = await act.batch(*map(act.delay, states))
        return found


@asynccontextmanager
async def start(scratch: Path) -> AsyncIterator[Peer]:
    pool = await xo.create_actor_pool("127.0.0.1", n_process=1)
    try:
        (address,) = pool.sub_processes
        yield Xoscar(await xo.create_actor(Server, address=address, uid="server"))
    finally:
        await pool.stop()
