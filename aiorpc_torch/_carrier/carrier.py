"""The carrier of large CPU tensors of one end of a connection: its interface."""

import abc
import asyncio
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Protocol

from torch import Tensor

from .._wire.blocks import Then
from .._wire.frames import CloseReason, frame
from .._wire.plain import dump


class Wire(Protocol):
    """A connection as a carrier sees it: a `Channel`, which describes these."""

    is_open: bool
    is_local: bool

    def write(self, data: bytes) -> None: ...
    def close(self, reason: CloseReason, detail: str = "") -> None: ...
    def abort(self, why: Exception | None = None) -> None: ...


Handle = Callable[[bytes, Sequence[Tensor]], int]
"""Handles the data and the tensors of a message; returns the number of its calls or results."""


class Carrier(abc.ABC):
    """One way for the tensors of a connection. Confined to its event loop.

    `changed` is called when `can_send` may have changed.
    """

    NEWS: ClassVar[int]  # kind of the frames that tell the peer of this way
    FIELDS: ClassVar[Callable[..., Any]]  # named tuple of their content, with defaults

    def __init__(
        self, wire: Wire, loop: asyncio.AbstractEventLoop, changed: Callable[[], object]
    ) -> None:
        self.can_send = False  # True if the peer can receive this way
        self.sent = 0  # messages
        self._wire = wire
        self._loop = loop
        self._changed = changed
        self._untold: dict[str, Any] = {}  # fields of the next news

    def tell(self, field: str, item: Any) -> None:
        """Add an item to a field of the news at the end of this iteration."""
        if not self._untold and not self._loop.is_closed():
            self._loop.call_soon(self._tell_now)
        self._untold.setdefault(field, []).append(item)

    def _tell_now(self, **fields: Any) -> None:
        """Tell the peer these fields, and what there is to tell."""
        fields, self._untold = fields | self._untold, {}
        if fields and self._wire.is_open:
            self._wire.write(frame(self.NEWS, dump(self.FIELDS(**fields))))

    @abc.abstractmethod
    def on_news(self, data: bytes) -> None:
        """Handle what the peer tells of this way.

        Raises an exception of any class if the frame is malformed.
        """

    @abc.abstractmethod
    def send(
        self, data: bytes, tensors: Sequence[Tensor], then: Then, is_current: Callable[[], bool]
    ) -> bool:
        """Send the tensors of a message, if they can be sent this way.

        Args:
            data: The rest of the message.
            tensors: Its tensors.
            then: Is called once, now or later: with the message to send when the peer can reach
                its tensors, with None if it cannot.
            is_current: Returns whether the message is still wanted, so that its tensors may not be
                changed yet. Meanwhile, messages with the same tensors share what is being sent.

        Returns:
            False if the message has to be sent otherwise; `then` is not called.
        """

    @abc.abstractmethod
    def on_message(self, handle: Handle, data: bytes) -> int:
        """Pass on a received message with its tensors.

        Raises an exception of any class if the frame is malformed.
        """

    @abc.abstractmethod
    def has_work(self) -> bool:
        """Return whether the peer still needs this process to get a message."""

    @abc.abstractmethod
    def close(self) -> None:
        """End what is under way."""
