"""Context variables, traces and metrics between processes."""

import asyncio
import json
import shutil
import subprocess
import urllib.parse
import urllib.request
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import aiorpc_torch as aiorpc
from aiorpc_torch import call, observe, testing
from aiorpc_torch.observe import Tracing
from aiorpc_torch.testing import Workers
from tests.support.certificates import Authority
from tests.support.example_programs import free_port
from tests.support.hooks import hooks as hooks

pytestmark = pytest.mark.usefixtures("hooks")

USER: ContextVar[str] = ContextVar("tests.observe.user", default="unknown")


def propagate_user() -> None:
    aiorpc.observe.propagate(USER)


async def user_seen(*path: str) -> str:
    """Pass the question on, through these workers."""
    return await call(path[0], user_seen, *path[1:]) if path else USER.get()


@pytest.mark.promise("calls.propagate")
async def test_a_variable_travels_through_workers(workers: Workers) -> None:
    """From process to process, where all of them know it."""
    names = ["a", "b", "c"]
    await workers(names)
    propagate_user()
    USER.set("ada")
    assert await call(names[0], user_seen) == "unknown", "it does not know the variable"
    for name in names:
        await call(name, propagate_user)
    assert await call(names[0], user_seen, *names[1:]) == "ada"


exporter = InMemorySpanExporter()


async def set_provider() -> None:
    """Do what a program does, in the middle of a world."""
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace.set_tracer_provider(provider)


async def exported() -> list[tuple[str, str, int, int | None]]:
    """Return name, kind, trace and parent of the spans of this process."""
    return [
        (span.name, span.kind.name, span.context.trace_id, span.parent and span.parent.span_id)
        for span in exporter.get_finished_spans()
    ]


@pytest.mark.promise("watching.automatic_spans")
async def test_a_trace_over_processes(workers: Workers) -> None:
    """Each has a provider of its own, set when its calls run already."""
    names = ["a", "b"]
    await workers(names)
    for name in names:
        await call(name, set_provider)
    mine = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(mine))
    aiorpc.observe.intercept(Tracing(provider))
    await call(names[0], user_seen, names[1])
    (client,) = mine.get_finished_spans()
    first, second = [await call(name, exported) for name in names]
    trace_id = client.context.trace_id
    assert [span[1] for span in first if span[2] == trace_id] == ["CLIENT", "SERVER"]
    assert [span[1] for span in second if span[2] == trace_id] == ["SERVER"]
    (received,) = (span for span in first if span[1:3] == ("SERVER", trace_id))
    assert received[3] == client.context.span_id


class Member:
    def __init__(self, name: str) -> None:
        self.name = name

    async def take(self, item: int) -> str:
        if self.name == "dies":
            await asyncio.Event().wait()
        return self.name


@pytest.mark.promise("watching.spans")
async def test_a_retry_of_a_map_is_a_span_of_its_own(workers: Workers) -> None:
    """Beside that of the call which was lost, under that of the map."""
    names = ["dies", "stays"]
    await workers(names)
    group = await aiorpc.create(names, Member, aiorpc.each(names))
    mine = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(mine))
    aiorpc.observe.intercept(Tracing(provider))
    results = group.map(Member.take, range(2), in_flight=1)
    first = asyncio.ensure_future(anext(results))
    # Until the other has answered.
    while {each.worker for each in aiorpc.observe.pending()} != {"dies"}:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    await asyncio.to_thread(testing.kill, "dies")
    assert [await first, *[each async for each in results]] == ["stays", "stays"]
    spans = mine.get_finished_spans()
    (of_map,) = (span for span in spans if span.name == "map Member/take")
    attempts = [span for span in spans if span.name == "Member/take"]
    assert {span.parent.span_id for span in attempts} == {of_map.context.span_id}
    errors = [span.attributes.get("error.type") for span in attempts]
    assert sorted(map(str, errors)) == ["None", "None", "WorkerLost"]


async def serve_metrics(tls: aiorpc.Tls | None) -> int:
    return observe.serve_metrics(tls=tls).port


@pytest.mark.skipif(shutil.which("prometheus") is None, reason="needs Prometheus itself")
@pytest.mark.slow
@pytest.mark.parametrize("has_tls", [False, True], ids=["clear", "tls"])
async def test_prometheus_scrapes_it(workers: Workers, tmp_path: Path, has_tls: bool) -> None:
    """Its server reads what a worker serves, and answers a query."""
    await workers(["a"])
    tls, https = None, {}
    if has_tls:
        authority = Authority(tmp_path)
        tls = aiorpc.Tls(*authority.files(is_named=True))
        cert, key, ca = authority.files("prometheus")
        files = {"cert_file": cert, "key_file": key, "ca_file": ca}
        https = {"scheme": "https", "tls_config": {**files, "server_name": "worker"}}
    metrics = await call("a", serve_metrics, tls)
    port = free_port()
    (tmp_path / "prometheus.yml").write_text(
        json.dumps(
            {
                "global": {"scrape_interval": "1s"},
                "scrape_configs": [
                    {
                        "job_name": "workers",
                        "static_configs": [{"targets": [f"127.0.0.1:{metrics}"]}],
                        **https,
                    }
                ],
            }
        )
    )
    command = ["prometheus", "--config.file=prometheus.yml", "--storage.tsdb.path=data"]
    command.append(f"--web.listen-address=127.0.0.1:{port}")
    query = urllib.parse.quote('rpc_server_call_duration_seconds_count{error_type=""}')
    url = f"http://127.0.0.1:{port}/api/v1/query?query={query}"
    process = await asyncio.create_subprocess_exec(
        *command, cwd=tmp_path, stderr=subprocess.DEVNULL
    )
    try:
        async with asyncio.timeout(60.0):
            while not (found := await asyncio.to_thread(ask, url)):
                await call("a", user_seen)
                await asyncio.sleep(0.1)
    finally:
        process.terminate()
        await process.wait()
    assert {each["metric"]["rpc_method"] for each in found} >= {"user_seen"}


def ask(url: str) -> list[Any]:
    """Return the series of a query, none while Prometheus starts."""
    try:
        with urllib.request.urlopen(url, timeout=10.0) as answer:
            return json.load(answer)["data"]["result"]  # type: ignore[no-any-return]
    except OSError:
        return []
