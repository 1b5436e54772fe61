"""A child process that is a worker: its start, the pipe to it, and its end.

The pipe carries the parent's commands to the child, and the child's failure to the parent. A closed
pipe means death, in both directions: the kernel closes it however a process ends.
"""

import asyncio
import atexit
import contextlib
import enum
import functools
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextvars import ContextVar
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, NoReturn

from .._aio.loops import call_soon
from .._aio.signals import force_exit
from .._protocol.by_value import is_main_without_file
from .._protocol.exceptions import RemoteFailure
from ..errors import WorkerLost
from .config import WorkerConfig
from .worker import run_worker

Main = Callable[..., Awaitable[Any]]

POLL_INTERVAL = 0.005  # seconds between looks for the exit code of a process whose pipe has ended
EXIT_POLLS = 100

ProcessFactory = Callable[[Callable[..., Any], tuple[Any, ...], str], BaseProcess]
"""A function that makes a process of a target function, its arguments and a name."""


def spawned_process(target: Callable[..., Any], args: tuple[Any, ...], name: str) -> BaseProcess:
    """Return a process with a new interpreter."""
    # Not "fork", which copies the locks of torch's threads but not the threads.
    return multiprocessing.get_context("spawn").Process(target=target, args=args, name=name)


process_factory: ContextVar[ProcessFactory] = ContextVar("process_factory", default=spawned_process)
"""Factory of the children's processes; `aiorpc_torch.testing` sets a faster one."""


def describe_exit(code: int | None) -> str:
    """Return the text for the exit code of a process; None: it has closed its pipe and runs."""
    if code is None:
        return "its process has closed the pipe to its parent"
    if code >= 0:
        return f"its process ended with exit code {code}"
    try:
        return f"its process was killed by {signal.Signals(-code).name}"
    except ValueError:  # of a real-time signal
        return f"its process was killed by signal {-code}"


class ParentCommand(enum.Enum):
    """A command from a parent to its child."""

    LEAVE = "leave"  # all workers leave: a child that only serves leaves too
    CANCEL = "cancel"  # a worker failed, or Ctrl-C was pressed: stop now


class ChildProcess:
    """A process that runs `main(me, *args)` as the worker of `config`, or only serves."""

    def __init__(self, config: WorkerConfig, main: Main | None, args: tuple[Any, ...]) -> None:
        self.name = config.name
        self.ended: asyncio.Future[BaseException | None] = asyncio.Future()
        self._failure: BaseException | None = None
        self._is_watched = True
        # This end stays open until `close`: its end would mean this process's death to the child.
        self._pipe, theirs = multiprocessing.Pipe()
        self._process = process_factory.get()(child_main, (theirs, config, main, args), config.name)
        with _sigint_blocked(), _main_importable():
            self._process.start()
        theirs.close()
        _running.add(self)
        asyncio.get_running_loop().add_reader(self._pipe.fileno(), self._receive)

    def send(self, command: ParentCommand) -> None:
        """Send a command to the child, which may have ended."""
        with contextlib.suppress(OSError):
            self._pipe.send(command)

    def _receive(self) -> None:
        try:
            self._failure = self._pipe.recv().exception()
        except (EOFError, OSError):
            self.ended.get_loop().remove_reader(self._pipe.fileno())
            self._await_exit(EXIT_POLLS)

    def _await_exit(self, polls: int) -> None:
        """Set the result once the process has an exit code, without blocking the loop."""
        # The kernel closes a process's files just before the process can be reaped.
        if not self._is_watched:
            return
        if self._process.exitcode is None and polls:
            self.ended.get_loop().call_later(POLL_INTERVAL, self._await_exit, polls - 1)
        else:
            self.ended.set_result(self._failure or self._exit_failure())

    def stop_watching(self) -> None:
        """Ignore what becomes of the process from now on."""
        self._is_watched = False
        self.ended.get_loop().remove_reader(self._pipe.fileno())

    def _exit_failure(self) -> BaseException | None:
        code = self._process.exitcode
        return None if code == 0 else WorkerLost(self.name, describe_exit(code))

    def exit_reason(self, seconds: float) -> str:
        """Return how the process has ended, "" if it runs after `seconds`. In any thread."""
        with contextlib.suppress(ValueError):  # it is closed: its world has ended
            self._process.join(seconds)
            if (code := self._process.exitcode) is not None:
                return describe_exit(code)
        return ""

    def release(self) -> bool:
        """Free what belongs to the process if it has ended; return whether it has."""
        if self._process.exitcode is None:
            return False
        _running.discard(self)
        self._pipe.close()  # the process's own descriptors are closed with its object
        return True

    def kill(self) -> None:
        """Kill the process."""
        self._process.kill()

    def close(self) -> None:
        """Kill the process if it has not ended, and free what belongs to it."""
        if self._process.exitcode is None:
            self._process.kill()
            self._process.join()
        self.release()
        self._process.close()


@contextlib.contextmanager
def _sigint_blocked() -> Iterator[None]:
    # Ctrl-C goes to the whole process group, and a child that is still importing torch would print
    # a traceback. A child inherits the mask, until `child_main` installs a handler.
    # multiprocessing's tracker unblocks the signal when it starts: so it starts first.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def _main_importable() -> Iterator[None]:
    # A child of multiprocessing runs the file of `__main__`, and would look for one of this name.
    main = sys.modules["__main__"]
    name = getattr(main, "__file__", None)
    if name is None or not is_main_without_file():
        yield
        return
    del main.__file__
    try:
        yield
    finally:
        main.__file__ = name


_running: set[ChildProcess] = set()


@atexit.register
def _kill_all() -> None:
    # Runs before multiprocessing's own exit function, which waits for children. Children of a world
    # that was never left wait for this process. (tests/integration/test_signals.py)
    for child in _running:
        child.kill()


# ── in the child ────────────────────────────────────────────────────────────────────────────────


def _obey(pipe: Connection, obey: Callable[[ParentCommand], None]) -> None:
    """Call `obey` with each command of the parent; end this process when the parent dies."""
    try:
        while True:
            obey(pipe.recv())
    except (EOFError, OSError):
        os._exit(1)  # the parent is dead, perhaps by kill -9


def child_main(
    pipe: Connection, config: WorkerConfig, main: Main | None, args: tuple[Any, ...]
) -> NoReturn:
    """Run in the child from its start to its end."""
    # A handler, not SIG_IGN, which programs that the child starts would inherit.
    signal.signal(signal.SIGINT, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    code = 0
    try:
        asyncio.run(_run(pipe, config, main, args))
        # As at the end of any program: what was given to an executor is done. Not after a failure,
        # which the parent sees when this process ends.
        threading._shutdown()  # type: ignore[attr-defined]
    except asyncio.CancelledError:
        pass  # by the parent's command
    except BaseException as exc:
        with contextlib.suppress(OSError):
            # Raised, and its traceback printed once, in the parent.
            pipe.send(RemoteFailure.of(exc, config.name))
        code = 1
    # As multiprocessing ends a forked child: exit functions run and streams are flushed, but the
    # interpreter is not finalized. With torch that would take a second of every core.
    atexit._run_exitfuncs()
    force_exit(code)


async def _run(
    pipe: Connection, config: WorkerConfig, main: Main | None, args: tuple[Any, ...]
) -> None:
    loop, task, leave = asyncio.get_running_loop(), asyncio.current_task(), asyncio.Event()
    assert task is not None
    actions: dict[ParentCommand, Callable[[], object]] = {
        ParentCommand.LEAVE: leave.set,
        ParentCommand.CANCEL: task.cancel,
    }
    obey = functools.partial(_obey, pipe, lambda command: call_soon(loop, actions[command]))
    threading.Thread(target=obey, name="aiorpc-parent", daemon=True).start()
    async with run_worker(config) as me:
        await (leave.wait() if main is None else main(me, *args))
