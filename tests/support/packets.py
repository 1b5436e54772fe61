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
_SOL_PACKET, _PACKET_STATISTICS = 263, 6
_SYN, _ACK = 2, 16
_RECORDS = range(20, 25)  # types of TLS

End = tuple[str, int]
"""Address and port."""


Flow = tuple[End, End]


class Stream:
    """What one end of a connection sends: bytes with numbers that begin anew after 2^32."""

    def __init__(self, initial: int) -> None:
        self.initial = initial
        self._parts: dict[int, bytes] = {}

    def take(self, number: int, data: bytes) -> None:
        """`data` passed, whose first byte has this number; perhaps not for the first time."""
        at = (number - self.initial - 1) % (1 << 32)
        self._parts[at] = max(self._parts.get(at, b""), data, key=len)

    def joined(self) -> bytes:
        """All bytes, without repetitions."""
        found = bytearray()
        for at, data in sorted(self._parts.items()):
            assert at <= len(found), f"no packet with the bytes {len(found)} to {at} was seen"
            found += data[len(found) - at :]
        return bytes(found)


class Packets:
    """The streams of bytes from end to end."""

    def __init__(self, sock: socket.socket) -> None:
        self.connected: set[Flow] = set()
        """Who has connected to whom."""
        self._streams: dict[Flow, list[Stream]] = defaultdict(list)  # ports are used again
        self._socket = sock
        self._read: list[bytes] = []
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        self._socket.settimeout(0.1)
        while True:
            try:
                self._read.append(self._socket.recv(1 << 18))
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
        if flags & _SYN:
            self._begin(flow, number, flags)
        elif data := packet[at + (packet[at + 12] >> 4) * 4 : end]:
            self._streams[flow][-1].take(number, data)

    def _begin(self, flow: Flow, number: int, flags: int) -> None:
        if not flags & _ACK:
            self.connected.add(flow)
        known = self._streams[flow]
        if not known or known[-1].initial != number:  # else sent once more
            known.append(Stream(number))

    def close(self) -> None:
        """Read no more than has come, of which nothing may be lost."""
        self._is_closing = True
        self._thread.join()
        statistics = self._socket.getsockopt(_SOL_PACKET, _PACKET_STATISTICS, 8)
        self._socket.close()
        _, lost = struct.unpack("II", statistics)
        assert not lost, f"{lost} packets were lost here"
        for each in self._read:
            self._take(each)

    def streams(self) -> list[tuple[Flow, bytes]]:
        """The bytes of each direction of each connection."""
        return [(flow, each.joined()) for flow, found in self._streams.items() for each in found]


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
