"""What the tests' own servers do with a connection that comes as they are closed."""

import asyncio
import contextlib
import gc
import socket
import sys
from typing import Any

import pytest

from tests.support.servers import serving


@pytest.mark.parametrize("steps", range(4))
async def test_a_connection_that_comes_as_the_server_is_closed(
    steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In whichever iteration of the loop: nothing is left open."""
    unraisable: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", unraisable.append)

    def abort(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.transport.abort()

    async with serving(asyncio.start_server(abort, "127.0.0.1", 0)) as server:
        dialled = socket.create_connection(server.sockets[0].getsockname(), 30.0)
        for _ in range(steps):
            await asyncio.sleep(0)
    with dialled, contextlib.suppress(ConnectionResetError):
        assert await asyncio.to_thread(dialled.recv, 1) == b""
    gc.collect()
    assert unraisable == []
