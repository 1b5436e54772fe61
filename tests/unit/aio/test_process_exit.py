"""A process ends beside its threads: with its exit code, its exit functions and its output."""

import subprocess
import sys
import threading

import pytest

from aiorpc_torch._aio import signals
from tests.support.slack import SLACK

# The module alone, without the package, which takes seconds to import torch.
PROGRAM = """
import atexit, ctypes, importlib.util, sys, threading

spec = importlib.util.spec_from_file_location("process_exit", sys.argv[1])
process_exit = importlib.util.module_from_spec(spec)
spec.loader.exec_module(process_exit)
libc, cxx = ctypes.CDLL(None), ctypes.CDLL("libstdc++.so.6")
abandoned, held = threading.Event(), threading.Lock()

def end_in_cxx():  # as a thread does that returns to Python after its end
    abandoned.wait()
    with held:
        cxx._ZSt9terminatev()

libc.fopen.restype = ctypes.c_void_p
file = ctypes.c_void_p(libc.fopen(b"/dev/stdout", b"w"))
libc.__cxa_atexit(libc.abort, None, None)  # an exit function of C++
thread = threading.Thread(target=end_in_cxx, daemon=True)
thread.start()

@atexit.register
def later():
    abandoned.set()
    while not held.locked():
        pass
    thread.join(0.2)  # it never ends; an abort is quicker
    print("later", flush=True)
    libc.fputs(b"from C\\n", file)

atexit.register(process_exit.abandon_threads)
atexit.register(print, "earlier", flush=True)
"""


@pytest.mark.parametrize(
    ("end", "code", "error"),
    [("", 0, ""), ("sys.exit(3)", 3, ""), ("1 / 0", 1, "ZeroDivisionError")],
)
def test_a_process_ends_beside_its_threads(end: str, code: int, error: str) -> None:
    """A thread in which C++ gives up hangs; it would have aborted the process, with code 134."""
    done = subprocess.run(
        [sys.executable, "-S", "-c", PROGRAM + end, signals.__file__],
        capture_output=True,
        text=True,
        timeout=60 + SLACK,
        check=False,
    )
    assert done.stdout.splitlines() == ["earlier", "later", "from C"]
    assert done.returncode == code
    assert error in done.stderr
    assert error or not done.stderr


def test_threads_of_the_library_are_found() -> None:
    """By their names, also those that are about to start."""
    assert not signals.has_threads()
    release = threading.Event()
    threads = [
        threading.Thread(target=release.wait, name=name, daemon=True)
        for name in ("theirs", "aiorpc-def-0")
    ]
    threads[0].start()
    assert not signals.has_threads()
    threads[1].start()
    assert signals.has_threads()
    release.set()
    for thread in threads:
        thread.join()
