"""Programs as a user starts them: one command, or one terminal for each worker."""

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[2]
PATIENCE = 500.0  # seconds for a program to run; only one that hangs takes as long
END = 30.0  # seconds in which everybody has ended once somebody was killed
_FIRST_RANDOM_PORT = 32768  # Linux's default
STRICT = ("-X", "dev", "-W", "error")

Process = subprocess.Popen[str]


def command(program: str, *args: str, python: Sequence[str] = ()) -> list[str]:
    """The command line, with options of Python's."""
    return [sys.executable, *python, "-m", f"examples.{program}", *args]


def run(program: str, *args: str, python: Sequence[str] = STRICT, timeout: float = PATIENCE) -> str:
    """What a program prints that ends well; by default every warning is an error."""
    return run_line(command(program, *args, python=python), timeout)


def run_line(line: Sequence[str], timeout: float) -> str:
    """The same of a command line; it warns only as far as Python was not told to be strict."""
    done = subprocess.run(
        line, cwd=ROOT, capture_output=True, text=True, timeout=timeout, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Warning" not in done.stderr or "-W" not in line
    assert "Traceback" not in done.stderr
    return done.stdout


@contextlib.contextmanager
def started(line: list[str], *, cwd: Path = ROOT, **environment: str) -> Iterator[Process]:
    """A process, of whose descendants nothing is left after the block."""
    with subprocess.Popen(
        line,
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | environment,
    ) as process:
        try:
            yield process
        finally:
            with contextlib.suppress(psutil.NoSuchProcess):
                for each in psutil.Process(process.pid).children(recursive=True):
                    each.kill()
            process.kill()


def free_port() -> int:
    """One that nobody listens at now, and that the system gives to nobody by itself.

    Programs take seconds to start. A port of the system's random range may be another test's by
    then: rank 0 would find it taken, and the others would ask a stranger.
    """
    while True:
        # Not by `random` itself, whose numbers a test may have seeded, as one beside it.
        port = random.SystemRandom().randrange(20000, _FIRST_RANDOM_PORT)
        with contextlib.suppress(OSError):
            socket.create_server(("127.0.0.1", port)).close()
            return port


@contextlib.contextmanager
def terminals(
    program: str, size: int, *args: str, python: Sequence[str] = ()
) -> Iterator[list[Process]]:
    """A process for each rank."""
    world = ("--master-port", str(free_port()), *args)
    with contextlib.ExitStack() as stack:
        lines = [
            command(program, *world, "--rank", str(rank), python=python) for rank in range(size)
        ]
        yield [stack.enter_context(started(line)) for line in lines]


@contextlib.contextmanager
def ranks(program: str, size: int, *args: str) -> Iterator[list[Process]]:
    """A process for each rank, with the world in its environment, as torchrun describes it."""
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(
                started(command(program, *args), **address, WORLD_SIZE=str(size), RANK=str(rank))
            )
            for rank in range(size)
        ]


def workers_of(process: Process) -> list[psutil.Process]:
    """The children that are workers of its local world, in the order of their ranks."""
    found = psutil.Process(process.pid).children(recursive=True)
    server = [each for each in found if "forkserver_main" in " ".join(each.cmdline())]
    workers = [each for each in server if each.ppid() != process.pid]
    return sorted(workers, key=lambda each: each.pid)


def until(process: Process, text: str) -> str:
    """Read what it prints up to a line with that text in it."""
    assert process.stdout is not None
    for line in process.stdout:
        if text in line:
            return line
    raise AssertionError(process.communicate())


def killed(pid: int) -> float:
    """End it as `kill -9` does; when."""
    os.kill(pid, signal.SIGKILL)
    return time.monotonic()


def all_ended(processes: Sequence[psutil.Process]) -> None:
    """None of these is left, in time."""
    assert not psutil.wait_procs(processes, timeout=END)[1]
