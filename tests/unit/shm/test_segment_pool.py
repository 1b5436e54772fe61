"""The pool of segments: never two messages in one, never more bytes than the limit."""

from collections import Counter

from hypothesis import given, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from aiorpc_torch._shm.segment_pool import MIN_SEGMENT, SegmentPool, segment_size

LIMIT = 16 * MIN_SEGMENT
COUNT = 5
WHICH = st.integers(0, 1000)


@given(st.integers(0, 1 << 40))
def test_a_segment_is_large_enough_and_hardly_larger(size: int) -> None:
    """At most a fifth of a segment is unused, and few sizes serve all messages."""
    found = segment_size(size)
    assert found >= max(size, MIN_SEGMENT)
    assert found <= MIN_SEGMENT or (found - size) * 5 <= found
    assert segment_size(found) == found
    assert found % 4096 == 0


class Pools(RuleBasedStateMachine):
    """A model that knows the holders of each segment."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = SegmentPool(LIMIT, COUNT)
        self.now = 0.0
        self.sizes: dict[int, int] = {}
        self.holders: Counter[int] = Counter()
        self.doomed: set[int] = set()
        self.free: dict[int, float] = {}

    def gone(self, numbers: list[int]) -> None:
        for number in numbers:
            assert number in self.free
            del self.free[number], self.sizes[number]

    @rule(size=st.integers(1, LIMIT * 5 // 4))
    def acquire(self, size: int) -> None:
        """A free one of its size, else a new one, if what is held leaves room for it."""
        found = self.pool.acquire(size)
        needed = segment_size(size)
        of_size = [each for each in self.free if self.sizes[each] == needed]
        held = sum(self.sizes[each] for each in self.holders)
        if found is None:
            assert not of_size
            assert held + needed > LIMIT or len(self.holders) == COUNT
            return
        self.gone(found.closed)
        assert found.size == needed
        assert found.is_new is not bool(of_size)
        if found.is_new:
            assert found.id not in self.sizes
            self.sizes[found.id] = needed
        else:
            assert found.id in of_size
            assert not found.closed
            del self.free[found.id]
        self.holders[found.id] = 1

    @precondition(lambda self: self.holders)
    @rule(which=WHICH)
    def hold(self, which: int) -> None:
        """Another receiver."""
        number = sorted(self.holders)[which % len(self.holders)]
        self.pool.hold(number)
        self.holders[number] += 1

    @precondition(lambda self: self.holders)
    @rule(which=WHICH, is_lost=st.booleans())
    def release(self, which: int, is_lost: bool) -> None:
        """Free after the last holder; closed instead if one of them was lost."""
        number = sorted(self.holders)[which % len(self.holders)]
        if is_lost:
            self.doomed.add(number)
            is_closed = self.pool.abandon(number, self.now)
        else:
            is_closed = self.pool.release(number, self.now)
        self.holders[number] -= 1
        is_last = not self.holders[number]
        assert is_closed is (is_last and number in self.doomed)
        if not is_last:
            return
        del self.holders[number]
        if is_closed:
            del self.sizes[number]
        else:
            self.free[number] = self.now

    @rule(seconds=st.integers(0, 10))
    def wait(self, seconds: int) -> None:
        """Time passes."""
        self.now += seconds

    @rule(seconds=st.integers(0, 10))
    def trim(self, seconds: int) -> None:
        """Those that were not used for so long are closed, and no others."""
        before = self.now - seconds
        idle = {each for each, since in self.free.items() if since <= before}
        closed = self.pool.trim(before)
        assert {*closed} == idle
        self.gone(closed)

    @invariant()
    def it_knows_its_bytes(self) -> None:
        assert len(self.pool) == len(self.sizes)
        assert len(self.pool) <= COUNT
        assert self.pool.total == sum(self.sizes.values()) <= LIMIT
        assert self.pool.has_free is bool(self.free)
        assert self.pool.oldest() == min(self.free.values(), default=None)


TestPools = Pools.TestCase
TestPools.settings = settings(max_examples=50, stateful_step_count=50, deadline=None)


def test_the_longest_unused_make_room() -> None:
    """The segment that was used last stays."""
    pool = SegmentPool(4 * MIN_SEGMENT)
    grants = [pool.acquire(1) for _ in range(4)]
    numbers = [each.id for each in grants if each is not None]
    for now, number in enumerate(reversed(numbers)):
        pool.release(number, float(now))
    found = pool.acquire(2 * MIN_SEGMENT)
    assert found is not None
    assert found.closed == numbers[:1:-1]


def test_what_was_used_last_is_used_again() -> None:
    """Its memory may still be in the processor's cache."""
    pool = SegmentPool(LIMIT)
    first, second = pool.acquire(1), pool.acquire(1)
    assert first is not None
    assert second is not None
    pool.release(second.id, 1.0)
    pool.release(first.id, 2.0)
    again = pool.acquire(1)
    assert again is not None
    assert again.id == first.id
