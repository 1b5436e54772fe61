"""The processes of children: forked from a server, or with new interpreters.

The server has imported torch, this library and the modules of `preload`, and has started no thread.
So a child is as fresh as one with a new interpreter, and starts in a hundredth of the time.
(tests/integration/test_forkserver.py; docs/worlds.md lists the differences)

Not `multiprocessing`'s fork server, which is one for the whole process. The program may use that
one with modules of its own. Its children keep the environment and the standard streams with which
it started, and it has a socket that has to be removed. This one is reached over a socket pair only.
"""

import asyncio
import contextlib
import math
import multiprocessing
import os
import pickle
import resource
import select
import signal
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import context, popen_fork, reduction, resource_tracker, spawn, util
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Literal

from .._aio.fork import close_on_fork
from .._aio.waiting import announced
from .._node.config import is_list_of_names
from ..errors import WorldTimeout
from .forkserver_main import MOST_DESCRIPTORS, NUMBER, STREAMS, InheritedDescriptor, main
from .process_table import exit_code_of_zombie, is_alive

# Beginnings of variables that torch and the libraries below it read while they are loaded. Children
# get all variables as they are when the child starts; for these that would be too late.
READ_AT_IMPORT = (
    *("AIORPC_CUDA", "ATEN_", "BLIS_", "C10_", "DNNL_", "GLIBC_", "GOMP_", "GOTO_", "KMP_", "LANG"),
    *("LC_", "LD_", "MALLOC_", "MKL", "NUMBA_", "NUMEXPR_", "NVFUSER_", "OMP_", "ONEDNN_"),
    *("OPENBLAS_", "PYTHON", "PYTORCH_", "TORCH_", "TORCHDYNAMO_", "TORCHINDUCTOR_", "TZ"),
)

ANSWER_TIMEOUT = 5.0  # seconds for it to fork a child; the thread that starts the child waits
END_TIMEOUT = 1.0  # seconds for its own end, which ends the processes that are left
REPORT_TIMEOUT = 0.5  # seconds for its report of the end of a process
REPORT_INTERVAL = 0.05  # seconds between looks for a process that has ended, if it is frozen
UNKNOWN_CODE = 255  # of a process that has ended after its server, as multiprocessing's


class ServerDied(RuntimeError):
    """The server has died, or was killed since it was frozen."""


class ForkServer:
    """A process that forks children, from its start to the end of this object or this process.

    It ends with the last reference to it, and when this process ends, also by `kill -9`.
    """

    def __init__(self, preload: Sequence[str]) -> None:
        # Raises in a child that still imports its `__main__`: a script without its `if __name__`.
        path = [str(each) for each in spawn.get_preparation_data("")["sys_path"]]
        self.preload = tuple(preload)
        self.inherits = inherited_state()
        self._is_ready = self._has_failed = False
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.setblocking(False)
        with theirs:
            self.pid = _start(theirs.fileno(), path, self.preload)
        close_on_fork(self.socket)
        weakref.finalize(self, _end, self.socket, self.pid, os.getpid())

    async def ready(self, timeout: float) -> None:
        """Wait until the modules are imported. Raises why they are not (`forkserver_main`)."""
        if self._is_ready:
            return
        self._has_failed = True  # unless it is ready in time
        async with asyncio.timeout(timeout):
            report = await asyncio.get_running_loop().sock_recv(self.socket, 1 << 17)
        error: BaseException | None = pickle.loads(report) if report else _died()
        if error is not None:
            raise error
        self._is_ready, self._has_failed = True, False

    def kill(self) -> None:
        """End it: it is frozen. Its children live on, and the next world has another."""
        self._has_failed = True  # at once: the process still looks alive for a moment
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def is_alive(self) -> bool:
        """Return whether the process has neither failed nor ended."""
        if self._has_failed:
            return False
        poller = select.poll()
        poller.register(self.socket, 0)
        return not poller.poll(0)  # no POLLHUP

    def serves(self, preload: Sequence[str]) -> bool:
        """Return whether it is alive, and a new process with these modules would be like it."""
        if not self.is_alive():
            return False
        return {*preload} <= {*self.preload} and self.inherits == inherited_state()

    def process(
        self, target: Callable[..., Any], args: tuple[Any, ...], name: str
    ) -> "ForkedProcess":
        """Return a process that this server will fork."""
        process = ForkedProcess(target=target, args=args, name=name)
        process.server = self
        return process


_current: ForkServer | None = None
_lock = threading.Lock()


def obtain(preload: Sequence[str]) -> ForkServer:
    """Return the running server, or start another if it cannot serve this world."""
    global _current
    with _lock:
        if _current is None or not _current.serves(preload):
            _current = ForkServer(preload)
        return _current


def _forget() -> None:
    """Leave the server of its parent to a fork of this process."""
    global _current, _lock
    _current, _lock = None, threading.Lock()


os.register_at_fork(after_in_child=_forget)


def server_pid() -> int | None:
    """Return the pid of the running server."""
    return None if _current is None else _current.pid


def inherited_state() -> dict[str, object]:
    """Return what a child takes from the process that forks it, and cannot change later."""
    lines = Path("/proc/self/status").read_text(errors="replace").splitlines()
    limits = [each for each in dir(resource) if each.startswith("RLIMIT_")]
    return {
        "interpreter": _interpreter(),
        "environment": {k: v for k, v in os.environ.items() if k.startswith(READ_AT_IMPORT)},
        "limits": [resource.getrlimit(getattr(resource, each)) for each in limits],
        "umask": [line for line in lines if line.startswith("Umask:")],
        "cpus": os.sched_getaffinity(0),
        "priority": os.getpriority(os.PRIO_PROCESS, 0),
        "ids": (os.getresuid(), os.getresgid(), os.getgroups(), os.getpgid(0), os.getsid(0)),
        "ignored": {n for n in signal.valid_signals() if signal.getsignal(n) is signal.SIG_IGN},
    }


def _interpreter() -> list[str]:
    """Return the interpreter's path and flags, as `multiprocessing` starts it."""
    flags: list[str] = util._args_from_interpreter_flags()  # type: ignore[attr-defined]
    return [os.fsdecode(spawn.get_executable()), *flags]


def _start(descriptor: int, path: list[str], preload: tuple[str, ...]) -> int:
    # It binds no name: in a child, names of a `__main__` without a file must be unknown.
    command = (
        f"__import__('sys').path[:] = {path!r}; "
        f"__import__({main.__module__!r}, fromlist=['main']).main({descriptor}, {preload!r})"
    )
    line = [*_interpreter(), "-c", command]
    return util.spawnv_passfds(os.fsencode(line[0]), line, [descriptor])


def _end(connection: socket.socket, pid: int, owner: int) -> None:
    if os.getpid() != owner:  # in a fork of this process, which has closed the descriptor
        connection.detach()
        return
    connection.close()  # so it ends
    limit = time.monotonic() + END_TIMEOUT
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(pid, os.WNOHANG) == (0, 0):
            if time.monotonic() > limit:  # it is frozen
                os.kill(pid, signal.SIGKILL)
            time.sleep(0.001)


def _died() -> ServerDied:
    return ServerDied("the process that forks the children of local worlds has died")


def _is_stream(descriptor: int) -> bool:
    """Return whether a new process would inherit it: if the stream is closed, it is another's."""
    try:
        return os.get_inheritable(descriptor)
    except OSError:
        return False


# ── children ────────────────────────────────────────────────────────────────────────────────────


class ForkedProcess(BaseProcess):
    """A process as `multiprocessing`'s, forked by a `ForkServer`."""

    server: ForkServer
    _start_method = "spawn"  # of the processes that the child starts itself

    @staticmethod
    def _Popen(process: "ForkedProcess") -> "_Launched":  # noqa: N802
        return _Launched(process)


class _Launched(popen_fork.Popen):
    """A started process, with the methods that `multiprocessing` calls."""

    method = "forkserver"
    DupFd = InheritedDescriptor

    def _launch(self, process: ForkedProcess) -> None:
        self._poll_lock = threading.Lock()  # the code comes once, to one of several threads
        self._is_reported = True  # until the server has died
        self._ended_at = 0.0  # when the process was first seen to have ended
        self._server: ForkServer = process.__dict__.pop("server")  # it reports the exit code
        self._inherited: list[int] = []
        with contextlib.ExitStack() as stack:
            data = stack.enter_context(open(os.memfd_create("aiorpc-child"), "w+b"))
            self._write(process, data)
            self._status, theirs = socket.socketpair()
            self.finalizer = util.Finalize(self, self._status.close)
            stack.enter_context(theirs)
            null = stack.enter_context(open(os.devnull, "r+b"))
            streams = [n if _is_stream(n) else null.fileno() for n in STREAMS]
            tracker: Any = resource_tracker.getfd()
            for start in range(0, len(self._inherited), MOST_DESCRIPTORS):
                some = self._inherited[start : start + MOST_DESCRIPTORS]
                socket.send_fds(self._status, [b"."], some)
            shared = [data.fileno(), theirs.fileno(), *streams, tracker]
            try:  # a request for a child that gets these, and the others on the second of them
                socket.send_fds(self._server.socket, [NUMBER.pack(len(self._inherited))], shared)
            except ConnectionError:
                raise _died() from None
        self.sentinel = self._status.fileno()
        self.pid = self._receive_pid()

    def _write(self, process: ForkedProcess, file: Any) -> None:
        context.set_spawning_popen(self)  # type: ignore[arg-type]
        try:
            # What a child with a new interpreter would have inherited.
            blocked_signals = signal.pthread_sigmask(signal.SIG_BLOCK, ())
            pickle.dump((dict(os.environ), blocked_signals), file)
            reduction.dump(spawn.get_preparation_data(process.name), file)
            reduction.dump(process, file)
        finally:
            context.set_spawning_popen(None)
        file.flush()
        file.seek(0)

    def duplicate_for_child(self, descriptor: int) -> int:
        """Pass a descriptor to the child; return its position among those passed."""
        self._inherited.append(descriptor)
        return len(self._inherited) - 1

    def _receive_pid(self) -> int:
        if not wait([self._status], ANSWER_TIMEOUT):
            self._server.kill()
        pid = self._receive()
        if pid is None:
            raise _died()
        if pid < 0:
            raise OSError(-pid, f"a child process cannot be forked: {os.strerror(-pid)}")
        return pid

    def _receive(self) -> int | None:
        try:
            data = self._status.recv(NUMBER.size, socket.MSG_WAITALL)
        except ConnectionResetError:  # the server died before it had the request
            return None
        return NUMBER.unpack(data)[0] if len(data) == NUMBER.size else None

    def poll(self, flag: int = os.WNOHANG) -> int | None:
        """Return the exit code, None while the process runs. `flag` 0 waits."""
        if flag != os.WNOHANG:
            return self.wait()
        with self._poll_lock:
            if self.returncode is None and self._is_reported and wait([self._status], 0):
                self.returncode = self._receive()
                self._is_reported = self.returncode is not None
            if self.returncode is not None:
                return self.returncode
            # Its server may have died, or be frozen.
            if (code := exit_code_of_zombie(self.pid)) is not None:
                now = time.monotonic()
                self._ended_at = self._ended_at or now
                self.returncode = code if now > self._ended_at + REPORT_TIMEOUT else None
            elif not (self._is_reported or is_alive(self.pid)):
                self.returncode = UNKNOWN_CODE
            return self.returncode

    def wait(self, timeout: float | None = None) -> int | None:
        """Wait for the exit code, for at most `timeout` seconds; return it, None if none came."""
        limit = math.inf if timeout is None else time.monotonic() + timeout
        while self.poll() is None and (left := limit - time.monotonic()) > 0:
            wait([self._status] if self._is_reported else [], min(left, REPORT_INTERVAL))
        return self.returncode

    def _send_signal(self, sig: int) -> None:
        self.poll()  # the server has reaped a process that has ended
        super()._send_signal(sig)  # type: ignore[misc]


# ── the options of a world ──────────────────────────────────────────────────────────────────────

Start = Literal["forkserver", "spawn"]
Logs = Literal["names"]

ProcessFactory = Callable[[Callable[..., Any], tuple[Any, ...], str], BaseProcess]
"""A function that makes a process of a target function, its arguments and a name."""


@dataclass(frozen=True, slots=True)
class ProcessOptions:
    """The checked options of a local world for the start of its children."""

    start: Start = "forkserver"
    preload: Sequence[str] = ()
    logs: Logs | None = None

    def __post_init__(self) -> None:
        if self.logs not in (None, "names"):
            raise ValueError(f'logs must be "names" or None, got {self.logs!r}')
        if self.start not in ("forkserver", "spawn"):
            raise ValueError(f'start must be "forkserver" or "spawn", got {self.start!r}')
        if not is_list_of_names(self.preload):
            raise TypeError(f"preload must be a tuple of module names, got {self.preload!r}")

    async def factory(self, timeout: float) -> ProcessFactory:
        """Return the factory of the children, once their server is ready if they have one."""
        if self.start == "spawn":
            return spawned_process
        with stop_signals_blocked():
            server = obtain(self.preload)
        names = ", ".join(("torch", *self.preload))
        try:
            with announced(f"children wait until their server has imported {names}"):
                await server.ready(timeout)
        except TimeoutError:
            raise WorldTimeout(
                f"the process that forks the children did not import {names} within {timeout:g} s",
                [],
            ) from None
        return server.process


def spawned_process(target: Callable[..., Any], args: tuple[Any, ...], name: str) -> BaseProcess:
    """Return a process with a new interpreter."""
    # Not "fork", which copies the locks of torch's threads but not the threads.
    return multiprocessing.get_context("spawn").Process(target=target, args=args, name=name)


STOP_SIGNALS = frozenset({signal.SIGINT, signal.SIGTERM})


@contextlib.contextmanager
def stop_signals_blocked() -> Iterator[None]:
    """Let processes that this thread starts in the block have Ctrl-C and SIGTERM blocked."""
    # Both may go to all processes of a program, and a child that is still importing torch would
    # print a traceback, or die. A child inherits the mask, until `child_main` installs handlers.
    # multiprocessing's tracker unblocks the signals when it starts: so it starts first.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
