"""What a worker knows of its peers beside their calls: who may call, who has left, who came back.

Confined to the worker's loop, but for `check`.
"""

from collections.abc import Callable, Mapping
from typing import Any

from torch.futures import Future

from .._protocol.handshake import Party
from ..errors import NotServing

Meet = Callable[[bytes, "Future[Any]"], None]
"""Answers a worker that has come back."""


def replaced(worker: str) -> str:
    """Return what a process is told whose place a newer process has taken."""
    return f"worker {worker!r} was restarted: a newer process has replaced this one"


class Peers:
    """The peers of one worker, and what they said when they left."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}  # the number of each member's process
        self.goodbyes: dict[str, str] = {}  # each peer's: "" if it left in order, else why
        self.failed: Callable[[str, str], None] = _ignore
        self._meet: Meet | None = None  # until this worker knows its peers
        self._newcomers: list[tuple[bytes, Future[Any]]] = []

    def __repr__(self) -> str:
        return f"<Peers, have left: {', '.join(self.goodbyes)}>"

    def know(self, numbers: Mapping[str, int]) -> None:
        """Set the members of this world, and the number of each one's process."""
        self.numbers = {**numbers}

    def check(self, caller: Party) -> None:
        """Raise for a caller that is not one of this world's.

        Raises:
            ValueError: if no member has that name.
            NotServing: if another process has taken its place.
        """
        if caller.name not in self.numbers:
            raise ValueError(f"no worker {caller.name!r} in this world")
        if caller.number != self.numbers[caller.name]:
            raise NotServing(replaced(caller.name))

    def part(self, peer: str, number: int, what: str, text: str) -> None:
        """Note how the connection of a peer has ended: "left" and "failed" are the peer's end."""
        if self.numbers.get(peer) != number or what not in ("left", "failed"):
            return
        first = peer not in self.goodbyes
        self.goodbyes[peer] = text if what == "failed" else ""
        if first and what == "failed":
            self.failed(peer, text)

    def welcome(self, meet: Meet) -> None:
        """From now on `meet` is told of workers that come back, and of those that have."""
        self._meet = meet
        while self._newcomers:
            meet(*self._newcomers.pop(0))

    def introduce(self, member: bytes, reply: "Future[Any]") -> None:
        """Take the word of a worker that has come back, and waits for `reply`."""
        self._newcomers.append((member, reply))
        if self._meet is not None:
            self.welcome(self._meet)

    def replace(self, peer: Party) -> None:
        """Take a worker that has come back for its predecessor, whose goodbye is void."""
        self.numbers[peer.name] = peer.number
        self.goodbyes.pop(peer.name, None)


def _ignore(*_: Any) -> None:
    """Observe nothing: replaced by the failure detector."""
