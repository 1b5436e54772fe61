"""What happens to a world when one of its workers is lost or leaves, in each of its states?

Each cell of the table runs three workers in processes of their own: `a`, `b` and `main`. A fault is
injected into `a` while the world is in a state. Calls that wait for `a` must fail with the
documented error in the documented time, and the others must go on. Every process must end by itself
with the right exit code. The benchmark's exit code is 1 if a cell failed.

    python -m benchmarks.faults [--only WORDS ...] [--jobs N] [--markdown docs/faults.md]

`--only "kill -9" "open stream"` runs the cells of that fault and that state; a fault or a state
alone selects its row or column.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import re
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path

import aiorpc_torch  # noqa: F401 - once, for all processes, which are forked

from ._compare import lay_out
from ._faults_cell import FAULTS, STATES, Fault, Verdict, makes_no_sense, play

LIMIT = 60.0  # seconds for a cell; one that takes longer has failed
Cell = tuple[Fault, str]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Every fault in every state.")
    names = [*(fault.name for fault in FAULTS), *STATES]
    parser.add_argument("--only", nargs="+", choices=names, default=[], metavar="WORDS")
    parser.add_argument("--jobs", type=int, default=3, metavar="N", help="cells at once (3)")
    parser.add_argument("--markdown", type=Path, metavar="PATH", help="page to put the table into")
    return parser.parse_args()


def chosen(only: Sequence[str]) -> list[Cell]:
    faults = [fault for fault in FAULTS if fault.name in only] or FAULTS
    states = [state for state in STATES if state in only] or STATES
    return [
        (fault, state) for fault in faults for state in states if not makes_no_sense(fault, state)
    ]


# ── each in a process of its own ────────────────────────────────────────────────────────────────


class Run:
    """A cell that is running."""

    def __init__(self, cell: Cell) -> None:
        self.cell = cell
        # Not a TemporaryDirectory, which every forked process would delete at its end.
        self._path = Path(tempfile.mkdtemp(prefix="aiorpc-faults-"))
        self._start = time.monotonic()
        sys.stdout.flush()
        self._pid = os.fork()
        if not self._pid:
            self._play()

    def _play(self) -> None:
        os.setpgid(0, 0)
        try:
            verdict = play(*self.cell, self._path)
        except BaseException:
            verdict = Verdict(wrong=[traceback.format_exc()])
        (self._path / "verdict").write_text(json.dumps(dataclasses.asdict(verdict)))
        os._exit(0)

    def verdict(self) -> Verdict | None:
        """Return the verdict, or None while the cell runs."""
        if os.waitpid(self._pid, os.WNOHANG)[0]:
            found = Verdict(**json.loads((self._path / "verdict").read_text()))
        elif time.monotonic() > self._start + LIMIT:
            found = Verdict(wrong=[f"it did not end within {LIMIT:g} s", *self._errors()])
            self._kill()
            os.waitpid(self._pid, 0)
        else:
            return None
        shutil.rmtree(self._path)
        return found

    def _errors(self) -> Iterator[str]:
        for path in self._path.glob("*.err"):
            yield f"{path.stem} wrote: {path.read_text(errors='replace')[-1500:]}"

    def _kill(self) -> None:
        for number in (signal.SIGKILL, signal.SIGCONT):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._pid, number)


def play_all(cells: list[Cell], jobs: int) -> dict[Cell, Verdict]:
    found: dict[Cell, Verdict] = {}
    waiting, running = [*cells], list[Run]()
    while waiting or running:
        while waiting and len(running) < jobs:
            running.append(Run(waiting.pop(0)))
        for run in [*running]:
            if (verdict := run.verdict()) is not None:
                running.remove(run)
                found[run.cell] = verdict
                say(run.cell, verdict)
        time.sleep(0.02)
    return found


# ── output ──────────────────────────────────────────────────────────────────────────────────────


def say(cell: Cell, verdict: Verdict) -> None:
    fault, state = cell
    print(f"{fault.name} × {state}: {in_words(verdict)}", flush=True)
    for wrong in verdict.wrong:
        print("    " + wrong.replace("\n", "\n    "), flush=True)


def in_words(verdict: Verdict) -> str:
    if verdict.skipped:
        return f"skipped: {verdict.skipped}"
    return f"{'FAILED' if verdict.wrong else 'OK'}  {measured(verdict)}"


def measured(verdict: Verdict) -> str:
    return f"{verdict.end}, {verdict.seconds:.1f} s" if verdict.end else ""


def table(found: dict[Cell, Verdict]) -> list[list[str]]:
    """Return the table: a row for each fault, a column for each state."""
    rows = [["", *STATES]]
    for fault in FAULTS:
        verdicts = [found.get((fault, state)) for state in STATES]
        if any(verdicts):
            cells = [
                shown(verdict) if verdict else "–" if makes_no_sense(fault, state) else ""
                for verdict, state in zip(verdicts, STATES, strict=True)
            ]
            rows.append([fault.name, *cells])
    return rows


def shown(verdict: Verdict) -> str:
    if verdict.skipped:
        return "skipped"
    return "FAILED" if verdict.wrong else f"OK {verdict.seconds:.1f} s"


def show(found: dict[Cell, Verdict]) -> None:
    rows = table(found)
    print()
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        return lay_out(rows)
    lines = Table(*rows[0], title="What happens when", caption="seconds: the longest wait")
    for name, *cells in rows[1:]:
        colours = {"F": "bold red", "O": "green", "s": "yellow"}
        styled = [f"[{colour}]{c}[/]" if (colour := colours.get(c[:1])) else c for c in cells]
        lines.add_row(name, *styled)
    Console(width=None if sys.stdout.isatty() else 140).print(lines)
    return None


def markdown(found: dict[Cell, Verdict]) -> str:
    """Return the table for the page: outcomes with their seconds."""
    head, *_ = table(found)
    lines = [head, ["---"] * len(head)]
    for fault in FAULTS:
        cells = [found.get((fault, state)) for state in STATES]
        words = [measured(verdict) or "skipped" if verdict else "–" for verdict in cells]
        lines.append([fault.name, *words])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def insert(path: Path, text: str) -> None:
    pattern = r"(<!-- faults -->\n).*?(<!-- end -->)"
    page, count = re.subn(
        pattern,
        lambda match: f"{match[1]}\n{text}\n\n{match[2]}",
        path.read_text(),
        flags=re.DOTALL,
    )
    if count != 1:
        sys.exit(f"{path} has no marks for the table: <!-- faults --> ... <!-- end -->")
    path.write_text(page)


def main() -> int:
    given = arguments()
    cells = chosen(given.only)
    start = time.monotonic()
    found = play_all(cells, given.jobs)
    show(found)
    failed = sum(bool(verdict.wrong) for verdict in found.values())
    skipped = sum(bool(verdict.skipped) for verdict in found.values())
    took = time.monotonic() - start
    print(f"{len(found)} cells in {took:.0f} s: {failed} failed, {skipped} skipped")
    if given.markdown is not None and not failed:
        insert(given.markdown, markdown(found))
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
