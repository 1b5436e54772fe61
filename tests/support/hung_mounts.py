"""A file system that does not answer, as NFS does without its server. Root on Linux.

It is a FUSE mount whose server never answers the first request of the kernel: every access waits.
"""

import contextlib
import ctypes
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

_MNT_DETACH = 2

_libc = ctypes.CDLL(None, use_errno=True)


@contextlib.contextmanager
def hung_mount(target: Path) -> Iterator[None]:
    """Mount it on a folder. All accesses fail at the end of the block."""
    try:
        server = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    except OSError as exc:
        pytest.skip(f"no FUSE here: {exc}")
    try:
        options = f"fd={server},rootmode=40000,user_id=0,group_id=0".encode()
        if _libc.mount(b"hung", bytes(target), b"fuse.hung", 0, options) != 0:
            pytest.skip(f"no FUSE mounts here: {os.strerror(ctypes.get_errno())}")
        try:
            yield
        finally:
            assert _libc.umount2(bytes(target), _MNT_DETACH) == 0
    finally:
        os.close(server)  # the kernel ends all that waits
