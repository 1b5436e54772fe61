"""Futures of torch as awaitables."""

import asyncio
import gc
import threading
import weakref
from typing import Any

import pytest
import torch
from torch.futures import Future

import aiorpc_torch as aiorpc
from aiorpc_torch.testing import done_future, failed_future, on_a_thread


class Odd(Exception):
    """Not to be made again from its arguments."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(f"{code}: {reason}")
        self.code = code


async def iterations(count: int = 3) -> None:
    """Let the event loop run what is due."""
    for _ in range(count):
        await asyncio.sleep(0)


async def test_a_done_future() -> None:
    """What is done already is there at once, without a loop iteration."""
    awaited = aiorpc.wrap_future(done_future([1, 2]))
    assert awaited.done()
    assert await awaited == [1, 2]


@pytest.mark.promise("calls.futures")
async def test_a_pending_future() -> None:
    """It is awaited until it completes."""
    future: Future[int] = Future()
    awaited = aiorpc.wrap_future(future)
    await iterations()
    assert not awaited.done()
    future.set_result(7)
    assert await awaited == 7


@pytest.mark.parametrize("value", [None, False, 0, (), ValueError("a value"), torch.ones(3)])
@pytest.mark.parametrize("early", [True, False])
async def test_the_result_is_the_very_object(value: object, early: bool) -> None:
    """Nothing is copied or interpreted on the way, not even an exception that is a result."""
    future: Future[Any] = Future()
    if early:
        future.set_result(value)
    awaited = aiorpc.wrap_future(future)
    if not early:
        on_a_thread(lambda: future.set_result(value))
    got = await awaited
    if isinstance(value, torch.Tensor):
        assert got.data_ptr() == value.data_ptr()
    else:
        assert got is value


async def test_completed_from_another_thread() -> None:
    """The awaiting task resumes on its own loop's thread, woken by the completion."""
    future: Future[str] = Future()
    go = threading.Event()

    def work() -> None:
        go.wait()
        future.set_result(threading.current_thread().name)

    thread = threading.Thread(target=work, name="completes")
    thread.start()
    here = threading.current_thread()
    awaited = aiorpc.wrap_future(future)
    go.set()
    assert await awaited == "completes"
    assert threading.current_thread() is here
    thread.join()


@pytest.mark.promise("calls.futures")
async def test_many_are_completed_in_any_order() -> None:
    """Each awaits its own, whatever the order and the thread of the completions."""
    futures: list[Future[int]] = [Future() for _ in range(1_000)]
    awaited = [aiorpc.wrap_future(future) for future in futures]

    def complete(some: list[int]) -> None:
        for index in some:
            futures[index].set_result(index)

    threads = [
        threading.Thread(target=complete, args=(list(range(start, 1_000, 4))[::-1],))
        for start in range(4)
    ]
    for thread in threads:
        thread.start()
    assert await asyncio.gather(*awaited) == list(range(1_000))
    for thread in threads:
        thread.join()


async def test_several_awaits_of_one_future() -> None:
    """A torch future may be wrapped more than once, and wrapped again after it is done."""
    future: Future[int] = Future()
    awaited = [aiorpc.wrap_future(future) for _ in range(3)]
    future.set_result(1)
    assert await asyncio.gather(*awaited, aiorpc.wrap_future(future)) == [1, 1, 1, 1]


@pytest.mark.promise("calls.futures")
@pytest.mark.parametrize("exc", [ValueError("x"), KeyError("k"), Odd(3, "odd"), OSError(2, "x")])
@pytest.mark.parametrize("early", [True, False])
async def test_an_error_raises_as_itself(exc: Exception, early: bool) -> None:
    """The very exception that was set is raised by the await."""
    future: Future[Any] = failed_future(exc) if early else Future()
    awaited = aiorpc.wrap_future(future)
    if not early:
        future.set_exception(exc)
    with pytest.raises(type(exc)) as caught:
        await awaited
    assert caught.value is exc


async def test_an_error_of_a_callback() -> None:
    """What a `then` raises is an error of the future it made, told with its text."""
    first: Future[int] = Future()
    awaited = aiorpc.wrap_future(first.then(lambda done: 1 // (done.wait() - 1)))
    first.set_result(1)
    with pytest.raises(Exception, match="division") as caught:
        await awaited
    assert not isinstance(caught.value, asyncio.InvalidStateError)


@pytest.mark.parametrize("early", [True, False])
async def test_stop_iteration_is_an_error_like_any_other(early: bool) -> None:
    """asyncio refuses it in a future and a coroutine cannot raise it: RuntimeError says so."""
    future: Future[Any] = failed_future(StopIteration(3)) if early else Future()
    awaited = aiorpc.wrap_future(future)
    if not early:
        future.set_exception(StopIteration(3))
    with pytest.raises(RuntimeError, match="StopIteration"):
        await awaited


@pytest.mark.parametrize("early", [True, False])
async def test_the_result_is_waited_for_and_not_peeked_at(
    early: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`wait()` orders CUDA streams and `value()` does not; it is called on the loop's thread."""
    calls: list[tuple[str, threading.Thread]] = []
    base = torch._C.Future

    def spy(name: str) -> None:
        original = getattr(base, name)

        def called(self: Any) -> Any:
            calls.append((name, threading.current_thread()))
            return original(self)

        monkeypatch.setattr(base, name, called)

    spy("wait")
    spy("value")
    future: Future[int] = Future()
    if early:
        future.set_result(1)
    awaited = aiorpc.wrap_future(future)
    if not early:
        on_a_thread(lambda: future.set_result(1))
    assert await awaited == 1
    assert calls == [("wait", threading.current_thread())]


# ── those who no longer wait ────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("fails", [True, False])
async def test_a_cancelled_task_does_not_hear_of_it(
    fails: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    """The result is dropped, an error too, and nothing is printed anywhere."""
    future: Future[int] = Future()
    started = asyncio.Event()

    async def wait() -> int:
        started.set()
        return await aiorpc.wrap_future(future)

    task = asyncio.create_task(wait())
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    if fails:
        future.set_exception(ValueError("nobody hears this"))
    else:
        future.set_result(1)
    await iterations()
    assert task.cancelled()
    assert capfd.readouterr().err == ""


async def test_one_who_is_cancelled_does_not_disturb_the_others() -> None:
    """Cancelling one wrapper of a future leaves the future and its other wrappers alone."""
    future: Future[int] = Future()
    one, other = aiorpc.wrap_future(future), aiorpc.wrap_future(future)
    one.cancel()
    future.set_result(5)
    assert await other == 5
    assert one.cancelled()


async def test_a_timeout_around_it() -> None:
    """`asyncio.timeout` ends the wait, and the late result is dropped."""
    future: Future[int] = Future()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0):
            await aiorpc.wrap_future(future)
    future.set_result(1)
    await iterations()


@pytest.mark.parametrize("fails", [True, False])
def test_a_closed_loop_is_left_in_peace(fails: bool, capfd: pytest.CaptureFixture[str]) -> None:
    """A completion after the loop is closed is dropped in silence, on whichever thread it comes."""
    future: Future[int] = Future()

    async def give_up() -> None:
        aiorpc.wrap_future(future)

    asyncio.run(give_up())
    set_it = (
        (lambda: future.set_exception(ValueError())) if fails else (lambda: future.set_result(1))
    )
    on_a_thread(set_it)
    gc.collect()
    assert future.done()
    assert capfd.readouterr() == ("", "")


def test_a_second_loop_in_the_same_process() -> None:
    """Each loop gets what was awaited on it; one that is gone does not stand in the way."""

    async def main(value: int) -> int:
        future: Future[int] = Future()
        awaited = aiorpc.wrap_future(future)
        on_a_thread(lambda: future.set_result(value))
        return await awaited

    assert [asyncio.run(main(value)) for value in range(3)] == [0, 1, 2]


def test_two_loops_at_once() -> None:
    """One future awaited on the loops of two threads completes on both."""
    future: Future[int] = Future()
    ready = threading.Barrier(3)
    results: list[int] = []

    async def main() -> int:
        awaited = aiorpc.wrap_future(future)
        ready.wait()
        return await awaited

    threads = [
        threading.Thread(target=lambda: results.append(asyncio.run(main()))) for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    ready.wait()
    future.set_result(9)
    for thread in threads:
        thread.join()
    assert results == [9, 9]


class Result:
    """Something to be watched until it is gone."""


async def test_thousands_leave_nothing_behind() -> None:
    """Results, futures and wrappers go when the caller lets go, served or given up."""
    watched: weakref.WeakSet[object] = weakref.WeakSet()
    for number in range(3_000):
        future: Future[Any] = Future()
        awaited = aiorpc.wrap_future(future)
        value = Result()
        for thing in (value, awaited, future):
            watched.add(thing)
        if number % 3 == 0:
            awaited.cancel()
        future.set_result(value)
        if number % 3 == 1:
            assert await awaited is value
    del future, awaited, value, thing
    await iterations(3_000 // 256 + 3)
    gc.collect()
    assert len(watched) == 0


def test_loops_are_not_kept() -> None:
    """Having awaited on a loop does not keep it alive once it is closed."""

    async def main() -> "weakref.ref[asyncio.AbstractEventLoop]":
        future: Future[int] = Future()
        awaited = aiorpc.wrap_future(future)
        future.set_result(1)
        await awaited
        return weakref.ref(asyncio.get_running_loop())

    loops = [asyncio.run(main()) for _ in range(3)]
    gc.collect()
    assert [loop() for loop in loops] == [None] * 3


# ── misuse, and what torch says ─────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("thing", [None, 1, "future", object(), threading.Event()])
async def test_only_torch_futures(thing: Any) -> None:
    """A TypeError that says what is wanted and shows what came."""
    with pytest.raises(TypeError, match=r"torch\.futures\.Future, got "):
        aiorpc.wrap_future(thing)


async def test_an_asyncio_future_is_none_of_torchs() -> None:
    """Nor is a coroutine; both are awaited as they are."""
    with pytest.raises(TypeError, match=r"torch\.futures\.Future, got <Future pending"):
        aiorpc.wrap_future(asyncio.get_running_loop().create_future())  # type: ignore[arg-type]


def test_needs_a_running_loop() -> None:
    """Outside a coroutine there is nothing to wake."""
    with pytest.raises(RuntimeError, match="no running event loop"):
        aiorpc.wrap_future(done_future(1))


@pytest.mark.promise("calls.futures")
async def test_what_rpc_async_returns_is_taken_too() -> None:
    """Its class is not torch.futures.Future but the base of it."""
    future = torch._C.Future([])
    awaited = aiorpc.wrap_future(future)  # type: ignore[arg-type]
    future.set_result(4)
    assert await awaited == 4
