"""The TCP packets that pass one end of a link, and what they say."""

import concurrent.futures
import contextlib
import ctypes
import socket
import struct
import threading
from collections import defaultdict
from collections.abc import Iterator

from tests.support.network_namespaces import LINK, Machine

_NEWNET = 0x40000000  # CLONE_NEWNET
_ALL = 0x0003  # ETH_P_ALL
_RCVBUFFORCE = 33
_RECORDS = range(20, 25)  # types of TLS

End = tuple[str, int]
"""Address and port."""


class Packets:
    """The streams of bytes from end to end."""

    def __init__(self, sock: socket.socket) -> None:
        self.connected: set[tuple[End, End]] = set()
        """Who has connected to whom."""
        self._parts: dict[tuple[End, End], dict[int, bytes]] = defaultdict(dict)
        self._socket = sock
        self._is_closing = False
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        self._socket.settimeout(0.1)
        while True:
            try:
                self._take(self._socket.recv(1 << 18))
            except TimeoutError:
                if self._is_closing:
                    return

    def _take(self, packet: bytes) -> None:
        kind, first, protocol = packet[12:14], packet[14] if len(packet) > 34 else 0, packet[23:24]
        if kind != b"\x08\x00" or protocol != b"\x06":  # IPv4, TCP
            return
        at = 14 + (first & 15) * 4
        end = 14 + int.from_bytes(packet[16:18], "big")
        near, far = (socket.inet_ntoa(packet[n : n + 4]) for n in (26, 30))
        source, target, number = struct.unpack_from("!HHI", packet, at)
        flags, flow = packet[at + 13], ((near, source), (far, target))
        if flags & 0x12 == 0x02:  # SYN without ACK
            self.connected.add(flow)
        if data := packet[at + (packet[at + 12] >> 4) * 4 : end]:
            known = self._parts[flow].get(number, b"")
            self._parts[flow][number] = max(known, data, key=len)

    def close(self) -> None:
        """Read no more than has come."""
        self._is_closing = True
        self._thread.join(10)
        self._socket.close()

    def streams(self) -> dict[tuple[End, End], bytes]:
        """The bytes of each direction, without repetitions."""
        found = {}
        for flow, parts in self._parts.items():
            numbers = sorted(parts)
            stream, following = bytearray(), numbers[0]
            for number in numbers:
                assert number <= following, f"a packet of {flow} was not seen"
                stream += parts[number][following - number :]
                following = max(following, number + len(parts[number]))
            found[flow] = bytes(stream)
        return found


def is_tls(stream: bytes) -> bool:
    """Whether these bytes are records of TLS, the last one perhaps not whole."""
    at = 0
    while at + 5 <= len(stream):
        kind, version, length = struct.unpack_from("!BHH", stream, at)
        if kind not in _RECORDS or version not in (0x0301, 0x0303) or length > 17000:
            return False
        at += 5 + length
    return True


@contextlib.contextmanager
def packets_at(machine: Machine) -> Iterator[Packets]:
    """Those that pass its link from now on."""

    def make() -> socket.socket:
        with open(f"/proc/{machine.pid}/ns/net") as namespace:
            assert ctypes.CDLL(None).setns(namespace.fileno(), _NEWNET) == 0
        found = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ALL))
        found.setsockopt(socket.SOL_SOCKET, _RCVBUFFORCE, 1 << 27)
        found.bind((LINK, 0))
        return found

    # A namespace is entered by a thread: this one, which ends.
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        sock = thread.submit(make).result()
    found = Packets(sock)
    try:
        yield found
    finally:
        found.close()
