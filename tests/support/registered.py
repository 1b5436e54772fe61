"""Objects that workers register under one name."""

import asyncio
import os

from aiorpc_torch import NotInWorld, register, unregister

NAME = "env"


class Env:
    """An object that tells of its process."""

    def __init__(self, tag: str = "") -> None:
        self.tag = tag
        self.items: list[int] = []

    async def pid(self) -> int:
        return os.getpid()

    async def add(self, value: int) -> str:
        return f"{self.tag}{value}"

    async def roll(self, item: int) -> int:
        """Return the item; a little later, so that others have free slots meanwhile."""
        self.items.append(item)
        await asyncio.sleep(0.01)
        return item

    async def stay(self, item: int) -> int:
        """Never return, if this is the first item here."""
        self.items.append(item)
        if len(self.items) == 1:
            await asyncio.Event().wait()
        return item

    async def refuse(self, item: int) -> None:
        """Raise the error of a call to a worker that has left, as a call of this method may."""
        self.items.append(item)
        raise NotInWorld("another worker has left")

    async def count(self) -> int:
        return len(self.items)


async def enlist(tag: str = "", name: str = NAME) -> int:
    """Register an object of this worker; return its process."""
    register(name, Env(tag))
    return os.getpid()


async def resign(name: str = NAME) -> None:
    """Remove it."""
    unregister(name)
