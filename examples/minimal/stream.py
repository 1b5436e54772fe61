"""A remote generator: items arrive while it runs, and it waits for a slow consumer."""

import asyncio
from collections.abc import AsyncIterator, Iterator

import aiorpc_torch as aiorpc


class Model:
    def __init__(self) -> None:
        self.closed = asyncio.Semaphore(0)

    async def generate(self, prompt: str, tokens: int) -> AsyncIterator[str]:
        try:
            for number in range(tokens):
                yield f"{prompt}{number}"
        finally:  # also if the consumer leaves early
            self.closed.release()

    def count(self, end: int) -> Iterator[int]:  # a plain generator runs in a thread
        yield from range(end)

    async def wait_closed(self) -> None:
        await self.closed.acquire()


async def main() -> None:
    async with aiorpc.local_world(["server"]):
        model = await aiorpc.create("server", Model)

        tokens = [token async for token in aiorpc.remote(model).generate("a", 4)]
        print("all:", *tokens)

        async for token in aiorpc.remote(model).generate("b", 1_000_000):
            if token.endswith("2"):
                print("left at:", token)
                break  # closes the remote generator

        print("sum:", sum([number async for number in aiorpc.remote(model).count(100)]))
        for _ in range(2):
            await aiorpc.remote(model).wait_closed()
        print("closed: both")


if __name__ == "__main__":
    asyncio.run(main())
