"""Limits of the library that tests of behaviour need. They are no promises and may change."""

from .._aio.tasks import SLOW_STEP as _SLOW_STEP
from .._wire.buffers import COPY_ON_LOOP as _COPY_ON_LOOP
from .._wire.connection_state import BYTES_PER_CREDIT as _BYTES, INITIAL_CREDIT, MAX_CALLS
from .._wire.frames import MAX_FRAME as _MAX_FRAME
from .._wire.tensors import INLINE_BYTES as _INLINE_BYTES

__all__ = (
    "BYTES_PER_CREDIT",
    "COPY_ON_LOOP",
    "FRAME_CALLS",
    "INLINE_BYTES",
    "MAX_FRAME",
    "SLOW_STEP",
    "STREAM_CREDIT",
)

INLINE_BYTES: int = _INLINE_BYTES
"""Most bytes of a tensor, of a call's arguments or of a result that travel on the connection."""

FRAME_CALLS: int = MAX_CALLS
"""Most calls or results in one frame, and in one callback of the event loop."""

STREAM_CREDIT: int = INITIAL_CREDIT
"""Small items of a stream that may be sent before the consumer takes one."""

BYTES_PER_CREDIT: int = _BYTES
"""Bytes of an item that cost one credit more."""

SLOW_STEP: float = _SLOW_STEP
"""Seconds of one step on the event loop after which a warning names it."""

COPY_ON_LOOP: int = _COPY_ON_LOOP
"""Most bytes that are copied to shared memory on the event loop; more are copied in a thread."""

MAX_FRAME: int = _MAX_FRAME
"""Most bytes of one frame; a longer result is held until its caller collects it."""
