"""Counters, traces and metrics of a run, for people, OpenTelemetry and Prometheus.

    from aiorpc_torch import observe

    print(observe.stats().in_flight, observe.pending())
    server = observe.serve_metrics(9464)  # http://127.0.0.1:9464/metrics

Spans need no call: once a program sets a tracer provider of OpenTelemetry, its calls are traced.
The modules of this package are written on its own names and those of `aiorpc_torch`.
"""

from .._batching.stats import BatchStats
from .._context.interception import CallInfo, Interceptor, intercept
from .._context.propagation import propagate
from .._inspection.calls_in_flight import PendingCall, pending, where
from .._inspection.counters import Stats, stats
from .._names import show_as as _show_as

__all__ = (
    "BatchStats",
    "CallInfo",
    "Interceptor",
    "MetricsServer",
    "PendingCall",
    "Stats",
    "Tracing",
    "intercept",
    "pending",
    "propagate",
    "serve_metrics",
    "stats",
    "where",
)
_show_as(__name__, globals(), [each for each in __all__ if each in globals()])

from .metrics_server import MetricsServer, serve_metrics  # noqa: E402 - it imports the names above
from .tracing import Tracing  # noqa: E402
