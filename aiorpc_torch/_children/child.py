"""A child process that is a worker: its start, the pipe to it, and its end.

The pipe carries the parent's commands to the child. To the parent it carries that the child has
entered its world, that it has left in order, and the child's failure. A closed pipe means death, in
both directions: the kernel closes it however a process ends. (The signal of `PR_SET_PDEATHSIG` is
sent when the *thread* that started the child ends.)
"""

import asyncio
import atexit
import contextlib
import gc
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal, NoReturn

from .._aio.fork import close_on_fork
from .._aio.loops import call_soon
from .._aio.signals import end_process
from .._node.config import WorkerConfig
from .._wire.by_value import is_main_without_file
from .._wire.exceptions import RemoteFailure
from .._world.worker import run_worker
from ..errors import WorkerLost
from .child_logs import ChildOutput, Outputs, use_outputs
from .processes import ProcessFactory, sigint_blocked

Main = Callable[..., Awaitable[Any]]

ParentCommand = Literal["leave", "stop", "cancel"]
"""A command from a parent to its child.

"leave": all workers leave, and a child that only serves leaves too. "stop": a child that only
serves leaves, and the others go on. "cancel": a worker failed, or
Ctrl-C was pressed; stop now.
"""

# What a child tells its parent: once it is in its world, and once it has left in order.
_ENTERED, _LEFT = "entered", "left"
POLL_INTERVAL = 0.005  # seconds between looks for the exit code of a process whose pipe has ended
EXIT_POLLS = 100
EXIT_CODE_TIMEOUT = 2.0  # seconds for the exit code of a process that ends now


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


def _is_exiting(pid: int | None) -> bool:
    """Return whether the kernel is ending a process: then its exit code comes, at once or soon."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:  # it has been reaped
        return True
    # The flags, of which PF_EXITING is set before any file of the process is closed.
    return bool(int(fields[6]) & 0x4)


class ChildProcess:
    """A process that runs `main(me, *args)` as the worker of `config`, or only serves."""

    def __init__(
        self,
        make_process: ProcessFactory,
        config: WorkerConfig,
        main: Main | None,
        args: tuple[Any, ...],
        output: ChildOutput | None = None,
    ) -> None:
        self.name = config.name
        self.has_entered = self._has_left = False
        self._output = output
        self.ended: asyncio.Future[BaseException | None] = asyncio.Future()
        self._failure: BaseException | None = None
        self._is_watched = True
        # This end stays open until `close`: its end would mean this process's death to the child.
        self._pipe, theirs = multiprocessing.Pipe()
        writers = () if output is None else output.writers
        self._process = make_process(child_main, (theirs, config, main, args, writers), config.name)
        try:
            with sigint_blocked(), _main_importable():
                self._process.start()
        finally:
            if output is not None:
                output.started()
        theirs.close()
        close_on_fork(self._pipe)
        _running.add(self)
        asyncio.get_running_loop().add_reader(self._pipe.fileno(), self._receive)

    def send(self, command: ParentCommand) -> None:
        """Send a command to the child, which may have ended."""
        with contextlib.suppress(OSError):
            self._pipe.send(command)

    def _receive(self) -> None:
        try:
            if (message := self._pipe.recv()) == _ENTERED:
                self.has_entered = True
            elif message == _LEFT:
                self._has_left = True
            else:
                self._failure = message.exception()
        except (EOFError, OSError):
            self.ended.get_loop().remove_reader(self._pipe.fileno())
            self._await_exit(EXIT_POLLS)

    def _await_exit(self, polls: int) -> None:
        """Set the result once the process has an exit code, without blocking the loop."""
        # The kernel closes a process's files just before the process can be reaped.
        if not self._is_watched:
            return
        is_awaited = polls > 0 or _is_exiting(self._process.pid)
        if (code := self._process.exitcode) is None and is_awaited:
            self.ended.get_loop().call_later(POLL_INTERVAL, self._await_exit, polls - 1)
        else:
            self.ended.set_result(self._failure or self._exit_failure(code))

    def stop_watching(self) -> None:
        """Ignore what becomes of the process from now on."""
        self._is_watched = False
        self.ended.get_loop().remove_reader(self._pipe.fileno())

    def _exit_failure(self, code: int | None) -> BaseException | None:
        if code == 0 and self._has_left:  # else code of a library has ended the process
            return None
        lost = WorkerLost(self.name, describe_exit(code))
        if self._output is not None and (note := self._output.note()):
            lost.add_note(note)
        return lost

    def is_exiting(self) -> bool:
        """Return whether the process has ended or ends now. In any thread."""
        with contextlib.suppress(ValueError):  # it is closed: its world has ended
            return _is_exiting(self._process.pid)
        return False

    async def wait_for_exit(self) -> None:
        """Wait for the exit code of a process that ends now."""
        # Under load, or with much memory to free, the kernel and the fork server may take a while.
        await asyncio.wait((self.ended,), timeout=EXIT_CODE_TIMEOUT)

    def exit_reason(self) -> str:
        """Return the text for the exit code, "" if there is none yet."""
        with contextlib.suppress(ValueError):
            if (code := self._process.exitcode) is not None:
                return describe_exit(code)
        return ""

    def release(self) -> bool:
        """Free what belongs to the process if it has ended; return whether it has."""
        if self._process.exitcode is None:
            return False
        _running.discard(self)
        if not self.ended.done():  # else the loop would watch the next file with its number
            self.stop_watching()
        self._pipe.close()  # the process's own descriptors are closed with its object
        return True

    def kill(self) -> None:
        """Kill the process."""
        self._process.kill()

    def close(self) -> None:
        """Kill the process if it has not ended, and free what belongs to it."""
        if self._process.exitcode is None:
            self._process.kill()
            self._process.join(EXIT_CODE_TIMEOUT)
        _running.discard(self)
        self._pipe.close()
        with contextlib.suppress(ValueError):  # its end is not known, as with SIGCHLD ignored
            self._process.close()


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

os.register_at_fork(after_in_child=_running.clear)  # a fork that ends must not end them


@atexit.register
def _kill_all() -> None:
    # Runs before multiprocessing's own exit function, which waits for children. Children of a world
    # that was never left wait for this process. (tests/integration/test_signals.py)
    for child in [*_running]:  # an event loop of another thread may run on
        child._is_watched = False
        child.kill()


# ── in the child ────────────────────────────────────────────────────────────────────────────────


def child_main(
    pipe: Connection,
    config: WorkerConfig,
    main: Main | None,
    args: tuple[Any, ...],
    outputs: Outputs = (),
) -> NoReturn:
    """Run in the child from its start to its end."""
    use_outputs(outputs)
    # A handler, not SIG_IGN, which programs that the child starts would inherit.
    close_on_fork(pipe)  # a process of a pool that outlives this one must not hide its death
    signal.signal(signal.SIGINT, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    gc.unfreeze()  # what the process that forked this one froze: `freeze_gc` decides
    code = 0
    try:
        config.initialize()
        with asyncio.Runner(loop_factory=config.loop_factory) as runner:
            runner.run(_run(pipe, config, main, args))
        # As at the end of any program: what was given to an executor is done. Not after a failure,
        # which the parent sees when this process ends.
        threading._shutdown()  # type: ignore[attr-defined]
        tell_parent(pipe, _LEFT)
    except asyncio.CancelledError:
        tell_parent(pipe, _LEFT)  # by the parent's command
    except BaseException as exc:
        # Raised, and its traceback printed once, in the parent.
        tell_parent(pipe, RemoteFailure.of(exc, config.name))
        code = 1
    end_process(code)


def tell_parent(pipe: Connection, message: object) -> None:
    """Send a message to the parent, unless it is dead."""
    with contextlib.suppress(OSError):
        pipe.send(message)


async def _run(
    pipe: Connection, config: WorkerConfig, main: Main | None, args: tuple[Any, ...]
) -> None:
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    leave, leaves_alone = asyncio.Event(), asyncio.Event()
    assert task is not None

    def stop() -> None:
        leaves_alone.set()
        leave.set()

    actions: dict[ParentCommand, Callable[[], object]]
    actions = {"leave": leave.set, "stop": stop, "cancel": task.cancel}

    def obey() -> None:
        """Obey the commands of the parent; end this process when the parent dies."""
        try:
            while True:
                call_soon(loop, actions[pipe.recv()])
        except (EOFError, OSError):
            os._exit(1)  # the parent is dead, perhaps by kill -9

    threading.Thread(target=obey, name="aiorpc-parent", daemon=True).start()
    async with run_worker(config) as me:
        tell_parent(pipe, _ENTERED)
        try:
            await (leave.wait() if main is None else main(me, *args))
        except SystemExit as exc:
            if exc.code not in (0, None):
                raise
        me._node.leaves_alone |= leaves_alone.is_set()
