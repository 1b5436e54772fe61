"""`logs="names"`: what children print, log and write natively has their names."""

import asyncio
import logging
import os
import signal
import sys
import time
from typing import Any

import pytest

import aiorpc_torch as aiorpc
from aiorpc_torch import WorkerLost, call

SOON = 60.0  # seconds after which something will never happen


def say(number: int) -> None:
    print("printed", number)
    print("to stderr", number, file=sys.stderr)
    logging.getLogger("tests").warning("logged %d", number)
    os.write(1, b"native\n")


def die() -> None:
    os.write(1, b"last words")
    os.kill(os.getpid(), signal.SIGKILL)


class Output:
    """The lines that were written to this process's streams."""

    def __init__(self, capfd: pytest.CaptureFixture[str]) -> None:
        self._capfd = capfd
        self.lines: list[str] = []

    def until(self, line: str) -> None:
        """Wait, with the event loop blocked."""
        end = time.monotonic() + SOON
        while line not in self.lines:
            assert time.monotonic() < end, self.lines
            time.sleep(0.01)
            for text in self._capfd.readouterr():
                self.lines += text.splitlines()


@pytest.mark.promise("top.logs")
@pytest.mark.parametrize("start", ["forkserver", pytest.param("spawn", marks=pytest.mark.slow)])
async def test_lines_have_names(start: Any, capfd: pytest.CaptureFixture[str]) -> None:
    """They come while the loop of the parent is blocked; a dead child's are in its error."""
    output = Output(capfd)
    async with aiorpc.local_world(["a", "b"], start=start, logs="names") as me:
        await asyncio.gather(*(call(name, say, n) for n, name in enumerate(("a", "b"))))
        for n, name in enumerate(("a", "b")):
            for line in (f"printed {n}", f"to stderr {n}", f"logged {n}", "native"):
                output.until(f"[{name}] {line}")
        with pytest.raises(WorkerLost) as caught:
            await call("a", die)
        await me.start("c")
        await call("c", say, 2)
        output.until("[c] printed 2")
    [note] = caught.value.__cause__.__notes__  # type: ignore[union-attr]
    assert note.splitlines()[0] == "the last lines of worker 'a':"
    assert "  last words" in note.splitlines()


@pytest.mark.promise("top.logs")
async def test_without_logs_lines_are_as_they_are(capfd: pytest.CaptureFixture[str]) -> None:
    output = Output(capfd)
    async with aiorpc.local_world(1):
        await call(1, os.write, 1, b"native\n")
        output.until("native")


async def test_wrong_logs() -> None:
    with pytest.raises(ValueError, match="logs must be \"names\" or None, got 'files'"):
        async with aiorpc.local_world(1, logs="files"):  # type: ignore[arg-type]
            pass
