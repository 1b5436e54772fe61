"""Spans of OpenTelemetry for calls, streams, batches, groups and maps.

The context of the caller's span travels as a propagated variable, in the format of the global
propagator (W3C's by default). At the callee it is attached to the context of the call, which lasts
until the call has ended: each step of a generator and each thread of it sees the span.
"""

import functools
import time
from collections.abc import Sequence
from contextvars import Context, ContextVar
from typing import Any

from .. import CallTimeout, __version__
from ..errors import RpcError
from . import CallInfo, Interceptor, propagate

SYSTEM = "aiorpc_torch"

_CARRIER: ContextVar[dict[str, str] | None] = ContextVar("aiorpc_torch.trace", default=None)
"""What the propagator writes of the span of a call."""


class Tracing(Interceptor):
    """Spans of all calls of this process. It is added by itself once a provider is set.

    Use it with `observe.intercept` for another provider than the global one. Needs extra `otel`.

    Args:
        provider: A tracer provider (default: the global one).

    Raises:
        ImportError: without `opentelemetry`.
    """

    def __init__(self, provider: Any = None) -> None:
        try:
            from opentelemetry import context, propagate as propagators, trace
        except ImportError as exc:
            raise ImportError(
                "traces need opentelemetry-api: pip install 'aiorpc_torch[otel]'"
            ) from exc
        self._otel, self._propagators, self._trace = context, propagators, trace
        self._tracer = trace.get_tracer(SYSTEM, __version__, provider)
        propagate(_CARRIER)

    def on_call(self, call: CallInfo) -> "functools.partial[None]":
        """Start the caller's span, a child of the current one."""
        kind = self._trace.SpanKind
        parent = self._otel.get_current()
        span = self._start(call, parent, kind.CLIENT if call.peer else kind.INTERNAL)
        inside = self._trace.set_span_in_context(span, parent)
        carrier: dict[str, str] = {}
        self._propagators.inject(carrier, inside)
        _CARRIER.set(carrier)
        self._otel.attach(inside)  # in a context of the call alone
        return functools.partial(self._end, span)

    def on_receive(self, call: CallInfo) -> "functools.partial[None]":
        """Start the callee's span: a child of the caller's, or a root without one."""
        parent = self._propagators.extract(_CARRIER.get() or {}, self._otel.Context())
        span = self._start(call, parent, self._trace.SpanKind.SERVER)
        self._otel.attach(self._trace.set_span_in_context(span, parent))
        return functools.partial(self._end, span)

    def on_batch(self, batch: CallInfo, callers: Sequence[Context]) -> "functools.partial[None]":
        """Start the span of a batch, with a link to each caller. That of a single one is a child.

        Calls of several traces meet in a batch, so no trace can own it.
        """
        trace = self._trace
        spans = [each.run(trace.get_current_span) for each in callers]
        links = [trace.Link(each.get_span_context()) for each in spans]
        links = [each for each in links if each.context.is_valid]
        parent = self._otel.Context()
        if len(links) == batch.size == 1:
            parent = callers[0].run(self._otel.get_current)
        span = self._start(batch, parent, trace.SpanKind.INTERNAL, links)
        self._otel.attach(trace.set_span_in_context(span, parent))
        return functools.partial(self._end, span)

    def _start(self, call: CallInfo, parent: Any, kind: Any, links: Sequence[Any] = ()) -> Any:
        waited, began = time.monotonic() - call.began, time.time_ns()
        service, _, method = call.method.rpartition(".")
        name = f"{service}/{method}" if service else method
        # In the names of OpenTelemetry's conventions for RPC.
        found: dict[str, Any] = {
            "rpc.system": SYSTEM,
            "rpc.system.name": SYSTEM,
            "rpc.method": method,
        }
        if service:
            found["rpc.service"] = service
        found["aiorpc_torch.kind"] = call.kind
        if call.peer:
            began -= int(1e9 * max(0.0, waited))
            is_server = kind.name == "SERVER"
            ends = (call.peer, call.worker) if is_server else (call.worker, call.peer)
            found["client.address"], found["server.address"] = ends
            if is_server:
                found["aiorpc_torch.queue.duration"] = waited
        else:
            name = f"{call.kind} {name}"
            found[f"aiorpc_torch.{call.kind}.size"] = call.size
            if call.kind == "batch":
                found["aiorpc_torch.batch.wait"] = waited
        return self._tracer.start_span(name, parent, kind, found, links, began)

    def _end(self, span: Any, failure: BaseException | None) -> None:
        status, error = self._trace.Status, self._trace.StatusCode.ERROR
        try:
            if failure is None:
                return
            name = type(failure).__name__
            span.set_status(status(error, name))
            span.set_attribute("error.type", type(failure).__qualname__)
            if isinstance(failure, CallTimeout):
                span.set_attribute("aiorpc_torch.deadline_exceeded", True)
            if isinstance(failure, RpcError) and hasattr(failure, "may_have_run"):
                span.set_attribute("aiorpc_torch.may_have_run", failure.may_have_run)
            span.record_exception(failure)
            span.set_status(status(error, f"{name}: {failure}"))
        finally:  # the text of a user's exception may raise
            span.end()
