"""Interceptors: what they are told of calls, at both ends."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextvars import Context, ContextVar
from typing import Any

import pytest

import aiorpc_torch as aiorpc
from aiorpc_torch import CallTimeout, Group, RRef, batched, remote
from aiorpc_torch.observe import CallInfo, Interceptor
from aiorpc_torch.testing import Gate
from tests.support.hooks import hooks as hooks
from tests.support.logs import logged
from tests.support.slack import BEGUN

pytestmark = pytest.mark.usefixtures("hooks", "world")

SET_BY: ContextVar[str] = ContextVar("tests.interception", default="none")


class Model:
    async def answer(self) -> str:
        return SET_BY.get()

    def in_thread(self) -> str:
        return SET_BY.get()

    def fail(self) -> None:
        raise LookupError("no answer")

    async def items(self) -> AsyncIterator[int]:
        yield 1
        yield 2

    @batched(max_size=2, max_wait=30.0)
    async def together(self, xs: list[int]) -> list[int]:
        return xs


class Notes(Interceptor):
    """Notes what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[str, str, str]] = []
        self.ends: list[tuple[str, str, str]] = []
        self.calls: list[CallInfo] = []

    def note(self, side: str, call: CallInfo) -> Callable[[BaseException | None], None]:
        self.told.append((side, call.kind, call.method))
        self.calls.append(call)

        def end(failure: BaseException | None) -> None:
            self.ends.append((side, call.method, type(failure).__name__))

        return end

    def on_call(self, call: CallInfo) -> Any:
        return self.note("call", call)

    def on_receive(self, call: CallInfo) -> Any:
        SET_BY.set("on_receive")
        return self.note("receive", call)

    def on_batch(self, batch: CallInfo, callers: Sequence[Context]) -> Any:
        assert len(callers) == batch.size
        assert {each.get(SET_BY) for each in callers} == {"on_receive"}
        return self.note("batch", batch)


@pytest.fixture
def notes() -> Notes:
    found = Notes()
    aiorpc.observe.intercept(found)
    return found


@pytest.mark.promise("watching.interceptors")
async def test_both_ends_of_a_call(notes: Notes) -> None:
    """In the order of events; the method sees what the interceptor has set."""
    model = remote(RRef(Model()))
    for method in ("answer", "in_thread"):
        assert await getattr(model, method)() == "on_receive"
    sides = [(side, kind, method) for side, kind, method in notes.told]
    assert sides == [
        ("call", "call", "Model.answer"),
        ("receive", "call", "Model.answer"),
        ("call", "call", "Model.in_thread"),
        ("receive", "call", "Model.in_thread"),
    ]
    assert [end[0] for end in notes.ends] == ["receive", "call"] * 2
    assert {(each.worker, each.peer) for each in notes.calls} == {("main", "main")}
    assert SET_BY.get() == "none"


@pytest.mark.promise("watching.interceptors")
async def test_failures(notes: Notes) -> None:
    """The end has the exception, of the method, of a deadline and of a cancellation."""
    model = remote(RRef(Model()))
    with pytest.raises(LookupError):
        await model.fail()
    assert notes.ends == [
        ("receive", "Model.fail", "LookupError"),
        ("call", "Model.fail", "LookupError"),
    ]
    notes.ends.clear()
    gate = RRef(Gate())
    with pytest.raises(CallTimeout):
        await remote(gate, timeout=BEGUN).passed()
    assert notes.ends[0] == ("call", "Gate.passed", "CallTimeout")
    waiting = asyncio.create_task(remote(gate).passed())
    await remote(gate).entered()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert ("call", "Gate.passed", "CancelledError") in notes.ends
    await remote(gate).open()  # the cancelled calls have ended there too
    passed = [each for each in notes.ends if each[:2] == ("receive", "Gate.passed")]
    assert [each[2] for each in passed] == ["CancelledError"] * 2


@pytest.mark.promise("watching.interceptors")
async def test_streams_groups_maps_and_batches(notes: Notes) -> None:
    """Each member's call is one of its own; a batch is told with the contexts of its callers."""
    group = Group([RRef(Model()), RRef(Model())])
    assert [item async for item in remote(group[0]).items()] == [1, 2]
    assert ("receive", "stream", "Model.items") in notes.told
    notes.told.clear()
    notes.ends.clear()
    await remote(group).answer()
    assert (
        notes.told[:3]
        == [("call", "group", "Model.answer")] + [("call", "call", "Model.answer")] * 2
    )
    assert notes.calls[-5].size == 2
    assert notes.ends[-1] == ("call", "Model.answer", "NoneType")
    assert [x async for x in group.map(Model.together, range(4))] == [0, 1, 2, 3]
    assert [each[0] for each in notes.told].count("batch") == 2
    assert len(notes.ends) == len(notes.told)


async def test_a_stream_that_is_left_early(notes: Notes) -> None:
    """To leave is no failure of the caller's."""
    stream = aiter(remote(RRef(Model())).items())
    assert await anext(stream) == 1
    await stream.aclose()  # type: ignore[attr-defined]
    ends = [end for end in notes.ends if end[0] == "call"]
    assert ends == [("call", "Model.items", "NoneType")]


async def awaited(call: Any) -> Any:
    return await call


async def iterated(call: Any) -> Any:
    return [each async for each in call]


@pytest.mark.parametrize("run", [awaited, iterated])
async def test_a_group_call_that_fails_at_its_start(
    notes: Notes, run: Callable[[Any], Any]
) -> None:
    """Its end has the exception of the caller, once."""
    unpicklable: ContextVar[Any] = ContextVar("tests.interception.unpicklable")
    aiorpc.observe.propagate(unpicklable)
    unpicklable.set(lambda: None)
    with pytest.raises(Exception, match="pickl") as failed:
        await run(remote(Group([RRef(Model()), RRef(Model())])).answer())
    name = type(failed.value).__name__
    assert notes.ends == [("call", "Model.answer", name)] * 2  # of a member, and of the group


class Broken(Interceptor):
    def on_call(self, call: CallInfo) -> Any:
        raise LookupError("in on_call")

    def on_receive(self, call: CallInfo) -> Any:
        def end(_: BaseException | None) -> None:
            raise LookupError("at the end")

        return end


@pytest.mark.parametrize("given", [Interceptor, 3])
def test_what_is_no_interceptor(given: Any) -> None:
    """A class is one of them."""
    with pytest.raises(TypeError, match="takes an instance of Interceptor, got"):
        aiorpc.observe.intercept(given)


async def test_an_interceptor_that_fails(notes: Notes, caplog: pytest.LogCaptureFixture) -> None:
    """It is logged, and changes nothing for the call and for other interceptors."""
    remove = aiorpc.observe.intercept(Broken())
    assert await remote(RRef(Model())).answer() == "on_receive"
    assert len(notes.ends) == 2
    with caplog.at_level(logging.WARNING):
        texts = [record.getMessage() for record in caplog.records]
    assert any("in on_call" in text for text in texts)
    assert any("at the end" in text for text in texts)
    remove()
    caplog.clear()
    await remote(RRef(Model())).answer()
    assert not logged(caplog)


class Ended(BaseException):
    """As SystemExit is, and `pytest.fail`."""


class Ending(Interceptor):
    """Raises in one hook, or at the end that the hook returns."""

    def __init__(self, hook: str, *, at_end: bool) -> None:
        self._hook = hook
        self._at_end = at_end

    def _note(self, hook: str) -> Any:
        def end(_: BaseException | None) -> None:
            if hook == self._hook:
                raise Ended(hook)

        if not self._at_end:
            end(None)
        return end

    def on_call(self, call: CallInfo) -> Any:
        return self._note("on_call")

    def on_receive(self, call: CallInfo) -> Any:
        return self._note("on_receive")

    def on_batch(self, batch: CallInfo, callers: Sequence[Context]) -> Any:
        return self._note("on_batch")


@pytest.mark.promise("watching.interceptors")
@pytest.mark.parametrize("at_end", [False, True])
@pytest.mark.parametrize("hook", ["on_call", "on_receive", "on_batch"])
async def test_an_interceptor_that_raises_anything(notes: Notes, hook: str, at_end: bool) -> None:
    """Each call still has its result, and other interceptors are told of its end."""
    aiorpc.observe.intercept(Ending(hook, at_end=at_end))
    model = RRef(Model())
    async with asyncio.timeout(30):
        assert await remote(model).answer() == "on_receive"
        assert await remote(model).in_thread() == "on_receive"
        assert await asyncio.gather(*(remote(model).together(x) for x in range(2))) == [0, 1]
        assert len(await remote(Group([model, model])).answer()) == 2
    assert len(notes.ends) == len(notes.told)
