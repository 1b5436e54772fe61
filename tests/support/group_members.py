"""Members of groups that tests call, and groups of them: importable from everywhere."""

from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

from torch import Tensor

from aiorpc_torch import Group, RRef, batched, create, each, remote


class Node:
    """Remembers its arguments; has every kind of method."""

    def __init__(self, number: Any = 0, *rest: Any) -> None:
        self.number = number
        self.rest = rest
        self.came: list[Any] = []

    async def note(self, *args: Any, **kwargs: Any) -> Any:
        self.came.append((args, kwargs))
        return self.number

    async def noted(self) -> list[Any]:
        return self.came

    async def add(self, amount: int) -> int:
        self.number += amount
        return self.number

    def plain(self, x: Any) -> Any:
        return self.number, x

    async def fail_if(self, number: int, exc: Any, *args: Any) -> Any:
        if self.number == number:
            raise exc(*args)
        return self.number

    async def items(self, count: int) -> AsyncIterator[int]:
        for n in range(count):
            yield n

    def items_in_thread(self, count: int) -> Iterator[int]:
        yield from range(count)

    async def add_to(self, others: Sequence[RRef[Any]]) -> list[int]:
        return [await remote(other).add(1) for other in others]

    async def sum(self, first: int, second: int) -> int:
        return first + second

    @batched(max_size=8)
    async def double(self, xs: list[int]) -> list[int]:
        return [2 * x for x in xs]

    async def scale(self, x: Tensor) -> Tensor:
        return x * self.number


class Loud(Node):
    async def add(self, amount: int) -> int:
        return 100 * await super().add(amount)


class Unpicklable:
    def __reduce__(self) -> Any:
        raise LookupError("this is not pickled")


class Counted:
    """Counts how often it is pickled."""

    def __init__(self) -> None:
        self.pickled = 0

    def __reduce__(self) -> Any:
        self.pickled += 1
        return Counted, ()


class Custom(BaseException):
    """No Exception."""


async def nodes(count: int = 3) -> Group[Node]:
    return await create([0] * count, Node, each(range(count)))


def give_back(value: Any) -> Any:
    return value
