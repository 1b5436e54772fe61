"""A value at a place that all workers of a world reach, changed by compare-and-swap.

Of several that swap at once, one succeeds. The values are all different: so whoever does not know
whether its swap took place, since the place did not answer, reads and compares.

A file on one machine, or on a file system with locks that hold between machines, such as NFS 4,
promises that. On one whose locks do not (NFS mounted with `nolock`), two may succeed.
"""

import contextlib
import fcntl
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

from .._aio.awaited import blocking_on, open_regular, read_regular
from .._torch.store import NoStoreError, StoreClient

MAX_VALUE = 1 << 16  # bytes of a file: a record has some hundreds
LOCK_TIMEOUT = 2.0  # seconds: a process holds the lock for less than a millisecond
_LOCK_INTERVAL = 0.005  # seconds between two attempts


class SharedValue(Protocol):
    """A value that several processes read and swap.

    Methods may block without end, and name what they wait for (`blocking_on`).
    """

    def read(self) -> bytes | None:
        """Return the value, None if there is none. Raises OSError if the place is not reached."""

    def swap(self, old: bytes | None, new: bytes) -> bool:
        """Write `new` if it is `old`; return whether it was. After an OSError it may have been."""

    def clear(self, old: bytes) -> None:
        """Remove the value if it is `old`. Raises OSError if the place is not reached."""

    def close(self) -> None:
        """Close the connections to the place, without a wait; the next call opens others."""
        return  # by default there are none


class FileValue(SharedValue):
    """A value in a file. A process that is killed leaves the last value, and no lock."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = path.with_name(f"{path.name}.lock")
        self._waiting = f"the file {path} does not answer: check its file system"

    def read(self) -> bytes | None:
        """See `SharedValue`. This one and the others raise ValueError if a FIFO is there, say."""
        with blocking_on(self._waiting):
            return self._read()

    def swap(self, old: bytes | None, new: bytes) -> bool:
        with blocking_on(self._waiting), self._locked():
            if (found := self._read()) != old:
                if found is None:
                    self._lock.unlink()
                return False
            # In one step: another process reads all of it, or what was there before.
            written = self._path.with_name(f"{self._path.name}.new")
            with open(open_regular(written, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "wb") as file:
                file.write(new)
            written.replace(self._path)
            return True

    def clear(self, old: bytes) -> None:
        with blocking_on(self._waiting), self._locked(creates=False) as is_locked:
            found = self._read() if is_locked else b""
            if found == old:
                self._path.unlink()
            if found in (None, old):
                self._lock.unlink()

    def _read(self) -> bytes | None:
        try:
            return read_regular(self._path, MAX_VALUE)
        except FileNotFoundError:
            self._check_folder()
            return None

    def _check_folder(self) -> None:
        """Raise an error that names the folder if it is not there: not mounted, say."""
        try:
            self._path.parent.stat()
        except FileNotFoundError as exc:
            text = "the folder is not there on this machine: mount it, or make it"
            raise FileNotFoundError(exc.errno, text, str(self._path.parent)) from exc

    @contextlib.contextmanager
    def _locked(self, *, creates: bool = True) -> Iterator[bool]:
        """Hold the lock in this block; give False if `creates` is false and nothing is there.

        A process that removes the value may end at any step: it makes no new lock behind another
        one that has removed both.
        """
        self._check_folder()
        end = time.monotonic() + LOCK_TIMEOUT
        while (descriptor := self._try_to_lock(creates or self._path.exists())) is None:
            if not creates and not self._path.exists() and not self._lock.exists():
                yield False
                return
            if time.monotonic() > end:  # a frozen process has it
                raise TimeoutError(f"another process keeps {self._lock} locked")
            time.sleep(_LOCK_INTERVAL)
        try:
            yield True
        finally:
            os.close(descriptor)

    def _try_to_lock(self, creates: bool) -> int | None:
        try:
            descriptor = open_regular(self._lock, os.O_RDWR | (os.O_CREAT if creates else 0))
        except FileNotFoundError:
            return None
        with contextlib.suppress(BlockingIOError, FileNotFoundError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(descriptor), self._lock.stat()):  # it was not removed
                return descriptor
        os.close(descriptor)
        return None


class StoreValue(SharedValue):
    """A value in a store of torch, which `connect` connects to."""

    def __init__(self, key: str, connect: Callable[[], StoreClient]) -> None:
        self._key = key
        self._connect = connect
        self._client: StoreClient | None = None
        self._used = threading.Lock()
        self._is_closed = False  # since the last call began

    def read(self) -> bytes | None:
        """See `SharedValue`. Raises NoStoreError if another program listens there."""
        found = self._ask(lambda client: client.read(self._key))
        return bytes.fromhex(found.decode()) if found else None

    def swap(self, old: bytes | None, new: bytes) -> bool:
        was, written = b"" if old is None else old.hex().encode(), new.hex().encode()
        return self._ask(lambda client: client.swap(self._key, was, written)) == written

    def clear(self, old: bytes) -> None:
        self.swap(old, b"")

    def close(self) -> None:
        """See `SharedValue`. A call that is under way closes its connection at its end."""
        self._is_closed = True
        if self._used.acquire(blocking=False):
            self._close()
            self._used.release()

    def _close(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None

    def _ask(self, question: Callable[[StoreClient], bytes | None]) -> bytes | None:
        with self._used:
            self._is_closed = False
            client = self._client = self._client or self._connect()
            try:
                return question(client)
            except TimeoutError:
                if client.is_cut_off:
                    self._close()
                raise  # else the client goes on to wait
            except (OSError, NoStoreError):
                self._close()
                raise
            finally:
                if self._is_closed:
                    self._close()
