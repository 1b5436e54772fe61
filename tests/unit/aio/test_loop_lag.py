"""The lag of a loop, and who blocks it, as another thread sees them."""

import asyncio
import threading
from typing import Any

from aiorpc_torch._aio.loop_lag import LoopLag
from aiorpc_torch._aio.places import stack_of_thread
from aiorpc_torch._aio.tasks import Steps


async def test_a_blocked_loop_is_seen_from_another_thread() -> None:
    """And what blocks it: the name of the coroutine, else of the user's function."""
    lag, loop_thread = LoopLag(asyncio.get_running_loop()), threading.get_ident()
    probed, release, seen = threading.Event(), threading.Event(), list[Any]()

    def look() -> None:
        lag.probe()
        lag.probe()  # one is under way
        probed.set()
        release.wait()

    def hold() -> None:
        seen.append((lag.blocked_for(), stack_of_thread(loop_thread)))

    thread = threading.Thread(target=look)
    thread.start()
    probed.wait()  # blocks this loop until the probe is sent
    asking = threading.Thread(target=hold)
    asking.start()
    asking.join()
    release.set()
    thread.join()
    [(blocked, stack)] = seen
    assert blocked > 0.0
    assert stack.function.endswith("is_seen_from_another_thread")
    while lag.blocked_for():  # noqa: ASYNC110
        await asyncio.sleep(0)
    assert lag.longest(60.0) >= blocked
    assert lag.longest(-1.0) == 0.0


async def test_a_method_is_named_by_its_call() -> None:
    found: list[Any] = []

    async def method() -> None:
        thread = threading.Thread(
            target=lambda: found.append(stack_of_thread(ident)), name="of-the-test"
        )
        thread.start()
        thread.join()

    ident = threading.get_ident()
    await Steps(method(), "Policy.act")
    assert found[0].function == "Policy.act"
    assert any("method" in frame for frame in found[0].frames)


def test_a_thread_that_has_ended_has_no_stack() -> None:
    thread = threading.Thread(target=int)
    thread.start()
    thread.join()
    assert stack_of_thread(-1) is None
