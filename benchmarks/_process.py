"""Memory, threads and tasks of a process, as the kernel and asyncio count them."""

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
M_ARENA_MAX = -8  # of mallopt(3)


def own_memory() -> int:
    """Return the bytes of this process's own memory.

    Pages of files and shared pages are left out. TensorPipe's buffers on one machine are shared:
    megabytes that count, page by page, once they are first written to.
    """
    with open("/proc/self/statm") as file:
        _, resident, shared, *_ = map(int, file.read().split())
    return (resident - shared) * PAGE


def swept_memory() -> int:
    """Return own memory after a garbage collection and a trim of the allocator's free memory."""
    gc.collect()
    with contextlib.suppress(AttributeError):  # only glibc has it; Python's allocator trims itself
        ctypes.CDLL(None).malloc_trim(0)
    return own_memory()


def use_one_arena() -> None:
    """Have glibc keep one arena, in this process and those that it starts.

    Else it gives each new thread another, until there are eight for a processor, and each keeps
    some megabytes.
    """
    os.environ["MALLOC_ARENA_MAX"] = "1"
    with contextlib.suppress(AttributeError):  # only glibc has it
        ctypes.CDLL(None).mallopt(M_ARENA_MAX, 1)


def resident_memory(pid: int) -> int:
    """Return the resident bytes of a process, with those that it shares."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE


def private_memory() -> int:
    """Return the bytes that no other process shares: not those of before a fork."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith("Private_"))


def open_descriptors() -> int:
    """Return the number of open descriptors of this process."""
    return len(os.listdir("/proc/self/fd")) - 1  # without that of the folder itself


def mapped_segments() -> int:
    """Return the number of mappings of shared-memory segments in this process."""
    return Path("/proc/self/maps").read_text().count("memfd:aiorpc")


def cpu_seconds(pids: Iterable[int]) -> float:
    """Return the CPU seconds of these processes, in all their threads.

    The clock is `clock_getcpuclockid`'s, since /proc/<pid>/stat counts in steps of 10 ms.
    """
    return sum(time.clock_gettime(~pid << 3 | 2) for pid in pids)


def wakeups(pids: Iterable[int]) -> int:
    """Return the number of voluntary context switches of all their threads."""
    statuses = [each for pid in pids for each in Path(f"/proc/{pid}/task").glob("*/status")]
    return sum(_number(status.read_text(), "voluntary_ctxt_switches:") for status in statuses)


def _number(text: str, head: str) -> int:
    return next(int(line.split()[1]) for line in text.splitlines() if line.startswith(head))


def family(pid: int) -> list[int]:
    """Return a process, its children and their descendants."""
    parents = {int(each.name): _parent(each) for each in Path("/proc").glob("[0-9]*")}
    found = [pid]
    for member in found:  # the list grows during the loop
        found += [child for child, parent in parents.items() if parent == member]
    return found


def _parent(process: Path) -> int:
    try:
        return int((process / "stat").read_text().rpartition(")")[2].split()[1])
    except OSError:  # it has ended
        return 0


class Census(NamedTuple):
    """Counts of a process at one moment."""

    memory: int  # bytes
    blocks: int  # objects, as Python's allocator counts them
    threads: int
    tasks: int
    stats: aiorpc.observe.Stats


async def census() -> Census:
    """Return the counts of the process that runs this."""
    threads = len(os.listdir("/proc/self/task"))
    tasks = len(asyncio.all_tasks())
    return Census(own_memory(), sys.getallocatedblocks(), threads, tasks, aiorpc.observe.stats())


async def census_at_rest() -> Census:
    """Return the counts after a garbage collection."""
    gc.collect()
    return await census()
