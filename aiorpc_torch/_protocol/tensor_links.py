"""The ways of large CPU tensors over one connection: shared memory, else tensor sockets.

Whoever calls this may send by torch RPC what neither takes.
"""

import asyncio
from collections.abc import Callable, Sequence

from torch import Tensor

from .._shm.segment_link import SegmentLink
from .._sockets.socket_link import Dial, SocketLink
from .._wire.frames import SEGMENTS, SHARED, TRANSFERS
from .._wire.shared_tensors import Then
from .channel import Channel


class TensorLinks:
    """Both ways of one end of a connection. Confined to the event loop `loop`.

    The caller offers sockets if the processes cannot share memory.

    Args:
        channel: the connection.
        loop: its event loop.
        dial: opens tensor sockets; None at the callee.
    """

    NEWS = (SEGMENTS, TRANSFERS)
    """Kinds of frames for `on_frame`."""

    def __init__(
        self, channel: Channel, loop: asyncio.AbstractEventLoop, dial: Dial | None = None
    ) -> None:
        self.segments = SegmentLink(channel, loop)
        self.sockets = SocketLink(channel, loop, dial)
        self._is_caller = dial is not None

    def __repr__(self) -> str:
        return f"<TensorLinks {self.segments!r}, {self.sockets!r}>"

    @property
    def can_send(self) -> bool:
        """True if one of the ways is open."""
        return self.segments.can_send or self.sockets.can_send

    def has_work(self) -> bool:
        """Return whether the peer still needs this process to get a message."""
        return self.segments.has_work() or self.sockets.has_work()

    def offer(self) -> None:
        """Begin to find out which way is open. For the caller."""
        self.segments.offer()
        self._offer_sockets()

    def _offer_sockets(self) -> None:
        if self._is_caller and self.segments.is_refused:
            self.sockets.offer()

    def on_frame(self, kind: int, data: bytes) -> None:
        """Handle a frame of one of the kinds `NEWS`."""
        if kind == TRANSFERS:
            self.sockets.on_frame(data)
        else:
            self.segments.on_frame(data)
            self._offer_sockets()

    def send(
        self,
        data: bytes,
        tensors: Sequence[Tensor],
        then: Then,
        is_current: Callable[[], bool],
    ) -> bool:
        """Send a message with its tensors, if they can be; otherwise return False.

        Args:
            data: The rest of the message.
            tensors: Its tensors.
            then: Is called once with the message to send, or None if its tensors were not sent.
            is_current: Returns whether the message is still wanted, so that its tensors may not
                be changed yet.
        """
        way = self.segments if self.segments.can_send else self.sockets
        return way.send(data, tensors, then, is_current)

    def read(self, kind: int, data: bytes) -> tuple[bytes, Sequence[Tensor]]:
        """Return data and tensors of a SHARED or a TRANSFERRED frame."""
        return self.segments.read(data) if kind == SHARED else self.sockets.read(data)

    def close(self) -> None:
        """End both ways."""
        self.segments.close()
        self.sockets.close()
