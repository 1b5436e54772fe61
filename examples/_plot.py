"""Pictures of curves over the steps of a run, written to a file without a display."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib as mpl


def curves(
    path: Path,
    lines: Mapping[str, Sequence[float] | Sequence[tuple[float, float]]],
    *,
    title: str,
    xlabel: str,
    ylabel: str,
    level: tuple[str, float] | None = None,
) -> Path:
    """Draw each line by its name, of values or of (x, y); return the path.

    Args:
        path: Path of the picture; its folder is made.
        lines: Values of each line, one a step, or points.
        title: Title of the picture.
        xlabel: Label of the steps.
        ylabel: Label of the values, with their unit.
        level: Name and value of a horizontal line to compare with.
    """
    mpl.use("Agg")
    from matplotlib import pyplot as plt  # after the backend is chosen

    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    for name, values in lines.items():
        points = [each if isinstance(each, tuple) else (n, each) for n, each in enumerate(values)]
        axes.plot(*zip(*points, strict=True), label=name)
    if level is not None:
        axes.axhline(level[1], linestyle="--", color="gray", label=level[0])
    axes.set(xlabel=xlabel, ylabel=ylabel, title=title)
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return path
