"""Calls in traces of `torch.profiler`, at both ends, with the names of both workers."""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
import torch
from torch.autograd import profiler_legacy
from torch.profiler import ProfilerActivity, profile, record_function

import aiorpc_torch as aiorpc
from aiorpc_torch import Group, RRef, batched, call, remote

pytestmark = pytest.mark.usefixtures("world")


class Model:
    def __init__(self) -> None:
        self.begun, self.gate = asyncio.Event(), asyncio.Event()

    async def held(self) -> None:
        self.begun.set()
        await self.gate.wait()

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


async def await_call(rref: RRef[Model]) -> None:
    await remote(rref).plain(1)


async def await_group(rref: RRef[Model]) -> None:
    await remote(Group([rref, rref])).plain(1)


async def iterate_stream(rref: RRef[Model]) -> None:
    assert [each async for each in remote(rref).items()] == [1, 2]


def spans(trace: profile, name: str) -> list[tuple[float, float]]:
    """Return start and end of the events whose names begin so."""
    return [
        (event.time_range.start, event.time_range.end)
        for event in trace.events() or ()
        if event.name.startswith(name)
    ]


@pytest.mark.parametrize(("use", "calls"), [(await_call, 1), (await_group, 2), (iterate_stream, 1)])
async def test_an_event_ends_before_its_caller_goes_on(
    use: Callable[[RRef[Model]], Awaitable[None]], calls: int
) -> None:
    """What the caller does next is outside the event; it may stop the profiler at once."""
    rref = RRef(Model())
    with profile(activities=[ProfilerActivity.CPU]) as trace:
        await use(rref)
        with record_function("next"):
            pass
    ((begin, _),) = spans(trace, "next")
    ends = [end for _, end in spans(trace, "aiorpc_call")]
    assert len(ends) == calls
    assert max(ends) <= begin


async def test_a_profiler_stops_while_a_call_is_in_flight() -> None:
    """The call's events end with the profiler, and nothing of them is in the next one's trace."""
    model = Model()
    with profile(activities=[ProfilerActivity.CPU]) as first:
        held = asyncio.ensure_future(remote(RRef(model)).held())
        await model.begun.wait()
        with record_function("next"):
            pass
    with profile(activities=[ProfilerActivity.CPU]) as second:
        model.gate.set()
        await held
    ((_, end),) = spans(first, "next")
    for side in ("call", "serve"):
        assert [last >= end for _, last in spans(first, f"aiorpc_{side}")] == [True]
    assert not spans(second, "aiorpc")


async def test_events_name_their_worker() -> None:
    """The node id of torch's own events is the worker id, as after `init_rpc`."""
    with profiler_legacy.profile() as trace:
        torch.ones(1)
    assert {event.node_id for event in trace.function_events} == {0}
