"""What do a propagated variable, metrics and traces cost a call? And what does a trace look like?

Processor time of caller and callee together, pinned to one core, with a small tensor there and
back. Each way takes turns with the bare call, each run in processes of its own. Spans are made and
dropped: exporting them is the exporter's cost.

    pip install '.[test]'
    python -m benchmarks.observe [--quick] [--repeat N]
    python -m benchmarks.observe --trace docs/figures/trace.svg

`--trace` draws some requests of the model server, from the spans that `examples.inference --trace`
has written.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from ._compare import Row, Runs, parse, show
from ._plot import ALSO_OURS, OTHER, OURS, RAW, STYLE
from .cpu import HERE, run

REQUESTS = 16  # that are drawn
MODES = ["api imported", "a variable", "metrics", "traces"]


def compare(repeat: int, *, quick: bool) -> None:
    """Print what each way costs beside the bare call."""
    lone, rounds = (300, 1) if quick else (5000, 5)

    def measured(mode: str) -> dict[str, float]:
        found = run(HERE, mode, lone=lone, rounds=rounds)
        return {kind: sum(both) for kind, both in found.items()}

    rows = []
    for mode in MODES:
        pairs = [(measured(mode), measured("off")) for _ in range(repeat)]
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
    id: str
    parent: str | None
    links: tuple[str, ...]


def trace(users: int = 4, seconds: float = 2.0) -> list[Span]:
    """Return the spans of a run of the example's processes."""
    program = [sys.executable, "-m", "examples.inference", "--clients", "2"]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "spans.jsonl"
        sizes = ["--users", str(users), "--seconds", str(seconds), "--trace", str(path)]
        subprocess.run([*program, *sizes], check=True)
        return [_span(json.loads(line)) for line in path.read_text().splitlines()]


def _span(found: dict[str, Any]) -> Span:
    return Span(
        found["resource"]["attributes"]["service.name"],
        found["kind"].removeprefix("SpanKind."),
        found["name"],
        _milliseconds(found["start_time"]),
        _milliseconds(found["end_time"]),
        found["context"]["span_id"],
        found["parent_id"],
        tuple(link["context"]["span_id"] for link in found["links"]),
    )


def _milliseconds(time: str) -> float:
    return 1e3 * datetime.fromisoformat(time).timestamp()


def chosen(spans: list[Span]) -> list[Span]:
    """Return some requests from the middle of the run, and the batches that answered them."""
    asking = {each.id for each in spans if each.name == "Client/ask"}
    clients = sorted((each for each in spans if each.parent in asking), key=lambda e: e.start)
    clients = clients[len(clients) // 2 :][:REQUESTS]
    known = {each.id for each in clients}
    servers = [each for each in spans if each.kind == "SERVER" and each.parent in known]
    known = {each.id for each in servers}
    batches = [each for each in spans if known & {*each.links, each.parent}]
    return [*clients, *servers, *(each for each in batches if each.kind == "INTERNAL")]


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
        rows: dict[str, int] = {}

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
                if link in rows:  # else of a request that is not drawn
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
        draw(chosen(trace()), given.trace)


if __name__ == "__main__":
    main()
