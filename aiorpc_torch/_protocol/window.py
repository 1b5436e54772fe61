"""How much may be sent to a peer before it answers: a state machine without a clock or a loop.

A caller that outruns its callee must exhaust neither's memory; so what is sent and not answered is
bounded, in calls and in bytes, and the rest waits at the caller. But calls that are answered may
wait for one that is not sent yet, and a bound that is never lifted would be a deadlock: so a full
window from which no answer comes lets one more call pass now and then.
"""

from collections.abc import Iterable

CALLS = 131_072
BYTES = 1 << 30
TRICKLE = 1.0  # seconds without an answer after which a full window lets one call pass


class Window:
    """What was sent and is not answered."""

    def __init__(self, calls: int = CALLS, size: int = BYTES) -> None:
        self._calls = calls
        self._bytes = size
        self._open: dict[int, int] = {}  # each call's number and its bytes
        self._size = 0
        self.answers = 0

    def __repr__(self) -> str:
        return f"<Window {len(self._open)} calls, {self._size} bytes>"

    def __len__(self) -> int:
        return len(self._open)

    def __contains__(self, number: int) -> bool:
        return number in self._open

    def admits(self, size: int) -> bool:
        """Whether a call of so many bytes may be sent. The first may, however large."""
        if not self._open:
            return True
        return len(self._open) < self._calls and self._size + size <= self._bytes

    def sent(self, number: int, size: int) -> None:
        """A call is on its way."""
        self._open[number] = size
        self._size += size

    def answered(self, numbers: Iterable[int]) -> None:
        """Their answers have come. One that was not expected is none."""
        for number in numbers:
            size = self._open.pop(number, None)
            if size is not None:
                self._size -= size
                self.answers += 1

    def clear(self) -> list[int]:
        """No answers will come any more: the numbers of the calls that were open."""
        numbers = [*self._open]
        self._open.clear()
        self._size = 0
        return numbers


# ── items of a stream ───────────────────────────────────────────────────────────────────────────

CREDIT = 64  # small items that may be on their way to a consumer, or wait for it
LARGE = 64 * 1024  # bytes of an item that cost as much as a small item more


def price(size: int) -> int:
    """Return what an item of `size` bytes takes of the credit."""
    return 1 + size // LARGE
