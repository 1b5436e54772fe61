"""`async with remote(rref).method()`: context managers at the callee."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

import aiorpc_torch as aiorpc
from aiorpc_torch import CallTimeout, Group, RRef, call, create, proxy, remote, supervised
from aiorpc_torch.observe import stats
from aiorpc_torch.testing import Gate
from tests.support.slack import BEGUN
from tests.support.two_ends import until


class Lender:
    """Lends one thing at a time."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.lock = asyncio.Lock()
        self.back = asyncio.Event()
        self.gate = Gate()

    @contextlib.asynccontextmanager
    async def lend(self, name: str) -> AsyncIterator[str]:
        try:
            async with self.lock:
                self.log.append(f"lent {name}")
                yield f"the {name}"
        finally:
            self.log.append("back")
            self.back.set()

    def lend_from_thread(self, name: str) -> contextlib.AbstractAsyncContextManager[str]:
        return self.lend(name)

    @contextlib.asynccontextmanager
    async def refuse(self) -> AsyncIterator[None]:
        raise LookupError("nothing to lend")
        yield

    async def items(self) -> AsyncIterator[int]:
        try:
            yield 1
            await asyncio.sleep(0)
            yield 2
        finally:
            self.back.set()

    async def number(self) -> int:
        return 1


@pytest.fixture
async def lender(world: aiorpc.types.Worker) -> Lender:
    return Lender()


@pytest.mark.promise("streams.entered")
async def test_it_is_left_at_the_end_of_the_block(lender: Lender) -> None:
    async with remote(RRef(lender)).lend("book") as value:
        assert value == "the book"
        assert lender.log == ["lent book"]
    await lender.back.wait()
    assert lender.log == ["lent book", "back"]


@pytest.mark.promise("streams.entered")
async def test_it_is_left_by_an_exception_and_by_a_cancellation(lender: Lender) -> None:
    with pytest.raises(ZeroDivisionError):
        async with proxy(RRef(lender)).lend("book"):
            raise ZeroDivisionError
    await lender.back.wait()
    lender.back.clear()

    async def keep() -> None:
        async with remote(RRef(lender)).lend_from_thread("pen"):
            inside.set()
            await asyncio.Event().wait()

    inside = asyncio.Event()
    keeping = asyncio.create_task(keep())
    await inside.wait()
    waiting = asyncio.create_task(keep())  # at its entry
    await asyncio.sleep(0)
    waiting.cancel()
    keeping.cancel()
    await asyncio.wait([keeping, waiting])
    await lender.back.wait()
    async with asyncio.timeout(30), remote(RRef(lender)).lend("map") as value:
        assert value == "the map"


async def test_other_ways_to_call(lender: Lender) -> None:
    rref = RRef(lender)
    async with remote(Group([rref]).any()).lend("book") as value:
        assert value == "the book"
    made = await supervised("main", Lender)
    async with remote(made).lend("book") as value:
        assert value == "the book"
    created = await create("main", Lender)
    async with call(created, Lender.lend, "pen") as value:
        assert value == "the pen"


async def test_what_cannot_be_entered_says_so(lender: Lender) -> None:
    rref = RRef(lender)
    with pytest.raises(LookupError, match="nothing to lend"):
        async with remote(rref).refuse():
            pass
    with pytest.raises(TypeError, match="items is a generator: use `async for`"):
        async with remote(rref).items():
            pass
    await lender.back.wait()
    with pytest.raises(TypeError, match="lend is a context manager: use `async with`"):
        async for _ in remote(rref).lend("book"):
            pass
    with pytest.raises(TypeError, match=r"it returned int: use `await`, .* or `async with`"):
        async with remote(rref).number():
            pass
    with pytest.raises(TypeError, match="lend is a context manager; use `async with`, not `await`"):
        await remote(rref).lend("book")


async def test_a_deadline_at_the_entry(lender: Lender) -> None:
    async with lender.lock:
        with pytest.raises(CallTimeout):
            async with remote(RRef(lender), timeout=0.01).lend("book"):
                pass
    async with asyncio.timeout(30), remote(RRef(lender)).lend("book"):
        pass


@pytest.mark.promise("streams.entered")
async def test_a_deadline_in_the_block_is_raised_at_its_end(lender: Lender) -> None:
    """The callee has left: the block did not have the lock to its end."""

    async def hold(found: Exception | None) -> None:
        async with remote(RRef(lender), timeout=BEGUN).lend("book"):
            await lender.back.wait()
            await until(lambda: not stats().in_flight)
            if found:
                raise found

    with pytest.raises(CallTimeout, match="lend on worker 'main' timed out"):
        await hold(None)
    lender.back.clear()
    with pytest.raises(LookupError, match="of the block"):
        await hold(LookupError("of the block"))
