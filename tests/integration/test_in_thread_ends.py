"""The start and the end of a world in a thread."""

import asyncio
import contextlib
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import aiorpc_torch as aiorpc
from aiorpc_torch import NotInWorld, in_thread, local_world, remote
from aiorpc_torch.testing import kill
from tests.support.actors import Counter

LONG = 60.0


def test_what_is_no_world() -> None:
    """The remedy is in the error."""
    untyped: Any = in_thread
    for wrong in (3, local_world, contextlib.nullcontext):
        with pytest.raises(TypeError, match="a world that is not entered"):
            with untyped(wrong):
                pass


def test_a_world_that_does_not_start() -> None:
    """Its error is raised at the entry, and no thread is left."""
    with pytest.raises(ValueError, match="two workers have one name"):
        with in_thread(local_world(["x", "x"])):
            pass
    assert "aiorpc-world" not in [each.name for each in threading.enumerate()]


PROGRAM = """
import asyncio, os, sys, threading, time
import aiorpc_torch as aiorpc
from aiorpc_torch.testing import kill

def main(how):
    with aiorpc.in_thread(aiorpc.local_world(["a"], max_restarts=1)) as me:
        if how == "raise":
            raise LookupError("of the block")
        if how == "outlived":
            waiting = threading.Thread(target=wait, args=(me,))
            waiting.start()
            print("in", flush=True)
            while not me.run(aiorpc.observe.pending):
                time.sleep(0.01)
        elif how == "interrupted":
            print("in", flush=True)
            me.run(aiorpc.call("a", asyncio.sleep, 600))
    if how == "outlived":
        waiting.join()
        try:
            me.run(asyncio.sleep(0))
        except aiorpc.NotInWorld as exc:
            print("after:", exc)

def wait(me):
    try:
        me.run(aiorpc.call("a", asyncio.sleep, 600))
    except (aiorpc.NotInWorld, aiorpc.WorkerGone) as exc:
        print("thread:", type(exc).__name__, flush=True)

if __name__ == "__main__":
    main(sys.argv[1])
"""


def program(tmp_path: Path) -> Path:
    path = tmp_path / "program.py"
    path.write_text(textwrap.dedent(PROGRAM))
    return path


def test_an_exception_of_the_block(tmp_path: Path) -> None:
    """It is raised as it was, once, and the world has ended."""
    done = subprocess.run(
        [sys.executable, str(program(tmp_path)), "raise"],
        capture_output=True,
        text=True,
        timeout=LONG,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.count("LookupError: of the block") == 1


@pytest.mark.promise("worlds.in_thread")
def test_what_runs_when_the_block_is_left(tmp_path: Path) -> None:
    """Calls of other threads end, and later ones raise."""
    done = subprocess.run(
        [sys.executable, str(program(tmp_path)), "outlived"],
        capture_output=True,
        text=True,
        timeout=LONG,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "thread: NotInWorld" in done.stdout
    assert "after: the block of in_thread() was left" in done.stdout


def test_ctrl_c_while_something_runs(tmp_path: Path) -> None:
    """It cancels what runs, and the world ends in order."""
    with subprocess.Popen(
        [sys.executable, str(program(tmp_path)), "interrupted"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as running:
        assert running.stdout is not None
        assert running.stdout.readline() == "in\n"
        time.sleep(0.2)  # it is in `run` now, or will be
        running.send_signal(signal.SIGINT)
        _, errors = running.communicate(timeout=LONG)
    assert running.returncode in (1, -signal.SIGINT), errors
    assert "KeyboardInterrupt" in errors


def test_calls_of_a_lost_worker() -> None:
    """As in any world: the error names it, and the object may be made again."""
    with in_thread(local_world(["a"], max_restarts=1)) as me:
        made = me.run(aiorpc.supervised("a", Counter))
        assert me.run(remote(made).add(1)) == 1
        kill("a")
        assert me.run(remote(made, retries=1).add(1)) == 1
        assert me.restarts == 0
    with pytest.raises(NotInWorld, match="the block of in_thread"):
        me.run(asyncio.sleep, 0)
