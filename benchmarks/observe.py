"""What do a propagated variable, metrics and traces cost a call? And what does a trace look like?

Processor time of caller and callee together, pinned to one core, with a small tensor there and
back. Each way takes turns with the bare call, each run in processes of its own. Spans are made and
dropped: exporting them is the exporter's cost.

    pip install '.[test]'
    python -m benchmarks.observe [--quick] [--repeat N]
    python -m benchmarks.observe --trace docs/figures/trace.svg

`--trace` draws some requests of the model server (examples/inference.py) from their spans.
"""

import argparse
import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch

import aiorpc_torch as aiorpc
from aiorpc_torch import RRef, batched, call, remote

from ._compare import Row, Runs, parse, show
from ._plot import ALSO_OURS, OTHER, OURS, RAW, STYLE

RUN = Path(__file__).parent / "_observe_run.py"
MODES = ["api imported", "a variable", "metrics", "traces"]


def run(mode: str, *, quick: bool) -> dict[str, float]:
    """Return the microseconds of a call, measured in new processes."""
    sizes = ("300", "1") if quick else ("5000", "5")
    done = subprocess.run(
        [sys.executable, "-P", str(RUN), mode, *sizes],  # -P: modules here have names of packages
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def compare(repeat: int, *, quick: bool) -> None:
    """Print what each way costs beside the bare call."""
    rows = []
    for mode in MODES:
        pairs = [(run(mode, quick=quick), run("off", quick=quick)) for _ in range(repeat)]
        for kind in pairs[0][0]:
            runs = Runs([on[kind] for on, _ in pairs], [off[kind] for _, off in pairs])
            rows.append(Row(f"{kind}: {mode}", "µs", runs))
    show(rows, ours="with it", other="off")


# ── a trace ─────────────────────────────────────────────────────────────────────────────────────


class Span(NamedTuple):
    """A finished span; times in milliseconds."""

    worker: str
    kind: str
    name: str
    start: float
    end: float
    id: int
    parent: int | None
    links: tuple[int, ...]


class Model:
    """A network that takes 4 ms, whatever the size of the batch."""

    def __init__(self) -> None:
        self.weight = torch.ones(8, 8)

    @batched(max_size=8, stack=True)
    async def infer(self, images: torch.Tensor) -> torch.Tensor:
        await asyncio.sleep(0.004)
        return images @ self.weight


class Users:
    """Users of the model in one process."""

    async def ask(self, model: RRef[Any], users: int, requests: int) -> None:
        async def use(number: int) -> None:
            await asyncio.sleep(0.0013 * number)
            for _ in range(requests):
                await remote(model).infer(torch.ones(8))
                await asyncio.sleep(0.002)

        await asyncio.gather(*map(use, range(users)))


_exporters: list[Any] = []


async def start_tracing() -> None:
    """Keep the spans of this process."""
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    provider = TracerProvider(shutdown_on_exit=False)
    _exporters.append(InMemorySpanExporter())
    provider.add_span_processor(SimpleSpanProcessor(_exporters[0]))
    trace.set_tracer_provider(provider)


async def spans_of(worker: str) -> list[Span]:
    """Return the spans of this process."""
    return [
        Span(
            worker,
            span.kind.name,
            span.name,
            span.start_time / 1e6,
            span.end_time / 1e6,
            span.context.span_id,
            span.parent and span.parent.span_id,
            tuple(link.context.span_id for link in span.links),
        )
        for span in _exporters[0].get_finished_spans()
        if span.name.endswith("infer")
    ]


async def trace() -> list[Span]:
    """Return the spans of some requests to a model server."""
    clients = ["client0", "client1"]
    async with aiorpc.local_world(clients, name="server"):
        users, model = await aiorpc.create_all(clients, Users), RRef(Model())
        await remote(users).ask(model, 1, 1)  # connects
        await start_tracing()
        for name in clients:
            await call(name, start_tracing)
        await remote(users).ask(model, 3, 3)
        found = await spans_of("server")
        for name in clients:
            found += await call(name, spans_of, name)
        return found


def draw(spans: list[Span], path: Path) -> None:
    """Draw requests as rows, and the batches that serve them below."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt  # after the backend is chosen

    first = min(span.start for span in spans)
    clients = sorted((each for each in spans if each.kind == "CLIENT"), key=lambda each: each.start)
    servers = {each.parent: each for each in spans if each.kind == "SERVER"}
    batches = [each for each in spans if each.kind == "INTERNAL"]
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(9.5, 5.2), layout="constrained")
        rows: dict[int, int] = {}

        def bar(span: Span, row: int, look: tuple[str, str], height: float, label: str) -> None:
            known = axes.get_legend_handles_labels()[1]
            label = "" if label in known else label
            left, width = span.start - first, span.end - span.start
            axes.barh(row, width, height, left, color=look[0], label=label or None)

        for row, client in enumerate(clients):
            bar(client, row, ALSO_OURS, 0.7, "request, at the client")
            if (server := servers.get(client.id)) is not None:
                bar(server, row, OURS, 0.35, "at the server")
                rows[server.id] = row
        for position, batch in enumerate(sorted(batches, key=lambda each: each.start)):
            row = len(clients) + 1 + position % 2
            bar(batch, row, RAW, 0.7, "batch")
            for link in batch.links or (() if batch.parent is None else (batch.parent,)):
                ends = [batch.start - first, batch.start - first], [rows[link], row]
                axes.plot(*ends, color=OTHER[0], linewidth=0.6)
        names = [*(each.worker for each in clients), "", "batches", ""]
        axes.set(xlabel="ms", yticks=range(len(names)), yticklabels=names)
        axes.invert_yaxis()
        axes.legend(loc="upper right")
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
        plt.close(figure)
    print(f"drawn: {path}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--trace", type=Path, metavar="PATH", help="draw a trace: .svg or .png")
    given = parse(parser)
    if given.trace is None:
        compare(given.repeat, quick=given.quick)
    else:
        draw(asyncio.run(trace()), given.trace)


if __name__ == "__main__":
    main()
