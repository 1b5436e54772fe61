"""The picture of `top`, made with rich: a table of workers, the verdicts, one worker in detail."""

import io
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from .format import number, seconds, share, size
from .model import SORTS, Row, by_world, nobody, sort_rows
from .verdicts import Verdict

WIDE = 100  # columns from which there is place for what a worker waits for
WIDEST = 125  # for all columns
MOST_VERDICTS = 8
FRAMES = 4  # of a call's stack
STYLES = {
    "ok": "green",
    **dict.fromkeys(("blocked", "stopped", "silent", "lost"), "bold red"),
    "replaced": "red",
    "held": "red",
    "grows": "yellow",
    "slow": "yellow",
    "waits": "cyan",
}
COLUMNS: Sequence[tuple[str, int, str, int, Callable[[Row], str]]] = (
    # title, width, key of `SORTS`, columns of a terminal from which it is shown, text of a row
    ("state", 7, "", 0, lambda row: "old" if row.state == "replaced" else row.state),
    ("in/s", 5, "i", 0, lambda row: number(row.incoming)),
    ("out/s", 5, "u", 0, lambda row: number(row.outgoing)),
    ("wait", 4, "w", 0, lambda row: number(row.waiting)),
    ("oldst", 5, "o", 0, lambda row: seconds(row.oldest)),
    ("bat/s", 5, "b", 0, lambda row: number(row.batches)),
    ("size", 4, "", WIDEST, lambda row: number(row.batch_size)),
    ("p50", 5, "", 0, lambda row: seconds(row.p50)),
    ("p99", 5, "p", 0, lambda row: seconds(row.p99)),
    ("lag", 5, "l", 0, lambda row: seconds(row.lag)),
    ("cpu", 4, "c", 0, lambda row: share(row.cpu)),
    ("gpu", 4, "g", 0, lambda row: share(row.gpu)),
    ("mem", 4, "m", 0, lambda row: size(row.memory)),
    ("seg", 3, "", WIDEST, lambda row: number(row.segments)),
    ("pid", 7, "", WIDEST, lambda row: str(row.pid or "-")),
    ("rst", 3, "", WIDEST, lambda row: str(row.restarts)),
)
FROM_OUTSIDE = "state", "cpu", "pid"  # columns that need no answer of the process
HELP = "↑↓ enter open  q quit  sort: "


@dataclass
class Screen:
    """The choices of the user: the order, the selected worker and the opened one."""

    sort: str = "r"
    selected: int = 0
    pid: int | None = None
    """The process whose worlds alone are shown."""
    opened: str = ""
    """The socket of the worker in detail, "" for the table."""

    def handle(self, key: str, rows: Sequence[Row]) -> bool:
        """Handle a key; return whether to go on."""
        if key in ("q", "\x03"):
            return False
        if key in SORTS:
            self.sort = key
        elif key in ("up", "k"):
            self.selected -= 1
        elif key in ("down", "j"):
            self.selected += 1
        elif key in ("escape", "left", "\x7f"):
            self.opened = ""
        elif key in ("\r", "\n", "right"):
            ordered = sort_rows(rows, self.sort)
            self.opened = ordered[self.selected].key if ordered else ""
        self.selected = max(0, min(self.selected, len(rows) - 1))
        return True


def picture(
    screen: Screen,
    rows: Sequence[Row],
    verdicts: Sequence[Verdict],
    detail: Mapping[str, Any],
    width: int,
    height: int,
) -> RenderableType:
    """Return the picture for a terminal of that many columns and lines.

    `detail` is the snapshot of the opened worker.
    """
    opened = next((row for row in rows if row.key and row.key == screen.opened), None)
    if opened is not None:
        own = [e for e in verdicts if (e.world, e.worker) == (opened.world, opened.name)]
        lines = [*_detail(opened, own, detail)]
        return _cut(Group(*lines[: height - 2], Text("esc back  q quit", style="dim")))
    if not rows:
        return Text(f"{nobody(screen.pid)}; q quit")
    shown = [_verdict_line(each, _also(each, rows)) for each in verdicts[:MOST_VERDICTS]]
    if len(verdicts) > MOST_VERDICTS:
        shown.append(Text(f"and {len(verdicts) - MOST_VERDICTS} more", style="dim"))
    shown = shown or [Text("nothing stands out", style="green")]
    room = max(3, height - len(shown) - 3)
    return _cut(Group(*shown, *_tables(screen, rows, width, room), _help()))


def _help() -> Text:
    """Return the line of the keys: those that sort are letters of the columns' names."""
    found = Text(HELP, style="dim")
    for key, (_, word) in SORTS.items():
        before, _, after = word.partition(key)
        found.append(before).append(key, style="bold underline not dim").append(f"{after} ")
    return found


def save(path: str, rows: Sequence[Row], verdicts: Sequence[Verdict]) -> None:
    """Draw the picture once, as SVG."""
    console = Console(record=True, file=io.StringIO(), width=WIDEST, force_terminal=True)
    height = len(rows) + MOST_VERDICTS
    console.print(picture(Screen(selected=-1), rows, verdicts, {}, WIDEST, height))
    # Without the fonts, which a browser would get from a third party.
    template = re.sub(r"@font-face \{\{.*?\}\}", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
    text = console.export_svg(title="python -m aiorpc_torch top", code_format=template)
    Path(path).write_text("".join(f"{line.rstrip()}\n" for line in text.splitlines()))


def _cut(group: Group) -> Group:
    for each in group.renderables:
        if isinstance(each, Text):
            each.no_wrap, each.overflow = True, "ellipsis"
    return group


def _verdict_line(verdict: Verdict, also: str = "") -> Text:
    text = Text(f"{verdict.worker}{also}: ", style=f"bold {STYLES[verdict.kind]}")
    return text.append(verdict.text, style="not bold")


def _also(verdict: Verdict, rows: Iterable[Row]) -> str:
    """Return the pid of a verdict's worker if other worlds have a worker of that name too."""
    pids = {row.world: row.pid for row in rows if row.name == verdict.worker}
    pid = pids.get(verdict.world)  # none on another host, where it is waited for
    return f" (pid {pid})" if len(pids) > 1 and pid else ""


def _tables(screen: Screen, rows: Sequence[Row], width: int, room: int) -> list[RenderableType]:
    """Return the header and a table for each world, scrolled to the selected worker."""
    lines: list[Text | Row] = []  # below the header: a text for each world if there are several
    ordered = sort_rows(rows, screen.sort)
    worlds = by_world(ordered)
    for world, of_world in worlds.items():
        if len(worlds) > 1:
            name = world
            if world.startswith("unix://"):  # a local one, known by the pid of rank 0
                pid = next((row.pid for row in of_world if row.rank == 0), 0)
                name = f"local world of process {pid}" if pid else "local world"
            count = f"{len(of_world)} worker{'s' * (len(of_world) > 1)}"
            lines.append(Text(f"{name}: {count}", style="dim"))
        lines += of_world
    selected = ordered[screen.selected] if 0 <= screen.selected < len(ordered) else None
    at = next((n for n, each in enumerate(lines) if each is selected), 0)
    first = max(0, min(at - room // 2, len(lines) - room))
    found: list[RenderableType] = [table := _table(screen, width, is_header=True)]
    for line in lines[first : first + room]:
        if isinstance(line, Text):  # as wide as the terminal
            found += [line, table := _table(screen, width)]
        else:
            style = "reverse" if line is selected else ""
            table.add_row(*_cells(line, width), style=style)
    return found


def _table(screen: Screen, width: int, *, is_header: bool = False) -> Table:
    """Return an empty table. All have the same widths."""
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, expand=True, header_style="bold")
    table.show_header = is_header
    table.add_column("worker", ratio=1, min_width=9, no_wrap=True)
    rest = width - 15
    for title, columns, key, least, _ in COLUMNS:
        if width >= least:
            style = "bold reverse" if key == screen.sort else "bold"
            header = Text(title, style=style)
            table.add_column(header, width=columns, no_wrap=True, justify="right", overflow="crop")
            rest -= 1 + columns
    if width >= WIDE:
        table.add_column("waits for", no_wrap=True, width=rest)
    return table


def _cells(row: Row, width: int) -> Iterable[Text]:
    """Yield the cells of a row. A str would be read as rich's markup, and ":cat:" as an emoji."""
    answers = row.state in ("ok", "blocked")
    yield Text(f"{row.name}{'*' * row.is_coordinator}")
    for title, _, _, least, text in COLUMNS:
        if width >= least:
            style = STYLES[row.state] if title == "state" else ""
            yield Text(text(row) if answers or title in FROM_OUTSIDE else "-", style=style)
    if width >= WIDE:
        yield Text(", ".join(f"{e.worker} {seconds(e.age)}" for e in row.waits if e.method))


# ── one worker ──────────────────────────────────────────────────────────────────────────────────


def _detail(
    row: Row, verdicts: Iterable[Verdict], data: Mapping[str, Any]
) -> Iterable[RenderableType]:
    more = f"  restarts {row.restarts}{'  keeps the directory' * row.is_coordinator}"
    more += f"  cpu {share(row.cpu)}  gpu {share(row.gpu)}"
    yield Text.assemble((row.name, "bold"), f"  rank {row.rank}  pid {row.pid}  {row.state}{more}")
    yield from map(_verdict_line, verdicts)
    if row.state == "blocked":
        yield Text("stack of the event loop's thread, the innermost frame first:", style="bold")
        yield from _stack(row.stack)
    for method in row.methods:
        times = f"p50 {seconds(method.p50)}  p99 {seconds(method.p99)}"
        yield Text(f"{method.name}  {number(method.calls)} calls in 10 s  {times}")
    for each in row.functions:
        batches = f"{number(each.rate)} batches/s of {number(each.size)}"
        yield Text(f"{each.name}  {batches}  {number(each.waiting)} calls wait")
    for wait in row.waits:
        waits = f"{number(wait.calls)} calls, {wait.method} for {seconds(wait.age)}"
        yield Text(f"waits for {wait.worker}: {waits}", style="cyan")
    if where := data.get("where", ()):
        yield Text("where its calls stand:", style="bold")
        yield from _stack(where)
    if calls := data.get("calls", ()):
        yield Text("oldest calls that run here:", style="bold")
    for call in calls:
        yield Text(f"{call['method']} of {call['worker']} for {seconds(call['age'])}")
        yield from _stack(call["stack"][-FRAMES:])
    for name, frames in data.get("threads", {}).items():
        yield Text(f"thread {name}:", style="bold")
        yield from _stack(frames[:FRAMES])


def _stack(frames: Iterable[str]) -> Iterable[Text]:
    return (Text(f"  {frame}", style="dim") for frame in frames)
