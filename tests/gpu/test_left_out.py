"""Each test about an order fails without its part of the synchronization."""

import asyncio
import importlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch

from aiorpc_torch._batching.collate import Collation
from aiorpc_torch._batching.cuda_collate import CudaCollator
from aiorpc_torch._batching.function import BatchFunction
from aiorpc_torch._torch import agent
from aiorpc_torch._torch.agent import channel_names
from aiorpc_torch._torch.cuda import fence_tensors, sendable
from tests.gpu import (
    test_cuda_collate,
    test_cuda_collate_internals,
    test_staging,
    test_stream_order,
)
from tests.gpu.left_out import PARTS, leave_out
from tests.support.at_once import runs_at_once
from tests.support.cuda_actors import GPU, NEEDS, needs_device
from tests.support.cuda_doubles import ONE, ZERO, CudaTensor, Streams

HERE = Path(__file__).parent

# Over the CPU the callee has no message before its data: nothing is left to wait for.
ONLY_IPC = {"arguments", "delivery"}


def test_each_part_has_a_test() -> None:
    """`test_fails_without_it` tries that it can fail."""
    # They have noted theirs.
    modules = test_cuda_collate, test_cuda_collate_internals, test_staging, test_stream_order
    assert len({each.__name__ for each in modules}) == 4
    assert {*NEEDS.values()} == {*PARTS}


def run_without(test: str) -> str:
    """Run a test without its part, in every variant; return what went wrong, "" if it failed."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(HERE / test)],
            env={**os.environ, "AIORPC_TEST_WITHOUT": NEEDS[test]},
            capture_output=True,
            text=True,
            timeout=40,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return ""  # it hangs: that is a failure too
    words = done.stdout + done.stderr
    has_failed = done.returncode == 1 or done.returncode < 0  # some parts keep the process alive
    return "" if has_failed and not re.search(r"\d (passed|skipped)", words) else words


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest) -> Iterator[dict[str, Future[str]]]:
    with runs_at_once(request, "test", run_without) as found:
        yield found


@pytest.mark.parametrize("test", NEEDS)
@pytest.mark.parametrize("marks", [pytest.param((), marks=[*GPU, needs_device], id="gpu")])
def test_fails_without_it(test: str, marks: object, runs: dict[str, Future[str]]) -> None:
    if NEEDS[test] in ONLY_IPC and "cuda_ipc" not in (channel_names(None) or ["cuda_ipc"]):
        pytest.skip("these channels go through the CPU")
    words = runs[test].result()
    assert not words, words


# ── the patches, by doubles of streams ──────────────────────────────────────────────────────────


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    return Streams().install(monkeypatch)


def waits_in(streams: Streams) -> int:
    return len([entry for entry in streams.log if entry[0] == "wait"])


@pytest.mark.parametrize("part", PARTS)
def test_patches_are_undone(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every name in the library that a part replaces exists."""
    with monkeypatch.context() as patches:
        leave_out(part, patches)
    assert fence_tensors([torch.ones(1)]) is None


@pytest.mark.parametrize(
    ("part", "module", "name"),
    [
        ("arguments", "_server.server", "fence_tensors"),
        ("arguments", "_server.server", "fence_tree"),
        ("results", "_wire.pickling", "fence_tensors"),
        ("results", "_batching.function", "fence_tree"),
        ("deferred", "_server.reply", "fence_tensors"),
    ],
)
def test_without_an_order(
    streams: Streams, monkeypatch: pytest.MonkeyPatch, part: str, module: str, name: str
) -> None:
    """The allocator is told all the same, and other fences are whole."""
    tensor = CudaTensor.on(ZERO)
    leave_out(part, monkeypatch)
    fence = getattr(importlib.import_module(f"aiorpc_torch.{module}"), name)([tensor])
    fence.wait()
    assert (waits_in(streams), tensor.used_on) == (0, ["default of cuda:0"])
    whole: Any = fence_tensors([tensor])
    whole.wait()
    assert waits_in(streams) == 1


def test_without_a_note_to_the_allocator(streams: Streams, monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = CudaTensor.on(ONE)
    leave_out("memory", monkeypatch)
    fence: Any = fence_tensors([tensor])
    fence.wait()
    assert (waits_in(streams), tensor.used_on) == (1, [])


@pytest.mark.parametrize(("part", "waits"), [("batch", 0), ("delivery", 1), ("results", 3)])
def test_without_an_order_of_batches(
    streams: Streams, monkeypatch: pytest.MonkeyPatch, part: str, waits: int
) -> None:
    leave_out(part, monkeypatch)

    async def function(items: list[int]) -> list[int]:
        await asyncio.sleep(0)
        return items

    collation = Collation(device="cuda")
    batches = BatchFunction(function, is_method=False, collation=collation)
    batches._stacked = False  # what is stacked would need a device
    assert asyncio.run(batches.run(None, [(1,)])) == [1]
    assert waits_in(streams) == waits


def test_with_a_stream_of_torchs_pool(streams: Streams, monkeypatch: pytest.MonkeyPatch) -> None:
    leave_out("stream", monkeypatch)
    CudaCollator(ZERO)
    assert streams.log == [("new", "stream 1", 0)]


def test_without_forms_that_can_be_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    x, empty = torch.empty(2, 3, device="meta"), torch.empty(0, device="meta")
    with monkeypatch.context() as patches:
        leave_out("aliases", patches)
        found = sendable([x, x.T, torch.ones(1)])
        assert found[0].untyped_storage()._cdata == found[1].untyped_storage()._cdata
    leave_out("empty", monkeypatch)
    assert sendable([empty])[0] is empty


def test_without_devices_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent, "TensorPipeAgent", lambda *args: args)
    leave_out("start", monkeypatch)
    new_agent: Any = agent.TensorPipeAgent
    assert new_agent("store", "a", 0, None, "options", {1: 1}, [ZERO])[-2:] == ({}, [])
