"""For tests of code that is built on this library: worlds that start fast, gates, faults, leaks.

    from aiorpc_torch import testing

    async with testing.world(["a"]):
        gate = await create("a", testing.Gate)

Nothing here imports pytest; the fixtures `world`, `workers` and `no_leaks` are those of the plugin
`pytest_aiorpc_torch`, which pytest loads by itself.
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

from .._server.exports import Export
from .._torch.devices import DeviceMaps
from .._world.config import Worker
from .._world.local import local_world
from .forkserver import warm_children
from .gate import Gate as Gate
from .leaks import no_leaks as no_leaks

__all__ = (
    "Gate",
    "Options",
    "Workers",
    "done_future",
    "failed_future",
    "frozen",
    "kill",
    "no_leaks",
    "on_a_thread",
    "world",
)

T = TypeVar("T")


# ── worlds ──────────────────────────────────────────────────────────────────────────────────────


class Options(TypedDict, total=False):
    """What `local_world` takes beside its workers."""

    name: str
    threads: int
    transports: Sequence[str] | None
    device_maps: DeviceMaps | None
    start_timeout: float
    stop_timeout: float
    heartbeat: float
    restart: int
    exports: Sequence[Export] | None
    freeze_gc: bool


class Workers(Protocol):
    """The type of the fixture `workers`: `me = await workers(["ps", "trainer0"])`."""

    async def __call__(self, workers: int | Sequence[str], **options: Unpack[Options]) -> Worker:
        """Start a world with these workers beside this process; it ends when the test does."""
        ...


@contextlib.asynccontextmanager
async def world(
    workers: int | Sequence[str] = 0, **options: Unpack[Options]
) -> AsyncIterator[Worker]:
    """`local_world`, with children that are there in a tenth of the time.

    They are forked from a process that has imported torch, which the first world with children
    starts and which ends with this process. Each child is fresh: it shares nothing with those of
    other worlds. It has this process's environment, working directory and `sys.path` as they are
    when the world starts, except for what is read when torch is imported (OMP_NUM_THREADS): that
    is as it was for the first.

    Args:
        workers: the children's names, or how many; none is a world of one.
        options: those of `local_world`.

    Raises:
        WorldTimeout, WorkerLost, ValueError, RuntimeError: as `local_world`.
    """
    async with contextlib.AsyncExitStack() as stack:
        with warm_children():
            me = await stack.enter_async_context(local_world(workers, **options))
        yield me


# ── faults ──────────────────────────────────────────────────────────────────────────────────────


def kill(worker: str) -> None:
    """End a worker's process as `kill -9` does, and return when it has ended.

    Args:
        worker: the name of a child of the local world that this process is in.

    Raises:
        ValueError: if there is no such child, or no more.
    """
    process = _process_of(worker)
    process.kill()
    process.join()


@contextlib.contextmanager
def frozen(worker: str) -> Iterator[None]:
    """Stop a worker's process until the end of the block: it is there, and does not answer.

    Args:
        worker: the name of a child of the local world that this process is in.

    Raises:
        ValueError: if there is no such child, or no more.
    """
    process = _process_of(worker)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):  # closed: its world was left meanwhile
            if process.is_alive():
                os.kill(process.pid, signal.SIGCONT)


def _process_of(worker: str) -> BaseProcess:
    children = {child.name: child for child in multiprocessing.active_children()}
    if worker not in children:
        raise ValueError(
            f"{worker!r} is no child process of this one; there are: "
            + (", ".join(children) or "none")
        )
    return children[worker]


# ── torch's futures, completed by hand ──────────────────────────────────────────────────────────


def done_future(value: T) -> "Future[T]":
    """A torch future that has its result."""
    future: Future[T] = Future()
    future.set_result(value)
    return future


def failed_future(exc: Exception) -> "Future[Any]":
    """A torch future that has failed.

    Raises:
        AssertionError: from torch, if `exc` is a BaseException that is no Exception.
    """
    future: Future[Any] = Future()
    future.set_exception(exc)
    return future


def on_a_thread(function: Callable[[], object]) -> None:
    """Run `function` in another thread, and return when it is done.

    Torch completes its futures on threads of its own: so does
    `on_a_thread(lambda: future.set_result(1))`.
    """
    thread = threading.Thread(target=function, name="on_a_thread")
    thread.start()
    thread.join()
