"""Steps that may block without end: names of what they wait for, and the opening of files.

State machines import this: it knows neither time nor threads. See `blocking`.
"""

import contextlib
import contextvars
import os
import stat
from collections.abc import Iterator

awaited: contextvars.ContextVar[list[str]] = contextvars.ContextVar("awaited")
"""The clauses of `blocking_on` around this code, if a `BlockingCall` runs it."""


@contextlib.contextmanager
def blocking_on(text: str) -> Iterator[None]:
    """Name what does not answer, and the remedy, if the block runs in a `BlockingCall`."""
    texts = awaited.get(None)
    if texts is None:
        yield
        return
    texts.append(text)
    try:
        yield
    finally:
        texts.pop()


_KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFDIR: "a directory",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def open_regular(path: str | os.PathLike[str], flags: int = os.O_RDONLY) -> int:
    """Open a regular file; return its descriptor. Others may block, or act, as they are opened.

    Raises:
        ValueError: if it is no regular file.
        OSError: if it cannot be opened.
    """
    with contextlib.suppress(FileNotFoundError):
        _check(path, os.stat(path))  # before `open`, which may act on a device
    descriptor = os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK, 0o666)
    try:
        _check(path, os.fstat(descriptor))
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def read_regular(path: str | os.PathLike[str], most: int = -1) -> bytes:
    """Return the content of a regular file.

    Raises as `open_regular`, and ValueError if it has more than `most` bytes (default: no limit).
    """
    with open(open_regular(path), "rb") as file:
        found = file.read(most + 1 if most >= 0 else -1)
    if 0 <= most < len(found):
        raise ValueError(
            f"{os.fspath(path)} has more than {most} bytes: remove it, or give another path"
        )
    return found


def _check(path: str | os.PathLike[str], found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        kind = _KINDS.get(stat.S_IFMT(found.st_mode), "of an unknown kind")
        name = os.fspath(path)
        raise ValueError(f"{name} is {kind}, not a file: remove it, or give another path")
