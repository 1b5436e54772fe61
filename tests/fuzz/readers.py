"""The readers of bytes that a peer sends, and what each may do with bytes that make no sense."""

import struct
from collections.abc import Callable
from typing import Any

from aiorpc_torch._protocol.lone import decode_call, decode_method, decode_result

from aiorpc_torch._protocol import endpoints, segment_link
from aiorpc_torch._protocol.columns import FAILED, PACKED
from aiorpc_torch._protocol.frames import FrameReader, ProtocolError
from aiorpc_torch._protocol.handshake import HELLO, Hello
from aiorpc_torch._protocol.messages import (
    CallGroup,
    Calls,
    _read_reply,
    decode_reply,
    load_calls,
    load_payload,
)
from aiorpc_torch._protocol.shared_tensors import check_places
from aiorpc_torch._protocol.wire_targets import NamedTarget, read_named
from aiorpc_torch._server import session
from aiorpc_torch._world import departures

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
        reader.received(size)
        data = data[size:]
        while reader.next() is not None:
            pass


def calls(data: bytes) -> None:
    """Read a frame of calls; pickles of users are left alone."""
    _read_groups(load_calls(data))


def payload(data: bytes) -> None:
    """Read a payload that came by torch."""
    _read_groups(load_payload(data)[2])


def _read_groups(message: Calls) -> None:
    for encoded in message.groups:
        group = CallGroup(encoded, iter(()), len(message.numbers))
        target = group.target(lambda target, _: target)
        if isinstance(target, NamedTarget) and not isinstance(target.on, bytes):
            read_named(target, lambda *_: abs)
        if not {kind for kind, _ in encoded.columns} & {PACKED, FAILED}:
            group.calls()


def reply(data: bytes) -> None:
    """Read a frame of results; pickles of users are left alone."""
    if not {kind for _, (kind, _) in _read_reply(data)} & {PACKED, FAILED}:
        decode_reply(data)


def lone_call(data: bytes) -> None:
    """Read a frame of one call."""
    decode_method(decode_call(data)[1])


def segments(data: bytes) -> None:
    """Read a message in shared memory, whose segments have as many bytes as it says."""
    names, places, _ = segment_link._read_shared(data)
    check_places(places, [size for _, _, _, size, _ in names])


def hello(data: bytes) -> None:
    """Read the hello of a caller."""
    Hello.load(data[:HELLO].ljust(HELLO, b"\0"))


READERS: dict[str, Callable[[bytes], Any]] = {
    "frames": frames,
    "calls": calls,
    "payload": payload,
    "reply": reply,
    "lone call": lone_call,
    "lone result": decode_result,
    "segments": segments,
    "news of segments": segment_link._read_news,
    "control": session._read_control,
    "slot": session._read_slot,
    "hello": hello,
    "departure": departures._read_request,
    "attach message": endpoints.read_attach_message,
}


def read_any(data: bytes) -> None:
    """Let the reader that the first byte names read the rest."""
    names = [*READERS]
    try:
        READERS[names[data[0] % len(names)]](data[1:])
    except (*REFUSED, ProtocolError):
        pass
