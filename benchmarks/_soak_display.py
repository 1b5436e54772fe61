"""The soak's display: a line for each sample of the processes, and a progress bar."""

import sys
import time
from collections.abc import Sequence
from typing import Any

from ._process import Census

MB = 1_000_000
SHOWN = 4
"""Of so many samples one is printed."""


class Display:
    """The display of `total` calls. It has a bar if rich is installed and stdout is a terminal."""

    def __init__(self, workers: Sequence[str], total: int) -> None:
        self._start = time.monotonic()
        self._bar: Any = _bar(total)
        self._last = 0, 0.0
        self._samples = 0
        heads = [f"{worker}: MB threads tasks" for worker in workers]
        self._line(f"{'calls':>9}  {'s':>4}  {'calls/s':>7}  " + "  ".join(heads))

    def show(self, settled: int) -> None:
        """Show the number of calls that have ended."""
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=settled)

    def sample(self, settled: int, found: Sequence[Census]) -> None:
        """Print a line of the table, for one of `SHOWN` samples."""
        self._samples += 1
        if self._samples % SHOWN:
            return
        now = time.monotonic() - self._start
        rate = (settled - self._last[0]) / (now - self._last[1])
        self._last = settled, now
        cells = [f"{each.memory / MB:9.1f} {each.threads:7} {each.tasks:5}" for each in found]
        self._line(f"{settled:9,}  {now:4.0f}  {rate:7,.0f}  " + "  ".join(cells))

    def close(self) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._bar.stop()

    def _line(self, text: str) -> None:
        if self._bar is not None:
            self._bar.console.print(text, highlight=False)
        else:
            print(text, flush=True)


def _bar(total: int) -> Any:
    if not sys.stdout.isatty():
        return None
    try:
        from rich.progress import Progress
    except ImportError:
        return None
    bar = Progress()
    bar.add_task("calls", total=total)
    bar.start()
    return bar
