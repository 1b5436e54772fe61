"""Samples of workers for the tests of `top`'s model, as a prober would take them."""

from collections.abc import Mapping, Sequence
from typing import Any

from aiorpc_torch._server.timings import bucket_of
from aiorpc_torch._top.model import History
from aiorpc_torch._top.probe import Sample

WORLD = "unix://world"


def data(name: str = "w", members: Sequence[str] = ("main", "w"), **more: Any) -> dict[str, Any]:
    """Return the snapshot of a worker; `stats` and `loop` are completed."""
    stats = {"calls": 0, "served": 0, "running": 0, "segments": 0, "batches": {}}
    found = {
        "name": name,
        "pid": 7,
        "world": WORLD,
        "members": {each: rank for rank, each in enumerate(members)},
        "lost": {},
        "stats": stats | more.pop("stats", {}),
        "timings": {},
        "slow_steps": {},
        "waits": [],
        "serving": [],
        "loop": {"lag": 0.0, "blocked": 0.0} | more.pop("loop", {}),
    }
    return found | more


def sample(at: float, found: Mapping[str, Any] | None, **more: Any) -> Sample:
    """Return a sample with that snapshot, None for a worker that does not answer."""
    name = more.pop("name", None) or (found or {}).get("name", "w")
    key = more.pop("key", f"aiorpc-top-0123456789abcdef-{name}")
    return Sample(key, name, at, None if found is None else dict(found), **more)


def history(*looks: Sequence[Sample]) -> History:
    """Return the history of these looks."""
    found = History()
    for each in looks:
        found.add(each)
    return found


def batches(waiting: int, number: int = 0, items: int = 0) -> dict[str, dict[str, int]]:
    """Return the counters of one batched function."""
    return {"Model.infer": {"batches": number, "items": items, "waiting": waiting, "size": 8}}


def durations(**calls: tuple[float, int]) -> dict[str, dict[str, int]]:
    """Return histograms as JSON has them: seconds and number of calls of each method."""
    return {name: {str(bucket_of(taken)): count} for name, (taken, count) in calls.items()}
