"""Batched generators under any consumers: each gets its items in order, and all are let go."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from hypothesis import given, strategies as st

from aiorpc_torch import batched

AHEAD = 64  # items that a generator may be ahead of its consumers

Caller = tuple[int, int, int]
"""How many items it is given, after how many it leaves, and how often others run between two."""

callers = st.lists(
    st.tuples(st.integers(0, 200), st.integers(1, 250), st.integers(0, 3)), min_size=1, max_size=6
)


class Source:
    """What a generator has done."""

    def __init__(self, size: int, fails_at: int | None) -> None:
        self.steps, self.taken, self.furthest = 0, 0, 0
        self.is_closed = False

        def entries(counts: list[int]) -> Iterator[list[Any]]:
            for step in range(max(counts) + 1):
                if step == fails_at:
                    raise LookupError
                self.steps = step + 1
                self.furthest = max(self.furthest, self.steps - self.taken)
                yield [step if step < count else StopAsyncIteration() for count in counts]

        @batched(max_size=size)
        async def generate(counts: list[int]) -> AsyncIterator[list[Any]]:
            try:
                for each in entries(counts):
                    yield each
            finally:
                self.is_closed = True

        self.generate: Any = generate


async def consume(source: Source, caller: Caller) -> tuple[list[int], bool]:
    """Return what came, and whether the iteration has failed."""
    count, most, pause = caller
    found: list[int] = []
    items = source.generate(count)
    try:
        async for item in items:
            found.append(item)
            source.taken = max(source.taken, len(found))
            if len(found) == most:
                break
            for _ in range(pause):
                await asyncio.sleep(0)
    except LookupError:
        return found, True
    finally:
        await items.aclose()
    return found, False


@pytest.mark.promise("batching.generators")
@given(callers, st.none() | st.integers(0, 200))
def test_any_consumers(consumers: list[Caller], fails_at: int | None) -> None:
    async def main() -> tuple[Source, list[tuple[list[int], bool]]]:
        source = Source(len(consumers), fails_at)
        async with asyncio.timeout(20.0):
            found = await asyncio.gather(*(consume(source, each) for each in consumers))
            while not source.is_closed:  # noqa: ASYNC110
                await asyncio.sleep(0)
        return source, found

    source, found = asyncio.run(main())
    for (count, most, _), (items, has_failed) in zip(consumers, found, strict=True):
        made = count if fails_at is None else min(count, fails_at)
        assert items == [*range(min(made, most))]
        assert has_failed == (made < most and fails_at is not None and fails_at <= count)
    assert source.furthest <= AHEAD + 1
