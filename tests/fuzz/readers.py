"""The readers of bytes that a peer sends, and what each may do with bytes that make no sense."""

import contextlib
import struct
from collections.abc import Callable, Sequence
from typing import Any

from aiorpc_torch._carrier import shared_memory
from aiorpc_torch._endpoint import entry_points
from aiorpc_torch._node import departures
from aiorpc_torch._server import dispatch
from aiorpc_torch._wire.blocks import tensors_at
from aiorpc_torch._wire.columns import FAILED, PACKED
from aiorpc_torch._wire.frames import FrameReader, ProtocolError
from aiorpc_torch._wire.handshake import HELLO, Hello
from aiorpc_torch._wire.messages import (
    CallHead,
    Group,
    decode_reply,
    load_payload,
    read_reply,
)
from aiorpc_torch._wire.wire_targets import NamedTarget, _read_rref, read_named
from tests.support.received_calls import load_calls

MOST_BYTES = 1 << 20  # of a segment that is tried

REFUSED = (ValueError, TypeError, LookupError, RecursionError, RuntimeError, struct.error)
"""What a reader may raise: its caller ends the connection, or fails the call.

`RuntimeError` is torch's, for shapes that it does not take; `ProtocolError` is one.
"""


def frames(data: bytes) -> None:
    """Read bytes as a connection does, in pieces of any size."""
    reader = FrameReader()
    while data:
        buffer = reader.buffer()
        size = min(len(buffer), max(1, data[0]))
        buffer[:size] = data[:size].ljust(size, b"\0")
        reader.end += size
        data = data[size:]
        while reader.next() is not None:
            pass


def calls(data: bytes) -> None:
    """Read a frame of calls; pickles of users are left alone."""
    _read_groups(load_calls(data))


def payload(data: bytes) -> None:
    """Read a payload that came by torch."""
    _read_groups(load_payload(data)[2])


def _read_groups(groups: Sequence[Group]) -> None:
    for group in groups:
        _read_group(CallHead(group.head), group)


def _read_group(head: CallHead, group: Group) -> None:
    """Read a group that a callee resolves, and one that it refuses."""
    head.skip(group, iter(()))
    target = head.target
    if isinstance(target, NamedTarget) and not isinstance(target.on, bytes):
        read_named(target, lambda *_: abs)
    head.tensors_of_target(iter(()))
    if not {PACKED, FAILED} & {*head.kinds}:
        head.rows(group, iter(()))


def head(data: bytes) -> None:
    """Read the head of a group of calls, and calls with it whose arguments are not there."""
    found = CallHead(data)
    for column in ([], [None], b""):
        with contextlib.suppress(*REFUSED):
            _read_group(found, Group(b"", [0], [column] * len(found.kinds)))


def reply(data: bytes) -> None:
    """Read a frame of results; pickles of users are left alone."""
    if not {PACKED, FAILED} & {kind for kind, _, _ in read_reply(data)}:
        decode_reply(data)


def segments(data: bytes) -> None:
    """Read a message in shared memory, whose segments have as many bytes as it says."""
    names, places, _ = shared_memory._read_shared(data)
    sizes = [size for _, _, _, size, _ in names]
    if sizes and 0 < min(sizes) <= max(sizes) <= MOST_BYTES:
        tensors_at(places, [(bytearray(size), size) for size in sizes])


def hello(data: bytes) -> None:
    """Read the hello of a caller."""
    Hello.load(data[:HELLO].ljust(HELLO, b"\0"))


READERS: dict[str, Callable[[bytes], Any]] = {
    "frames": frames,
    "calls": calls,
    "payload": payload,
    "reply": reply,
    "head": head,
    "rref": _read_rref,
    "segments": segments,
    "news of segments": shared_memory._read_news,
    "control": dispatch._read_control,
    "slot": dispatch._read_slot,
    "hello": hello,
    "departure": departures._read_request,
    "attach message": entry_points.read_attach_message,
}


def read_any(data: bytes) -> None:
    """Let the reader that the first byte names read the rest."""
    names = [*READERS]
    try:
        READERS[names[data[0] % len(names)]](data[1:])
    except (*REFUSED, ProtocolError):
        pass
