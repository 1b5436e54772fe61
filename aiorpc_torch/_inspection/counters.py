"""Counters of this process."""

from dataclasses import dataclass, field

from .._batching.stats import BatchStats, batch_stats
from .._carrier.shared_memory import segment_counts
from .._client import pool
from .._endpoint import entry_points
from .._endpoint.runtime import mark_runs_on_loop


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
        served, running, held = server.tally()
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
