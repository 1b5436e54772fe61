"""Processes as the kernel's table has them: their ends, and the processes that they have started.

What a child starts has the child's pid in its environment: so it is found when the child has ended,
however that was. (A fork that executes no other program has not; `_aio.fork` ends it.) A process
with a session or a group of its own is left alone: it was started to live on.
"""

import contextlib
import os
import signal
import time
from pathlib import Path

_PF_EXITING = 0x4  # set before the kernel closes any file of the process


def is_exiting(pid: int | None) -> bool:
    """Return whether the kernel is ending a process: then its exit code comes, at once or soon."""
    fields = _fields(pid)
    return not fields or bool(int(fields[6]) & _PF_EXITING)  # without any it has been reaped


def is_alive(pid: int) -> bool:
    """Return whether a process exists, perhaps as a zombie."""
    return bool(_fields(pid))


def exit_code_of_zombie(pid: int) -> int | None:
    """Return the exit code of a process that has ended and is not reaped; else None."""
    fields = _fields(pid)
    # The main thread of a process may be a zombie before the other threads have ended.
    if not fields or fields[0] != "Z" or len(_threads(pid)) > 1:
        return None
    return os.waitstatus_to_exitcode(int(fields[49]))


def _fields(pid: int | None) -> list[str]:
    """Return the fields of /proc/PID/stat behind the name: the state is the first."""
    with contextlib.suppress(OSError):
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
        return stat.rpartition(")")[2].split()
    return []


def _threads(pid: int) -> list[str]:
    with contextlib.suppress(OSError):
        return os.listdir(f"/proc/{pid}/task")
    return []


def _shares_group(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return os.getpgid(pid) == os.getpgrp()
    return False


def kill_tree(pid: int) -> None:
    """Kill a process and its descendants."""
    with contextlib.suppress(OSError):  # it has ended
        os.kill(pid, signal.SIGSTOP)  # it starts no more
        kill_descendants(pid)
        os.kill(pid, signal.SIGKILL)


def kill_descendants(pid: int) -> None:
    """Kill the descendants of a process."""
    for thread in _threads(pid):
        with contextlib.suppress(OSError):
            for child in Path(f"/proc/{pid}/task/{thread}/children").read_text().split():
                if _shares_group(int(child)):
                    kill_tree(int(child))


# ── what a process has left ─────────────────────────────────────────────────────────────────────

_MARK = "AIORPC_TORCH_CHILD"
KILL_TIMEOUT = 0.5  # seconds for killed processes to end


def mark_this_process() -> None:
    """Let `kill_left_by` find the processes that this one starts from now on."""
    os.environ[_MARK] = str(os.getpid())


def kill_left_by(pid: int) -> None:
    """Kill the processes that one which has ended has started, and wait for their end."""
    limit = time.monotonic() + KILL_TIMEOUT
    while (left := _left_by(pid)) and time.monotonic() < limit:
        for each in left:
            with contextlib.suppress(OSError):
                os.kill(each, signal.SIGKILL)
        time.sleep(0.001)


def _left_by(pid: int) -> list[int]:
    mark, found = f"{_MARK}={pid}".encode(), list[int]()
    for each in filter(str.isdigit, os.listdir("/proc")):
        if not _shares_group(int(each)):
            continue
        with contextlib.suppress(OSError):  # it has ended
            if mark in Path(f"/proc/{each}/environ").read_bytes().split(b"\0"):
                found.append(int(each))
    return found
