"""The figure of `benchmarks.peers`: a panel for each of a few rows, with a bar for each system."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from ._compare import number
from ._peers_work import Workload
from ._plot import OTHER, OURS, STYLE

ROWS = ("crowd", "batched", "lone")
"""Methods of the workloads that are drawn."""

Bars = Mapping[str, Sequence[float]]
"""Systems and their measurements, one for each repetition; none if the system has no such thing."""


def draw(rows: Sequence[tuple[Workload, Bars]], path: Path) -> None:
    """Write the panels, side by side; a bar is the median, its line goes from least to greatest."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt  # after the backend is chosen

    path.parent.mkdir(parents=True, exist_ok=True)
    with plt.rc_context(STYLE):
        figure, panels = plt.subplots(
            1, len(rows), figsize=(3.4 * len(rows), 2.3), sharey=True, layout="constrained"
        )
        for axes, (workload, bars) in zip(panels, rows, strict=True):
            _draw_panel(axes, workload, bars)
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
        plt.close(figure)
    print(f"\ndrawn: {path}")


def _draw_panel(axes: Any, workload: Workload, bars: Bars) -> None:
    names = list(bars)[::-1]  # from below
    runs = [bars[name] or [0.0] for name in names]
    middle, low, high = ([each(run) for run in runs] for each in (median, min, max))
    errors = [
        [m - at for m, at in zip(middle, low, strict=True)],
        [at - m for m, at in zip(middle, high, strict=True)],
    ]
    colours = [OURS[0] if name.startswith("ours") else OTHER[0] for name in names]
    axes.barh(names, middle, xerr=errors, color=colours, height=0.65, ecolor="#333333")
    for at, (value, end) in enumerate(zip(middle, high, strict=True)):
        axes.text(end + 0.02 * max(high), at, number(value) if value else "–", va="center")
    less = workload.unit in ("µs", "ms", "s")
    axes.set(title=workload.what, xlabel=f"{workload.unit}, {'less' if less else 'more'} is better")
    axes.set_xlim(right=1.25 * max(high))
    axes.set_xticks([])
    axes.grid(visible=False)
