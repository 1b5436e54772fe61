"""The start and the end of a world in a thread."""

import asyncio
import contextlib
import os
import resource
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
import asyncio, os, signal, sys, threading, time
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

def leave():
    started = threading.Event()
    class Lingering:
        async def __aenter__(self):
            return "me"
        async def __aexit__(self, *_):
            started.set()
            await asyncio.Event().wait()
    threading.Thread(target=lambda: (started.wait(), os.kill(os.getpid(), signal.SIGINT))).start()
    try:
        with aiorpc.in_thread(Lingering()):
            pass
    except KeyboardInterrupt:
        print("KeyboardInterrupt")
    print([each.name for each in threading.enumerate() if "world" in each.name])
    with aiorpc.in_thread(aiorpc.local_world(0)) as me:
        print(me.run(asyncio.sleep, 0, "again"))

if __name__ == "__main__":
    leave() if sys.argv[1] == "leaving" else main(sys.argv[1])
"""


def program(tmp_path: Path) -> Path:
    path = tmp_path / "program.py"
    path.write_text(textwrap.dedent(PROGRAM))
    return path


def ended(tmp_path: Path, how: str) -> "subprocess.CompletedProcess[str]":
    """Run the program to its end."""
    return subprocess.run(
        [sys.executable, str(program(tmp_path)), how],
        capture_output=True,
        text=True,
        timeout=LONG,
        check=False,
    )


@pytest.mark.slow
def test_an_exception_of_the_block(tmp_path: Path) -> None:
    """It is raised as it was, once, and the world has ended."""
    done = ended(tmp_path, "raise")
    assert done.returncode == 1
    assert done.stderr.count("LookupError: of the block") == 1


@pytest.mark.slow
@pytest.mark.promise("worlds.in_thread")
def test_what_runs_when_the_block_is_left(tmp_path: Path) -> None:
    """Calls of other threads end, and later ones raise."""
    done = ended(tmp_path, "outlived")
    assert done.returncode == 0, done.stderr
    assert any(f"thread: {kind}" in done.stdout for kind in ("NotInWorld", "WorkerLeft"))
    assert "after: the block of in_thread() was left" in done.stdout


@pytest.mark.slow
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


@pytest.mark.promise("worlds.in_thread")
def test_what_is_run_while_the_block_is_left() -> None:
    """It raises NotInWorld, also while the loop still waits for its threads."""
    busy, left = threading.Event(), threading.Event()
    told: list[BaseException] = []

    async def keep_a_thread() -> None:
        asyncio.get_running_loop().run_in_executor(None, busy.wait, LONG)

    def work(me: Any) -> None:
        try:
            me.run(until_cancelled)
        except BaseException as exc:
            told.append(exc)
        try:  # the loop runs still, and waits for the thread
            me.run(asyncio.sleep, LONG)
        except BaseException as exc:
            told.append(exc)
        busy.set()

    async def until_cancelled() -> None:
        left.set()
        await asyncio.Event().wait()

    with in_thread(local_world(0)) as me:
        me.run(keep_a_thread)
        working = threading.Thread(target=work, args=(me,))
        working.start()
        assert left.wait(LONG)
    working.join(LONG)
    assert not working.is_alive()
    assert [type(each) for each in told] == [NotInWorld] * 2


@pytest.mark.slow
def test_ctrl_c_while_the_block_is_left(tmp_path: Path) -> None:
    """It ends the wait for the end of the world, which is left in no thread."""
    done = ended(tmp_path, "leaving")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["KeyboardInterrupt", "[]", "again"]


def test_no_loop_can_be_made() -> None:
    """Its error is raised at the entry."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    least = os.dup(0)
    os.close(least)
    world = local_world(0)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (least, limits[1]))
        with pytest.raises(OSError, match="Too many open files"), in_thread(world):
            pass
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert "aiorpc-world" not in [each.name for each in threading.enumerate()]
