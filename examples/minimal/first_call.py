"""A first remote call: an object in another process, called, timed out and cancelled."""

import asyncio

import aiorpc_torch as aiorpc


class Counter:
    def __init__(self, start: int) -> None:
        self.value = start

    async def add(self, amount: int) -> int:  # `async def`: on the other process's event loop
        self.value += amount
        return self.value

    def slow_add(self, amount: int) -> int:  # `def`: in a thread of the other process
        return self.value + amount

    async def never(self) -> None:
        await asyncio.Event().wait()

    async def fail(self) -> None:
        raise LookupError("no such thing")


async def main() -> None:
    async with aiorpc.local_world(["other"]):  # this process and one child
        counter = await aiorpc.create("other", Counter, 5)  # an RRef of an object there
        print("one call:", await aiorpc.remote(counter).add(2))
        print(
            "many at once:",
            await asyncio.gather(*(aiorpc.remote(counter).add(1) for _ in range(3))),
        )
        print("in a thread:", await aiorpc.remote(counter).slow_add(90))

        try:
            await aiorpc.remote(counter, timeout=0.2).never()
        except aiorpc.CallTimeout as exc:
            print("timeout:", exc.method, "on", exc.worker)

        try:
            await aiorpc.remote(counter).fail()
        except LookupError as exc:  # its own class; the remote traceback is its cause
            print("an exception:", exc, "| caused by", type(exc.__cause__).__name__)


if __name__ == "__main__":
    asyncio.run(main())
