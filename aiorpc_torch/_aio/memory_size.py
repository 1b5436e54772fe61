"""The memory that this process may use: the machine's, or less by the limit of its control group.

A container with 8 GB on a machine with 1 TB must not reserve parts of the terabyte.
(tests/unit/aio/test_memory_size.py)
"""

import contextlib
import functools
import os
from collections.abc import Iterator
from pathlib import Path

_GROUPS = Path("/proc/self/cgroup")

_CONTROLLERS = {
    "": (Path("/sys/fs/cgroup"), "memory.max"),
    "memory": (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"),
}
"""Root and file of the limits of version 2 and of version 1."""


@functools.cache
def memory_size() -> int:
    """Return the bytes of memory that this process may use."""
    return min(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), *_limits())


def _limits() -> Iterator[int]:
    """Yield the limits of this process's control groups and of those around them."""
    yield 1 << 63
    with contextlib.suppress(OSError):  # not on Linux
        for line in _GROUPS.read_text().splitlines():
            _, names, path = line.split(":", 2)
            for name in names.split(","):
                if name in _CONTROLLERS:
                    yield from _limits_in(*_CONTROLLERS[name], path)


def _limits_in(root: Path, file: str, path: str) -> Iterator[int]:
    folder = root / path.lstrip("/")
    for each in (folder, *folder.parents):
        # A group outside of this process's mount has no folder; "max" is no limit.
        with contextlib.suppress(OSError, ValueError):
            yield int((each / file).read_text())
        if each == root:
            break
