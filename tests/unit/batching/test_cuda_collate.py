"""Batches on a device, by doubles of streams: what is queued behind what."""

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

from aiorpc_torch._batching.collate import Collation
from aiorpc_torch._batching.cuda_collate import CudaCollator
from aiorpc_torch._batching.function import BatchFunction
from aiorpc_torch._torch.cuda import note_delivered
from tests.support.cuda_doubles import ONE, ZERO, CudaTensor, Streams


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    monkeypatch.setattr(CudaCollator, "to_device", lambda _, tensor: tensor)  # there is none
    return Streams().install(monkeypatch)


def batch_function(function: Callable[..., Any]) -> BatchFunction:
    return BatchFunction(function, is_method=False, collation=Collation(device="cuda"))


def test_the_stream_is_of_a_pool_of_its_own(streams: Streams) -> None:
    """torch RPC takes the streams of its transfers from the 32 of priority 0."""
    assert CudaCollator(torch.device("cuda")).device == ZERO
    assert streams.log == [("new", "stream 1", -1)]


def test_results_on_another_gpu(streams: Streams) -> None:
    """Are copied by a call that blocks: the event of this stream would not cover the copy."""
    copied, _ = CudaCollator(ZERO).to_host([CudaTensor.on(ONE), torch.ones(1)])
    assert copied[0] == "copied to the CPU"
    assert streams.log[-1] == ("record", "stream 1")


async def test_each_step_of_a_coroutine_is_behind_the_stream_of_the_loop(
    streams: Streams,
) -> None:
    """What it awaits arrives on the latter, and is then used on the batch's stream as well."""
    arrived, later = CudaTensor.on(ZERO), CudaTensor.on(ZERO)
    here: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    async def function(items: Any) -> Any:
        streams.log.append(("first step", str(torch.cuda.current_stream())))
        await here
        streams.log.append(("second step", str(torch.cuda.current_stream())))
        return items

    batch = asyncio.create_task(batch_function(function).run(None, [(1,), (2,)]))
    await asyncio.sleep(0)
    assert str(torch.cuda.current_stream()) == "default of cuda:0"
    note_delivered([arrived])
    here.set_result(None)
    assert await batch == [1, 2]
    note_delivered([later])
    loop, own = "default of cuda:0", "stream 1"
    behind = [("record", loop), ("wait", own, loop)]
    steps = [entry for entry in streams.log if entry[0] != "new"]
    assert steps[:8] == [
        *behind,  # the arguments
        *behind,
        ("first step", own),
        *behind,
        ("second step", own),
    ]
    assert (arrived.used_on, later.used_on) == ([own], [])


async def test_a_plain_function_is_behind_the_arguments(streams: Streams) -> None:
    """In its thread, on the stream of the batch."""

    def function(items: Any) -> Any:
        streams.log.append(("called", str(torch.cuda.current_stream())))
        return items

    assert await batch_function(function).run(None, [(1,)]) == [1]
    loop, own = "default of cuda:0", "stream 1"
    assert streams.log[1:] == [
        ("record", loop),
        ("wait", own, loop),
        ("called", own),
        ("record", own),
        ("synchronize", "unrecorded"),
    ]


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("concat", [False, True])
def test_rows_on_a_device_are_used_on_the_stream_of_the_batch(
    streams: Streams, requires_grad: bool, concat: bool
) -> None:
    rows = [CudaTensor.on(ZERO) for _ in range(2)]
    for row in rows:
        row.requires_grad_(requires_grad)
    collator = CudaCollator(ZERO, concat=concat)
    with collator.on_stream(), contextlib.suppress(Exception):  # perhaps there is no device
        collator.join(rows)
    assert [row.used_on for row in rows] == [["stream 1"]] * 2
