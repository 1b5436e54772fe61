"""Deadlines of streams, seen through a reader of this process."""

import asyncio
import time

import anyio
import pytest

from aiorpc_torch import CallTimeout
from aiorpc_torch._client.call import RemoteStream
from aiorpc_torch._client.stream_reader import StreamReader
from aiorpc_torch._wire.exceptions import RemoteFailure
from aiorpc_torch._wire.targets import FetchTarget

pytestmark = pytest.mark.usefixtures("world")


async def test_a_scope_is_reported_before_an_error_at_its_deadline() -> None:
    """The stream's error is here when a loop that was held comes to look: still the scope ends."""

    class Elsewhere:
        def cancel(self, number: int) -> None:
            """Nothing runs there."""

    def fail_late() -> None:
        while anyio.current_time() <= scope.deadline:
            """Hold the loop."""
        reader.add(0, RemoteFailure.of(CallTimeout("a nested call"), "b"), 0)

    reader = StreamReader()
    reader.connection, reader.target = Elsewhere(), FetchTarget((0, 0))
    with anyio.move_on_after(0.02) as scope:
        stream = RemoteStream(reader, time.monotonic() + 0.02, None)
        asyncio.get_running_loop().call_soon(fail_late)
        await anext(stream)
    assert scope.cancelled_caught
