"""An event loop in a thread of its own."""

import asyncio
import threading

from aiorpc_torch._aio.loops import LoopThread, call_soon

SOON = 30.0


def test_it_serves_until_it_is_closed() -> None:
    found: list[str] = []
    called = threading.Event()

    async def serve() -> None:
        await thread.closing.wait()
        found.append(threading.current_thread().name)

    thread = LoopThread("aiorpc-test", serve)
    thread.start()
    call_soon(thread.loop, called.set)
    assert called.wait(SOON)
    assert not found
    thread.close(SOON)
    assert found == ["aiorpc-test"]
    assert thread.loop.is_closed()


def test_what_is_scheduled_before_the_start_runs() -> None:
    """Its owner may use the loop as soon as there is one."""
    found: list[asyncio.AbstractEventLoop] = []

    async def serve() -> None:
        await thread.closing.wait()

    thread = LoopThread("aiorpc-test", serve)
    call_soon(thread.loop, lambda: found.append(asyncio.get_running_loop()))
    thread.start()
    thread.close(SOON)
    assert found == [thread.loop]
