"""A frame that a session cannot read."""

import asyncio
from operator import add

import pytest

from aiorpc_torch import RemoteError, call
from aiorpc_torch._wire.frames import frame
from tests.support.two_ends import TwoEnds, gated, until

from .test_session import ends

__all__ = ["ends"]

UNKNOWN = 99  # a kind of frame


async def test_a_frame_that_it_cannot_read_ends_it(
    ends: TwoEnds, caplog: pytest.LogCaptureFixture
) -> None:
    """The calls that run are cancelled; the caller is told why, and connects anew."""
    running, session = asyncio.ensure_future(call("far", gated, 1)), ends.session
    await ends.gate.wait_for()
    ends.connection.write(frame(UNKNOWN, b""))
    with pytest.raises(RemoteError, match=r"'far' has closed the connection: .* kind 99"):
        await running
    assert "rejected an unreadable frame" in caplog.text
    await until(lambda: session.ended.is_set() and ends.gate.cancelled)
    assert await call("far", add, 1, 2) == 3
    assert ends.session is not session
