"""A connection that outlives the flows which carry it: what is sent again, and when a flow is dead.

A flow is one connection between two ports, which keeps bytes in order as long as it lives. So bytes
are counted, not frames: on a new flow each end tells how many it has, and the other one goes on
from there. No I/O and no clock: the driver is `relay`. (tests/unit/port/test_sequence.py)
"""

import struct
from collections import deque

Part = bytes | memoryview

WINDOW = 8 << 20
"""Bytes that one end keeps until they are acknowledged. A connection carries no more in a round
trip: about what Linux lets TCP have on its way."""

TICKS = 8
"""Ticks in a `heartbeat`."""

_QUIET, _DEAD = 2, 6  # ticks without a byte until the other end is asked, and until a flow is dead
_HEAD = struct.Struct("<BQ")  # kind, and a number: bytes that follow, or bytes that have come
_DATA, _END, _ACKNOWLEDGEMENT, _PING = range(4)
_OPENING = struct.Struct("<16sBQ")  # the connection, whether it may be new, bytes that have come
COUNT = struct.Struct("<Q")  # the answer: bytes that have come to the other end
OPENING = _OPENING.size

_LAST = memoryview(b"\0")  # stands for the end of our bytes, and counts as one


class Sequence:
    """One end of a connection: what it sends until that is acknowledged, and what has come.

    Attributes:
        received: bytes that have come; the other end's end counts as one.
        is_ended: whether our bytes have ended.
        is_over: whether those of the other end have.
    """

    def __init__(self, window: int = WINDOW) -> None:
        self.received = 0
        self.is_ended = self.is_over = False
        self._window = window
        self._told = 0  # of `received`
        self._acknowledged = self._sent = self._taken = 0  # of ours
        self._kept: deque[memoryview] = deque()  # not acknowledged
        self._unsent: deque[memoryview] = deque()  # of those
        self._owes_acknowledgement = self._owes_ping = False
        self._silence = 0  # ticks
        self._head, self._left = b"", 0  # of the frame that comes

    @property
    def has_room(self) -> bool:
        """Return whether more of our bytes may be put."""
        return not self.is_ended and self._taken - self._acknowledged < self._window

    @property
    def has_arrived(self) -> bool:
        """Return whether the other end has all our bytes, and knows that they have ended."""
        return self.is_ended and self._acknowledged == self._taken

    def put(self, data: bytes) -> None:
        """Send bytes, b"" at their end."""
        self.is_ended = not data
        part = memoryview(data) if data else _LAST
        self._kept.append(part)
        self._unsent.append(part)
        self._taken += len(part)

    def next(self) -> list[Part]:
        """Return what is to be sent now, [] if nothing is."""
        head = b""
        if self._owes_acknowledgement:
            head = _HEAD.pack(_ACKNOWLEDGEMENT, self.received)
            self._told = self.received
        if self._owes_ping:
            head += _HEAD.pack(_PING, 0)
        self._owes_acknowledgement = self._owes_ping = False
        if not self._unsent:
            return [head] if head else []
        part = self._unsent.popleft()
        self._sent += len(part)
        if part is _LAST:
            return [head + _HEAD.pack(_END, 0)]
        return [head + _HEAD.pack(_DATA, len(part)), part]

    def feed(self, data: bytes) -> list[Part]:
        """Return the bytes of the other end in what a flow brings.

        Raises:
            ValueError: if the other end breaks the rules.
        """
        self._silence = 0
        rest = memoryview(data)
        found: list[Part] = []
        while rest:
            if self._left:
                part, rest = rest[: self._left], rest[self._left :]
                self._left -= len(part)
                self.received += len(part)
                found.append(part)
            else:
                size = _HEAD.size - len(self._head)
                self._head, rest = self._head + rest[:size], rest[size:]
                if len(self._head) == _HEAD.size:
                    kind, number = _HEAD.unpack(self._head)
                    self._head = b""
                    self._take_head(kind, number)
        # The other end stops at its window. The last bytes are acknowledged by a tick.
        self._owes_acknowledgement |= self.received - self._told >= self._window // 8
        return found

    def _take_head(self, kind: int, number: int) -> None:
        if kind > _PING or (self.is_over and kind <= _END):
            raise ValueError(f"unexpected frame {kind}")
        if kind == _DATA:
            self._left = number
        elif kind == _ACKNOWLEDGEMENT:
            self._acknowledge(number)
        else:
            self._owes_acknowledgement = True  # of a ping it is the answer
        if kind == _END:
            self.is_over = True
            self.received += 1

    def resume(self, number: int) -> None:
        """Go on by a new flow: the other end has so many of our bytes, and was told `received`.

        Raises:
            ValueError: if that cannot be.
        """
        self._acknowledge(number)
        self._unsent = self._kept.copy()
        self._sent, self._told = number, self.received
        self._owes_acknowledgement = self._owes_ping = False
        self._head, self._left, self._silence = b"", 0, 0

    def tick(self, *, is_reading: bool) -> bool:
        """Count the silence of the other end; return whether the flow is alive.

        Ticks are counted, not seconds: a process that was frozen has heard nothing, and no tick
        either. While nothing is read, since torch has not taken the last bytes, nothing can be
        heard; but the other end is told that this one lives.
        """
        self._silence = self._silence + 1 if is_reading else 0
        self._owes_ping |= self._silence >= _QUIET
        self._owes_acknowledgement |= self._told != self.received or not is_reading
        return self._silence < _DEAD

    def _acknowledge(self, number: int) -> None:
        if not self._acknowledged <= number <= self._sent:
            raise ValueError(f"{number} bytes acknowledged, of {self._sent}")
        left, self._acknowledged = number - self._acknowledged, number
        while left:
            part = self._kept.popleft()
            if len(part) > left:
                self._kept.appendleft(part[left:])
            left -= min(left, len(part))


def format_opening(identity: bytes, number: int, *, is_new: bool) -> bytes:
    """Return the first bytes of a flow.

    Args:
        identity: 16 bytes, which name the connection.
        number: bytes that have come by its earlier flows.
        is_new: whether the other end may not know the connection yet.
    """
    return _OPENING.pack(identity, is_new, number)


def read_opening(data: bytes) -> tuple[bytes, bool, int]:
    """Return the identity, whether the connection may be new, and the bytes that have come.

    Raises:
        ValueError: if a new one has brought bytes.
    """
    identity, is_new, number = _OPENING.unpack(data)
    if is_new and number:
        raise ValueError(f"a new connection that has brought {number} bytes")
    return identity, bool(is_new), number
