"""A server and its clients under torchrun, one process each, on one machine or on several.

torchrun --nproc-per-node 3 examples/minimal/torchrun_server_client.py
"""

import asyncio
import os
from collections import Counter

import aiorpc_torch as aiorpc


class Words:
    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    async def add(self, text: str) -> None:
        self.counts.update(text.replace(",", "").split())

    async def top(self) -> tuple[str, int]:
        return self.counts.most_common(1)[0]


async def serve() -> None:
    async with aiorpc.worker("server"):  # rank, world size and address are torchrun's
        aiorpc.register("words", Words())
        # The end of the block serves on until all clients have left.


async def ask(rank: int) -> None:
    async with aiorpc.worker(f"client{rank}"):
        words = await aiorpc.lookup("words", on="server")  # waits until it is registered
        await aiorpc.remote(words).add("never say never, never")
        word, count = await aiorpc.remote(words).top()
        print(f"client{rank}: {word!r}, three times or more: {count >= 3}", flush=True)


if __name__ == "__main__":
    rank = int(os.environ["RANK"])
    asyncio.run(ask(rank) if rank else serve())
