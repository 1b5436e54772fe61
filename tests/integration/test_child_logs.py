"""`logs="names"`: what children print, log and write natively has their names."""

import asyncio
import contextlib
import logging
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
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
    """What is written to two files, in place of the streams of this process."""

    def __init__(self, folder: Path) -> None:
        self._files = [folder / "out", folder / "err"]

    @classmethod
    @contextlib.contextmanager
    def taken(cls, folder: Path) -> "Iterator[Output]":
        """In the block. `capfd` may lose what comes as it is read."""
        found = cls(folder)
        with contextlib.ExitStack() as stack:
            for stream, path in enumerate(found._files, 1):
                file = stack.enter_context(path.open("ab"))
                kept = os.dup(stream)
                stack.callback(os.close, kept)
                stack.callback(os.dup2, kept, stream)
                os.dup2(file.fileno(), stream)
            yield found

    def until(self, line: str) -> None:
        """Wait, with the event loop blocked."""
        end = time.monotonic() + SOON
        while line not in (lines := [each for file in self._files for each in _lines(file)]):
            assert time.monotonic() < end, lines
            time.sleep(0.01)


def _lines(file: Path) -> list[str]:
    return file.read_text().splitlines()


@pytest.mark.promise("top.logs")
@pytest.mark.parametrize("start", ["forkserver", pytest.param("spawn", marks=pytest.mark.slow)])
async def test_lines_have_names(start: Any, tmp_path: Path) -> None:
    """They come while the loop of the parent is blocked; a dead child's are in its error."""
    with Output.taken(tmp_path) as output:
        note = await _note_of_a_death(start, output)
    assert note.splitlines()[0] == "the last lines of worker 'a':"
    assert "  last words" in note.splitlines()


async def _note_of_a_death(start: Any, output: Output) -> str:
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
    return str(note)


@pytest.mark.promise("top.logs")
async def test_without_logs_lines_are_as_they_are(tmp_path: Path) -> None:
    with Output.taken(tmp_path) as output:
        async with aiorpc.local_world(1):
            await call(1, os.write, 1, b"native\n")
            output.until("native")


async def test_wrong_logs() -> None:
    with pytest.raises(ValueError, match="logs must be \"names\" or None, got 'files'"):
        async with aiorpc.local_world(1, logs="files"):  # type: ignore[arg-type]
            pass
