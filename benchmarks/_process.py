"""What a process weighs: its memory, threads and tasks, as the kernel and asyncio count them."""

import asyncio
import contextlib
import ctypes
import gc
import os
import sys
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
