"""Figures in one style: the median of the repetitions as a line, their spread as a band.

Matplotlib is imported only to draw.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from ._compare import Runs

# Colours that the colour-blind can tell apart, and markers for prints in grey.
OURS, ALSO_OURS, RAW, OTHER = ("#0072b2", "o"), ("#56b4e9", "s"), ("#d55e00", "^"), ("#666666", "D")

STYLE: Any = {
    "axes.axisbelow": True,
    "axes.edgecolor": "#999999",
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlesize": "medium",
    "font.size": 10.0,
    "grid.color": "#e5e5e5",
    "legend.frameon": False,
    "lines.linewidth": 1.8,
    "lines.markersize": 4.0,
    "svg.hashsalt": "aiorpc_torch",  # equal figures give equal files
}


@dataclass(frozen=True, slots=True)
class Curve:
    """Measurements at each x, one for each repetition."""

    label: str
    look: tuple[str, str]
    xs: Sequence[float]
    runs: Sequence[Sequence[float]]


@dataclass(frozen=True, slots=True)
class Panel:
    """A pair of axes. `x` and `y` are their labels, with units."""

    title: str
    x: str
    y: str
    curves: Sequence[Curve]
    log: str = "x"  # the logarithmic axes
    mark: tuple[float, str] | None = None  # a vertical line and its label
    events: Mapping[str, Sequence[float]] = field(default_factory=dict)  # xs, by kind


def pair(points: Sequence[float], runs: Sequence[Runs], raw: str) -> list[Curve]:
    """Return the two curves of a sweep of both ways."""
    return [
        Curve("ours", OURS, points, [each.ours for each in runs]),
        Curve(raw, RAW, points, [each.raw for each in runs]),
    ]


def draw(panels: Sequence[Panel], path: Path | None) -> None:
    """Write the panels, side by side, to a picture of the format that the suffix names.

    Does nothing without a path.
    """
    if path is None:
        return
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt  # after the backend is chosen

    path.parent.mkdir(parents=True, exist_ok=True)
    with plt.rc_context(STYLE):
        size = sum(9.2 if each.events else 4.6 for each in panels), 3.8
        figure = plt.figure(figsize=size, layout="constrained")
        for number, panel in enumerate(panels, 1):
            _draw_panel(figure.add_subplot(1, len(panels), number), panel)
        figure.savefig(path, dpi=110, metadata={"Date": None} if path.suffix == ".svg" else None)
        plt.close(figure)
    print(f"\ndrawn: {path}")


def _draw_panel(axes: Any, panel: Panel) -> None:
    for curve in panel.curves:
        colour, marker = curve.look
        middle, low, high = ([*map(each, curve.runs)] for each in (median, min, max))
        axes.plot(curve.xs, middle, color=colour, marker=marker, label=curve.label)
        axes.fill_between(curve.xs, low, high, color=colour, alpha=0.18, linewidth=0)
    axes.set(title=panel.title, xlabel=panel.x, ylabel=panel.y)
    for name, axis in (("x", axes.xaxis), ("y", axes.yaxis)):
        if name in panel.log:
            getattr(axes, f"set_{name}scale")("log")
        _label(axis, logarithmic=name in panel.log)
    if "x" in panel.log:
        axes.set_xticks(_few(sorted({x for curve in panel.curves for x in curve.xs})))
    if "y" not in panel.log:
        axes.set_ylim(bottom=0.0)
    if panel.mark is not None:
        x, text = panel.mark
        axes.axvline(x, color="#333333", linewidth=1.0, linestyle=":", label=text)
    if panel.events:
        _mark_events(axes, panel)
        axes.legend(loc="lower right")
    else:
        axes.legend()


def _mark_events(axes: Any, panel: Panel) -> None:
    """Draw a row of marks for each kind of event, above the curves."""
    place, top = axes.get_xaxis_transform(), 1.04 + 0.055 * (len(panel.events) - 1)
    for number, (kind, xs) in enumerate(panel.events.items()):
        y = top - 0.055 * number
        axes.plot(xs, [y] * len(xs), "|k", markersize=7.0, transform=place, clip_on=False)
        axes.text(-0.01, y, kind, ha="right", va="center", transform=axes.transAxes)
    axes.set_title(panel.title, pad=11.0 * len(panel.events) + 6.0)  # points


def _label(axis: Any, *, logarithmic: bool) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    if logarithmic:
        axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: brief(value)))
    axis.set_minor_locator(NullLocator())


def _few(xs: list[float]) -> list[float]:
    """Return the points of a sweep, or every other one if their labels would touch."""
    return xs if len(xs) <= 8 else xs[::2]


def brief(value: float) -> str:
    """Return a short form of a number: 1.5M, or 64Ki for powers of two."""
    binary = bool(value >= 1_024 and math.log2(value).is_integer())
    base, letters = (1_024.0, "KMG") if binary else (1_000.0, "kMG")
    power = 0
    while value >= base and power < len(letters):
        value, power = value / base, power + 1
    letter = letters[power - 1] + "i" * binary if power else ""
    return f"{value:.3g}{letter}"
