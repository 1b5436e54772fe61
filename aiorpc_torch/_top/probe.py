"""Snapshots of all workers of this user on this host, over their abstract Unix sockets.

Each process has at most one request under way. One that does not answer, since it is stopped, say,
delays the others once, and its request stays until it goes on.
"""

import contextlib
import json
import os
import re
import select
import socket
import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .._aio.sockets import connect_unix, is_same_user, peer_pid
from .._inspection.snapshot_socket import NAME_LENGTH, PREFIX
from .._text import printable_parts

SOCKETS = Path("/proc/net/unix")
# Inode and name of a socket that listens: "00010000" are its flags. Any user may choose the name of
# a socket, with newlines and forged lines in it.
_SOCKET = re.compile(
    rf"^\S+ \S+ \S+ 00010000 \S+ \S+ +(\d+) @({PREFIX}[0-9a-f]{{16}}-[\w:-]{{1,{NAME_LENGTH}}})$",
    re.ASCII | re.MULTILINE,
)
MAX_ANSWER = 1 << 24  # bytes of a snapshot
ANSWER_TIMEOUT = 0.4  # seconds for all the processes that have answered before
_TOKEN_LENGTH = 17  # of the name of a socket, before the name of the worker
# The kernel takes 7 ms for the pages of a worker: a few workers are read in each look, in turn.
MEMORY_INTERVAL = 10.0  # seconds between two reads of one worker's memory
MEMORY_READS = 8  # in one look
_TICKS = os.sysconf("SC_CLK_TCK")  # in a second of processor time


@dataclass(frozen=True, slots=True)
class Sample:
    """A look at one process."""

    key: str  # name of its socket
    name: str  # of its worker
    time: float  # `time.monotonic()` of the look
    data: dict[str, Any] | None  # its snapshot, None if it has not answered
    silent: float = 0.0  # seconds since it was asked, if it has not answered
    pid: int = 0  # 0 if it is unknown here
    state: str = "?"  # letter of its state in /proc: "T" is a stopped process
    cpu: float = 0.0  # seconds of processor time that it has taken
    # Bytes of its own, 0 if they are unknown. Pages that forked children share with the process
    # that forked them are not its own.
    memory: int = 0


def listening() -> dict[str, set[str]]:
    """Return the sockets of workers in this network namespace, of all users: names and inodes.

    A name has several inodes if a line is forged.
    """
    found = defaultdict[str, set[str]](set)
    for inode, name in _SOCKET.findall(SOCKETS.read_text(errors="replace")):
        found[name].add(inode)
    return found


def _own_sockets() -> dict[str, int]:
    """Return the pids of this user's processes by the inodes of their sockets."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or is of another user
            # Its effective user: the owner of the folder may be root.
            status = (folder / "status").read_text(errors="replace")
            if int(status.partition("\nUid:")[2].split()[1]) != os.geteuid():
                continue
            for each in (folder / "fd").iterdir():
                with contextlib.suppress(OSError):  # it is closed
                    found[os.readlink(each)] = int(folder.name)
    return {link[8:-1]: pid for link, pid in found.items() if link.startswith("socket:[")}


class Prober:
    """Takes samples of all workers of this user."""

    def __init__(self) -> None:
        self._requests: dict[str, _Request] = {}
        self._foreign: set[str] = set()  # sockets of other users
        self._own: dict[str, int] | None = None  # `_own_sockets`, if this look needs it
        self._memory: dict[str, tuple[float, int]] = {}  # time of the read, and bytes

    def sample(self, detail: Iterable[str] = (), timeout: float = ANSWER_TIMEOUT) -> list[Sample]:
        """Return a sample of each worker.

        Args:
            detail: sockets that are asked for their calls and stacks, too.
            timeout: seconds for those to answer that were not waited for before.
        """
        sockets, self._own = listening(), None
        self._foreign &= sockets.keys()
        for name in self._requests.keys() - sockets.keys():
            self._requests.pop(name).close()
        names = sorted(sockets.keys() - self._foreign)
        asked = (self._ask(name, sockets[name], detail) for name in names)
        fresh = [each for each in asked if each is not None]
        self._receive(fresh, time.monotonic() + timeout)
        self._read_memory()
        return [self._finish(name, each) for name, each in [*self._requests.items()]]

    def close(self) -> None:
        """Close the connections."""
        for each in self._requests.values():
            each.close()
        self._requests.clear()

    def _ask(self, name: str, inodes: set[str], detail: Iterable[str]) -> "_Request | None":
        """Send a request, unless one is under way; return it if it is new."""
        if name in self._requests:
            return None
        try:
            request = _Request(connect_unix(name), b"detail\n" if name in detail else b"brief\n")
        except PermissionError:
            self._foreign.add(name)
        except BlockingIOError:  # its backlog is full: many viewers, and it does not answer
            # This user's process that has all these sockets: 0 if there is none.
            own = self._own = _own_sockets() if self._own is None else self._own
            if pid := min(own.get(inode, 0) for inode in inodes):
                self._requests[name] = _Request(None, b"", pid)
            else:
                self._foreign.add(name)
        except OSError:  # it has ended
            pass
        else:
            self._requests[name] = request
            return request
        return None

    def _receive(self, fresh: list["_Request"], end: float) -> None:
        """Read what has come; wait for the fresh requests only."""
        while True:
            reading = {each.fileno(): each for each in self._requests.values() if each.is_waiting}
            left = max(0.0, end - time.monotonic()) if any(e.is_waiting for e in fresh) else 0.0
            poller = select.poll()
            for each in reading:
                poller.register(each, select.POLLIN)
            ready = poller.poll(left * 1000)
            for descriptor, _ in ready:
                reading[descriptor].receive()
            if not ready:
                return

    def _read_memory(self) -> None:
        """Read the memory of the workers whose last read is the oldest, a few at a time."""
        now, known = time.monotonic(), self._memory
        self._memory = {name: known.get(name, (0.0, 0)) for name in self._requests}
        for name in sorted(self._memory, key=lambda name: self._memory[name])[:MEMORY_READS]:
            if now - self._memory[name][0] > MEMORY_INTERVAL:
                own = 0
                with contextlib.suppress(OSError, ValueError):
                    smaps = Path(f"/proc/{self._requests[name].pid}/smaps_rollup")
                    for line in smaps.read_text().splitlines():
                        if line.startswith("Private_"):
                            own += int(line.split()[1]) * 1024
                self._memory[name] = now, own

    def _finish(self, name: str, request: "_Request") -> Sample:
        """Return the sample of a request; forget the request if it is answered."""
        data, worker = request.data(), name[len(PREFIX) + _TOKEN_LENGTH :]
        now, silent = time.monotonic(), 0.0
        if request.is_waiting:
            silent = now - request.started
        else:
            self._requests.pop(name).close()
        pid, state, cpu = request.pid, "?", 0.0
        with contextlib.suppress(OSError, IndexError):
            text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
            fields = text.rpartition(")")[2].split()
            state, cpu = fields[0], (int(fields[11]) + int(fields[12])) / _TICKS
        return Sample(name, worker, now, data, silent, pid, state, cpu, self._memory[name][1])


class _Request:
    """A request to one process, and what has come of the answer."""

    def __init__(self, connection: socket.socket | None, request: bytes, pid: int = 0) -> None:
        self.started = time.monotonic()
        self.pid = pid
        self._received = bytearray()
        self._connection = connection
        self.is_waiting = connection is not None
        if connection is None:
            return
        if not is_same_user(connection):
            connection.close()
            raise PermissionError("a process of another user")
        self.pid = peer_pid(connection)
        with contextlib.suppress(OSError):  # it ends: so `receive` sees
            connection.send(request)

    def fileno(self) -> int:
        assert self._connection is not None
        return self._connection.fileno()

    def receive(self) -> None:
        """Read what has come."""
        assert self._connection is not None
        try:
            data = self._connection.recv(1 << 20)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        self._received += data
        self.is_waiting = bool(data) and len(self._received) <= MAX_ANSWER

    def data(self) -> dict[str, Any] | None:
        """Return the snapshot with printable text, None without a whole one."""
        if not self._received.endswith(b"\n"):
            return None
        try:
            found = printable_parts(json.loads(self._received))
        except (ValueError, RecursionError):
            return None
        return found if isinstance(found, dict) and "error" not in found else None

    def close(self) -> None:
        """Close the connection."""
        if self._connection is not None:
            self._connection.close()
