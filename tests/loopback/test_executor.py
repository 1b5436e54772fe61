"""How a worker runs the calls that it gets: in order, on the loop and in its threads."""

import asyncio
import contextvars
import threading
from typing import Any

import pytest

import aiorpc_torch as aiorpc
from aiorpc_torch import RemoteError, RRef, remote
from aiorpc_torch.testing import world

SOON = 30.0  # seconds after which something will never happen
VARIABLE: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="")


class Served:
    """Calls of it are served."""

    def __init__(self) -> None:
        self.started: list[Any] = []
        self.begun = threading.Semaphore(0)
        self.gate = threading.Event()

    async def on_loop(self, name: str) -> None:
        self.started.append(name)

    def plain(self, name: Any) -> Any:
        self.begun.release()
        assert self.gate.wait(SOON)
        self.started.append(name)
        return name

    def numbered(self, number: int) -> int:
        self.started.append(number)
        self.begun.release()
        assert self.gate.wait(SOON)
        return number

    async def sets(self) -> str:
        before = VARIABLE.get()
        VARIABLE.set("set")
        return before

    def sets_in_a_thread(self) -> str:
        before = VARIABLE.get()
        VARIABLE.set("set")
        return before

    async def inner(self) -> tuple[str, bool]:
        return VARIABLE.get(), threading.current_thread() is threading.main_thread()

    def coroutine(self) -> Any:
        VARIABLE.set("of the thread")
        return self.inner()

    async def ends(self, error: type[BaseException]) -> None:
        raise error

    def ends_in_a_thread(self, error: type[BaseException]) -> None:
        raise error


async def test_calls_start_in_order() -> None:
    """Those on the loop run to their first wait at once; plain ones, in threads, as they came."""
    async with world(threads=2):
        served = Served()
        proxy = remote(RRef(served))
        calls = [
            asyncio.ensure_future(each)
            for each in (proxy.on_loop("a"), proxy.plain("b"), proxy.on_loop("c"))
        ]
        await asyncio.gather(calls[0], calls[2])
        assert served.started == ["a", "c"]
        served.gate.set()
        await calls[1]
        assert served.started == ["a", "c", "b"]


async def test_plain_calls_wait_for_a_thread() -> None:
    """Beyond the number of threads they wait, and start in order."""
    async with world(threads=2):
        served = Served()
        proxy = remote(RRef(served))
        calls = [asyncio.ensure_future(proxy.numbered(number)) for number in range(5)]
        for _ in range(2):
            assert await asyncio.to_thread(served.begun.acquire, timeout=SOON)
        assert sorted(served.started) == [0, 1]
        served.gate.set()
        assert await asyncio.gather(*calls) == [0, 1, 2, 3, 4]
        assert sorted(served.started[2:4]) == [2, 3]


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("method", ["ends", "ends_in_a_thread"])
async def test_no_exception_of_a_call_ends_the_worker(
    method: str, error: type[BaseException]
) -> None:
    """Not even one that ends a process: it is the caller's."""
    proxy: Any = remote(RRef(Served()))
    with pytest.raises(RemoteError, match=error.__name__):
        await getattr(proxy, method)(error)
    assert await proxy.sets() == ""


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize("method", ["sets", "sets_in_a_thread"])
async def test_what_a_call_sets_is_its_own(method: str) -> None:
    """Each has a copy of the context in which the worker was started."""
    proxy: Any = remote(RRef(Served()))
    for _ in range(3):
        assert await getattr(proxy, method)() == ""


@pytest.mark.usefixtures("world")
async def test_a_coroutine_behind_a_plain_function() -> None:
    """It runs on the loop, in the context of its thread."""
    assert await remote(RRef(Served())).coroutine() == ("of the thread", True)


async def test_threads_that_do_not_end_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    served = Served()
    with pytest.raises(LookupError):  # noqa: PT012
        async with aiorpc.local_world(0, threads=1, stop_timeout=0.2):
            call = asyncio.ensure_future(remote(RRef(served)).plain(1))
            assert await asyncio.to_thread(served.begun.acquire, timeout=SOON)
            raise LookupError
    assert "1 plain `def` calls still run on worker main" in caplog.text
    served.gate.set()
    with pytest.raises(aiorpc.RpcError):
        await call
