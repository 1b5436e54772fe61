"""Every call ends, whatever the objects of users do, and whatever tasks their code cancels."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any

import pytest

from aiorpc_torch import Fill, Group, RemoteError, RRef, batched, create, exclusive, remote
from aiorpc_torch.testing import Gate
from tests.support.raw_connections import SOON

pytestmark = pytest.mark.usefixtures("world")


class Guarded:
    """Each access to it raises."""

    def __getattribute__(self, name: str) -> Any:
        raise ZeroDivisionError(name)


class Proxy:
    """It takes each name for a key."""

    def __getattr__(self, name: str) -> Any:
        raise KeyError(name)


class Unpicklable:
    def __reduce__(self) -> Any:
        raise LookupError("this is not pickled")


class Exits:
    def __reduce__(self) -> Any:
        raise SystemExit("as it is pickled")


class KeyedError(Exception):
    """It takes each name for a key."""

    def __getattr__(self, name: str) -> Any:
        raise KeyError(name)


class Untold(TypeError):
    def __str__(self) -> str:
        raise ZeroDivisionError("in __str__")


class Truthless(Exception):
    def __bool__(self) -> bool:
        raise ZeroDivisionError("in __bool__")


class Agent:
    """Returns and raises what it is asked for. Only `batch` is batched."""

    def __init__(self) -> None:
        self.gate = Gate()

    def plain(self, cls: type) -> Any:
        return cls()

    async def on_loop(self, cls: type) -> Any:
        return cls()

    def items(self, cls: type) -> Iterator[Any]:
        try:
            yield cls()
        finally:
            raise ValueError("in the finally")

    def throw(self, cls: type[BaseException]) -> None:
        raise cls()

    async def throw_on_loop(self, cls: type[BaseException]) -> None:
        raise cls()

    @batched(Fill(2, 0.1))
    async def throw_in_a_batch(self, classes: list[type[BaseException]]) -> list[int]:
        raise classes[0]()

    async def waits(self) -> None:
        """Wait, and cancel each call that has not begun, when it is cancelled itself."""
        try:
            await self.gate.passed()
        finally:
            for task in asyncio.all_tasks() - {asyncio.current_task()}:
                if "number" in task.get_name():
                    task.cancel()

    async def number(self, number: int) -> int:
        return number

    async def stop_iteration(self) -> None:
        raise StopIteration


@exclusive
class Exclusive(Agent):
    """One call at a time."""


agents = pytest.mark.parametrize("agent", [Agent, Exclusive])


async def ended(agent: RRef[Any], call: Coroutine[Any, Any, Any]) -> BaseException:
    """Return what a call raises. Further calls of the object are served after it."""
    async with asyncio.timeout(SOON):
        try:
            await call
        except Exception as exc:
            assert await remote(agent).number(3) == 3
            return exc
    raise AssertionError


async def drained(stream: Any) -> None:
    async for _ in stream:
        pass


@agents
@pytest.mark.parametrize("method", ["plain", "on_loop"])
@pytest.mark.parametrize("cls", [Guarded, Unpicklable, Exits])
async def test_results_that_cannot_be_sent(agent: type[Agent], method: str, cls: type) -> None:
    rref = await create(0, agent)
    await ended(rref, getattr(remote(rref), method)(cls))


@agents
@pytest.mark.parametrize("cls", [Guarded, Unpicklable, Exits])
async def test_a_generator_that_raises_as_it_is_closed(agent: type[Agent], cls: type) -> None:
    """It is closed since its item cannot be sent. Its caller gets what it raises then."""
    rref = await create(0, agent)
    found = await ended(rref, drained(remote(rref).items(cls)))
    assert str(found) == "in the finally"


@agents
@pytest.mark.parametrize("method", ["plain", "on_loop"])
@pytest.mark.parametrize("cls", [Guarded, Proxy])
async def test_what_is_no_iterator(agent: type[Agent], method: str, cls: type) -> None:
    rref = await create(0, agent)
    await ended(rref, drained(getattr(remote(rref), method)(cls)))


@agents
@pytest.mark.parametrize("method", ["throw", "throw_on_loop", "throw_in_a_batch"])
@pytest.mark.parametrize("cls", [KeyedError, Untold, Truthless])
async def test_exceptions_whose_methods_raise(
    agent: type[Agent], method: str, cls: type[BaseException]
) -> None:
    """Of a call, of a group, and of an item of a map."""
    rref = await create(0, agent)
    assert isinstance(await ended(rref, getattr(remote(rref), method)(cls)), cls)
    group: Any = Group([rref, rref])
    found: Any = await ended(rref, getattr(remote(group), method)(cls))
    assert [type(each) for each in found.exceptions] == [cls, cls]
    results = group.map(getattr(Agent, method), [cls, cls])
    assert isinstance(await ended(rref, drained(results)), cls)


async def test_an_item_of_a_map_that_exits_as_it_is_pickled() -> None:
    """It is raised at its place."""
    rref = await create(0, Agent)
    items: Any = [1, Exits(), 3]
    results = Group([rref]).map(Agent.number, items)
    async with asyncio.timeout(SOON):
        assert await anext(results) == 1
        with pytest.raises(SystemExit, match="as it is pickled"):
            await anext(results)


async def test_a_log_handler_that_raises(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As that of pytest does for what it cannot format. The log has frames of this library."""

    def handle(_: logging.LogRecord) -> None:
        raise ZeroDivisionError("in a log handler")

    handler, log = logging.NullHandler(), logging.getLogger("aiorpc_torch")
    monkeypatch.setattr(handler, "handle", handle)
    monkeypatch.setattr(log, "handlers", [handler])
    caplog.set_level(logging.DEBUG, "aiorpc_torch")
    rref = await create(0, Agent)
    try:
        found = await ended(rref, remote(rref).stop_iteration())
    finally:
        monkeypatch.undo()
    assert str(found) == "coroutine raised StopIteration"


# ── tasks that other code cancels before their first step ──────────────────────────────────────


@agents
async def test_a_call_that_is_cancelled_before_it_begins(agent: type[Agent]) -> None:
    """By code of its worker, which cancels tasks that it does not know."""
    rref, other = await create(0, Agent), await create(0, agent)
    waiting = asyncio.create_task(remote(rref).waits())
    await remote(rref).number(0)
    await rref.local_value().gate.entered()
    waiting.cancel()
    await asyncio.sleep(0)
    async with asyncio.timeout(SOON):
        found = await asyncio.gather(
            *(remote(other).number(n) for n in range(3)), return_exceptions=True
        )
        assert await remote(other).number(3) == 3
    assert isinstance(found[0], RemoteError)
    assert "CancelledError" in str(found[0])


@pytest.fixture
async def cancels() -> AsyncIterator[Callable[[str], None]]:
    """Let each new task of a coroutine with that name be cancelled at once."""
    loop = asyncio.get_running_loop()
    names = list[str]()

    def make(
        loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any
    ) -> "asyncio.Task[Any]":
        task = asyncio.Task(coroutine, loop=loop, **options)
        if coroutine.__name__ in names:
            task.cancel()
        return task

    loop.set_task_factory(make)  # type: ignore[arg-type]
    yield names.append
    loop.set_task_factory(None)


async def test_a_map_whose_task_is_cancelled(cancels: Callable[[str], None]) -> None:
    rref = await create(0, Agent)
    cancels("_take_items")
    async with asyncio.timeout(SOON):
        with pytest.raises(asyncio.CancelledError):
            await anext(Group([rref]).map(Agent.number, [1]))
