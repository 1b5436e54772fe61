"""Shared-memory segments without a name: memfd files that other processes map.

A receiver opens a segment of a sender through `/proc/<pid>/fd/<descriptor>`. This works for
processes of one user in one process namespace. asyncio's transports cannot pass descriptors, and a
second socket for them would need an order with the first. A segment has no file: it is gone when no
process has it open or mapped, also after `kill -9`. (tests/unit/aio/test_segments.py)
"""

import ctypes
import fcntl
import mmap
import os
import secrets
import stat
import weakref
from typing import NamedTuple

from .host import this_host

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL

SWITCH = "AIORPC_TORCH_SHARED_MEMORY"
"""Name of an environment variable; with the value "0" no segment is made or opened."""

_SECRET = 32  # bytes of a probe


class SegmentError(Exception):
    """A peer named a file that is not one of its segments."""


class SegmentLost(SegmentError):
    """The process that made a segment has ended before it was mapped here."""


class SegmentName(NamedTuple):
    """The name of a segment for other processes."""

    pid: int  # of the process that made it
    descriptor: int  # in that process
    inode: int  # the descriptor may be reused for another file
    size: int  # bytes


def is_supported() -> bool:
    """Return whether this process may make and open segments."""
    return hasattr(os, "memfd_create") and os.environ.get(SWITCH) != "0"


def sharing_group() -> str:
    """Return `this_host()` if its processes can map each other's segments, else "".

    A process that is not dumpable has one, too: to map may fail.
    """
    return this_host() if is_supported() else ""


_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_FAILED = ctypes.c_void_p(-1).value

Buffer = ctypes.Array[ctypes.c_ubyte]


class Mapping:
    """A mapping of a file or of new memory, until the object and its buffers are gone.

    Python's `mmap` keeps a descriptor for each mapping; a receiver would soon have none left.

    Raises:
        OSError: if there is no address space.
    """

    __slots__ = ("__weakref__", "address", "size")

    def __init__(self, descriptor: int, size: int, flags: int) -> None:
        access = mmap.PROT_READ | mmap.PROT_WRITE
        address = _libc.mmap(None, size, access, flags, descriptor, 0)
        if address in (None, _FAILED):
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        self.address: int = address
        self.size = size
        weakref.finalize(self, _libc.munmap, address, size).atexit = False

    @classmethod
    def anonymous(cls, size: int) -> "Mapping":
        """Return new memory of this process alone, of huge pages where the system has them."""
        found = cls(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        advise_huge_pages(found.address, size)
        return found

    def buffer(self) -> Buffer:
        """Return the memory as a new object, which weak references can refer to."""
        found = (ctypes.c_ubyte * self.size).from_address(self.address)
        found.mapping = self  # type: ignore[attr-defined]
        return found


def advise_huge_pages(address: int, size: int) -> None:
    """Let the system use huge pages for memory that is about to be written, where it has them."""
    start = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    if (size := (address + size - start) // mmap.PAGESIZE * mmap.PAGESIZE) > 0:
        _libc.madvise(start, size, mmap.MADV_HUGEPAGE)


class Segment:
    """A segment of this process. Its descriptor is closed with the object.

    Memory is taken as it is written. Raises OSError if there is no memory or no descriptor.
    """

    __slots__ = ("__weakref__", "_mapping", "name")

    def __init__(self, size: int) -> None:
        descriptor = os.memfd_create("aiorpc", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        weakref.finalize(self, os.close, descriptor).atexit = False
        os.ftruncate(descriptor, size)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)  # no receiver gets a SIGBUS
        self._mapping = Mapping(descriptor, size, mmap.MAP_SHARED)
        self.name = SegmentName(os.getpid(), descriptor, os.fstat(descriptor).st_ino, size)

    def buffer(self) -> Buffer:
        """Return the memory, to be written."""
        return self._mapping.buffer()

    def private_buffer(self) -> Buffer:
        """Return the memory in a mapping in which what is written stays; it needs no descriptor.

        Raises OSError if this process has no address space for it.
        """
        return Mapping(self.name.descriptor, self.name.size, mmap.MAP_PRIVATE).buffer()

    def write(self, offset: int, address: int, size: int) -> None:
        """Copy `size` bytes of memory to `offset`. Releases the GIL.

        Raises ValueError if they do not fit.
        """
        if not 0 <= offset <= self.name.size - size:
            raise ValueError(f"{size} bytes at {offset} exceed a segment of {self.name.size}")
        ctypes.memmove(self._mapping.address + offset, address, size)


def map_segment(name: SegmentName, *, private: bool) -> Mapping:
    """Map a segment of another process, or of this one, for reading and writing.

    What is written stays in this mapping if it is `private`.

    Raises:
        SegmentLost: if the process that made it has ended.
        SegmentError: if there is no such segment, or a smaller one.
        OSError: if this process has no descriptor or no address space for it.
    """
    path = f"/proc/{name.pid:d}/fd/{name.descriptor:d}"
    try:
        _check(name, os.stat(path))  # before `open`, which may act on a device
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
    except (FileNotFoundError, PermissionError) as exc:
        kind = SegmentLost if _has_ended(name.pid) else SegmentError
        raise kind(f"no segment {name}: {exc}") from exc
    try:
        _check(name, os.fstat(descriptor))
        if not fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
            raise SegmentError(f"segment {name} may shrink")
        return Mapping(descriptor, name.size, mmap.MAP_PRIVATE if private else mmap.MAP_SHARED)
    finally:
        os.close(descriptor)


def _has_ended(pid: int) -> bool:
    """Return whether a process has no descriptors, as one that ends or waits to be reaped."""
    try:
        return not os.listdir(f"/proc/{pid:d}/fd")
    except (FileNotFoundError, PermissionError):  # it is the superuser's once the process has ended
        return True


def _check(name: SegmentName, found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode) or found.st_ino != name.inode:
        raise SegmentError(f"no segment {name}: the descriptor is another file's")
    if not 0 < name.size <= found.st_size:
        raise SegmentError(f"segment {name} has {found.st_size} bytes")


class Probe:
    """A small segment with a secret: a peer that reads the secret can map segments.

    One trial finds all reasons alike why a peer cannot: another user or process namespace, a
    process that is not dumpable, a system without memfd.
    """

    def __init__(self) -> None:
        self.secret = secrets.token_bytes(_SECRET)
        self._segment = Segment(mmap.PAGESIZE)
        content = ctypes.create_string_buffer(self.secret)
        self._segment.write(0, ctypes.addressof(content), _SECRET)
        self.name = self._segment.name  # for `read_probe` of the peer


def read_probe(name: SegmentName) -> bytes:
    """Return the secret of a peer's probe, b"" if this process cannot map its segments."""
    if not is_supported():
        return b""
    try:
        return bytes(map_segment(name, private=False).buffer()[:_SECRET])
    except (OSError, SegmentError, ValueError, OverflowError):
        return b""
