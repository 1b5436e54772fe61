"""The claim of a place: never two are valid at once, whoever is slow, frozen or cut off."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given, strategies as st

from aiorpc_torch._directory.record import (
    ISOLATION_PAUSE,
    STAGGER,
    Claim,
    Record,
    Watch,
    claim_place,
    lease_for,
    read_record,
)

LEASE = 4.0


class Value:
    """A value in this process. It may not answer, before or after it is written."""

    def __init__(self) -> None:
        self.value: bytes | None = None
        self.loses = ""  # "request" or "answer"

    def read(self) -> bytes | None:
        if self.loses:
            raise TimeoutError
        return self.value

    def swap(self, old: bytes | None, new: bytes) -> bool:
        if self.loses == "request":
            raise TimeoutError
        found = self.value == old
        if found:
            self.value = new
        if self.loses == "answer":
            raise TimeoutError
        return found

    def clear(self, old: bytes) -> None:
        if self.read() == old:
            self.value = None

    def close(self) -> None:
        pass


def claimed(value: Value, now: float = 0.0, holder: str = "a") -> Claim:
    found = value.read()
    last = None if found is None else read_record(found)
    claim = claim_place(value, found, last, Record(holder, holder, lease=LEASE), now)
    assert claim is not None
    return claim


def test_a_claim_ends_with_its_lease() -> None:
    """Counted from before the record was written. A renewal begins another one."""
    value = Value()
    claim = claimed(value, 10.0)
    assert 10.0 + LEASE - 0.1 < claim.end <= 10.0 + LEASE
    assert claim.renew(12.0, 5, 2)
    assert claim.end > 12.0 + LEASE - 0.1
    record = read_record(value.value)
    assert (record.number, record.entries, record.joins, record.is_closed) == (1, 5, 2, False)
    assert claim.renew(13.0, 5, 2, is_closed=True)
    assert read_record(value.value).is_closed


@pytest.mark.parametrize("loses", ["request", "answer"])
def test_a_renewal_without_an_answer(loses: str) -> None:
    """It may have taken place: the next ones find out."""
    value = Value()
    claim = claimed(value)
    for _ in range(3):
        value.loses = loses
        with pytest.raises(TimeoutError):
            claim.renew(1.0, 1, 0)
    value.loses = ""
    assert claim.renew(2.0, 2, 0)
    assert read_record(value.value).entries == 2
    value.loses = loses
    with pytest.raises(TimeoutError):
        claim.renew(3.0, 3, 0)
    value.loses = ""
    claim.clear()
    assert value.value is None


def test_who_may_claim() -> None:
    """After the lease, in turn; at once if the keeper has left, has died, or there is none."""
    open_, closed = Record("w", "a", lease=LEASE), Record("w", "a", lease=LEASE, is_closed=True)
    watch = Watch()
    watch.see(b"1", 10.0)
    for before in (0, 2):
        wait = LEASE + before * STAGGER
        assert not watch.may_claim(open_, 10.0 + wait - 0.1, before, is_dead=False)
        assert watch.may_claim(open_, 10.0 + wait, before, is_dead=False)
    for record, is_dead in ((closed, False), (open_, True), (None, False)):
        assert watch.may_claim(record, 10.0, 0, is_dead=is_dead)
        assert not watch.may_claim(record, 10.0, 1, is_dead=is_dead)
    for before in (0, 100):  # one that was cut off: the others may be alive
        pause, may_claim = max(ISOLATION_PAUSE, before * STAGGER), watch.may_claim
        assert not may_claim(closed, 9.9 + pause, before, is_dead=False, was_isolated=True)
        assert may_claim(closed, 10.0 + pause, before, is_dead=False, was_isolated=True)
    watch.see(b"1", 12.0)
    assert watch.may_claim(open_, 10.0 + LEASE, 0, is_dead=False)
    watch.see(b"2", 13.0)
    assert not watch.may_claim(open_, 13.0 + LEASE - 0.1, 0, is_dead=False)


def test_the_lease() -> None:
    """With the time to notice it is less than the heartbeat and 3 s."""
    assert lease_for(10.0) == 5.0
    assert lease_for(0.05) == 2.0


@dataclass
class Worker:
    """One that keeps the directory, or would like to. Its clock has its own zero."""

    name: str
    offset: float
    claim: Claim | None = None
    watch: Watch = field(default_factory=Watch)
    delayed: float | None = None
    """The time at which a renewal has begun that is not written yet: the worker is frozen."""


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["pass", "look", "look", "begin", "write", "claim", "lose", "reach"]),
        st.integers(0, 2),
        st.floats(0.1, 3.0),
    ),
    max_size=60,
)


@pytest.mark.promise("succession.never_two")
@given(STEPS)
def test_never_two(steps: list[tuple[str, int, float]]) -> None:
    """At each instant at most one claim is valid, and the numbers of entries never go back."""
    value, now = Value(), 0.0
    workers = [Worker(name, 100.0 * n) for n, name in enumerate("abc")]
    workers[0].claim = claimed(value, workers[0].offset)
    entries = 0
    for step, number, seconds in steps:
        worker = workers[number]
        here = now + worker.offset
        try:
            match step:
                case "pass":
                    now += seconds
                case "look":
                    worker.watch.see(value.read(), here)
                case "begin" if worker.claim is not None and here < worker.claim.end:
                    worker.delayed = here
                case "write" if worker.claim is not None and worker.delayed is not None:
                    begun, worker.delayed = worker.delayed, None
                    if worker.claim.renew(begun, entries + 1, 0):
                        entries += 1
                    else:
                        worker.claim = None
                case "claim" if worker.claim is None or here >= worker.claim.end:
                    found = value.read()
                    worker.watch.see(found, here)
                    record = None if found is None else read_record(found)
                    if worker.watch.may_claim(record, here, 0, is_dead=False):
                        worker.claim = claimed(value, here, worker.name)
                case "lose":
                    value.loses = ["request", "answer", ""][number]
                case "reach":
                    value.loses = ""
        except TimeoutError:
            pass
        held = (each for each in workers if each.claim is not None)
        valid = [each for each in held if each.claim and now + each.offset < each.claim.end]
        assert len(valid) <= 1, valid
    value.loses = ""
    found = value.read()
    assert found is None or read_record(found).entries >= entries
