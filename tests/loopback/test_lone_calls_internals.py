"""Frames of lone calls: what is sent, what cannot be read, and what cannot be encoded."""

import asyncio
from typing import Any

import pytest
import torch

from aiorpc_torch import RRef, remote
from aiorpc_torch._channel import Channel
from aiorpc_torch._client.pool import current
from aiorpc_torch._server import session
from aiorpc_torch._wire.frames import CALLS, HEADER, HEADER_BYTES, RESULTS
from aiorpc_torch._wire.messages import decode_reply
from aiorpc_torch._wire.plain import dump
from tests.support.raw_connections import server
from tests.support.received_calls import load_calls
from tests.unit.wire.test_messages import same

from .test_lone_calls import Echo


@pytest.mark.promise("order.lone")
async def test_a_lone_call_and_its_result_are_all_that_is_sent(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lone call of a connection that is open, and its result."""
    seen: list[tuple[int, bytes]] = []
    write = Channel.write

    def watched(channel: Channel, data: bytes) -> None:
        seen.append((HEADER.unpack_from(data)[1], data[HEADER_BYTES:]))
        write(channel, data)

    echo = remote(RRef(Echo()))
    await echo.on_loop(1)
    monkeypatch.setattr(Channel, "write", watched)
    await echo.on_loop(torch.ones(4))
    assert [kind for kind, _ in seen] == [CALLS, RESULTS]
    (_, call), (_, result) = seen
    assert [group.columns for group in load_calls(call)] == [[torch.ones(4).numpy().tobytes()]]
    ((_, value),) = decode_reply(result)
    assert same(value, torch.ones(4))


async def test_a_result_that_cannot_be_encoded(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch reports a lack of memory as a RuntimeError: its caller is answered all the same."""
    echo = remote(RRef(Echo()))
    await echo.on_loop(1)

    def fail(*_: Any) -> bytes:
        monkeypatch.undo()
        raise RuntimeError("can't allocate memory")

    monkeypatch.setattr(session, "dump", fail)
    async with asyncio.timeout(30.0):
        assert await echo.on_loop(2) == 2


@pytest.mark.parametrize(
    "columns",
    [[[1, 2]], [[]], [b"abc"], [], [[1], [2]], [[b"x", 1]]],
    ids=["two cells", "no cell", "bytes", "no column", "two columns", "cells of two calls"],
)
async def test_a_lone_call_that_cannot_be_read(world: Any, columns: Any) -> None:
    """Of a head that is known: it fails alone, as one among others, and later ones are served."""
    echo = remote(RRef(Echo()))
    assert [await echo.on_loop(1), await echo.on_loop(2)] == [1, 2]
    connection = current().connection("main")
    dispatcher = server().sessions[connection.key].dispatcher
    (head,) = [data for data, each in dispatcher.heads.items() if each.is_simple]
    served = dispatcher.served
    assert dispatcher.on_calls(dump(((head, (1 << 20,), columns),))) == 1
    assert dispatcher.served == served + 1
    assert await echo.on_loop(3) == 3
    async with asyncio.timeout(30.0):
        while dispatcher.calls:  # noqa: ASYNC110 - until its answer has left
            await asyncio.sleep(0.01)
