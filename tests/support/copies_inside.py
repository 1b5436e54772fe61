"""Copies of large tensors to shared memory: held back, or made to fail."""

from collections.abc import Callable
from typing import Any, NoReturn

import pytest

from aiorpc_torch._carrier import memory, shared_memory


def hold_copies(patch: pytest.MonkeyPatch) -> list[Callable[[], None]]:
    """Return the list to which copies are added, in place of a thread that makes them."""
    found: list[Callable[[], None]] = []
    patch.setattr(shared_memory, "memory_threads", found.append)
    return found


def count_copies(patch: pytest.MonkeyPatch) -> list[Callable[[], None]]:
    """Return the list to which copies are added that a thread makes."""
    found, start = list[Callable[[], None]](), shared_memory.memory_threads

    def count(copy: Callable[[], None]) -> None:
        found.append(copy)
        start(copy)

    patch.setattr(shared_memory, "memory_threads", count)
    return found


def start_no_thread(patch: pytest.MonkeyPatch) -> None:
    """Let no thread start for a copy."""

    def fail(_: Any) -> NoReturn:
        raise RuntimeError("can't start new thread")

    patch.setattr(shared_memory, "memory_threads", fail)


def fail_writes(patch: pytest.MonkeyPatch) -> None:
    """Let each copy to a segment fail."""

    def fail(*_: Any) -> NoReturn:
        raise MemoryError("no memory")

    patch.setattr("aiorpc_torch._aio.segments.Segment.write", fail)


def limit_memory(patch: pytest.MonkeyPatch, size: int) -> None:
    """Let worlds that start from now on have at most `size` bytes of segments."""
    patch.setattr(memory, "memory_limit", lambda: size)


def read_no_probe(patch: pytest.MonkeyPatch) -> None:
    """Let no peer read the segment that is offered to it, as in another process namespace."""
    patch.setattr("aiorpc_torch._carrier.shared_memory.read_probe", lambda _: b"")
