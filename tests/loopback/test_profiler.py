"""Calls in traces of `torch.profiler`, at both ends, with the names of both workers."""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import aiorpc_torch as aiorpc
from aiorpc_torch import RRef, batched, call, remote

pytestmark = pytest.mark.usefixtures("world")


class Model:
    async def slow(self, x: torch.Tensor) -> torch.Tensor:
        await asyncio.sleep(0.02)
        return x @ x

    def plain(self, x: int) -> int:
        return x

    async def items(self) -> AsyncIterator[int]:
        yield 1
        yield 2

    @batched(max_size=8)
    async def batch(self, xs: list[int]) -> list[int]:
        return xs


@aiorpc.exclusive
class Exclusive(Model):
    pass


@pytest.mark.parametrize("cls", [Model, Exclusive])
async def test_calls_are_events(cls: type[Model], tmp_path: Path) -> None:
    """Lone ones, those that are sent together, streams and batches; from the call to its end."""
    rref = RRef(cls())
    x = torch.ones(4, 4)
    await remote(rref).slow(x)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        await remote(rref).slow(x)
        await asyncio.gather(*(remote(rref).plain(n) for n in range(5)))
        assert [each async for each in remote(rref).items()] == [1, 2]
        assert await asyncio.gather(remote(rref).batch(1), call(rref, Model.batch, 2)) == [1, 2]
    await remote(rref).slow(x)
    profiler.export_chrome_trace(str(tmp_path / "trace"))
    trace = json.loads((tmp_path / "trace").read_text())["traceEvents"]
    found = [each for each in trace if each.get("name", "").startswith("aiorpc_")]
    counts = Counter(each["name"] for each in found)
    assert counts.pop("aiorpc_call#slow(main -> main)") == 1
    assert counts.pop("aiorpc_serve#Model.slow(main -> main)") == 1
    assert counts.pop("aiorpc_call#plain(main -> main)") == 5
    assert counts.pop("aiorpc_serve#Model.plain(main -> main)") == 5
    assert counts.pop("aiorpc_call#items(main -> main)") == 1
    assert counts.pop("aiorpc_serve#Model.items(main -> main)") == 1
    assert counts.pop("aiorpc_serve#Model.batch(main -> main)") == 2
    assert sum(counts.values()) == 2  # the same at the caller, with the class or not
    (slow,) = (each for each in found if each["name"].startswith("aiorpc_call#slow"))
    (served,) = (each for each in found if each["name"].startswith("aiorpc_serve#Model.slow"))
    assert slow["dur"] >= served["dur"] >= 20_000  # microseconds
    assert slow["ts"] <= served["ts"] <= served["ts"] + served["dur"] <= slow["ts"] + slow["dur"]
