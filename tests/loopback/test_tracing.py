"""Spans of OpenTelemetry's SDK for calls, streams, batches, groups and maps."""

import asyncio
import gzip
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from opentelemetry import baggage, context, trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode, Tracer
from torch.distributed import rpc

import aiorpc_torch as aiorpc
from aiorpc_torch import CallTimeout, Group, RRef, async_execution, batched, call, remote
from aiorpc_torch.observe import Tracing
from aiorpc_torch.testing import Gate
from tests.support.hooks import are_looked_for, hooks as hooks
from tests.support.slack import BEGUN

pytestmark = pytest.mark.usefixtures("hooks", "world")


class Spans:
    """What the SDK has exported."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        self.provider = TracerProvider(shutdown_on_exit=False)
        self.provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.tracer: Tracer = self.provider.get_tracer("tests")

    def all(self) -> list[ReadableSpan]:
        return [*self._exporter.get_finished_spans()]

    def of(self, name: str, kind: SpanKind) -> list[ReadableSpan]:
        return [span for span in self.all() if (span.name, span.kind) == (name, kind)]

    def one(self, name: str, kind: SpanKind) -> ReadableSpan:
        (span,) = self.of(name, kind)
        return span


@pytest.fixture
def spans(hooks: None) -> Spans:
    found = Spans()
    aiorpc.observe.intercept(Tracing(found.provider))
    return found


def parent_of(span: ReadableSpan) -> int | None:
    return None if span.parent is None else span.parent.span_id


def id_of(span: ReadableSpan) -> int:
    return span.get_span_context().span_id  # type: ignore[union-attr]


def trace_of(span: ReadableSpan) -> int:
    return span.get_span_context().trace_id  # type: ignore[union-attr]


def current() -> int:
    return trace.get_current_span().get_span_context().span_id


class Model:
    async def answer(self) -> int:
        await asyncio.sleep(0)
        return current()

    def in_thread(self) -> int:
        return current()

    async def nested(self) -> int:
        return await call("main", span_here)

    async def items(self) -> AsyncIterator[int]:
        for _ in range(3):
            yield current()
            await asyncio.sleep(0)

    def items_in_thread(self) -> Iterator[int]:
        for _ in range(3):
            yield current()

    def fail(self) -> None:
        raise LookupError("no answer")

    @batched(max_size=3, max_wait=30.0)
    def together(self, xs: list[int]) -> list[int]:
        return [current()] * len(xs)

    @batched(max_size=1)
    async def alone(self, xs: list[int]) -> list[int]:
        return [current()] * len(xs)

    async def baggage(self) -> object:
        return baggage.get_baggage("user")


def span_here() -> int:
    return current()


@pytest.mark.promise("watching.spans")
@pytest.mark.parametrize("method", ["answer", "in_thread"])
async def test_a_call(spans: Spans, method: str) -> None:
    """The caller's span is a child of the current one; the method runs in the callee's."""
    rref = await aiorpc.create("main", Model)
    with spans.tracer.start_as_current_span("mine") as mine:
        seen = await getattr(remote(rref), method)()
        assert current() == mine.get_span_context().span_id
    client = spans.one(f"Model/{method}", SpanKind.CLIENT)
    server = spans.one(f"Model/{method}", SpanKind.SERVER)
    assert parent_of(client) == mine.get_span_context().span_id
    assert parent_of(server) == id_of(client)
    assert seen == id_of(server)
    assert dict(client.attributes or {}) == {
        "rpc.system": "aiorpc_torch",
        "rpc.system.name": "aiorpc_torch",
        "rpc.service": "Model",
        "rpc.method": method,
        "client.address": "main",
        "server.address": "main",
        "aiorpc_torch.kind": "call",
    }
    assert client.status.status_code is StatusCode.UNSET
    assert client.start_time <= server.start_time <= server.end_time <= client.end_time  # type: ignore[operator]


@pytest.mark.promise("watching.spans")
async def test_nested_calls_and_concurrent_ones(spans: Spans) -> None:
    """Each trace holds its own calls, through workers and threads."""
    model = remote(RRef(Model()))

    async def traced() -> tuple[int, int]:
        with spans.tracer.start_as_current_span("mine") as mine:
            return mine.get_span_context().trace_id, await model.nested()

    found = await asyncio.gather(*(traced() for _ in range(5)))
    servers = {id_of(span): span for span in spans.of("span_here", SpanKind.SERVER)}
    for trace_id, seen in found:
        assert trace_of(servers[seen]) == trace_id
        path = [span for span in spans.all() if trace_of(span) == trace_id]
        assert len(path) == 5  # mine, two ends of two calls


@pytest.mark.promise("watching.spans")
@pytest.mark.parametrize("method", ["items", "items_in_thread"])
async def test_streams(spans: Spans, method: str) -> None:
    """Each step of a generator sees the callee's span, and its consumer does not."""
    async for seen in getattr(remote(RRef(Model())), method)():
        assert current() == 0
        last = seen
    server = spans.one(f"Model/{method}", SpanKind.SERVER)
    assert last == id_of(server)
    assert parent_of(server) == id_of(spans.one(f"Model/{method}", SpanKind.CLIENT))


@pytest.mark.promise("watching.spans")
async def test_a_batch_links_to_its_callers(spans: Spans) -> None:
    """All of them. That of one caller is its child."""
    model = remote(RRef(Model()))
    (seen, *_) = await asyncio.gather(*(model.together(x) for x in range(3)))
    batch = spans.one("batch Model/together", SpanKind.INTERNAL)
    servers = spans.of("Model/together", SpanKind.SERVER)
    assert seen == id_of(batch)
    assert parent_of(batch) is None
    assert {each.context.span_id for each in batch.links} == {*map(id_of, servers)}
    assert (batch.attributes or {})["aiorpc_torch.batch.size"] == 3
    await model.alone(1)
    alone = spans.one("batch Model/alone", SpanKind.INTERNAL)
    assert parent_of(alone) == id_of(spans.one("Model/alone", SpanKind.SERVER))


@pytest.mark.promise("watching.spans")
async def test_groups_and_maps(spans: Spans) -> None:
    """The calls of the members are children of one span."""
    group = Group([RRef(Model()) for _ in range(3)])
    with spans.tracer.start_as_current_span("mine") as mine:
        await remote(group).answer()
        assert [found async for found in group.map(Model.in_thread, [])] == []
        async for _ in group.map(Model.alone, range(4)):
            pass
    parent = spans.one("group Model/answer", SpanKind.INTERNAL)
    members = spans.of("Model/answer", SpanKind.CLIENT)
    assert parent_of(parent) == mine.get_span_context().span_id
    assert [parent_of(each) for each in members] == [id_of(parent)] * 3
    parent = spans.one("map Model/alone", SpanKind.INTERNAL)
    attempts = spans.of("Model/alone", SpanKind.CLIENT)
    assert [parent_of(each) for each in attempts] == [id_of(parent)] * 4


@pytest.mark.promise("watching.spans")
async def test_failures_and_deadlines(spans: Spans) -> None:
    """They are the status of the spans, and their attributes."""
    with pytest.raises(LookupError):
        await remote(RRef(Model())).fail()
    for kind in (SpanKind.CLIENT, SpanKind.SERVER):
        span = spans.one("Model/fail", kind)
        assert span.status.status_code is StatusCode.ERROR
        assert span.status.description == "LookupError: no answer"
        assert (span.attributes or {})["error.type"] == "LookupError"
        assert [event.name for event in span.events] == ["exception"]
    gate = RRef(Gate())
    with pytest.raises(CallTimeout):
        await remote(gate, timeout=BEGUN).passed()
    late = spans.one("Gate/passed", SpanKind.CLIENT)
    assert (late.attributes or {})["error.type"] == "CallTimeout"
    assert (late.attributes or {})["aiorpc_torch.deadline_exceeded"] is True
    assert (late.attributes or {})["aiorpc_torch.may_have_run"] is True
    await remote(gate).open()


class Textless(Exception):
    def __str__(self) -> str:
        raise LookupError("no text")


async def raise_textless() -> None:
    raise Textless


async def test_a_failure_without_a_text(spans: Spans) -> None:
    """The spans end, as failures, though the text of the exception cannot be made."""
    with pytest.raises(Textless):
        await call("main", raise_textless)
    assert [span.kind for span in spans.all()] == [SpanKind.SERVER, SpanKind.CLIENT]
    for span in spans.all():
        assert span.status.status_code == StatusCode.ERROR
        assert span.status.description == "Textless"


async def test_baggage_travels(spans: Spans) -> None:
    """All that the global propagator writes."""
    token = context.attach(baggage.set_baggage("user", "ada"))
    try:
        assert await remote(RRef(Model())).baggage() == "ada"
    finally:
        context.detach(token)


@async_execution
async def for_torch_clients() -> int:
    return current()


async def test_plain_torch_clients(spans: Spans) -> None:
    """The callee's span is a root."""
    seen = await asyncio.to_thread(rpc.rpc_sync, "main", for_torch_clients)
    server = spans.one("for_torch_clients", SpanKind.SERVER)
    assert (seen, parent_of(server)) == (id_of(server), None)


@pytest.fixture
def global_provider(hooks: None, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Spans]:
    """Return what sets a provider, as `trace.set_tracer_provider` does once in a process."""
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", None)
    monkeypatch.setattr(trace, "_TRACER_PROVIDER_SET_ONCE", trace.Once())

    def set_provider() -> Spans:
        found = Spans()
        trace.set_tracer_provider(found.provider)
        return found

    return set_provider


@pytest.mark.promise("watching.automatic_spans")
async def test_it_begins_by_itself(global_provider: Callable[[], Spans]) -> None:
    """Once a provider is set, in the middle of a world; not before."""
    model = remote(RRef(Model()))
    assert await model.answer() == 0
    assert not are_looked_for(), "nothing is looked for without a provider"
    spans = global_provider()
    seen = await model.answer()
    assert seen == id_of(spans.one("Model/answer", SpanKind.SERVER))
    assert [span.kind for span in spans.all()] == [SpanKind.SERVER, SpanKind.CLIENT]


# ── exported ────────────────────────────────────────────────────────────────────────────────────


class Receiver(ThreadingHTTPServer):
    """A collector that takes spans over OTLP, as protobuf over HTTP."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.requests: list[ExportTraceServiceRequest] = []

    def spans(self) -> list[Any]:
        return [
            span
            for request in self.requests
            for resource in request.resource_spans
            for scope in resource.scope_spans
            if scope.scope.name == "aiorpc_torch"
            for span in scope.spans
        ]


class _Handler(BaseHTTPRequestHandler):
    server: Receiver

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        self.server.requests.append(ExportTraceServiceRequest.FromString(body))
        self.send_response(200)
        self.send_header("Content-Type", "application/x-protobuf")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Print nothing."""


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    server = Receiver()
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.mark.promise("watching.spans")
async def test_a_collector_gets_the_spans(hooks: None, receiver: Receiver) -> None:
    """What the SDK's exporter sends over OTLP has both ends of a call and a batch's links."""
    provider = TracerProvider(shutdown_on_exit=False)
    exporter = OTLPSpanExporter(f"http://127.0.0.1:{receiver.server_port}/v1/traces")
    provider.add_span_processor(BatchSpanProcessor(exporter))
    aiorpc.observe.intercept(Tracing(provider))
    model = remote(RRef(Model()))
    await asyncio.gather(*(model.together(x) for x in range(3)))
    await asyncio.to_thread(provider.shutdown)  # which flushes
    found = receiver.spans()
    clients = {span.span_id: span for span in found if span.kind == 3}
    servers = [span for span in found if span.kind == 2]
    (batch,) = (span for span in found if span.kind == 1)
    assert len(clients) == len(servers) == 3
    assert {span.parent_span_id for span in servers} == {*clients}
    assert {link.span_id for link in batch.links} == {span.span_id for span in servers}
    attributes = {each.key: each.value.string_value for each in servers[0].attributes}
    assert (attributes["rpc.service"], attributes["rpc.method"]) == ("Model", "together")
