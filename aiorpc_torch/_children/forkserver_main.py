"""The process that forks children: it imports modules, then forks one child for each request.

It ignores Ctrl-C, SIGTERM and SIGHUP, which a terminal or a supervisor sends to all processes of a
program. It kills its children and ends when the program's end of the socket is closed. When a child
has ended, it kills the processes that this has left.
"""

import contextlib
import errno
import fcntl
import gc
import importlib
import os
import pickle
import select
import signal
import socket
import struct
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Sequence
from multiprocessing import resource_tracker, spawn
from typing import Any, NoReturn

from .._aio.signals import end_process, exit_code
from .process_table import kill_left_by

# Of a request: how many descriptors follow. Then a pid or a negative errno, and the exit code.
NUMBER = struct.Struct("q")
MOST_DESCRIPTORS = 250  # of one message; the kernel takes 253
STREAMS = (0, 1, 2)
STARTS_CHILDREN = 87
"""The exit code of a child in which the program starts children as it is imported.

The parent says what is wrong. The traceback has 40 lines, and is that of each child.
"""
_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class InheritedDescriptor:
    """A descriptor that travels to a child, in pickles of `multiprocessing`."""

    received: Sequence[int] = ()

    def __init__(self, position: int) -> None:
        self.position = position

    def detach(self) -> int:
        """Return the descriptor in the child."""
        return self.received[self.position]


# ── the server ──────────────────────────────────────────────────────────────────────────────────


def main(descriptor: int, preload: Sequence[str]) -> NoReturn:
    """Run the server; in a child, run the child."""
    control = socket.socket(fileno=fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 1 + max(STREAMS)))
    os.close(descriptor)  # it is one of a stream's if the program has closed that stream
    while (null := os.open(os.devnull, os.O_RDWR)) in STREAMS:
        pass
    os.close(null)
    handlers = {each: signal.signal(each, signal.SIG_IGN) for each in _IGNORED}
    # If the program ignores it, nothing here could wait for a child.
    handlers[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # the program's: SIGINT was blocked until here
    error = _imported(preload)
    with contextlib.suppress(ConnectionError):  # the program has ended, which `_serve` finds out
        control.send(pickle.dumps(error))
    if error is not None:
        os._exit(1)
    gc.collect()
    gc.freeze()  # a collection in a child would copy the pages of all objects
    # Each child would finalize them at its exit. torch takes its libraries of operators apart then,
    # in 28 ms (2.15). They are private to CPython (3.11 to 3.14).
    for each in [*weakref.finalize._registry]:  # type: ignore[attr-defined]
        each.atexit = False
    _end_child(_serve(control, handlers))


def _imported(preload: Sequence[str]) -> BaseException | None:
    """Import the modules; return why children cannot be forked, None if they can."""
    for name in ("aiorpc_torch", *preload):
        try:
            importlib.import_module(name)
        except BaseException as exc:
            summary = traceback.format_exception_only(exc)[-1].strip()
            error = ImportError(f"{name!r} of preload= cannot be imported: {summary}", name=name)
            error.add_note(traceback.format_exc()[-50_000:])
            return error
    with contextlib.suppress(ImportError):
        importlib.import_module("uvloop")
    # Libraries may end their threads in a fork's handler, and so once for all: OpenBLAS does, of
    # which numpy's import starts threads.
    if (pid := os.fork()) == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    remedy = 'do that in a function, or pass start="spawn"'
    if len(os.listdir("/proc/self/task")) > 1:
        others = [each.name for each in threading.enumerate()[1:]] or ["threads of a library"]
        return RuntimeError(
            f"a module of preload= started threads, which a fork does not copy: "
            f"{', '.join(others)}; {remedy}"
        )
    torch = sys.modules["torch"]
    if torch.cuda.is_initialized() or any(map(_is_cuda, os.listdir("/proc/self/fd"))):
        return RuntimeError(
            f"a module of preload= initialized CUDA, which forked children cannot use then; "
            f"{remedy}"
        )
    return None


def _is_cuda(descriptor: str) -> bool:
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}").startswith("/dev/nvidia-uvm")
    except OSError:  # it was the one of the folder
        return False


def _serve(control: socket.socket, handlers: dict[signal.Signals, Any]) -> Callable[[], Any]:
    """Fork a child for each request; return in each child only, with what it has to run."""
    children: dict[int, socket.socket] = {}  # by pid; they take the exit code
    wakeups, written = socket.socketpair()
    written.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(written.fileno())
    if sys.stdout is not None:
        sys.stdout.flush()  # else each child would print the text again
    os.chdir("/")  # keep no folder in use
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    os.close(null)
    poller = select.poll()
    poller.register(control, select.POLLIN)
    poller.register(wakeups, select.POLLIN)
    while True:
        ready = {descriptor for descriptor, _ in poller.poll()}
        if wakeups.fileno() in ready:
            wakeups.recv(1 << 16)
            for pid in [*children]:
                if (found := os.waitpid(pid, os.WNOHANG)) != (0, 0):
                    with children.pop(pid) as status:
                        kill_left_by(pid)
                        _tell(status, os.waitstatus_to_exitcode(found[1]))
        if control.fileno() not in ready:
            continue
        try:
            request, descriptors = _receive(control)
        except ConnectionError:  # the program ended before it read what this process has sent
            request = b""
        if not request:
            for pid in children:
                os.kill(pid, signal.SIGKILL)
            for pid in children:
                kill_left_by(pid)
            os._exit(0)
        data, descriptor, *others = descriptors
        told = socket.socket(fileno=descriptor)
        try:
            pid = os.fork()
        except OSError as exc:
            pid = -(exc.errno or 1)
        if pid == 0:
            signal.set_wakeup_fd(-1)
            for ignored, handler in handlers.items():
                signal.signal(ignored, signal.SIG_DFL if handler is None else handler)
            for each in (control, wakeups, written, *children.values()):
                each.close()
            return lambda: _run_child(data, told, others, *NUMBER.unpack(request))
        for passed in (data, *others):
            os.close(passed)
        _tell(told, pid)
        if pid > 0:
            children[pid] = told
        else:
            told.close()


def _receive(connection: socket.socket) -> tuple[bytes, list[int]]:
    """Return a message and its descriptors."""
    size, most, flags = NUMBER.size, MOST_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC
    data, descriptors, *_ = socket.recv_fds(connection, size, most, flags=flags)
    return data, descriptors


def _tell(status: socket.socket, number: int) -> None:
    with contextlib.suppress(OSError):  # the program has ended
        status.send(NUMBER.pack(number), socket.MSG_NOSIGNAL)


# ── a child ─────────────────────────────────────────────────────────────────────────────────────


def _run_child(data: int, told: socket.socket, descriptors: Sequence[int], more: int) -> Any:
    """Become the process that the program described in `data`, and run it to its end."""
    *streams, tracker = descriptors
    InheritedDescriptor.received = _receive_all(told, more)
    for standard, stream in zip(STREAMS, streams, strict=True):
        os.dup2(stream, standard)
        os.close(stream)
    if sys.stdout is not None:
        sys.stdout.reconfigure(line_buffering=os.isatty(1))  # type: ignore[union-attr]
    resource_tracker._resource_tracker._fd = tracker  # type: ignore[attr-defined]
    with open(data, "rb", closefd=False) as file:
        environment, blocked_signals = pickle.load(file)
        os.lseek(data, file.tell(), os.SEEK_SET)
    os.environ.clear()
    os.environ.update(environment)
    signal.pthread_sigmask(signal.SIG_SETMASK, blocked_signals)
    # As in a new interpreter, each of these starts anywhere. Python's own is seeded by the fork.
    sys.modules["torch"].default_generator.seed()
    if (numpy := sys.modules.get("numpy.random")) is not None:
        numpy.seed()
    return spawn._main(data, told.detach())


def _receive_all(connection: socket.socket, count: int) -> Sequence[int]:
    """Return the descriptors of as many messages as it takes: a state dict may have thousands."""
    found: list[int] = []
    while len(found) < count:
        _, some = _receive(connection)
        if not some:
            raise OSError(errno.EMFILE, "a child process cannot receive all descriptors")
        found += some
    return found


def _end_child(run: Callable[[], Any]) -> NoReturn:
    """Run a child that `child_main` did not end: it could not be unpickled, say."""
    try:
        code = run()
    except BaseException as exc:
        # multiprocessing refuses to start a process while the program is imported.
        is_refused = isinstance(exc, RuntimeError) and "bootstrapping phase" in str(exc)
        code = STARTS_CHILDREN if is_refused else exit_code(exc)
    end_process(code)
