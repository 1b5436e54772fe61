"""The picture of `top`, made with rich: a table of workers, the verdicts, one worker in detail."""

import io
import re
from collections.abc import Iterable, Mapping, Sequence
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
    "blocked": "bold red",
    "stopped": "bold red",
    "silent": "bold red",
    "lost": "bold red",
    "replaced": "red",
    "held": "red",
    "grows": "yellow",
    "slow": "yellow",
    "waits": "cyan",
}
COLUMNS = (  # title, width, key of `SORTS`, columns of a terminal from which it is shown
    ("state", 7, "", 0),
    ("in/s", 5, "i", 0),
    ("out/s", 5, "u", 0),
    ("wait", 4, "w", 0),
    ("oldst", 5, "o", 0),
    ("bat/s", 5, "b", 0),
    ("size", 4, "", WIDEST),
    ("p50", 5, "", 0),
    ("p99", 5, "p", 0),
    ("lag", 5, "l", 0),
    ("cpu", 4, "c", 0),
    ("gpu", 4, "g", 0),
    ("mem", 4, "m", 0),
    ("seg", 3, "", WIDEST),
    ("pid", 7, "", WIDEST),
    ("rst", 3, "", WIDEST),
)
FROM_OUTSIDE = "cpu", "pid"  # columns that need no answer of the process
HELP = "↑↓ enter open  q quit  sort: "
SORT_WORDS = (
    *("rank", "name", "in", "out", "wait", "old", "bat", "p99", "lag", "cpu", "gpu", "mem"),
)


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
            self.opened = self._selected_key(rows)
        self.selected = max(0, min(self.selected, len(rows) - 1))
        return True

    def _selected_key(self, rows: Sequence[Row]) -> str:
        ordered = self.order(rows)
        return ordered[self.selected].key if ordered else ""

    def order(self, rows: Iterable[Row]) -> list[Row]:
        """Return the rows as they are shown."""
        return sort_rows(rows, self.sort)


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
    for key, word in zip(SORTS, SORT_WORDS, strict=True):
        before, _, after = word.partition(key)
        found.append(before).append(key, style="bold underline not dim").append(f"{after} ")
    return found


def save(path: str, rows: Sequence[Row], verdicts: Sequence[Verdict], width: int = WIDEST) -> None:
    """Draw the picture once, as SVG."""
    console = Console(record=True, file=io.StringIO(), width=width, force_terminal=True)
    console.print(
        picture(Screen(selected=-1), rows, verdicts, {}, width, len(rows) + MOST_VERDICTS)
    )
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
    lines = [*_lines(screen.order(rows), screen.selected)]
    at = next((n for n, (is_selected, _) in enumerate(lines) if is_selected), 0)
    first = max(0, min(at - room // 2, len(lines) - room))
    found: list[RenderableType] = [table := _table(screen, width, is_header=True)]
    for is_selected, line in lines[first : first + room]:
        if isinstance(line, Text):  # as wide as the terminal
            found += [line, table := _table(screen, width)]
            continue
        name, *cells, waits = line
        kept = [each for each, (*_, least) in zip(cells, COLUMNS, strict=True) if width >= least]
        more = [waits] if width >= WIDE else []
        table.add_row(name, *kept, *more, style="reverse" if is_selected else "")
    return found


def _table(screen: Screen, width: int, *, is_header: bool = False) -> Table:
    """Return an empty table. All have the same widths."""
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, expand=True, header_style="bold")
    table.show_header = is_header
    table.add_column("worker", ratio=1, min_width=9, no_wrap=True)
    shown = [each for each in COLUMNS if width >= each[-1]]
    for title, columns, key, _ in shown:
        is_sorted = key and key == screen.sort
        style = "bold reverse" if is_sorted else "bold"
        table.add_column(
            Text(title, style=style), width=columns, no_wrap=True, justify="right", overflow="crop"
        )
    if width >= WIDE:
        rest = width - sum(1 + columns for _, columns, *_ in shown) - 15
        table.add_column("waits for", no_wrap=True, width=rest)
    return table


def _lines(
    rows: Sequence[Row], selected: int
) -> Iterable[tuple[bool, Text | list[RenderableType]]]:
    """Yield what is below the header: a text for each world if there are several, and the rows."""
    worlds = by_world(rows)
    position = 0
    for world, of_world in worlds.items():
        if len(worlds) > 1:
            yield False, Text(_title(world, of_world), style="dim")
        for row in of_world:
            yield position == selected, _cells(row)
            position += 1


def _title(world: str, rows: Sequence[Row]) -> str:
    """Return the line above the rows of a world: that of a local one has the pid of rank 0."""
    pid = next((row.pid for row in rows if row.rank == 0), 0)
    of = f" of process {pid}" if pid else ""
    name = f"local world{of}" if world.startswith("unix://") else world
    return f"{name}: {len(rows)} worker{'s' * (len(rows) > 1)}"


def _cells(row: Row) -> list[RenderableType]:
    numbers = (
        *(number(row.incoming), number(row.outgoing), number(row.waiting), seconds(row.oldest)),
        *(number(row.batches), number(row.batch_size), seconds(row.p50), seconds(row.p99)),
        *(seconds(row.lag), share(row.cpu), share(row.gpu), size(row.memory), number(row.segments)),
        *(str(row.pid or "-"), str(row.restarts)),
    )
    titles = (title for title, *_ in COLUMNS[1:])
    answers = row.state in ("ok", "blocked")
    waits = ", ".join(f"{e.worker} {seconds(e.age)}" for e in row.waits if e.method)
    return [  # a str would be read as rich's markup, and ":cat:" as an emoji
        Text(f"{row.name}{'*' * row.is_coordinator}"),
        Text("old" if row.state == "replaced" else row.state, style=STYLES[row.state]),
        *(
            each if answers or title in FROM_OUTSIDE else "-"
            for title, each in zip(titles, numbers, strict=True)
        ),
        Text(waits),
    ]


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
        calls = f"{number(wait.calls)} calls, {wait.method} for {seconds(wait.age)}"
        yield Text(f"waits for {wait.worker}: {calls}", style="cyan")
    if where := data.get("where", ()):
        yield Text("where its calls stand:", style="bold")
        yield from _stack(where)
    yield from _calls(data)


def _calls(data: Mapping[str, Any]) -> Iterable[RenderableType]:
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
