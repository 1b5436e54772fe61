"""Steps of a start that may block without end: reads of files, lookups of names."""

from collections.abc import Callable
from typing import TypeVar

from .._aio.blocking import Blocked, BlockingCall
from ..errors import WorldTimeout

T = TypeVar("T")

MIN_STEP = 1.0  # seconds for a step, also where less of the timeout is left


async def start_step(step: Callable[[], T], timeout: float, left: float | None = None) -> T:
    """Run a step of a start in a thread, and return its result.

    Args:
        step: a function that blocks.
        timeout: seconds of the whole start.
        left: seconds of it that are left (default: all).

    Raises:
        WorldTimeout: if the step does not end in time; it names what does not answer.
    """
    call = BlockingCall(step, "a step of the start does not end")
    try:
        return await call.result(max(timeout if left is None else left, MIN_STEP))
    except Blocked as exc:
        raise WorldTimeout(f"no world within {timeout:g} s: {exc}") from exc
