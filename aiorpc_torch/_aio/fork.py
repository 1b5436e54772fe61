"""Forks of a worker's process: what they inherit, what they may do, and their end.

A child made by `fork` (a DataLoader's, say) inherits every descriptor. A connection would then end
only with the child. The child calls `os.close`: a transport's `close` would change
the event loop's epoll, which the child shares with its parent.
(tests/loopback/test_connections_internals.py)

For the same reason a child must not run the event loop, nor unwind it. It has none of the threads
either, so it is no worker: it answers no call and makes none. It ends where the code ends that
forked: the block of a world, a method, or the step of the event loop. The kernel kills it when the
worker's process ends. (tests/unit/aio/test_fork.py, tests/integration/test_forks.py)
"""

import asyncio
import contextlib
import fcntl
import gc
import os
import signal
import socket
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, TypeVar

from ..errors import NotInWorld
from .signals import exit_code, force_exit

T = TypeVar("T")

_Owner = asyncio.Transport | socket.socket | Connection


class _Worker(NamedTuple):
    """The worker of this process: its name, its event loop and the loop's thread."""

    name: str
    loop: asyncio.AbstractEventLoop | None
    thread: int


_descriptors: "weakref.WeakKeyDictionary[_Owner, int]" = weakref.WeakKeyDictionary()

_worker: _Worker | None = None
_forked_from = ""  # name of the worker from whose process this one was forked
generation = 0
"""How many of this process's ancestors, itself included, are forks of a worker's process."""

_task: "asyncio.Task[object] | None" = None  # the current one of a worker that forks
# A pipe: its only writing end in the worker's process, a reading end of its own in each fork.
_life: int | None = None


def close_on_fork(owner: _Owner) -> None:
    """Close the descriptor of a transport, socket or pipe in children forked from now on.

    A transport with TLS is left out: give its socket. uvloop's cannot be referred to weakly.
    """
    if isinstance(owner, socket.socket | Connection):
        _descriptors[owner] = owner.fileno()
    elif owner.get_extra_info("sslcontext") is None:
        _descriptors[owner] = owner.get_extra_info("socket").fileno()


# ── what a fork may do ──────────────────────────────────────────────────────────────────────────


def begin_worker(name: str) -> None:
    """Note that this process is a worker on the running event loop, until `end_worker`."""
    global _worker
    _worker = _Worker(name, asyncio._get_running_loop(), threading.get_ident())


def end_worker() -> None:
    """Note that this process is no worker: processes that it forks from now on are none of ours."""
    global _worker
    _worker = None


def fork_text() -> str:
    """Return why this process is no worker and what to do, "" unless a worker has forked it."""
    return _forked_from and (
        f"this process was forked from worker {_forked_from!r}, and is not a worker: make the call "
        "in that worker, or start this process with multiprocessing's 'spawn' and enter the world "
        "there with worker(name, join=True)"
    )


def check_not_forked() -> None:
    """Raise NotInWorld if a worker has forked this process."""
    if _forked_from:
        raise NotInWorld(fork_text())


# ── the end of a fork ───────────────────────────────────────────────────────────────────────────


@contextlib.contextmanager
def forks_exit_here() -> Iterator[None]:
    """End a fork of this process here if it leaves the block, by `sys.exit`, an error or `return`.

    Streams are flushed; exit functions do not run, as those of any process that `os.fork` has made
    beside threads.
    """
    owner, code = os.getpid(), 0
    try:
        yield
    except BaseException as exc:
        if os.getpid() == owner:
            raise
        code = exit_code(exc)
    if os.getpid() != owner:
        force_exit(code)


def run_in_method(function: Callable[..., T], *args: Any) -> T:
    """Return `function(*args)`. A fork that a worker makes in it ends with it.

    As `forks_exit_here`, for any call: it costs a tenth of a microsecond.
    """
    before = generation
    try:
        result = function(*args)
    except BaseException as exc:
        end_fork_since(before, exc)
        raise
    if generation != before:
        end_fork_since(before)
    return result


def end_fork_since(before: int, exc: BaseException | None = None) -> None:
    """End this process if a worker has forked it since `generation` was `before`.

    `exc` has ended the code that has forked.
    """
    if generation == before:
        return
    if exc is None or isinstance(exc, StopIteration | StopAsyncIteration):  # of a generator
        force_exit(0)
    force_exit(exit_code(exc))


def _end_after_step(loop: asyncio.AbstractEventLoop, task: "asyncio.Task[object] | None") -> None:
    """End this fork before its copy of the event loop runs another callback.

    The failure of the task that has forked gives the exit code.
    """

    def end() -> None:
        has_ended = task is not None and task.done() and not task.cancelled()
        failure = task.exception() if task is not None and has_ended else None
        force_exit(0 if failure is None else exit_code(failure))

    loop.call_soon(end)
    queue = getattr(loop, "_ready", None)
    if queue is None:  # uvloop gives its queue no name in Python
        queue = next((each for each in gc.get_referents(loop) if type(each) is deque), deque())
    queue.rotate(1)  # what was added last comes first


# ── at a fork ───────────────────────────────────────────────────────────────────────────────────


def _before() -> None:
    global _life, _task
    if _worker is None:
        return
    if _worker.loop is not None and _worker.thread == threading.get_ident():
        _task = asyncio.current_task(_worker.loop)
    if _life is None:
        with contextlib.suppress(OSError):
            reader, _life = os.pipe()
            os.close(reader)


def _in_parent() -> None:
    global _task
    _task = None


def _in_child() -> None:
    global _forked_from, _worker, generation
    for owner, descriptor in list(_descriptors.items()):
        if isinstance(owner, Connection):
            owner.close()
            continue
        is_closed = owner.fileno() < 0 if isinstance(owner, socket.socket) else owner.is_closing()
        if not is_closed:
            with contextlib.suppress(OSError):
                os.close(descriptor)
    worker, _worker = _worker, None
    if worker is not None:
        _forked_from = worker.name
    if _forked_from:
        generation += 1
        signal.set_wakeup_fd(-1)  # of the event loop: the parent would get the child's signals
    with contextlib.suppress(OSError):
        _take_life()
    if worker is not None and worker.loop is not None and worker.thread == threading.get_ident():
        _end_after_step(worker.loop, _task)


def _take_life() -> None:
    """Let the kernel kill this process when the worker's process ends, however that ends."""
    global _life
    if (inherited := _life) is None:
        return
    _life = None
    try:
        if _forked_from:
            # The receiver of a signal belongs to the open file, which forks share: open another.
            _life = os.open(f"/proc/self/fd/{inherited}", os.O_RDONLY | os.O_NONBLOCK)
    finally:
        os.close(inherited)
    if _life is None:
        return
    fcntl.fcntl(_life, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(_life, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(_life, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)
    with contextlib.suppress(BlockingIOError):  # the worker lives
        if not os.read(_life, 1):
            os._exit(1)


os.register_at_fork(before=_before, after_in_parent=_in_parent, after_in_child=_in_child)
