"""Reports of long waits: one line on a terminal, ever fewer lines in a log."""

import asyncio
import io
import logging
from types import SimpleNamespace

import pytest

from aiorpc_torch._aio import waiting
from aiorpc_torch._aio.waiting import WaitReport, announced


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    """Time that a test moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(waiting, "time", found)
    return found


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """A terminal for stderr, and a program that has set up no logging."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "20")
    monkeypatch.setattr(waiting.log, "hasHandlers", lambda: False)
    monkeypatch.setattr(waiting.multiprocessing, "parent_process", lambda: None)
    found = Terminal()
    monkeypatch.setattr(waiting, "sys", SimpleNamespace(stderr=found))  # pytest sets sys.stderr
    return found


def test_a_terminal_gets_one_line_that_is_erased(clock: Clock, terminal: Terminal) -> None:
    with WaitReport(logging.WARNING, 10.0) as report:
        assert report.pause == waiting.TERMINAL_DELAY
        report.tell("too early")
        assert terminal.getvalue() == ""
        clock.now += waiting.TERMINAL_DELAY
        for text in ("w0 waits for 1, 2", "w0 waits for 1, 2", "w0 waits for 2, which is long"):
            report.tell(text)
        assert report.pause == 10.0
    lines = terminal.getvalue().split("\r\x1b[K")
    assert lines == ["", "w0 waits for 1, 2\r", "w0 waits for 2, whi\r", ""]


def test_a_short_wait_shows_nothing(clock: Clock, terminal: Terminal) -> None:
    with WaitReport(logging.WARNING, 10.0):
        clock.now += 1.0
    assert terminal.getvalue() == ""


def test_the_log_gets_ever_fewer_lines(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    """At once more often when what is awaited changes."""
    told: list[float] = []
    with caplog.at_level(logging.INFO, "aiorpc_torch"), WaitReport(logging.INFO, 10.0) as report:
        assert report.pause == 10.0
        for second in range(200):
            clock.now += 1.0
            before = len(caplog.records)
            report.tell("w0 waits for 1" if second < 149 else "w0 waits for 2")
            if len(caplog.records) > before:
                told.append(second + 1)
    assert told == [10, 20, 40, 80, 150, 160, 180]


@pytest.mark.parametrize("where", ["terminal", "log"])
def test_a_timer_that_is_a_little_early(
    where: str, clock: Clock, request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture
) -> None:
    """As uvloop's, which count whole milliseconds: no other timer follows that of `announced`."""
    terminal = request.getfixturevalue("terminal") if where == "terminal" else io.StringIO()
    with WaitReport(logging.WARNING, 10.0) as report:
        clock.now += report.pause - 0.001
        report.tell("w0 waits")
        told = terminal.getvalue() if where == "terminal" else caplog.text
    assert "w0 waits" in told


@pytest.mark.parametrize("why", ["logging", "child", "dumb", "file"])
def test_where_there_is_no_line(
    why: str, terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    if why == "logging":
        monkeypatch.setattr(waiting.log, "hasHandlers", lambda: True)
    elif why == "child":
        monkeypatch.setattr(waiting.multiprocessing, "parent_process", lambda: "it")
    elif why == "dumb":
        monkeypatch.setenv("TERM", "dumb")
    else:
        monkeypatch.setattr(waiting, "sys", SimpleNamespace(stderr=io.StringIO()))
    assert not waiting._is_terminal()


async def test_a_wait_is_announced(
    monkeypatch: pytest.MonkeyPatch, clock: Clock, terminal: Terminal
) -> None:
    monkeypatch.setattr(waiting, "TERMINAL_DELAY", 0.0)
    with announced("importing torch"):
        while not terminal.getvalue():  # noqa: ASYNC110
            await asyncio.sleep(0)
    assert terminal.getvalue() == "\r\x1b[Kimporting torch\r\r\x1b[K"
