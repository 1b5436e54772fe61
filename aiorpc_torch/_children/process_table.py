"""Processes as the kernel's table has them: their ends, and the processes that they have started.

A descendant that has made a session or a process group of its own is left alone: it was started to
live on.
"""

import contextlib
import os
import signal
from collections.abc import Collection
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


def children_of(pid: int) -> list[int]:
    """Return the children of a process that share this process's group, zombies too."""
    found: list[int] = []
    for thread in _threads(pid):
        with contextlib.suppress(OSError):
            listed = Path(f"/proc/{pid}/task/{thread}/children").read_text().split()
            found += [int(each) for each in listed if _shares_group(int(each))]
    return found


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


def kill_descendants(pid: int, spared: Collection[int] = ()) -> None:
    """Kill the descendants of a process, but some of its children with theirs."""
    for child in children_of(pid):
        if child not in spared:
            kill_tree(child)
