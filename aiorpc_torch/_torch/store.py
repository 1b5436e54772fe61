"""A key of torch's TCPStore, read within a time limit.

torch's own client waits without a limit for a server that accepts connections and does not answer.
If a connection ends, it prints C++ frames. (2.13 to 2.15; tests/torch_facts/test_store.py)
"""

import socket
import struct

_VALIDATE, _COMPARE_SET = 0, 2
_MAGIC = 0x3C85F7CE
_LENGTH = struct.Struct("=Q")
_MAX_VALUE = 1 << 16  # bytes
_PREFIX = "/"  # torch's, of all keys
_ABSENT = b"\0"  # a value that nothing writes


class NoStoreError(ValueError):
    """What has answered is no store: `first` are its first bytes."""

    def __init__(self, first: bytes) -> None:
        super().__init__(f"no store of torch: {first!r}")
        self.first = first


class StoreClient:
    """A client of the store at the other end of a connection, which has a timeout."""

    def __init__(self, connected: socket.socket) -> None:
        self._connected = connected
        self._preface = struct.pack("=BI", _VALIDATE, _MAGIC)

    def read(self, key: str) -> bytes | None:
        """Return the value of a key, None if there is none.

        Raises:
            NoStoreError: if another program answers.
            OSError: if the connection ends, or nothing answers in time.
        """
        # `get` would wait for the key, in the server too.
        fields = ((_PREFIX + key).encode(), _ABSENT, _ABSENT)
        request = b"".join(_LENGTH.pack(len(each)) + each for each in fields)
        self._connected.sendall(self._preface + bytes([_COMPARE_SET]) + request)
        self._preface = b""
        first = _receive(self._connected, _LENGTH.size)
        [length] = _LENGTH.unpack(first.ljust(_LENGTH.size, b"\xff"))
        if length > _MAX_VALUE:
            raise NoStoreError(first)
        value = _receive(self._connected, length)
        if len(value) < length:
            raise ConnectionResetError("the connection has ended")
        return None if value == _ABSENT else value

    def close(self) -> None:
        """Close the connection."""
        self._connected.close()


def _receive(connected: socket.socket, size: int) -> bytes:
    """Return so many bytes, or fewer if the connection ends after some."""
    found = b""
    while len(found) < size and (more := connected.recv(size - len(found))):
        found += more
    if not found and size:
        raise ConnectionResetError("the connection has ended")
    return found
