"""Where calls stand, as tests ask for it."""

import asyncio
import contextlib
import inspect
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from aiorpc_torch import CallTimeout
from aiorpc_torch.observe import where
from aiorpc_torch.types import Standings

SOON = 30.0  # seconds
TRIES = 10


def line_of(function: Any, text: str) -> str:
    """Return the file and the number of the line of a function with that text, as it is shown."""
    function = inspect.unwrap(function)
    lines, first = inspect.getsourcelines(function)
    (found,) = (first + number for number, line in enumerate(lines) if text in line)
    return f"{inspect.getsourcefile(function)}:{found} in {function.__qualname__}"


class Guard:
    """A lock for the `async with` of callers."""

    def __init__(self) -> None:
        self.lock = asyncio.Lock()

    @contextlib.asynccontextmanager
    async def hold(self) -> AsyncIterator[None]:
        async with self.lock:
            yield


async def until_late(call: Callable[[], Any], *texts: str) -> CallTimeout:
    """Return the error of a call that times out, with these texts.

    The call is made again if the workers have not told in time: others keep the machine busy.
    """
    for _ in range(TRIES):
        with pytest.raises(CallTimeout) as raised:
            await call()
        if all(each in str(raised.value) for each in texts):
            return raised.value
    raise AssertionError(f"{texts} not in:\n{raised.value}")


async def until_stands(*texts: str, ask: Callable[[], Any] = where) -> Standings:
    """Return where calls stand once all these texts are in it."""
    found = Standings()
    try:
        async with asyncio.timeout(SOON):
            while not all(each in str(found) for each in texts):
                found = await ask()
                await asyncio.sleep(0.01)  # it does not wait if there are no calls
    except TimeoutError:
        raise AssertionError(f"{texts} not in:\n{found}") from None
    return found
