"""A child process with a pipe to it, ended together with its own children."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from typing import Any

PATIENCE = 15.0
"""Seconds for a process to end once its pipe is closed."""


@contextmanager
def process(main: Callable[..., None], *args: Any) -> Iterator[Connection]:
    """Run `main(connection, *args)` in a process of its own, which ends when the pipe is closed."""
    spawn = multiprocessing.get_context("spawn")
    mine, its = spawn.Pipe()
    child = spawn.Process(target=main, args=(its, *args))
    child.start()
    its.close()
    patience = 0.0
    try:
        yield mine
        patience = PATIENCE
    finally:
        mine.close()
        child.join(patience)
        child.kill()
        child.join()
        assert child.pid is not None
        with suppress(ProcessLookupError):  # it led no group, or the group has ended
            os.killpg(child.pid, signal.SIGKILL)


def take_figures(child: Connection, limit: float, system: Any) -> None:
    """Add what a process sends within `limit` seconds to the figures of a system, or a failure."""
    try:
        reply = child.recv() if child.poll(limit) else f"no figures in {limit:.0f} s"
    except EOFError:
        reply = "its process died"
    (system.failures if isinstance(reply, str) else system.figures).append(reply)


def end_with_parent() -> None:
    """Lead a process group, which the parent can end and which ends with the parent."""
    os.setpgid(0, 0)
    threading.Thread(target=_follow_parent, daemon=True).start()


def _follow_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.killpg(0, signal.SIGKILL)
