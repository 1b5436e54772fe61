"""A class and functions to export, and a list of what ran that should not."""

import functools
import os as os
from collections.abc import AsyncIterator, Callable
from typing import Any, ClassVar

from aiorpc_torch import batched

ran: list[Any] = []  # by what is not to be run


class Base:
    async def inherited(self) -> str:
        return "inherited"


class Shop(Base):
    secret = "plain data"
    tax: ClassVar[Callable[..., Any]] = staticmethod(functools.partial(max, 2))

    class Shelf:
        def __init__(self) -> None:
            self.items = 3

    async def buy(self, item: Any = None) -> Any:
        return item

    def count(self) -> int:
        return 1

    async def items(self, count: int) -> AsyncIterator[int]:
        for item in range(count):
            yield item

    @batched(max_size=4)
    async def double(self, numbers: list[int]) -> list[int]:
        return [2 * number for number in numbers]

    @staticmethod
    def static() -> str:
        return "static"

    @classmethod
    def by_class(cls) -> str:
        return cls.__name__

    def _private(self) -> None:
        ran.append("private")

    @property
    def computed(self) -> Any:
        ran.append("property")
        return lambda: 1


def price(item: Any = None) -> Any:
    return item


def other(item: Any = None) -> None:
    ran.append("other")
