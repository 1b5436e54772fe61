"""A child process that is a worker: its start, the pipe to it, and its end.

The pipe carries the parent's commands to the child. The child tells that it has entered its world,
that it got a SIGTERM, that it has left in order, or its failure. A closed pipe means death, in both
directions: the kernel closes it however a process ends. (The signal of `PR_SET_PDEATHSIG` is sent
when the *thread* that started the child ends.)
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
import time
from collections.abc import Awaitable, Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType
from typing import Any, Literal, NoReturn

from .._aio.fork import close_on_fork, forks_exit_here
from .._aio.loops import call_soon
from .._aio.signals import end_process
from .._aio.tasks import run_to_end
from .._aio.threads import run_in_thread
from .._node.config import WorkerConfig
from .._wire.by_value import is_main_without_file
from .._wire.exceptions import RemoteFailure
from .._world.worker import run_worker
from ..errors import WorkerLost
from .child_logs import ChildOutput, Outputs, use_outputs
from .forkserver import (
    STOP_SIGNALS,
    UNKNOWN_CODE,
    ForkedProcess,
    ProcessFactory,
    stop_signals_blocked,
)
from .forkserver_main import STARTS_CHILDREN
from .process_table import (
    is_exiting,
    kill_descendants,
    kill_left_by,
    kill_tree,
    mark_this_process,
)

Main = Callable[..., Awaitable[Any]]

ParentCommand = Literal["leave", "stop", "cancel"]
"""A command from a parent to its child.

"leave": all workers leave, and a child that only serves leaves too. "stop": a child that only
serves leaves, and the others go on. "cancel": a worker failed, or
Ctrl-C was pressed; stop now.
"""

# What a child tells its parent: it is in its world; it got a SIGTERM; it has left in order.
_ENTERED, _SIGTERM, _LEFT = "entered", "sigterm", "left"
POLL_INTERVAL = 0.005  # seconds between looks for the exit code of a process whose pipe has ended
EXIT_POLLS = 100
EXIT_CODE_TIMEOUT = 2.0  # seconds for the exit code of a process that ends now
FAILED_TIMEOUT = 2.0  # seconds for the end of a child that has told its failure


class ChildProcess:
    """A process that runs `main(me, *args)` as the worker of `config`, or only serves."""

    def __init__(
        self,
        make_process: ProcessFactory,
        config: WorkerConfig,
        main: Main | None,
        args: tuple[Any, ...],
        output: ChildOutput | None = None,
        on_sigterm: Callable[["ChildProcess"], object] = lambda _: None,
    ) -> None:
        self.name = config.name
        self.config = config
        self.entered_at: float | None = None
        """When it has entered its world (`time.monotonic()`)."""
        self.is_leaving = False  # alone: it was told to, or is not supervised
        self.is_replaced = False  # killed, so that another one starts in its place
        self._has_left = False
        self._output = output
        self._on_sigterm = on_sigterm
        self.ended: asyncio.Future[BaseException | None] = asyncio.Future()
        self._failure: BaseException | None = None
        self._code: int | None = None  # the last one that was seen
        self._reason = ""  # why this process has killed it
        self._is_watched = True
        # This end stays open until `close`: its end would mean this process's death to the child.
        self._pipe, self._theirs = multiprocessing.Pipe()
        writers = () if output is None else output.writers
        args = (self._theirs, config, main, args, writers)
        self._process = make_process(child_main, args, config.name)

    async def start(self) -> None:
        """Start the process, in a thread: the server that forks it may be frozen (`ServerDied`)."""
        starting = asyncio.create_task(run_in_thread(self._start, "aiorpc-start"))
        try:
            await run_to_end(starting)
        except BaseException:
            if not self.has_started():
                self._pipe.close()
            raise
        finally:
            if self.has_started():
                _running.add(self)
                self.ended.get_loop().add_reader(self._pipe.fileno(), self._receive)

    def _start(self) -> None:
        try:
            for end in (self._pipe, self._theirs):
                close_on_fork(end)
            with stop_signals_blocked(), _main_importable():
                self._process.start()
        finally:
            self._theirs.close()
            if self._output is not None:
                self._output.started()

    def has_started(self) -> bool:
        """Return whether the process was started."""
        return self._process.pid is not None

    def is_entering(self) -> bool:
        """Return whether it is on its way into the world."""
        return not (self.is_leaving or self.ended.done() or self.entered_at is not None)

    def lived(self) -> float:
        """Return the seconds since it has entered its world, 0 if it has not."""
        return 0.0 if self.entered_at is None else time.monotonic() - self.entered_at

    def send(self, command: ParentCommand) -> None:
        """Send a command to the child, which may have ended."""
        with contextlib.suppress(OSError):
            self._pipe.send(command)

    def _receive(self) -> None:
        try:
            if (message := self._pipe.recv()) == _ENTERED:
                self.entered_at = time.monotonic()
            elif message == _SIGTERM:
                self._on_sigterm(self)
            elif message == _LEFT:
                self._has_left = True
            else:
                self._failure = message.exception()
                # Exit functions of libraries may wait for ever.
                self.ended.get_loop().call_later(FAILED_TIMEOUT, self.kill)
        except (EOFError, OSError):
            self.ended.get_loop().remove_reader(self._pipe.fileno())
            self._await_exit(EXIT_POLLS)

    def _await_exit(self, polls: int) -> None:
        """Set the result once the process has an exit code, without blocking the loop."""
        # The kernel closes a process's files just before the process can be reaped.
        if not self._is_watched:
            return
        is_awaited = polls > 0 or self.is_exiting()
        if (code := self._exit_code()) is None and is_awaited:
            self.ended.get_loop().call_later(POLL_INTERVAL, self._await_exit, polls - 1)
        else:
            if (pid := self._process.pid) and not isinstance(self._process, ForkedProcess):
                kill_left_by(pid)  # else its server has done so
            failure = self._failure
            # Without its message, code of a library has ended the process.
            if failure is None and not (self._has_left and code in (0, UNKNOWN_CODE)):
                failure = WorkerLost(self.name, self._reason_of(code))
                if self._output is not None and (note := self._output.note()):
                    failure.add_note(note)
            self.ended.set_result(failure)

    def stop_watching(self) -> None:
        """Ignore what becomes of the process from now on."""
        self._is_watched = False
        self.ended.get_loop().remove_reader(self._pipe.fileno())

    def is_exiting(self) -> bool:
        """Return whether the process has ended or ends now. In any thread."""
        try:
            return is_exiting(self._process.pid)
        except ValueError:  # it is closed
            return self._code is not None

    async def wait_for_exit(self) -> None:
        """Wait for the exit code of a process that ends now."""
        # Under load, or with much memory to free, the kernel and the fork server may take a while.
        await asyncio.wait((self.ended,), timeout=EXIT_CODE_TIMEOUT)

    def exit_reason(self) -> str:
        """Return the text for the exit code, "" if there is none yet."""
        code = self._exit_code()
        return "" if code is None else self._reason_of(code)

    def _reason_of(self, code: int | None) -> str:
        """Return the text for an exit code; None: the process has closed its pipe, and runs."""
        if self._reason:
            return self._reason
        if code is None:
            return "its process has closed the pipe to its parent"
        # A process that has entered its world had imported the program: its code is the program's.
        has_entered = self.entered_at is not None
        if code == STARTS_CHILDREN and not has_entered:
            return (
                "it imports this program, which starts a world then: put that behind "
                '`if __name__ == "__main__":`'
            )
        if code >= 0:
            by_watchdog = code == 1 and self.config.watchdog is not None and has_entered
            why = ", as its watchdog ends it" if by_watchdog else ""
            return f"its process ended with exit code {code}{why}"
        try:
            return f"its process was killed by {signal.Signals(-code).name}"
        except ValueError:  # of a real-time signal
            return f"its process was killed by signal {-code}"

    def _exit_code(self) -> int | None:
        with contextlib.suppress(ValueError):  # it is closed
            self._code = self._process.exitcode
        return self._code

    def release(self) -> bool:
        """Free what belongs to the process if it has ended; return whether it has."""
        if self._exit_code() is None:
            return False
        _running.discard(self)
        if not self.ended.done():  # else the loop would watch the next file with its number
            self.stop_watching()
        self._pipe.close()
        self._process.close()
        return True

    def kill(self, reason: str = "") -> None:
        """Kill the process with its descendants, if it has not ended."""
        if self._exit_code() is None and (pid := self._process.pid) is not None:
            self._reason = reason
            kill_tree(pid)
            self._process.kill()

    def close(self) -> None:
        """Kill the process if it has not ended, and free what belongs to it."""
        if self._exit_code() is None:
            self.kill()
            self._process.join(EXIT_CODE_TIMEOUT)
        _running.discard(self)
        self._pipe.close()
        with contextlib.suppress(ValueError):  # its end is not known, as with SIGCHLD ignored
            self._process.close()


_main_lock = threading.Lock()  # several threads may start children


@contextlib.contextmanager
def _main_importable() -> Iterator[None]:
    # A child of multiprocessing runs the file of `__main__`, and would look for one of this name.
    main = sys.modules["__main__"]
    with _main_lock:
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
    mark_this_process()
    with contextlib.suppress(OSError):  # 15 bytes for `ps -o comm`, `top`, `htop`
        Path("/proc/self/comm").write_text(config.name)
    close_on_fork(pipe)  # a process of a pool that outlives this one must not hide its death
    _leave_signals_to_parent(pipe)
    gc.unfreeze()  # what the process that forked this one froze: `freeze_gc` decides
    code, commands = 0, set[ParentCommand]()
    try:
        with forks_exit_here():
            config.initialize()
        with asyncio.Runner(loop_factory=config.loop_factory) as runner:
            runner.run(_run(pipe, config, main, args, commands))
        # As at the end of any program: what was given to an executor is done. Not after a failure,
        # which the parent sees when this process ends.
        threading._shutdown()  # type: ignore[attr-defined]
        tell_parent(pipe, _LEFT)
    except BaseException as exc:
        signal.signal(signal.SIGTERM, lambda *_: None)  # no message in the middle of this one
        is_told = isinstance(exc, asyncio.CancelledError) and "cancel" in commands
        # A failure is raised, and its traceback printed once, in the parent.
        tell_parent(pipe, _LEFT if is_told else RemoteFailure.of(exc, config.name))
        # The exit function of multiprocessing waits for the processes of a pool, without end.
        kill_descendants(os.getpid())
        code = 0 if is_told else 1
    end_process(code)


def _leave_signals_to_parent(pipe: Connection) -> None:
    """Ignore Ctrl-C, and tell the parent of a SIGTERM: it may have got one too, and stop in order.

    Handlers, not SIG_IGN, which programs that the child starts would inherit.
    """
    owner = os.getpid()

    def on_sigterm(signum: int, frame: FrameType | None) -> None:
        if os.getpid() == owner:
            tell_parent(pipe, _SIGTERM)
        else:  # a fork, of a pool, say
            signal.signal(signum, signal.SIG_DFL)
            os.kill(os.getpid(), signum)

    signal.signal(signal.SIGINT, lambda *_: None)
    signal.signal(signal.SIGTERM, on_sigterm)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


def tell_parent(pipe: Connection, message: object) -> None:
    """Send a message to the parent, unless it is dead."""
    with contextlib.suppress(OSError):
        pipe.send(message)


async def _run(
    pipe: Connection,
    config: WorkerConfig,
    main: Main | None,
    args: tuple[Any, ...],
    commands: set[ParentCommand],
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
                commands.add(command := pipe.recv())
                call_soon(loop, actions[command])
        except (EOFError, OSError):  # the parent is dead, perhaps by kill -9
            kill_descendants(os.getpid())
            os._exit(1)

    threading.Thread(target=obey, name="aiorpc-parent", daemon=True).start()
    async with run_worker(config) as me:
        tell_parent(pipe, _ENTERED)
        try:
            await (leave.wait() if main is None else main(me, *args))
        except SystemExit as exc:
            if exc.code not in (0, None):
                raise
        me._node.leaves_alone |= leaves_alone.is_set()
