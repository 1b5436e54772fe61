"""Traces and metrics of a run, for OpenTelemetry and Prometheus.

    from aiorpc_torch import observe

    server = observe.serve_metrics(9464)  # http://127.0.0.1:9464/metrics

Spans need no call: once a program sets a tracer provider of OpenTelemetry, its calls are traced.
This package is written on the public names of `aiorpc_torch` alone.
"""

from .metrics_server import MetricsServer as MetricsServer, serve_metrics as serve_metrics
from .tracing import Tracing as Tracing

__all__ = ("MetricsServer", "Tracing", "serve_metrics")
