"""The peers of one worker: which may connect, which have left, which rejoin.

Confined to the worker's loop.
"""

from collections.abc import Callable, Mapping
from typing import Any

from torch.futures import Future

from .._protocol.handshake import Party
from ..errors import NotServing

RequestHandler = Callable[[bytes, "Future[Any]"], None]
"""Answers a request of a peer: takes its data and the future of the answer."""


def replaced_text(worker: str) -> str:
    """Return the error text for a process that was replaced."""
    return f"worker {worker!r} was restarted: a newer process has replaced this one"


class HeldRequests:
    """Requests of peers, held until this worker knows its peers and has a handler."""

    def __init__(self) -> None:
        self._handler: RequestHandler | None = None
        self._held: list[tuple[bytes, Future[Any]]] = []

    def put(self, data: bytes, reply: "Future[Any]") -> None:
        """Pass a request to the handler, at once or when there is one."""
        self._held.append((data, reply))
        if self._handler is not None:
            self.set_handler(self._handler)

    def set_handler(self, handler: RequestHandler) -> None:
        """Set the handler, and call it for the requests that wait."""
        self._handler = handler
        while self._held:
            handler(*self._held.pop(0))


class PeerTable:
    """The peers of one worker, their leave messages and their requests.

    Attributes:
        on_change: called when a peer has left.
    """

    def __init__(self) -> None:
        self.process_numbers: dict[str, int] = {}  # of each member
        self.leave_messages: dict[str, str] = {}  # of each peer: "" or its failure
        self.on_failure: Callable[[str, str], None] = _ignore
        self.on_detached: Callable[[str, str], None] = _ignore
        self.on_change: Callable[[], None] = _ignore
        self.rejoins = HeldRequests()
        self.departures = HeldRequests()

    def set_members(self, process_numbers: Mapping[str, int]) -> None:
        """Set the members of this world, each with its process number."""
        self.process_numbers.clear()
        self.process_numbers.update(process_numbers)

    def check_member(self, caller: Party) -> None:
        """Check that a caller is a current member of this world.

        Raises:
            ValueError: if no member has that name.
            NotServing: if another process has replaced the caller.
        """
        if caller.name not in self.process_numbers:
            raise ValueError(f"no worker {caller.name!r} in this world")
        if caller.number != self.process_numbers[caller.name]:
            raise NotServing(replaced_text(caller.name))

    def on_leave_message(self, peer: str, number: int, what: str, text: str) -> None:
        """Record that a peer has left or has failed with error `text`; ignore other reasons."""
        if what == "detached":
            self.on_detached(peer, text)
        if self.process_numbers.get(peer) != number or what not in ("left", "failed"):
            return
        first = peer not in self.leave_messages
        self.leave_messages[peer] = text if what == "failed" else ""
        if first and what == "failed":
            self.on_failure(peer, text)
        self.on_change()

    def replace(self, peer: Party) -> None:
        """Replace a member's process, and drop the leave message of the old process."""
        self.process_numbers[peer.name] = peer.number
        self.leave_messages.pop(peer.name, None)


def _ignore(*_: Any) -> None:
    """Ignore the event. The failure detector or `attach` replaces this."""
