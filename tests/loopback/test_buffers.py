"""Arrays and long bytes, by each way of large values: they arrive as they are, and in order."""

import asyncio
import os
import threading
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
import torch

import aiorpc_torch as aiorpc
from aiorpc_torch import Group, RRef, batched, call, each, remote
from aiorpc_torch.observe import stats
from aiorpc_torch.testing import settled
from tests.support.equal_values import are_equal
from tests.support.tensor_ways import TENSOR_WAYS, set_way

LONG = 3 << 20
SOON = 30.0


@pytest.fixture(params=TENSOR_WAYS)
async def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A world of one whose large values travel this way."""
    set_way(monkeypatch, request.param)
    async with aiorpc.local_world(0):
        shelf = remote(RRef(Shelf()))
        async with asyncio.timeout(SOON):  # until the connection knows its ways
            while not await travels(shelf, request.param):
                pass
        yield request.param


async def travels(shelf: Any, way: str) -> bool:
    before = stats()
    await shelf.get(torch.zeros(LONG // 4))
    now = stats()
    shared = now.shared_messages - before.shared_messages
    sockets = now.socket_messages - before.socket_messages
    return {"shared": shared, "sockets": sockets, "torch": not (shared or sockets)}[way] > 0


class Shelf:
    def __init__(self) -> None:
        self.seen: list[Any] = []

    async def get(self, value: Any) -> Any:
        return value

    def get_in_thread(self, value: Any) -> Any:
        return value

    async def note(self, value: Any) -> None:
        self.seen.append(value if isinstance(value, int) else len(value))

    async def noted(self) -> list[int]:
        return self.seen

    async def items(self, value: Any) -> AsyncIterator[Any]:
        for number in range(3):
            yield value
            yield number

    async def reused(self, size: int, count: int) -> AsyncIterator[Any]:
        buffer = np.zeros(size, np.uint8)
        for number in range(count):
            buffer[:] = number
            yield buffer

    async def fail(self, value: Any) -> None:
        raise LookupError("with a value", value)

    async def change(self, value: Any) -> Any:
        value[:2] = value[2:4]
        return value[:2].tobytes()

    @batched(max_size=4, max_wait=0.05)
    async def together(self, values: list[Any]) -> list[Any]:
        return values


def content(size: int = LONG) -> Any:
    return np.frombuffer(os.urandom(size), np.uint8).copy()


VALUES = {
    "array": content,
    "fortran": lambda: np.asfortranarray(content().reshape(1024, -1)),
    "structured": lambda: content().view([("a", "<i4"), ("b", "<i8")]),
    "read-only": lambda: np.frombuffer(os.urandom(LONG), np.uint8),
    "arrays": lambda: {name: content(LONG // 20 + name) for name in range(20)},
    "small arrays": lambda: [content(1000 + size) for size in range(300)],
    "bytes": lambda: os.urandom(LONG),
    "bytearray": lambda: bytearray(os.urandom(LONG)),
    "text": lambda: os.urandom(LONG // 2).hex(),
    "memoryview": lambda: memoryview(os.urandom(LONG)),
    "a few": lambda: (content(100_000), os.urandom(300_000), torch.randn(300_000), "x", content(9)),
}


@pytest.mark.promise("values.buffers")
@pytest.mark.parametrize("of", VALUES)
async def test_values_arrive_as_they_are(way: str, of: str) -> None:
    """As arguments, results, items, values of groups and of batches, and in exceptions."""
    value: Any = VALUES[of]()
    rref = RRef(Shelf())
    shelf = remote(rref)
    assert are_equal(await shelf.get(value), value)
    assert are_equal(await shelf.get_in_thread(value), value)
    assert are_equal(await shelf.get([{"x": value}, value]), [{"x": value}, value])
    items = [item async for item in shelf.items(value)]
    assert are_equal(items, [value, 0, value, 1, value, 2])
    group = Group([rref, RRef(Shelf())])
    assert are_equal(await remote(group).get(value), [value, value])
    assert are_equal(await call(group, Shelf.get, each([value, 1])), [value, 1])
    both = await asyncio.gather(shelf.together(value), shelf.together(value))
    assert are_equal(both, [value, value])
    with pytest.raises(LookupError, match="with a value") as raised:
        await shelf.fail(value)
    assert are_equal(raised.value.args[1], value)


async def test_they_travel_that_way(way: str) -> None:
    """Not through the bytes of a connection."""
    shelf = remote(RRef(Shelf()))
    for value in (content(), os.urandom(LONG)):
        before = stats()
        await shelf.get(value)
        now = stats()
        shared = now.shared_messages - before.shared_messages
        sockets = now.socket_messages - before.socket_messages
        assert {"shared": shared, "sockets": sockets, "torch": 2}[way] == 2 or way != "torch"
        assert (shared > 0, sockets > 0) == (way == "shared", way == "sockets")


async def test_a_writable_array_is_the_callees_own(way: str) -> None:
    """What it changes stays there."""
    value = content()
    before = value.copy()
    assert await remote(RRef(Shelf())).change(value) == before[2:4].tobytes()
    assert are_equal(value, before)


@pytest.mark.promise("order.start")
async def test_calls_stay_in_order_behind_what_is_loaded(way: str) -> None:
    """Long bytes are loaded in a thread: later calls of the object wait, also small ones."""
    rref = RRef(Shelf())
    shelf = remote(rref)
    calls = []
    for number in range(5):
        calls.append(shelf.note(os.urandom(LONG + number)))
        calls.append(shelf.note(number))
        calls.append(shelf.note(content(LONG + number)))
    await asyncio.gather(*calls)
    expected = [each_ for n in range(5) for each_ in (LONG + n, n, LONG + n)]
    assert await shelf.noted() == expected


class Slow:
    """Is unpickled when its gate opens."""

    gate = threading.Event()
    begun = threading.Event()

    def __init__(self, content: bytes) -> None:
        self.content = content

    def __len__(self) -> int:
        return len(self.content)

    def __reduce__(self) -> Any:
        return loaded_slowly, (self.content,)


def loaded_slowly(content: bytes) -> Slow:
    Slow.begun.set()
    if not Slow.gate.wait(SOON):
        raise TimeoutError
    return Slow(content)


@pytest.fixture
def gate() -> Any:
    Slow.gate.clear()
    Slow.begun.clear()
    yield Slow.gate
    Slow.gate.set()


@pytest.mark.parametrize("ends", ["cancelled", "late"])
async def test_a_call_that_ends_while_it_is_loaded(
    monkeypatch: pytest.MonkeyPatch, gate: threading.Event, ends: str
) -> None:
    """It does not run, and the calls behind it do."""
    async with aiorpc.local_world(0):
        shelf = remote(RRef(Shelf()))
        await shelf.get(torch.zeros(LONG // 4))
        limit = 0.2 if ends == "late" else None
        calling = asyncio.ensure_future(
            remote(shelf, timeout=limit).note(Slow(os.urandom(LONG)))  # type: ignore[call-overload]
        )
        await asyncio.to_thread(Slow.begun.wait, SOON)
        behind = asyncio.ensure_future(shelf.note(1))
        if ends == "cancelled":
            calling.cancel()
        (told,) = await asyncio.gather(calling, return_exceptions=True)
        assert isinstance(told, asyncio.CancelledError | aiorpc.CallTimeout)
        gate.set()
        await behind
        assert await shelf.noted() == [1]


async def test_a_result_that_is_loaded_when_its_caller_has_gone(gate: threading.Event) -> None:
    """Nothing is left of it."""
    async with aiorpc.local_world(0):
        shelf = remote(RRef(Shelf()))
        await shelf.get(torch.zeros(LONG // 4))
        gate.set()
        rref = RRef(Shelf())
        await remote(rref).get(Slow(b"x" * 9))
        gate.clear()
        Slow.begun.clear()
        kept = await aiorpc.create(0, Slow, os.urandom(LONG))
        asking = asyncio.ensure_future(aiorpc.call(kept, as_result))
        await asyncio.to_thread(Slow.begun.wait, SOON)
        asking.cancel()
        await asyncio.wait([asking])
        gate.set()
        assert await shelf.get(1) == 1


def as_result(found: Slow) -> list[Slow]:
    return [found]


class Broken:
    """Cannot be unpickled."""

    def __reduce__(self) -> Any:
        return broken, (os.urandom(LONG),)


def broken(_: bytes) -> None:
    raise LookupError("it is broken")


async def test_what_cannot_be_loaded_fails_its_own_call(way: str) -> None:
    """With the error and a note, and no other."""
    shelf = remote(RRef(Shelf()))
    calls = [shelf.get(1), shelf.get(Broken()), shelf.together(Broken()), shelf.get(2)]
    first, second, third, last = await asyncio.gather(*calls, return_exceptions=True)
    assert (first, last) == (1, 2)
    for failure in (second, third):
        assert isinstance(failure, LookupError)
        assert "while unpickling" in "".join(failure.__notes__)


async def test_an_item_is_sent_before_its_buffer_is_used_again(way: str) -> None:
    """A generator may fill one array over and over."""
    shelf = remote(RRef(Shelf()))
    found = [(len(item), {*item.tolist()}) async for item in shelf.reused(LONG // 8, 6)]
    assert found == [(LONG // 8, {number}) for number in range(6)]


@pytest.fixture
async def loading(gate: threading.Event) -> Any:
    """A call whose result is being loaded, and what the event loop has to complain of."""
    problems: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, found: problems.append(found))
    async with aiorpc.local_world(0):
        shelf = remote(RRef(Shelf()))
        await shelf.get(torch.zeros(LONG // 4))
        kept = RRef([Slow(os.urandom(LONG))])
        yield lambda: call(0, taken, kept)
        gate.set()
        assert await shelf.get(1) == 1
    assert problems == []


def taken(kept: "RRef[list[Slow]]") -> list[Slow]:
    return kept.local_value()


async def test_a_block_that_ends_while_a_result_is_loaded(loading: Any) -> None:
    """The call ends with CallTimeout, at the deadline."""
    with pytest.raises(aiorpc.CallTimeout), aiorpc.timeout(0.2):
        await loading()


async def test_an_interceptor_of_a_call_that_is_cancelled_while_it_is_loaded(
    loading: Any, gate: threading.Event
) -> None:
    """It is told once, and of the cancellation."""
    told: list[Any] = []

    class Watch(aiorpc.observe.Interceptor):
        def on_call(self, _: Any) -> Any:
            return told.append

    stop = aiorpc.observe.intercept(Watch())
    try:
        calling = asyncio.ensure_future(loading())
        await asyncio.to_thread(Slow.begun.wait, SOON)
        calling.cancel()
        await asyncio.wait([calling])
    finally:
        stop()
    gate.set()
    assert [type(each_) for each_ in told] == [asyncio.CancelledError]


async def test_each_caller_of_a_batch_gets_an_exception_of_its_own(way: str) -> None:
    """Also in the batch's own process: what one changes, no other sees."""

    class Failing:
        @batched(max_size=3, max_wait=0.05)
        async def ask(self, numbers: list[int]) -> list[int]:
            raise LookupError(np.zeros(LONG))

    failing = Failing()
    calls = [failing.ask(1) for _ in range(3)]
    failures: list[Any] = await asyncio.gather(*calls, return_exceptions=True)
    for number, failure in enumerate(failures):
        assert failure.args[0][0] == 0
        failure.args[0][:] = number + 1


class Marked:
    """Tells when it is unpickled."""

    loaded = threading.Event()

    def __init__(self, content: bytes) -> None:
        self.content = content

    def __reduce__(self) -> Any:
        return marked, (self.content,)


def marked(content: bytes) -> Marked:
    Marked.loaded.set()
    return Marked(content)


async def test_a_call_that_is_cancelled_behind_one_that_is_loaded(gate: threading.Event) -> None:
    """Its own arguments have been loaded: it is answered, and does not run."""
    Marked.loaded.clear()
    async with aiorpc.local_world(0):
        shelf, other = remote(RRef(Shelf())), remote(RRef(Shelf()))
        await shelf.get(torch.zeros(LONG // 4))
        first = asyncio.ensure_future(shelf.note(Slow(os.urandom(LONG))))
        await asyncio.to_thread(Slow.begun.wait, SOON)
        second = asyncio.ensure_future(shelf.note(Marked(os.urandom(LONG))))
        await asyncio.to_thread(Marked.loaded.wait, SOON)
        for _ in range(3):  # its loop knows that it is loaded
            await other.get(1)
        second.cancel()
        await asyncio.wait([second])
        await other.get(1)
        gate.set()
        await first
        assert await shelf.noted() == [LONG]
        async with asyncio.timeout(SOON):
            await settled()  # the loop may learn late that it is loaded
        assert (stats().running, stats().in_flight) == (0, 0)
