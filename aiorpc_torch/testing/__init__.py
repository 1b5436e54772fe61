"""Helpers for tests of code that uses this library: fast worlds, gates, faults, leak checks.

    from aiorpc_torch import testing

    async with testing.world(["a"]):
        gate = await aiorpc.create("a", testing.Gate)

This package does not import pytest. The fixtures `world`, `workers` and `no_leaks` are in the
plugin `pytest_aiorpc_torch`, which pytest loads automatically.
"""

import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from multiprocessing.process import BaseProcess
from typing import Any, Protocol, TypedDict, TypeVar, Unpack

from torch.futures import Future

from .._aio.loops import LoopFactory
from .._children.forkserver import Logs, Start
from .._children.local import LocalWorker, local_world
from .._node.config import Initializer
from .._server.exports import Export
from .._torch.devices import DeviceMaps
from . import limits as limits
from .connections import (
    ConnectionInfo as ConnectionInfo,
    connection as connection,
    connections as connections,
    drop_connection as drop_connection,
    set_flow_limits as set_flow_limits,
    settled as settled,
    stalled as stalled,
)
from .gate import Gate as Gate
from .leaks import no_leaks as no_leaks

__all__ = (
    "ConnectionInfo",
    "Gate",
    "Options",
    "Workers",
    "connection",
    "connections",
    "done_future",
    "drop_connection",
    "failed_future",
    "frozen",
    "kill",
    "limits",
    "no_leaks",
    "on_a_thread",
    "set_flow_limits",
    "settled",
    "stalled",
    "world",
)

T = TypeVar("T")


# ── worlds ──────────────────────────────────────────────────────────────────────────────────────


class Options(TypedDict, total=False):
    """The options of `local_world`, without its workers."""

    name: str
    threads: int
    transports: Sequence[str] | None
    channels: Sequence[str] | None
    device_maps: DeviceMaps | None
    start_timeout: float
    stop_timeout: float
    heartbeat: float
    watchdog: float | None
    max_restarts: int
    exports: Sequence[Export] | None
    freeze_gc: bool
    handle_signals: bool
    start: Start
    preload: Sequence[str]
    loop_factory: LoopFactory | None
    initializer: Initializer | None
    logs: Logs | None


class Workers(Protocol):
    """The type of the fixture `workers`: `me = await workers(["ps", "trainer0"])`."""

    async def __call__(
        self, workers: int | Sequence[str], **options: Unpack[Options]
    ) -> LocalWorker:
        """Start a world of these workers and this process; it ends with the test."""


@contextlib.asynccontextmanager
async def world(
    workers: int | Sequence[str] = 0, **options: Unpack[Options]
) -> AsyncIterator[LocalWorker]:
    """Enter a `local_world`, by default of this process alone.

    The process from which children are forked starts with the first world that has some, and ends
    with this one. Children share nothing with those of other worlds.

    Args:
        workers: names or number of the children (default: none, a world of one).
        options: options of `local_world`.

    Raises:
        WorldTimeout, WorkerLost, ValueError, RuntimeError: as `local_world`.
    """
    async with local_world(workers, **options) as me:
        yield me


# ── faults ──────────────────────────────────────────────────────────────────────────────────────


def kill(worker: str) -> None:
    """Kill a worker's process as `kill -9` does, and return when it has ended.

    Args:
        worker: name of a child of the local world that this process is in.

    Raises:
        ValueError: if no such child is alive.
    """
    process = _process_of(worker)
    process.kill()
    process.join()


@contextlib.contextmanager
def frozen(worker: str) -> Iterator[None]:
    """Suspend a worker's process until the end of the block: it is alive, but does not answer.

    Args:
        worker: name of a child of the local world that this process is in.

    Raises:
        ValueError: if no such child is alive.
    """
    process = _process_of(worker)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):  # closed, since its world has ended
            if process.is_alive():
                os.kill(process.pid, signal.SIGCONT)


def _process_of(worker: str) -> BaseProcess:
    children = {child.name: child for child in multiprocessing.active_children()}
    if worker not in children:
        raise ValueError(
            f"{worker!r} is not a child process of this one; its children: "
            + (", ".join(children) or "none")
        )
    return children[worker]


# ── torch futures ───────────────────────────────────────────────────────────────────────────────


def done_future(value: T) -> "Future[T]":
    """Return a torch future with this result."""
    future: Future[T] = Future()
    future.set_result(value)
    return future


def failed_future(exc: Exception) -> "Future[Any]":
    """Return a torch future that failed with `exc`.

    Raises:
        AssertionError: by torch, if `exc` is not an `Exception`.
    """
    future: Future[Any] = Future()
    future.set_exception(exc)
    return future


def on_a_thread(function: Callable[[], object]) -> None:
    """Run `function` in another thread, and return when it has ended.

    `on_a_thread(lambda: future.set_result(1))` completes a future as torch does, on another thread.
    """
    thread = threading.Thread(target=function, name="on_a_thread")
    thread.start()
    thread.join()
