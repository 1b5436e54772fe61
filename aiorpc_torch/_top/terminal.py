"""`python -m aiorpc_torch top`: looks every second, shows the picture, obeys keys."""

import contextlib
import dataclasses
import importlib.util
import json
import os
import select
import sys
import termios
import time
import tty
from collections.abc import Iterator

from .model import History, Row, by_world, nobody
from .probe import Prober
from .verdicts import Verdict, verdicts

INTERVAL = 1.0  # seconds between two looks
LOOKS, LOOK_INTERVAL = 5, 0.5  # of `--json`, which needs differences
SEQUENCE_TIMEOUT = 0.05  # seconds for the rest of a key's escape sequence
ARROWS = {"\x1b[A": "up", "\x1b[B": "down", "\x1b[C": "right", "\x1b[D": "left"}
ARROWS |= {f"\x1bO{key[-1]}": name for key, name in ARROWS.items()}  # in application mode


def run_top(*, as_json: bool = False, svg: str | None = None, pid: int | None = None) -> int:
    """Run `top`; return its exit code.

    Args:
        as_json: whether to print the rows and verdicts once, as JSON.
        svg: file for the picture, which is drawn once (default: none, it is shown live).
        pid: process whose worlds are shown (default: all of this user).
    """
    if not as_json and importlib.util.find_spec("rich") is None:
        return _fail("top needs rich: pip install 'aiorpc_torch[top]'; without it, use --json")
    if as_json or svg is not None:
        return _show_once(svg, pid)
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        return _fail("top needs a terminal; use --json elsewhere")
    with contextlib.suppress(KeyboardInterrupt), contextlib.closing(Prober()) as prober:
        _show(prober, pid)
    return 0


def _show_once(svg: str | None, pid: int | None) -> int:
    """Draw the picture, or print JSON without a file for it; return the exit code."""
    rows, found = look(pid)
    if pid is not None and not rows:
        return _fail(f"{nobody(pid)}; without --pid, top shows all workers")
    if not rows:  # what is printed is valid, and empty
        sys.stderr.write(f"{nobody(pid)}\n")
    if svg is None:
        worlds = {
            world: [dataclasses.asdict(row) for row in of_world]
            for world, of_world in by_world(rows).items()
        }
        report = {"worlds": worlds, "verdicts": [dataclasses.asdict(each) for each in found]}
        sys.stdout.write(json.dumps(report, indent=1) + "\n")
        return 0
    from .view import save

    try:
        save(svg, rows, found)
    except OSError as exc:
        return _fail(f"top cannot write {svg}: {exc.strerror or exc}")
    return 0


def _fail(text: str) -> int:
    sys.stderr.write(f"{text}\n")
    return 1


def look(pid: int | None = None) -> tuple[list[Row], list[Verdict]]:
    """Return rows and verdicts after a few looks."""
    history = History()
    with contextlib.closing(Prober()) as prober:
        for number in range(LOOKS):
            if number:
                time.sleep(LOOK_INTERVAL)
            history.add(prober.sample())
    rows = history.rows(pid)
    return rows, verdicts(history, rows)


def _show(prober: Prober, pid: int | None) -> None:
    from rich.live import Live

    from .view import Screen, picture

    history, screen, keys = History(), Screen(pid=pid), Keys(sys.stdin.fileno())
    with keys.raw(), Live(screen=True, auto_refresh=False) as live:
        while True:
            history.add(prober.sample({screen.opened} - {""}))
            rows = history.rows(pid)
            found, due = verdicts(history, rows), time.monotonic() + INTERVAL
            while True:
                detail = (
                    history.tracks[screen.opened].data if screen.opened in history.tracks else {}
                )
                width, height = live.console.size
                live.update(picture(screen, rows, found, detail, width, height), refresh=True)
                if (key := keys.next(due - time.monotonic())) is None:
                    break
                if not screen.handle(key, rows):
                    return
                if screen.opened and "calls" not in detail:
                    break  # look now, for its stacks


class Keys:
    """The keys that are pressed at a terminal."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    @contextlib.contextmanager
    def raw(self) -> Iterator[None]:
        """Get each key at once in this block, without an echo. Ctrl-C stays a signal."""
        before = termios.tcgetattr(self._descriptor)
        tty.setcbreak(self._descriptor)
        try:
            yield
        finally:
            termios.tcsetattr(self._descriptor, termios.TCSADRAIN, before)

    def next(self, timeout: float) -> str | None:
        """Return the next key, None after `timeout` seconds; "q" at the terminal's end."""
        if not self._is_ready(timeout):
            return None
        key = self._read()
        if key == "\x1b":  # of an arrow, or the key itself; over ssh the rest may come later
            while len(key) < 3 and self._is_ready(SEQUENCE_TIMEOUT):
                key += self._read()
            return ARROWS.get(key, "escape")
        return key or "q"

    def _is_ready(self, timeout: float) -> bool:
        return bool(select.select([self._descriptor], [], [], max(0.0, timeout))[0])

    def _read(self) -> str:
        try:
            return os.read(self._descriptor, 1).decode(errors="replace")
        except OSError:  # the terminal has gone
            return ""
