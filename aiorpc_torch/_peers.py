"""What a callee knows of its peers beside their calls: who may call, who leaves, who has come back.

It answers nobody's calls; a watch is a torch future that ends with its peer's goodbye.
"""

import asyncio
import threading
from collections import defaultdict
from collections.abc import Callable, Container
from typing import Any

from torch.futures import Future

from .errors import NotServing

Meet = Callable[[bytes, "Future[Any]"], None]
"""Answers a worker that has come back."""


class Peers:
    """Of one worker. Torch's threads ask `check` and `watched`; the rest is its loop's."""

    def __init__(self) -> None:
        self.members: Container[str] | None = None  # who may call; None: whoever can
        self.goodbyes: dict[str, str] = {}  # each peer's: "" if it leaves in order, else why
        self.failed: Callable[[str, str], None] = _nobody_asks
        self._farewells: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)
        self._first_links: dict[str, int] = {}  # of those who came back: earlier ones are void
        self._lock = threading.Lock()
        self._watches: list[tuple[str, Future[Any]]] = []
        self._closed = False
        self._meet: Meet | None = None  # until this worker knows its peers
        self._newcomers: list[tuple[bytes, Future[Any]]] = []

    def __repr__(self) -> str:
        return f"<Peers, leaving: {', '.join(self.goodbyes)}>"

    def check(self, name: str, link: int) -> None:
        """Raise for a caller, or a link of it, that is not one of this world's."""
        self._check_member(name)
        if link < self._first_links.get(name, 0):
            raise NotServing(f"worker {name!r} has a successor: this is not it")

    def _check_member(self, name: str) -> None:
        if self.members is not None and name not in self.members:
            raise ValueError(f"no worker {name!r} in this world")

    def watched(self, name: bytes) -> "Future[Any]":
        """What completes when worker `name`, or this one, leaves or has left; at once for nobody's.

        One that were left open would keep its sender's torch from ending: who first hears of
        another by its goodbye asks for a watch when its own goodbye may be here already.
        """
        watch: Future[Any] = Future()
        try:
            peer = name.decode()
            self._check_member(peer)
        except Exception:
            watch.set_result(None)
            return watch
        with self._lock:
            if not (has_left := self._closed or peer in self.goodbyes):
                self._watches.append((peer, watch))
        if has_left:
            watch.set_result(None)
        return watch

    def release(self, peer: str | None = None) -> None:
        """End that peer's watches; without a name this worker leaves: all, and those to come."""
        with self._lock:
            self._closed |= peer is None
            ended = [watch for watch in self._watches if peer in (watch[0], None)]
            self._watches = [watch for watch in self._watches if watch not in ended]
        for _, watch in ended:
            watch.set_result(None)

    def part(self, peer: str, failure: str) -> None:
        """It has said goodbye."""
        first = peer not in self.goodbyes
        self.goodbyes[peer] = failure
        self.farewell(peer).set()
        if first and failure:
            self.failed(peer, failure)

    def farewell(self, peer: str) -> asyncio.Event:
        """Set once `peer` has said goodbye, or was found lost."""
        return self._farewells[peer]

    def welcome(self, meet: Meet) -> None:
        """From now on `meet` is told of workers that come back, and of those that have."""
        self._meet = meet
        while self._newcomers:
            meet(*self._newcomers.pop(0))

    def introduce(self, member: bytes, reply: "Future[Any]") -> None:
        """A worker says that it has come back, and waits for `reply`."""
        self._newcomers.append((member, reply))
        if self._meet is not None:
            self.welcome(self._meet)

    def replace(self, peer: str, first_link: int) -> None:
        """It has come back, with links from that number on: what its predecessor said is void."""
        self._first_links[peer] = first_link
        self.goodbyes.pop(peer, None)
        self._farewells.pop(peer, None)


def _nobody_asks(*_: str) -> None:
    """Of whose failure somebody has heard: until a world's vigil wants to know."""
