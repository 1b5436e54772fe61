"""The metrics, in the names that OpenTelemetry's conventions have in Prometheus's format."""

import contextlib
import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from .._gauges import measured_objects
from .._inspection.gpus import gpu_use
from .._inspection.world import STATES, WorldNumbers, world_numbers
from . import Stats, stats
from .histograms import Histogram
from .loop_lag import LoopLag
from .recorder import Recorder

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

METHOD, PEER_CALLED, PEER_CALLING, ERROR = (
    "rpc_method",
    "server_address",
    "client_address",
    "error_type",
)


class Metrics:
    """The metrics of this process, for a registry of `prometheus_client`.

    Args:
        recorder: counts the calls.
        lag: measures the event loop, if there is one.
    """

    def __init__(self, recorder: Recorder, lag: LoopLag | None) -> None:
        self._recorder = recorder
        self._lag = lag

    def collect(self) -> Iterator[Any]:
        """Yield the metric families. In any thread."""
        yield from self._histograms()
        yield from _totals(now := stats())
        yield from _batches(now)
        yield from _world(world := world_numbers())
        yield from _objects({} if world is None else world.names)
        yield from self._process("" if world is None else world.worker)

    def describe(self) -> list[Any]:
        """Return no descriptions: the names are known at a scrape."""
        return []

    def _histograms(self) -> Iterator[Any]:
        found, calls = self._recorder, "Seconds of calls"
        for name, text, labels, histogram in (
            ("rpc_client_call_duration_seconds", calls, (METHOD, PEER_CALLED, ERROR), found.client),
            (
                "rpc_server_call_duration_seconds",
                calls,
                (METHOD, PEER_CALLING, ERROR),
                found.server,
            ),
            ("aiorpc_server_queue_duration_seconds", "From arrival", (METHOD,), found.queue),
            ("aiorpc_batch_duration_seconds", "Seconds of batches", (METHOD, ERROR), found.batch),
            ("aiorpc_batch_wait_seconds", "Of the oldest call", (METHOD,), found.batch_wait),
            ("aiorpc_batch_size", "Calls in a batch", (METHOD,), found.batch_size),
        ):
            yield _histogram(name, text, labels, histogram)

    def _process(self, worker: str) -> Iterator[Any]:
        core = _core()
        gpus = core.GaugeMetricFamily(
            "aiorpc_gpu_utilization_ratio", "Time with a kernel, of any process", labels=["device"]
        )
        for device, share in gpu_use().items():
            gpus.add_metric((str(device),), share)
        yield gpus
        if self._lag is not None:
            text = "Longest lag of the event loop in the last 15 s"
            name = "aiorpc_event_loop_lag_seconds"
            yield core.GaugeMetricFamily(name, text, value=self._lag.longest())
        target = core.GaugeMetricFamily(
            "target_info", "This worker", labels=("service_name", "service_instance_id")
        )
        target.add_metric(("aiorpc_torch", worker or self._recorder.worker), 1)
        yield target


def _totals(now: Stats) -> Iterator[Any]:
    core = _core()
    for field, (name, text) in COUNTERS.items():
        yield core.CounterMetricFamily(name, text, value=getattr(now, field))
    for field, (name, text) in GAUGES.items():
        yield core.GaugeMetricFamily(name, text, value=getattr(now, field))


def _batches(now: Stats) -> Iterator[Any]:
    core = _core()
    waiting = core.GaugeMetricFamily("aiorpc_batch_waiting_calls", "Waiting calls", labels=[METHOD])
    full = core.GaugeMetricFamily(
        "aiorpc_batch_full_size", "Calls in a full batch", labels=[METHOD]
    )
    starts = core.CounterMetricFamily(
        "aiorpc_batches", "Batches by the reason of their start", labels=[METHOD, "reason"]
    )
    for name, batch in now.batches.items():
        waiting.add_metric((name,), batch.waiting)
        full.add_metric((name,), batch.size)
        for reason, count in batch.reasons.items():
            starts.add_metric((name, reason), count)
    yield from (waiting, full, starts)


def _world(world: WorldNumbers | None) -> Iterator[Any]:
    """Yield the numbers of the world, none outside of one."""
    if world is None:
        return
    core = _core()
    yield core.GaugeMetricFamily(
        "aiorpc_world_size", "Workers that have not left", value=world.size
    )
    workers = core.GaugeMetricFamily(
        "aiorpc_workers", "Workers, as this one knows them", labels=["state"]
    )
    for state in dict.fromkeys(STATES.values()):
        workers.add_metric((state,), world.states.get(state, 0))
    yield workers
    text = "How often this worker's process was started again"
    yield core.GaugeMetricFamily("aiorpc_worker_restarts", text, value=world.restarts)
    if world.is_coordinator is not None:
        text = "1 for the worker that keeps the directory"
        yield core.GaugeMetricFamily("aiorpc_coordinator", text, value=world.is_coordinator)


def _objects(names: Mapping[int, str]) -> Iterator[Any]:
    """Yield the numbers of the objects of `training`; of several with one name the greatest."""
    found: defaultdict[str, dict[str, float]] = defaultdict(dict)
    for each, followed in measured_objects().items():
        name = names.get(id(each), followed)
        with contextlib.suppress(RuntimeError):  # its event loop changes what it counts
            for metric, value in each._numbers().items():
                found[metric][name] = max(value, found[metric].get(name, value))
    core = _core()
    for metric, text in OBJECTS.items():
        is_counter = metric in OBJECT_COUNTERS
        kind = core.CounterMetricFamily if is_counter else core.GaugeMetricFamily
        family = kind(metric, text, labels=["name"])
        for name, value in found[metric].items():
            family.add_metric((name,), value)
        yield family


def _histogram(name: str, text: str, labels: Sequence[str], histogram: Histogram) -> Any:
    family = _core().HistogramMetricFamily(name, text, labels=labels)
    bounds = [*(str(float(each)) for each in histogram.bounds), "+Inf"]
    for values, counts in histogram.collect().items():
        cumulated = itertools.accumulate(counts.buckets)
        family.add_metric(values, [*zip(bounds, cumulated, strict=True)], counts.total[0])
    return family


def _core() -> Any:
    import prometheus_client.core

    return prometheus_client.core
