"""A key of torch's TCPStore, read and swapped within a time limit.

torch's own client waits without a limit for a server that accepts connections and does not answer.
If a connection ends, it prints C++ frames. (2.13 to 2.15; tests/torch_facts/test_store.py)
"""

import socket
import struct

from .._aio.flows import read_flow

_VALIDATE, _COMPARE_SET = 0, 2
_MAGIC = 0x3C85F7CE
_LENGTH = struct.Struct("=Q")
_MAX = 1 << 16  # bytes of a value
_PREFIX = "/"  # torch's, of all keys
_ABSENT = b"\0"  # a value that nothing writes


class NoStoreError(ValueError):
    """Another program than a store has answered: `first` are its first bytes."""

    def __init__(self, first: bytes) -> None:
        super().__init__(f"no store of torch: {first!r}")
        self.first = first


class StoreClient:
    """A client of the store at the other end of a connection, which has a timeout.

    After a `TimeoutError` a method may be called again, and goes on to wait: a store may look up
    the names of its clients first, which takes long where no name server answers.
    """

    def __init__(self, connected: socket.socket) -> None:
        self._connected = connected
        self._preface = struct.pack("=BI", _VALIDATE, _MAGIC)
        self._asked: list[bytes] = []  # what is not answered
        self._received = b""

    def read(self, key: str) -> bytes | None:
        """Return the value of a key, None if there is none.

        Raises:
            NoStoreError: if another program answers.
            OSError: if the connection ends, or nothing answers in time.
        """
        # `get` would wait for the key, in the server too.
        value = self.swap(key, _ABSENT, _ABSENT)
        return None if value == _ABSENT else value

    def swap(self, key: str, old: bytes, new: bytes) -> bytes:
        """Write `new` if the value of a key is `old`, "" for none; return the value after that.

        If there is none and `old` is not "", nothing is written, and torch returns `old`.

        Raises:
            NoStoreError, OSError: as `read`. The value may have been written.
        """
        fields = ((_PREFIX + key).encode(), old, new)
        request = b"".join(_LENGTH.pack(len(each)) + each for each in fields)
        if request not in self._asked:
            self._connected.sendall(self._preface + bytes([_COMPARE_SET]) + request)
            self._preface = b""
            self._asked.append(request)
        while True:
            size = _LENGTH.size
            has_size = self._receive(size)
            if not has_size or (length := _LENGTH.unpack(self._received[:size])[0]) > _MAX:
                raise NoStoreError(self._received)
            if not self._receive(size + length):
                raise ConnectionResetError("the connection has ended")
            value, self._received = self._received[size:], b""
            if self._asked.pop(0) == request:
                return value

    def _receive(self, size: int) -> bool:
        """Wait for so many bytes; return False if the connection ends after some."""
        while (missing := size - len(self._received)) > 0:
            if not (more := self._connected.recv(missing)):
                if not self._received:
                    raise ConnectionResetError("the connection has ended")
                return False
            self._received += more
        return True

    @property
    def is_cut_off(self) -> bool:
        """Return whether the other machine has not acknowledged what was sent.

        TCP sends it again ever more rarely, so this connection works long after the link does.
        """
        info = read_flow(self._connected)
        return info is not None and info.is_missing

    def close(self) -> None:
        """Close the connection."""
        self._connected.close()
