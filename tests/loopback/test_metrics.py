"""`observe.serve_metrics`, scraped over HTTP and read with Prometheus's parser."""

import asyncio
import json
import re
import ssl
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import torch
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from aiorpc_torch import Group, RRef, batched, register, remote
from aiorpc_torch.observe import MetricsServer, metrics, recorder, serve_metrics
from aiorpc_torch.observe.recorder import OTHER
from aiorpc_torch.training import Replay, StalenessLimit, Weights, follow
from tests.support.certificates import Authority
from tests.support.hooks import hooks as hooks

pytestmark = pytest.mark.usefixtures("hooks", "world")

DOCS = Path(__file__).parents[2] / "docs"
DASHBOARD, ALERTS = DOCS / "figures" / "grafana-dashboard.json", DOCS / "alerts.yml"


class Measured:
    async def answer(self, _: int = 0) -> None:
        await asyncio.sleep(0)

    def fail(self) -> None:
        raise LookupError

    @batched(max_size=4, max_wait=30.0)
    async def together(self, xs: list[int]) -> list[int]:
        return xs


def scrape(server: MetricsServer, context: ssl.SSLContext | None = None) -> str:
    """Return what a scrape gets, as OpenMetrics."""
    accepts = {"Accept": "application/openmetrics-text; version=1.0.0"}
    request = urllib.request.Request(server.url, headers=accepts)
    with urllib.request.urlopen(request, timeout=30.0, context=context) as answer:
        assert answer.headers["Content-Type"].startswith("application/openmetrics-text")
        return answer.read().decode()  # type: ignore[no-any-return]


def samples(text: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Return the values by name and labels."""
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


async def scraped(server: MetricsServer) -> dict[Any, float]:
    return samples(await asyncio.to_thread(scrape, server))


def key(name: str, /, **labels: str) -> Any:
    return name, frozenset(labels.items())


@pytest.mark.promise("watching.metrics")
async def test_a_scrape() -> None:
    """Calls, errors, durations, waits, batches and the counters of `stats`."""
    with serve_metrics() as server:
        model = RRef(Measured())
        for _ in range(3):
            await remote(model).answer()
        with pytest.raises(LookupError):
            await remote(model).fail()
        assert await asyncio.gather(*(remote(model).together(x) for x in range(4))) == [0, 1, 2, 3]
        found = await scraped(server)
    duration = "rpc_server_call_duration_seconds"
    answered = {"rpc_method": "Measured.answer", "error_type": ""}
    assert found[key(f"{duration}_count", client_address="main", **answered)] == 3
    client = "rpc_client_call_duration_seconds"
    assert found[key(f"{client}_count", server_address="main", **answered)] == 3
    failed = {"rpc_method": "Measured.fail", "error_type": "LookupError"}
    assert found[key(f"{duration}_count", client_address="main", **failed)] == 1
    assert found[key(f"{duration}_sum", client_address="main", **answered)] > 0
    assert found[key(f"{duration}_bucket", client_address="main", le="+Inf", **answered)] == 3
    together = {"rpc_method": "Measured.together"}
    assert found[key("aiorpc_server_queue_duration_seconds_count", **together)] == 4
    assert found[key("aiorpc_batch_size_sum", **together)] == 4
    assert found[key("aiorpc_batch_size_bucket", le="4.0", **together)] == 1
    assert found[key("aiorpc_batch_wait_seconds_count", **together)] == 1
    assert found[key("aiorpc_batches_total", reason="full", **together)] == 1
    assert found[key("aiorpc_client_calls_total")] == 8
    assert found[key("aiorpc_server_calls_total")] == 8
    assert found[key("aiorpc_client_active_calls")] == 0
    assert found[key("target_info", service_name="aiorpc_torch", service_instance_id="main")] == 1


@pytest.mark.promise("watching.metrics")
async def test_a_blocked_loop_is_scraped() -> None:
    """From this very step of the loop: its lag is in the answer."""
    with serve_metrics() as server:
        await asyncio.sleep(0)
        while server._lag is not None and server._lag._lag._sent is None:
            time.sleep(0.05)  # noqa: ASYNC251 - until it is asked, and cannot answer
        time.sleep(0.2)  # noqa: ASYNC251
        found = samples(scrape(server))
    assert found[key("aiorpc_event_loop_lag_seconds")] >= 0.2


@pytest.mark.promise("watching.metrics")
async def test_labels_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Methods beyond the limit are one."""
    monkeypatch.setattr(recorder, "MAX_METHODS", 1)
    with serve_metrics() as server:
        group = Group([RRef(Measured()), RRef(Measured())])
        await remote(group).answer()
        for _ in range(2):
            with pytest.raises(LookupError):
                await remote(group[0]).fail()
        found = await scraped(server)
    counts = {
        dict(labels)["rpc_method"]: value
        for (name, labels), value in found.items()
        if name == "rpc_server_call_duration_seconds_count"
    }
    assert counts == {"Measured.answer": 2, OTHER: 2}


async def test_what_close_ends() -> None:
    """The port, the threads and the counting; twice is once."""
    server = serve_metrics()
    assert repr(server) == f"<MetricsServer {server.url}>"
    server.close()
    server.close()
    assert repr(server).endswith(", closed>")
    with pytest.raises(OSError, match="refused"):
        await scraped(server)
    again = serve_metrics(server.port)
    with pytest.raises(OSError, match=f"port {again.port} of 127.0.0.1: .* in use"):
        serve_metrics(server.port)
    again.close()


async def test_no_loop_runs() -> None:
    """There is no lag to measure."""
    server = await asyncio.to_thread(serve_metrics)
    found = await scraped(server)
    await asyncio.to_thread(server.close)
    assert key("aiorpc_event_loop_lag_seconds") not in found
    assert found[key("aiorpc_client_calls_total")] == 0


@pytest.mark.promise("watching.metrics_run")
async def test_the_world_and_the_objects_of_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """Objects have the name under which they are registered; followers that of their publisher."""
    monkeypatch.setattr(metrics, "gpu_use", lambda: {1: 0.25})
    with serve_metrics() as server:
        weights, replay = Weights({"a": torch.ones(1)}, version=4), Replay()
        limit = StalenessLimit(3, 8, version=4)
        register("learner", weights)
        register("buffer", replay)
        async with await follow("learner"), limit.ticket():
            await weights.publish({"a": torch.zeros(1)})
            await limit.advance(5)
            for item in range(2):
                await replay.insert(item)
            await replay.sample(6)
            found = await scraped(server)
    learner, buffer = {"name": "learner"}, {"name": "buffer"}
    expected = {
        key("aiorpc_world_size"): 1,
        key("aiorpc_workers", state="alive"): 1,
        key("aiorpc_workers", state="lost"): 0,
        key("aiorpc_worker_restarts"): 0,
        key("aiorpc_coordinator"): 1,
        key("aiorpc_weights_version", **learner): 5,
        key("aiorpc_follower_version", **learner): 4,  # nobody has put the next one in
        key("aiorpc_staleness_versions", name=""): 1,
        key("aiorpc_staleness_rollouts", name=""): 1,
        key("aiorpc_replay_items", **buffer): 2,
        key("aiorpc_replay_inserted_total", **buffer): 2,
        key("aiorpc_replay_sampled_total", **buffer): 6,
        key("aiorpc_replay_samples_per_insert", **buffer): 3,
        key("aiorpc_gpu_utilization_ratio", device="1"): 0.25,
    }
    assert {each: found[each] for each in expected} == expected
    assert 0 < found[key("aiorpc_follower_age_seconds", **learner)] < 60
    assert found[key("process_cpu_seconds_total")] > 0


@pytest.mark.promise("watching.metrics_run")
async def test_the_dashboard_and_the_alerts_name_metrics_that_exist(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each name in their queries is one of a scrape, or of Prometheus itself."""
    monkeypatch.setattr(metrics, "gpu_use", lambda: {0: 1.0})
    with serve_metrics() as server:
        model, others = RRef(Measured()), (StalenessLimit(1, 1), Replay())
        register("learner", Weights({}))
        async with await follow("learner"):
            await asyncio.gather(*(remote(model).together(x) for x in range(4)))
            found = {name for name, _ in await scraped(server)}
    del others
    dashboard = json.loads(DASHBOARD.read_text())
    queries = [each["expr"] for panel in dashboard["panels"] for each in panel.get("targets", ())]
    alerts = [line for line in ALERTS.read_text().splitlines() if not line.lstrip().startswith("#")]
    assert len(queries) >= 10
    assert sum("expr:" in line for line in alerts) >= 10
    for text in ("\n".join(queries), "\n".join(alerts)):
        names = {*re.findall(r"\b(?:aiorpc|rpc|process)_\w+", text)}
        assert names - {"rpc_method", "aiorpc_torch"} <= found


@pytest.mark.promise("watching.metrics_tls")
async def test_wrong_ports() -> None:
    with pytest.raises(ValueError, match="port must be from 0 to 65535, got 99999"):
        serve_metrics(99999)
    with pytest.raises(TypeError, match="port must be an int, got '9464'"):
        serve_metrics("9464")  # type: ignore[arg-type]
    with serve_metrics() as server, pytest.raises(OSError, match="with port=0 it gets a free one"):
        serve_metrics(server.port)


async def test_https(tmp_path: Path) -> None:
    """A scraper has a certificate of the same authority."""
    authority = Authority(tmp_path)
    with serve_metrics(tls=authority.tls()) as server:
        assert server.url == f"https://127.0.0.1:{server.port}/metrics"
        found = samples(await asyncio.to_thread(scrape, server, authority.tls("scraper").client))
        with pytest.raises(OSError):  # noqa: PT011 - of TLS, or of the connection
            await asyncio.to_thread(scrape, server, ssl._create_unverified_context())
    assert found[key("aiorpc_client_calls_total")] == 0


async def test_wrong_certificates(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="tls must be a Tls, got True"):
        serve_metrics(tls=True)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="expired"):
        serve_metrics(tls=Authority(tmp_path).expired())


async def test_ipv6() -> None:
    try:
        server = serve_metrics(host="::1")
    except OSError:
        pytest.skip("no IPv6 here")
    with server:
        assert server.url == f"http://[::1]:{server.port}/metrics"
        assert await scraped(server)
