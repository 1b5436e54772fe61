"""The metrics, in the names that OpenTelemetry's conventions have in Prometheus's format."""

import asyncio
import contextlib
import itertools
import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from .._aio.loop_lag import LoopLag
from .._gauges import measured_objects
from .._inspection.counters import STATES, WorldNumbers, gpu_use, world_numbers
from . import Stats, stats
from .recorder import Histogram, Recorder

COUNTERS = {
    "calls": ("aiorpc_client_calls", "Calls and streams made by this process"),
    "messages": ("aiorpc_client_messages", "Frames and torch messages sent with calls"),
    "bytes_sent": ("aiorpc_client_sent_bytes", "Bytes of these messages"),
    "late": ("aiorpc_client_late_results", "Results that came after their calls had ended"),
    "shared_messages": ("aiorpc_client_shared_messages", "Messages with tensors in shared memory"),
    "socket_messages": ("aiorpc_client_socket_messages", "Messages with tensors on sockets"),
    "served": ("aiorpc_server_calls", "Calls and streams received"),
}
"""Fields of `Stats` that only grow in a world."""

GAUGES = {
    "in_flight": ("aiorpc_client_active_calls", "Calls made here that are pending"),
    "unsent": ("aiorpc_client_unsent_calls", "Pending calls that are not sent yet"),
    "running": ("aiorpc_server_active_calls", "Received calls that are not finished"),
    "held_bytes": ("aiorpc_server_held_bytes", "Large results that callers have yet to collect"),
    "segments": ("aiorpc_shared_memory_segments", "Segments of shared memory made here"),
    "segment_bytes": ("aiorpc_shared_memory_bytes", "Bytes of these segments"),
}

OBJECTS = {
    "aiorpc_weights_version": "Newest version that was published here",
    "aiorpc_follower_version": "Version that is in at a follower",
    "aiorpc_follower_age_seconds": "Seconds since a follower's version has changed",
    "aiorpc_staleness_versions": "Versions by which the oldest rollout that runs is behind",
    "aiorpc_staleness_rollouts": "Rollouts that run",
    "aiorpc_staleness_waiting_rollouts": "Rollouts that wait for a ticket",
    "aiorpc_replay_items": "Items in a replay buffer",
    "aiorpc_replay_samples_per_insert": "Items sampled for each item inserted",
    "aiorpc_replay_waiting_inserts": "Inserts that wait",
    "aiorpc_replay_waiting_samples": "Samples that wait",
    "aiorpc_replay_inserted": "Items inserted into a replay buffer",
    "aiorpc_replay_sampled": "Items sampled from a replay buffer",
}
"""Numbers of the objects of `training`, by the name under which they are registered."""

OBJECT_COUNTERS = {"aiorpc_replay_inserted", "aiorpc_replay_sampled"}

INTERVAL = 1.0  # seconds between two probes of an event loop
WINDOW = 15.0  # seconds over which its longest lag is told: a usual scrape interval

METHOD, ERROR = "rpc_method", "error_type"
CALL_LABELS = (METHOD, "server_address", ERROR), (METHOD, "client_address", ERROR)

HISTOGRAMS = (  # attribute of the recorder, name, text, labels
    ("client", "rpc_client_call_duration_seconds", "Seconds of calls", CALL_LABELS[0]),
    ("server", "rpc_server_call_duration_seconds", "Seconds of calls", CALL_LABELS[1]),
    ("queue", "aiorpc_server_queue_duration_seconds", "From arrival", (METHOD,)),
    ("batch", "aiorpc_batch_duration_seconds", "Seconds of batches", (METHOD, ERROR)),
    ("batch_wait", "aiorpc_batch_wait_seconds", "Of the oldest call", (METHOD,)),
    ("batch_size", "aiorpc_batch_size", "Calls in a batch", (METHOD,)),
)


class LagThread:
    """A daemon thread that probes a loop once a second, from `start` to `close`.

    So a blocked loop is seen while it is blocked.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._lag = LoopLag(loop)
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="aiorpc-loop-lag", daemon=True)

    def start(self) -> None:
        """Start to measure."""
        self._thread.start()

    def close(self) -> None:
        """Stop to measure."""
        self._is_closed.set()
        self._thread.join()

    def longest(self) -> float:
        """Return the longest lag in seconds of the last `WINDOW` seconds. In any thread."""
        return 0.0 if self._loop.is_closed() else self._lag.longest(WINDOW)

    def _run(self) -> None:
        while not self._loop.is_closed():
            self._lag.probe()
            if self._is_closed.wait(INTERVAL):
                return


class Metrics:
    """The metrics of this process, for a registry of `prometheus_client`."""

    def __init__(self, recorder: Recorder, lag: LagThread | None) -> None:
        self._recorder = recorder
        self._lag = lag

    def collect(self) -> Iterator[Any]:
        """Yield the metric families. In any thread."""
        for attribute, name, text, labels in HISTOGRAMS:
            yield _histogram(getattr(self._recorder, attribute), name, text, labels)
        yield from _counters(stats())
        world = world_numbers()
        if world is not None:
            yield from _world(world)
        yield from _objects({} if world is None else world.names)
        gpus = {(str(device),): share for device, share in gpu_use().items()}
        text = "Time with a kernel, of any process"
        yield _family("Gauge", "aiorpc_gpu_utilization_ratio", text, gpus, "device")
        if self._lag is not None:
            text = "Longest lag of the event loop in the last 15 s"
            yield _family("Gauge", "aiorpc_event_loop_lag_seconds", text, {(): self._lag.longest()})
        worker = ("" if world is None else world.worker) or self._recorder.worker
        values, labels = {("aiorpc_torch", worker): 1}, ("service_name", "service_instance_id")
        yield _family("Gauge", "target_info", "This worker", values, *labels)

    def describe(self) -> list[Any]:
        """Return no descriptions: the names are known at a scrape."""
        return []


def _histogram(histogram: Histogram, name: str, text: str, labels: Sequence[str]) -> Any:
    from prometheus_client.core import HistogramMetricFamily

    family: Any = HistogramMetricFamily(name, text, labels=labels)
    bounds = [*(str(float(each)) for each in histogram.bounds), "+Inf"]
    for values, counts in histogram.collect().items():
        cumulated = itertools.accumulate(counts.buckets)
        family.add_metric(values, [*zip(bounds, cumulated, strict=True)], counts.total[0])
    return family


def _counters(now: Stats) -> Iterator[Any]:
    for kind, fields in (("Counter", COUNTERS), ("Gauge", GAUGES)):
        for field, (name, text) in fields.items():
            yield _family(kind, name, text, {(): getattr(now, field)})
    waiting = {(name,): batch.waiting for name, batch in now.batches.items()}
    yield _family("Gauge", "aiorpc_batch_waiting_calls", "Waiting calls", waiting, METHOD)
    full = {(name,): batch.size for name, batch in now.batches.items()}
    yield _family("Gauge", "aiorpc_batch_full_size", "Calls in a full batch", full, METHOD)
    starts = {
        (name, reason): count
        for name, batch in now.batches.items()
        for reason, count in batch.reasons.items()
    }
    text = "Batches by the reason of their start"
    yield _family("Counter", "aiorpc_batches", text, starts, METHOD, "reason")


def _world(world: WorldNumbers) -> Iterator[Any]:
    text = "Workers that have not left"
    yield _family("Gauge", "aiorpc_world_size", text, {(): world.size})
    states = {(state,): world.states.get(state, 0) for state in STATES.values()}
    text = "Workers, as this one knows them"
    yield _family("Gauge", "aiorpc_workers", text, states, "state")
    text = "How often this worker's process was started again"
    yield _family("Gauge", "aiorpc_worker_restarts", text, {(): world.restarts})
    if world.is_coordinator is not None:
        text = "1 for the worker that keeps the directory"
        yield _family("Gauge", "aiorpc_coordinator", text, {(): world.is_coordinator})


def _objects(names: Mapping[int, str]) -> Iterator[Any]:
    """Yield the numbers of the objects of `training`; of several with one name the greatest."""
    found: defaultdict[str, dict[Sequence[str], float]] = defaultdict(dict)
    for each, followed in measured_objects().items():
        name = (names.get(id(each), followed),)
        with contextlib.suppress(RuntimeError):  # its event loop changes what it counts
            for metric, value in each._numbers().items():
                found[metric][name] = max(value, found[metric].get(name, value))
    for metric, text in OBJECTS.items():
        kind = "Counter" if metric in OBJECT_COUNTERS else "Gauge"
        yield _family(kind, metric, text, found[metric], "name")


def _family(kind: str, name: str, text: str, values: Mapping[Any, float], *labels: str) -> Any:
    """Return a family of metrics: the values by those of their labels."""
    from prometheus_client import core

    family = getattr(core, f"{kind}MetricFamily")(name, text, labels=labels)
    for of, value in values.items():
        family.add_metric(of, value)
    return family
