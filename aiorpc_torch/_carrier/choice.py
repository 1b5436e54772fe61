"""The choice of the carrier of a connection: shared memory, else tensor sockets.

Both ends choose once: sockets if one end cannot map the segments of the other. Until then, and for
what the carrier does not take, tensors travel by torch RPC.
"""

import asyncio
from collections.abc import Callable
from functools import partial

from .._wire.frames import SEGMENTS, SHARED, TRANSFERRED, TRANSFERS
from .carrier import Carrier, Handle, Wire
from .shared_memory import SharedMemory
from .tensor_sockets import Dial, Offer, TensorSockets


class Carriers:
    """The carriers of one end of a connection. Confined to its event loop.

    `opened` is called when a carrier was chosen. `dial` opens tensor sockets; None at the callee.
    """

    def __init__(
        self,
        wire: Wire,
        loop: asyncio.AbstractEventLoop,
        opened: Callable[[], object],
        dial: Dial | None,
    ) -> None:
        self.chosen: Carrier | None = None  # of what is sent; None while torch RPC carries it
        self._opened = opened
        self._is_caller = dial is not None
        self.shared = SharedMemory(wire, loop, self._choose)
        self.sockets = TensorSockets(wire, loop, self._choose, dial)

    def handlers(self, handle: Handle) -> dict[int, Callable[[bytes], int | None]]:
        """Return the handlers of frames by their kind; `handle` gets data and their tensors."""
        return {
            SEGMENTS: self.shared.on_news,
            TRANSFERS: self.sockets.on_news,
            SHARED: partial(self.shared.on_message, handle),
            TRANSFERRED: partial(self.sockets.on_message, handle),
        }

    def offer(self, known: Offer | None) -> None:
        """Begin to find out which carrier it is. For the caller.

        `known` is what the same process has told on an earlier connection of its tensor sockets.
        So the first tensor does not need torch's connection: a router that has forgotten the
        earlier connection has perhaps forgotten that one too, for good.
        """
        self.shared.offer()
        if known is not None:
            self.sockets.expect(known)
        self._choose()

    def _choose(self) -> None:
        before, self.chosen = self.chosen, None
        if self.shared.can_send and not self.shared.is_refused:
            self.chosen = self.shared
        elif self.sockets.can_send:
            self.chosen = self.sockets
        if self.shared.is_refused and self._is_caller:
            self.sockets.offer()
        if before is None and self.chosen is not None:
            self._opened()

    def has_work(self) -> bool:
        """Return whether the peer still needs this process to get a message."""
        return self.shared.has_work() or self.sockets.has_work()

    def drop_cancelled(self) -> None:
        """End what is sent for messages that are not wanted any more."""
        self.sockets.drop_cancelled()

    def close(self) -> None:
        """End both."""
        self.chosen = None
        self.shared.close()
        self.sockets.close()
