"""Warnings of an event loop that stands, from another thread."""

import logging
import sys
import threading
import time
import types
from collections.abc import Callable
from typing import Any

import pytest

from aiorpc_torch._aio import loop_lag
from aiorpc_torch._aio.loop_lag import LOOK_INTERVAL, LOOKS, StallWatch
from aiorpc_torch._aio.places import is_at_lock


class Lag:
    """That of a loop which stands as long as it is told."""

    def __init__(self) -> None:
        self.blocked, self.probes = 0.0, 0

    def probe(self) -> None:
        self.probes += 1

    def blocked_for(self) -> float:
        return self.blocked


class Watched:
    """A watch of this thread, and its clock."""

    def __init__(self) -> None:
        self.lag, self.now = Lag(), 100.0
        lag: Any = self.lag
        self.watch = StallWatch(lag, threading.get_ident(), "w0")

    def look(self, blocked: float) -> None:
        self.now += LOOK_INTERVAL
        self.lag.blocked = blocked
        self.watch.look(self.now)

    def stall(self) -> None:
        for number in range(LOOKS + 2):
            self.look(number * LOOK_INTERVAL)


def texts(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]


@pytest.mark.promise("worlds.stalls")
def test_one_warning_for_each_stall(caplog: pytest.LogCaptureFixture) -> None:
    """It names the line of the program, and a place at most once a minute."""
    watched = Watched()
    watched.stall()
    [text] = texts(caplog)
    start = f"the event loop of 'w0' has stood for 5 s in Watched.look ({__file__}:"
    assert text.startswith(start)
    assert "Run that in a thread" in text
    assert "collective" not in text
    watched.stall()
    assert len(texts(caplog)) == 1
    watched.now += 60.0
    watched.stall()
    assert len(texts(caplog)) == 2


@pytest.mark.promise("worlds.stalls")
def test_a_lock_of_threads(caplog: pytest.LogCaptureFixture) -> None:
    """A coroutine that has it across an `await` needs this loop to release it."""
    lock, is_done = threading.Lock(), threading.Event()
    watched = Watched()

    def wait() -> None:
        with lock:
            is_done.set()

    with lock:
        waiting = threading.Thread(target=wait)
        waiting.start()
        watched.watch = StallWatch(watched.watch._lag, waiting.ident or 0, "w0")
        while not is_at_lock(sys._current_frames()[waiting.ident or 0]):
            time.sleep(0.001)
        watched.stall()
    waiting.join()
    assert is_done.is_set()
    [text] = texts(caplog)
    assert "across an `await` must be an `asyncio.Lock`. Else run that in a thread" in text


def test_a_process_that_was_frozen(caplog: pytest.LogCaptureFixture) -> None:
    """Its loop runs at the next look: it was not blocked. Looks that come too often are none."""
    watched = Watched()
    for blocked in (0.0, 1000.0, 0.0, 0.1, 0.1, 0.1):
        watched.look(blocked)
    watched.lag.blocked = 1000.0
    for _ in range(9):
        watched.watch.look(watched.now + 0.1)
    assert texts(caplog) == []
    assert watched.lag.probes == 6


def test_a_thread_that_has_ended(caplog: pytest.LogCaptureFixture) -> None:
    watched = Watched()
    watched.watch = StallWatch(watched.watch._lag, -1, "w0")
    watched.stall()
    assert texts(caplog) == []


def in_module(name: str, function: str, inner: Callable[[], object]) -> Callable[[], object]:
    """Return a function of that module, which calls `inner`."""
    module = types.ModuleType(name)
    code = compile(f"def {function}():\n    inner()", f"/torch/{name}.py", "exec")
    module.__dict__["inner"] = inner
    exec(code, module.__dict__)
    found: Callable[[], object] = module.__dict__[function]
    return found


@pytest.mark.promise("worlds.stalls")
def test_a_collective_is_named(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the function of torch.distributed that the program has called; other code of torch not."""
    watched = Watched()
    code: Any = sys.modules[__name__].__file__
    here = loop_lag.is_of_user
    monkeypatch.setattr(loop_lag, "is_of_user", lambda file: file != code and here(file))
    inner = in_module("torch.nn.modules.module", "wait", watched.stall)
    collective = in_module("torch.distributed.distributed_c10d", "all_reduce", inner)
    in_module(
        "program", "train", in_module("torch.distributed.c10d_logger", "wrapper", collective)
    )()
    in_module("program", "compute", in_module("torch.nn.modules.module", "run", watched.stall))()
    first, second = texts(caplog)
    assert "in torch.distributed.all_reduce (/torch/program.py:2)" in first
    assert "A collective waits for all ranks" in first
    assert "in compute (/torch/program.py:2)" in second
    assert "collective" not in second


def test_places_are_bounded(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop_lag, "_MAX_PLACES", 1)
    watched = Watched()
    watched.stall()
    in_module("program", "other", watched.stall)()
    assert len(watched.watch._warned) == 1
    assert len(texts(caplog)) == 1
