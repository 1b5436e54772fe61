"""Flow control: bounds of unanswered calls and of unread stream items.

Unanswered calls are bounded in number and bytes; further calls wait at the caller. So a fast caller
exhausts no memory. But sent calls may wait for one that is not sent yet. To avoid that deadlock, a
full window without answers admits one more call at each `TRICKLE_INTERVAL`.
"""

from collections.abc import Iterable

MAX_OPEN_CALLS = 131_072  # calls without an answer
MAX_OPEN_BYTES = 1 << 30  # bytes of such calls
TRICKLE_INTERVAL = 1.0  # seconds without an answer after which a full window admits one call


class FlowWindow(dict[int, int]):
    """The calls that were sent and not answered: the number of each, and its bytes."""

    def __init__(self, calls: int = MAX_OPEN_CALLS, size: int = MAX_OPEN_BYTES) -> None:
        super().__init__()
        self._calls = calls
        self._bytes = size
        self._size = 0
        self.answers = 0

    def __repr__(self) -> str:
        return f"<Window {len(self)} calls, {self._size} bytes>"

    def admits(self, size: int) -> bool:
        """Return whether a call of `size` bytes may be sent. A single call always may."""
        return not self or (len(self) < self._calls and self._size + size <= self._bytes)

    def sent(self, number: int, size: int) -> None:
        """Count a sent call."""
        self[number] = size
        self._size += size

    def answered(self, numbers: Iterable[int]) -> None:
        """Release these calls; ignore unknown numbers."""
        for number in numbers:
            size = self.pop(number, None)
            if size is not None:
                self._size -= size
                self.answers += 1

    def release_all(self) -> list[int]:
        """Release every call; return their numbers."""
        numbers = [*self]
        self.clear()
        self._size = 0
        return numbers


# ── items of a stream ───────────────────────────────────────────────────────────────────────────

INITIAL_CREDIT = 64  # small items of a stream that may be sent before the consumer takes one
BYTES_PER_CREDIT = 64 * 1024  # each of these blocks of bytes in an item costs one more credit


def credit_cost(size: int) -> int:
    """Return the credit that an item of `size` bytes takes."""
    return 1 + size // BYTES_PER_CREDIT
