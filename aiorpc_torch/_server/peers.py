"""The peers of one worker: which may connect, which have left, which rejoin.

Confined to the worker's loop.
"""

from collections.abc import Callable, Mapping
from typing import Any

from torch.futures import Future

from .._protocol.handshake import Party
from ..errors import NotServing

OnRejoin = Callable[[bytes, "Future[Any]"], None]
"""Answers a worker that rejoins: takes its description and the future of the answer."""


def replaced_text(worker: str) -> str:
    """Return the error text for a process that was replaced."""
    return f"worker {worker!r} was restarted: a newer process has replaced this one"


class PeerTable:
    """The peers of one worker, and their leave messages."""

    def __init__(self) -> None:
        self.process_numbers: dict[str, int] = {}  # of each member
        self.leave_messages: dict[str, str] = {}  # of each peer: "" or its failure
        self.on_failure: Callable[[str, str], None] = _ignore
        self.on_detached: Callable[[str, str], None] = _ignore
        self._on_rejoin: OnRejoin | None = None  # None until this worker knows its peers
        self._waiting_rejoins: list[tuple[bytes, Future[Any]]] = []

    def set_members(self, process_numbers: Mapping[str, int]) -> None:
        """Set the members of this world, each with its process number."""
        self.process_numbers = {**process_numbers}

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

    def set_rejoin_handler(self, handler: OnRejoin) -> None:
        """Set the handler of workers that rejoin, and call it for those that wait."""
        self._on_rejoin = handler
        while self._waiting_rejoins:
            handler(*self._waiting_rejoins.pop(0))

    def on_rejoin(self, member: bytes, reply: "Future[Any]") -> None:
        """Pass a worker that rejoins to the handler, at once or when there is one."""
        self._waiting_rejoins.append((member, reply))
        if self._on_rejoin is not None:
            self.set_rejoin_handler(self._on_rejoin)

    def replace(self, peer: Party) -> None:
        """Replace a member's process, and drop the leave message of the old process."""
        self.process_numbers[peer.name] = peer.number
        self.leave_messages.pop(peer.name, None)


def _ignore(*_: Any) -> None:
    """Ignore the event. The failure detector or `attach` replaces this."""
