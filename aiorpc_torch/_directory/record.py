"""The record at a place that can be rewritten: where the directory of a world is, and whose it is.

One worker keeps the directory. It renews its record, by compare-and-swap, so that no two can: if
another one has written since, the swap fails, and the directory closes. It writes the numbers that
it gives to processes before it gives them, so that none is given twice.

Any other may claim the place once the record has stood unchanged for its lease, measured by the
clock of the one that looks. The keeper stops, by its own clock, a lease after its last renewal
began, which was before anybody could read it. Clocks need not agree, only run at one speed.
"""

import msgspec

from .._wire.plain import dump, reader
from .shared_values import SharedValue

MIN_LEASE = 2.0  # seconds
STAGGER = 1.0  # seconds for which a worker lets the one before it claim the place
ISOLATION_PAUSE = 4.0  # seconds for which one that was cut off lets the others claim it
# They look at the place every 3.4 s at least: an attempt to connect takes 3 s, a pause 0.4 s.


class Record(msgspec.Struct, frozen=True, array_like=True):
    """A directory's record. With TCP at a fixed address rank 0 writes one that it never renews."""

    world: str  # random id of the directory, which greets with it; name of its abstract Unix socket
    holder: str  # name of the worker that keeps it
    namespace: str = ""  # network namespace in which that socket is reached
    host: str = ""  # address for other namespaces, "" for that of the store
    port: int = 0  # port for other namespaces, 0 if it listens at none
    lease: float = 0.0  # seconds for which it stands without a renewal
    number: int = 0  # it grows with each record at this place
    entries: int = 0  # processes that have entered since the start
    joins: int = 0  # those of them that have got a new rank
    is_closed: bool = False  # whether its keeper has left


read_record = reader(Record)


def lease_for(heartbeat: float) -> float:
    """Return the lease in seconds: a takeover is to end within `heartbeat` and 3 s."""
    return max(heartbeat / 2, MIN_LEASE)


class Watch:
    """The place as one worker sees it, in order to claim it. It has no clock."""

    def __init__(self) -> None:
        self._seen: bytes | None = None
        self._since = float("-inf")

    def see(self, value: bytes | None, now: float) -> None:
        """Note the value of the place, read before `now`."""
        if self._since == float("-inf") or value != self._seen:
            self._seen, self._since = value, now

    def may_claim(
        self,
        record: Record | None,
        now: float,
        before: int,  # number of the workers that are to claim it rather
        *,
        is_dead: bool,  # the process that has written the record is known to be dead
        was_isolated: bool = False,  # the directory here has ended: most were beyond a cut, perhaps
    ) -> bool:
        """Return whether the place may be claimed: a swap decides."""
        lease = 0.0 if record is None or record.is_closed or is_dead else record.lease
        pause = max(before * STAGGER, ISOLATION_PAUSE if was_isolated else 0.0)
        return now - self._since >= lease + pause


class Claim:
    """The record of a directory as its keeper renews it. Methods block; one at a time.

    It is made once `record` was `written` as the value of the place, at the time `now` or later.
    """

    def __init__(self, value: SharedValue, record: Record, written: bytes, now: float) -> None:
        self._value, self._record = value, record
        self._written = [written]  # and after it those of which it is not known
        self.end = now + record.lease  # until then no other worker can have claimed the place
        self.lease = record.lease

    @property
    def numbers(self) -> tuple[int, int]:
        return self._record.entries, self._record.joins

    def renew(self, now: float, entries: int, joins: int, *, is_closed: bool = False) -> bool:
        """Renew the record; return False if another worker has the place. Raises OSError."""
        number = self._record.number + 1
        record = msgspec.structs.replace(
            self._record, number=number, entries=entries, joins=joins, is_closed=is_closed
        )
        new = dump(record)
        known, self._written = self._written, [*self._written, new]
        if not any(self._value.swap(old, new) for old in known):
            return False
        self._record, self._written, self.end = record, [new], now + self.lease
        return True

    def close(self) -> None:
        self._value.close()

    def abandon(self, now: float) -> None:
        """Leave the place as if it had not been claimed. Raises OSError as `renew`."""
        if self._record.number:
            self.renew(now, *self.numbers, is_closed=True)
        else:
            self.clear()

    def clear(self) -> None:
        """Remove the record: the world has ended. Raises OSError as `renew`."""
        for written in self._written:
            self._value.clear(written)


def claim_place(
    value: SharedValue, old: bytes | None, last: Record | None, record: Record, now: float
) -> Claim | None:
    """Claim a place whose value is `old`; return None if another worker was quicker."""
    if last is not None:  # its numbers stay, so that none is given twice
        numbers = {"number": last.number + 1, "entries": last.entries, "joins": last.joins}
        record = msgspec.structs.replace(record, **numbers)
    new = dump(record)
    return Claim(value, record, new, now) if value.swap(old, new) else None
