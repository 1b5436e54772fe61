"""Departures: the peers of a worker that have left, and a wait until all have.

A peer has left if the store of the rendezvous says so, or a leave message does. A lost peer is not
waited for.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field

from .._aio.threads import run_in_thread
from .._client.pool import ConnectionPool
from .._protocol import endpoints
from .._protocol.messages import dump_plain
from .._torch.agent import PeerInfo
from .._torch.transport import send, wrap_future
from ..errors import WorldTimeout
from .failure_detector import FailureDetector
from .rendezvous import Rendezvous

log = logging.getLogger("aiorpc_torch")

# All in seconds.
_MIN_POLL = 0.005  # between two reads of which peers have left
LEAVING_POLL, SERVING_POLL = 0.05, 0.25  # the longest of these intervals
PROBE_INTERVAL = 1.0  # between two probes of peers that have not left
LOG_INTERVAL = 10.0  # between two log lines about the peers that are awaited
MESSAGE_TIMEOUT = 0.3  # for peers to take a leave message

_THREAD = "aiorpc-leave"


@dataclass(eq=False)
class Departures:
    """The departures of one worker's peers."""

    pool: ConnectionPool
    detector: FailureDetector
    peers: Mapping[str, PeerInfo]
    """The other workers by name."""
    told: Callable[[], Mapping[str, str]]
    """Returns the leave messages of peers: "" or a failure."""
    probe: Callable[[str], None]
    """Asks whether a peer lives."""
    rendezvous: Rendezvous | None = None
    _marked: set[str] = field(default_factory=set)  # left, as the store says
    _is_leaving: bool = False  # this worker's own block has ended

    def left(self) -> set[str]:
        """Return the peers that have left."""
        return self._marked | self.told().keys()

    def missing(self, among: Collection[str] | None = None) -> list[str]:
        """Return those of the peers `among` that have not left and are not lost."""
        gone = self.detector.lost_peers.keys() | self.left()
        return [peer for peer in (self.peers if among is None else among) if peer not in gone]

    async def mark_left(self) -> None:
        """Tell the peers that this worker's block has ended in order; it still serves."""
        self._is_leaving = True
        if self.rendezvous is None:
            await self.tell(self.missing())
            return
        try:
            await run_in_thread(self.rendezvous.mark_left, _THREAD)
        except WorldTimeout:
            await self._on_store_lost()

    async def wait(
        self,
        among: Collection[str] | None = None,
        *,
        poll: float = LEAVING_POLL,
        level: int = logging.WARNING,
    ) -> None:
        """Wait until no peer is missing.

        Args:
            among: names of the peers to wait for (default: all).
            poll: longest interval in seconds between two reads of the store.
            level: level of the log lines that name the awaited peers.
        """
        start = time.monotonic()
        next_probe, next_log = start + PROBE_INTERVAL, start + LOG_INTERVAL
        interval, watched = _MIN_POLL, {*self.missing(among)}
        with self.pool.watching_peers(watched, lambda _: None):  # a frozen one is lost in time
            while missing := await self._read(among):
                watched.clear()
                watched.update(missing)
                if time.monotonic() > next_probe:
                    next_probe = time.monotonic() + PROBE_INTERVAL
                    for peer in missing:
                        self.probe(peer)
                if time.monotonic() > next_log:
                    next_log = time.monotonic() + LOG_INTERVAL
                    names = ", ".join(missing)
                    log.log(level, "%s serves until %s leave", self.pool.name, names)
                await asyncio.sleep(interval)
                interval = min(interval * 1.5, poll)

    async def has_left_in_order(self, peer: str) -> bool:
        """Return whether a peer's block has ended in order, as far as this worker can know."""
        await self._read_store([peer])
        return peer in self._marked or self.told().get(peer) == ""

    def failure_of(self, peer: str) -> str:
        """Return the failure that ended a peer's block, in one line; "" if it told none."""
        return self.told().get(peer, "").partition("\n")[0]

    async def _read(self, among: Collection[str] | None) -> list[str]:
        """Return the missing peers, after a look into the store."""
        if missing := self.missing(among):
            await self._read_store(missing)
        return self.missing(among)

    async def _read_store(self, peers: Collection[str]) -> None:
        rendezvous = self.rendezvous
        if rendezvous is None:
            return
        ranks = [self.peers[peer].rank for peer in peers]
        try:
            left = await run_in_thread(lambda: rendezvous.left_ranks(ranks), _THREAD)
        except WorldTimeout:
            await self._on_store_lost()
        else:
            self._marked |= {peer for peer in peers if self.peers[peer].rank in left}

    async def _on_store_lost(self) -> None:
        """Go on without the store: rank 0 has left with it, or died."""
        self.rendezvous = None
        first = {peer for peer, each in self.peers.items() if each.rank == 0}
        if self._is_leaving:
            self._marked |= first
            await self.tell(self.missing())
        else:
            for peer in first:
                self.probe(peer)

    async def tell(self, peers: Iterable[str], failure: str = "") -> None:
        """Tell by torch RPC, as far as the peers answer, that this worker leaves or has failed."""
        data = dump_plain((self.pool.me.name, self.pool.me.number, failure))
        answers = []
        for peer in peers:
            with contextlib.suppress(Exception):  # torch does not reach it
                answers.append(
                    wrap_future(send(self.peers[peer].info, endpoints.leave_message, data))
                )
        if answers:
            await asyncio.wait(answers, timeout=MESSAGE_TIMEOUT)
            for answer in answers:
                answer.cancel()
