"""What a process weighs: its memory, threads and tasks, as the kernel and asyncio count them."""

import asyncio
import contextlib
import ctypes
import gc
import os
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import aiorpc_torch as aiorpc

PAGE = os.sysconf("SC_PAGE_SIZE")


def own_memory() -> int:
    """Bytes of this process in memory that are its own.

    Without pages of files, and without those that it shares with its peers: TensorPipe's buffers
    on one machine, megabytes that count, page by page, once they are first written to.
    """
    with open("/proc/self/statm") as file:
        _, resident, shared, *_ = map(int, file.read().split())
    return (resident - shared) * PAGE


def swept_memory() -> int:
    """The same, once garbage is collected and what the allocator keeps in stock is given back."""
    gc.collect()
    with contextlib.suppress(AttributeError):  # it is glibc's; Python's own stock goes by itself
        ctypes.CDLL(None).malloc_trim(0)
    return own_memory()


def resident_memory(pid: int) -> int:
    """Bytes of a process that are in memory, those that it shares with others too."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE


def cpu_seconds(pids: Iterable[int]) -> float:
    """What these processes have used of all cores, in all their threads.

    By the clock of each, `clock_getcpuclockid`'s: /proc/<pid>/stat counts in steps of 10 ms.
    """
    return sum(time.clock_gettime(~pid << 3 | 2) for pid in pids)


def wakeups(pids: Iterable[int]) -> int:
    """How often their threads have gone to sleep of their own will, and so been woken."""
    statuses = [each for pid in pids for each in Path(f"/proc/{pid}/task").glob("*/status")]
    return sum(_number(status.read_text(), "voluntary_ctxt_switches:") for status in statuses)


def _number(text: str, head: str) -> int:
    return next(int(line.split()[1]) for line in text.splitlines() if line.startswith(head))


def family(pid: int) -> list[int]:
    """A process, its children and theirs."""
    parents = {int(each.name): _parent(each) for each in Path("/proc").glob("[0-9]*")}
    found = [pid]
    for member in found:  # it grows meanwhile
        found += [child for child, parent in parents.items() if parent == member]
    return found


def _parent(process: Path) -> int:
    try:
        return int((process / "stat").read_text().rpartition(")")[2].split()[1])
    except OSError:  # it has ended
        return 0


class Census(NamedTuple):
    """A process at one moment."""

    memory: int  # bytes
    blocks: int  # objects, as Python's allocator counts them
    threads: int
    tasks: int
    stats: aiorpc.Stats


async def census() -> Census:
    """Of the process whose loop runs this."""
    threads = len(os.listdir("/proc/self/task"))
    tasks = len(asyncio.all_tasks())
    return Census(own_memory(), sys.getallocatedblocks(), threads, tasks, aiorpc.stats())


async def census_at_rest() -> Census:
    """The same, once garbage is collected."""
    gc.collect()
    return await census()
