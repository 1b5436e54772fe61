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
        self._signs: dict[str, float] = {}  # written by any thread, so never iterated
        self._watched: dict[str, float] = {}  # since when somebody waits
        self._asked: dict[str, float] = {}
        self._last_look = float("-inf")

    def __repr__(self) -> str:
        return f"<Pulse of {sorted(self._watched)}, asked: {sorted(self._asked)}>"

    def heard(self, peer: str, now: float) -> None:
        """It has given a sign of life. From any thread, also while another looks."""
        self._signs[peer] = now

    def look(self, now: float, peers: Iterable[str]) -> tuple[list[str], list[str]]:
        """Whom to ask and who is lost, of those for whom somebody waits."""
        self._watched = {peer: self._watched.get(peer, now) for peer in {*peers}}
        heard = {
            peer: max(since, self._signs.get(peer, since)) for peer, since in self._watched.items()
        }
        self._asked = {
            peer: since for peer, since in self._asked.items() if heard.get(peer, now) < since
        }
        if now - self._last_look > 2 * self.interval:
            # This process has been busy or asleep itself: answers may lie there unread.
            self._asked = dict.fromkeys(self._asked, now)
        self._last_look = now
        lost = [peer for peer, since in self._asked.items() if now - since >= self._answer]
        for peer in lost:
            del self._watched[peer], self._asked[peer]
        ask = [
            peer
            for peer in self._watched
            if peer not in self._asked and now - heard[peer] >= self._silence
        ]
        self._asked.update(dict.fromkeys(ask, now))
        return ask, lost
