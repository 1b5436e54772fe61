"""Opening regular files: what else has a path may block, or act, as it is opened."""

import contextlib
import os
import stat

_KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFDIR: "a directory",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def open_regular(path: str | os.PathLike[str], flags: int = os.O_RDONLY) -> int:
    """Open a regular file; return its descriptor.

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
