"""Calls that an executor runs, without a connection."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from aiorpc_torch._server.calls import ServerCall
from aiorpc_torch._server.executor import Executor
from aiorpc_torch.errors import CallTimeout, WorkerLeft

SOON = 30.0  # seconds after which something will never happen


class Call(ServerCall):
    """A call whose end is a future."""

    def __init__(self, function: Callable[..., Any], *args: Any, on_loop: bool = False) -> None:
        super().__init__(function, (args, {}))
        self.on_loop, self.worker, self.started = on_loop, "w", 0.0
        self.ended: asyncio.Future[Any] = asyncio.Future()
        self.ended.add_done_callback(asyncio.Future.exception)  # or asyncio logs it in a later test
        self._loop = asyncio.get_running_loop()

    def succeed(self, value: Any) -> None:
        self._end(self.ended.set_result, value)

    def fail(self, exc: BaseException) -> None:
        self._end(self.ended.set_exception, exc)

    def _end(self, end: Callable[[Any], None], outcome: Any) -> None:
        self._loop.call_soon_threadsafe(lambda: self.ended.done() or end(outcome))


@pytest.fixture
async def executor() -> AsyncIterator[Executor]:
    executor = Executor(2)
    yield executor
    executor.close(SOON, "w")


async def end_of(call: Call) -> Any:
    """The value of a call, or its error."""
    async with asyncio.timeout(SOON):
        return (await asyncio.gather(call.ended, return_exceptions=True))[0]


async def test_a_generator_that_gets_no_thread(executor: Executor) -> None:
    """It is none that runs: a pause of its object would wait for it without end."""

    def refuse(_: Any) -> None:
        raise RuntimeError("can't start new thread")

    executor.submit_to_threads = refuse  # type: ignore[method-assign]
    call: Any = Call(lambda: None)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        executor._submit_rest(call, lambda: None)
    assert executor.in_threads == set()


@pytest.mark.parametrize("on_loop", [True, False])
async def test_a_call_past_its_deadline_never_runs(executor: Executor, on_loop: bool) -> None:
    """Its error says so."""
    call = Call(pytest.fail, "it ran", on_loop=on_loop)
    call.deadline = time.monotonic()
    executor.start([call])
    error = await end_of(call)
    assert isinstance(error, CallTimeout)
    assert not error.may_have_run


@pytest.mark.parametrize("on_loop", [True, False])
async def test_a_call_cancelled_before_it_starts_never_runs(
    executor: Executor, on_loop: bool
) -> None:
    call = Call(pytest.fail, "it ran", on_loop=on_loop)
    executor.cancel(call)
    executor.start([call])
    assert isinstance(await end_of(call), asyncio.CancelledError)


async def test_a_second_cancellation_does_not_interrupt_the_cleanup(executor: Executor) -> None:
    begun, cleaning, gate = asyncio.Event(), asyncio.Event(), asyncio.Event()
    cleaned = []

    async def waits() -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            cleaning.set()
            await gate.wait()
            cleaned.append("all")

    call = Call(waits, on_loop=True)
    executor.start([call])
    async with asyncio.timeout(SOON):
        await begun.wait()
        executor.cancel(call)
        await cleaning.wait()
    executor.cancel(call)
    gate.set()
    assert isinstance(await end_of(call), asyncio.CancelledError)
    assert cleaned == ["all"]


async def test_no_call_overtakes_one_that_starts_after_a_cancelled_coroutine(
    executor: Executor,
) -> None:
    """Its start is scheduled, behind a callback that starts the next call."""
    waiting, started, loop = asyncio.Event(), list[str](), asyncio.get_running_loop()

    async def note(name: str) -> None:
        started.append(name)

    cancelled = Call(waiting.wait, on_loop=True)
    first, second = (Call(note, name, on_loop=True) for name in ("first", "second"))
    executor.start([cancelled])
    await asyncio.sleep(0)
    executor.cancel(cancelled)
    loop.call_soon(executor.start, [second])
    executor.start([first])
    await asyncio.gather(end_of(first), end_of(second))
    assert started == ["first", "second"]


async def test_no_plain_function_overtakes_a_call_whose_start_is_scheduled(
    executor: Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It goes to a thread after that; a later coroutine starts after both."""
    waiting, started, submit = asyncio.Event(), list[str](), executor.submit_to_threads

    async def note(name: str) -> None:
        started.append(name)

    def note_threads(*tasks: Any) -> None:
        started.append("plain")
        submit(*tasks)

    monkeypatch.setattr(executor, "submit_to_threads", note_threads)
    cancelled = Call(waiting.wait, on_loop=True)
    first, last = (Call(note, name, on_loop=True) for name in ("first", "last"))
    plain = Call(int, on_loop=False)
    executor.start([cancelled])
    await asyncio.sleep(0)
    executor.cancel(cancelled)
    executor.start([first, plain])
    executor.start([last])
    await asyncio.gather(end_of(first), end_of(plain), end_of(last))
    assert started == ["first", "plain", "last"]


async def test_refused_calls_never_run(executor: Executor) -> None:
    executor.refusal = lambda: WorkerLeft("it has left")
    call = Call(pytest.fail, "it ran", on_loop=True)
    executor.start([call])
    assert isinstance(await end_of(call), WorkerLeft)
