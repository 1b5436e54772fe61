"""Counters of this process, of its CUDA devices and of its world."""

import importlib.util
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch

from .._batching.stats import BatchStats, batch_stats
from .._carrier.shared_memory import segment_counts
from .._client import pool
from .._endpoint import entry_points
from .._endpoint.runtime import mark_runs_on_loop
from .._peers.peers import State


@dataclass(frozen=True, slots=True)
class Stats:
    """Counters of this process since it entered its world.

    Attributes:
        calls: Calls and streams made by this process.
        in_flight: Those of `calls` that are pending; `pending()` has their ages.
        unsent: Those of `in_flight` that wait for flow control, or for a copy to shared memory.
        messages: Frames and torch messages sent with calls; coalesced calls share one.
        bytes_sent: Bytes of `messages`, large tensors included.
        late: Results that arrived after their calls had been cancelled or had timed out.
        shared_messages: Those of `messages` whose tensors were sent in shared memory.
        socket_messages: Those of `messages` whose tensors were sent on tensor sockets.
        segments: Segments of shared memory that this process has made, in use or free.
        segment_bytes: Bytes of `segments`.
        served: Calls and streams received from other workers and from this one.
        running: Those of `served` that are not finished.
        held_bytes: Bytes of large results that callers have yet to collect.
        batches: Counters of each `@batched` function called here, by qualified name, since it was
            made.
    """

    calls: int = 0
    in_flight: int = 0
    unsent: int = 0
    messages: int = 0
    bytes_sent: int = 0
    late: int = 0
    shared_messages: int = 0
    socket_messages: int = 0
    segments: int = 0
    segment_bytes: int = 0
    served: int = 0
    running: int = 0
    held_bytes: int = 0
    batches: dict[str, BatchStats] = field(default_factory=dict)


@mark_runs_on_loop  # a worker whose threads all hang must still tell
def stats() -> Stats:
    """Return a snapshot of the counters of this process.

    `await call("w", observe.stats)` returns those of worker `w`, from its event loop: it needs no
    free thread there.
    """
    served = running = held = 0
    if (server := entry_points.serving()) is not None:
        served, running, held = server.sessions.tally()
    connections = pool.find_current()
    sent = connections.counters() if connections else {}
    segments, size = segment_counts()
    return Stats(
        served=served,
        running=running,
        held_bytes=held,
        segments=segments,
        segment_bytes=size,
        batches=batch_stats(),
        **sent,
    )


def gpu_use() -> dict[int, float]:
    """Return for each device with tensors of this process its share of time with a kernel, 0 to 1.

    Kernels of other processes count too. It is over the driver's last sample, of up to a second.
    NVML tells it: a process without CUDA starts none. Empty without CUDA, or without
    `nvidia-ml-py`.
    """
    is_used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    if not is_used or importlib.util.find_spec("pynvml") is None:
        return {}
    try:
        return {
            each: torch.cuda.utilization(each) / 100
            for each in range(torch.cuda.device_count())
            if torch.cuda.memory_reserved(each)
        }
    except Exception:  # of NVML: no driver in this container, a MIG device, ...
        return {}


STATES = {each: each.name.lower() for each in State} | {State.ENDED: "left"}


@dataclass(frozen=True, slots=True)
class WorldNumbers:
    """The workers of a world, as one of them knows them."""

    worker: str  # name of this worker
    size: int  # workers that have not left
    states: dict[str, int]  # number of workers in each state, this one included
    restarts: int  # how often this worker's process was started again
    is_coordinator: bool | None  # None in a world without a directory
    names: dict[int, str]  # under which objects are registered here, by the objects' ids


def world_numbers() -> WorldNumbers | None:
    """Return the numbers of the world, None outside of one. In any thread."""
    node: Any = entry_points.here
    if node is None or node.members.name not in node.members.workers:  # it starts
        return None
    members, names = node.members, node.server.names
    states = Counter(STATES[each.state] for each in members.everybody())
    found = ((name, names.find(name)) for name in names.names())
    objects = {id(rref.local_value()): name for name, rref in found if rref is not None}
    size = states.total() - states["left"]
    is_coordinator = members.coordinator == members.name if members.coordinator else None
    return WorldNumbers(members.name, size, dict(states), members.restarts, is_coordinator, objects)
