"""Spans of OpenTelemetry in a file, for `--trace`. A real program exports them to a collector."""

from opentelemetry import trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import ConsoleSpanExporter, SimpleSpanProcessor


def write_spans(path: str, worker: str) -> None:
    """From now on, append each span of this process to a file, as a line of JSON."""
    lines = open(path, "a", buffering=1 << 20)  # noqa: SIM115 - each line in one write, to the end
    exporter = ConsoleSpanExporter(out=lines, formatter=lambda span: f"{span.to_json(None)}\n")
    provider = TracerProvider(resource=Resource({"service.name": worker}))
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
