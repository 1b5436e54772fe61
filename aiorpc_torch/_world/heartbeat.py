"""Decide which silent peers to ping and which are lost: a state machine without clock or loop.

Only peers that something waits for are watched. A silent peer is pinged; a peer that does not
answer in time is lost. Call `check` every `interval` seconds.
"""

from collections.abc import Iterable


class HeartbeatTracker:
    """A tracker of signs of life: a peer is lost within `timeout` seconds, and pinged before.

    The time of each peer's last sign of life is in `last_heard`, which any thread may write.
    """

    def __init__(self, timeout: float, last_heard: dict[str, float]) -> None:
        self.interval = timeout / 8
        self._silence = timeout / 4  # seconds without a sign of life before a ping
        self._answer_timeout = timeout / 2
        self._last_heard = last_heard  # never iterated
        self._watched: dict[str, float] = {}  # time at which something began to wait for the peer
        self._pinged: dict[str, float] = {}
        self._last_check = float("-inf")

    def record(self, peer: str, now: float) -> None:
        """Record a sign of life. Thread-safe, also during `check`."""
        self._last_heard[peer] = now

    def check(self, now: float, peers: Iterable[str]) -> tuple[list[str], list[str]]:
        """Return the peers to ping and the lost peers, of the `peers` that something waits for."""
        self._watched = {peer: self._watched.get(peer, now) for peer in {*peers}}
        heard = {
            peer: max(since, self._last_heard.get(peer, since))
            for peer, since in self._watched.items()
        }
        self._pinged = {
            peer: since for peer, since in self._pinged.items() if heard.get(peer, now) < since
        }
        if now - self._last_check > 2 * self.interval:
            # This process was blocked or suspended: answers may be here unread.
            self._pinged = dict.fromkeys(self._pinged, now)
        self._last_check = now
        lost = [peer for peer, since in self._pinged.items() if now - since >= self._answer_timeout]
        for peer in lost:
            del self._watched[peer], self._pinged[peer]
        to_ping = [
            peer
            for peer in self._watched
            if peer not in self._pinged and now - heard[peer] >= self._silence
        ]
        self._pinged.update(dict.fromkeys(to_ping, now))
        return to_ping, lost
