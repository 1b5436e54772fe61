"""Who is alive: a state machine without a clock, a loop or torch.

Of peers for whom somebody waits, whoever is not heard of is asked, and whoever does not answer in
time is lost. `look` says what to do; it is called every `interval` seconds.
"""

from collections.abc import Iterable


class Pulse:
    """A peer is lost after at most `patience` seconds of silence, and never without being asked."""

    def __init__(self, patience: float) -> None:
        self.interval = patience / 8
        self._silence = patience / 4  # after which it is asked
        self._answer = patience / 2  # in which it answers
        self._heard: dict[str, float] = {}
        self._asked: dict[str, float] = {}
        self._last_look = float("-inf")

    def __repr__(self) -> str:
        return f"<Pulse of {sorted(self._heard)}, asked: {sorted(self._asked)}>"

    def heard(self, peer: str, now: float) -> None:
        """It has given a sign of life."""
        if peer in self._heard:
            self._heard[peer] = now
        self._asked.pop(peer, None)

    def look(self, now: float, peers: Iterable[str]) -> tuple[list[str], list[str]]:
        """Whom to ask and who is lost, of those for whom somebody waits."""
        watched = set(peers)
        self._heard = {peer: self._heard.get(peer, now) for peer in watched}
        self._asked = {peer: since for peer, since in self._asked.items() if peer in watched}
        if now - self._last_look > 2 * self.interval:
            # This process has been busy or asleep itself: answers may lie there unread.
            self._asked = dict.fromkeys(self._asked, now)
        self._last_look = now
        lost = [peer for peer, since in self._asked.items() if now - since >= self._answer]
        for peer in lost:
            del self._heard[peer], self._asked[peer]
        ask = [
            peer
            for peer, heard in self._heard.items()
            if peer not in self._asked and now - heard >= self._silence
        ]
        self._asked.update(dict.fromkeys(ask, now))
        return ask, lost
