"""The pool of memory: never two messages in one piece, never more bytes than the limit."""

from hypothesis import given, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from aiorpc_torch._carrier.memory_pool import MIN_PIECE, MemoryPool, Piece, piece_size

LIMIT = 16 * MIN_PIECE
COUNT = 5
WHICH = st.integers(0, 1000)


@given(st.integers(0, 1 << 40))
def test_a_piece_is_large_enough_and_hardly_larger(size: int) -> None:
    """At most a fifth of a piece is unused, and few sizes serve all messages."""
    found = piece_size(size)
    assert found >= max(size, MIN_PIECE)
    assert found <= MIN_PIECE or (found - size) * 5 <= found
    assert piece_size(found) == found
    assert found % 4096 == 0


class Pools(RuleBasedStateMachine):
    """A model that knows the holders of each piece."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = MemoryPool(LIMIT, self.make, self.closed, COUNT)
        self.now = 0.0
        self.has_memory = True
        self.made: list[int] = []
        self.known: dict[int, Piece[int]] = {}
        self.holders: dict[int, int] = {}
        self.doomed: set[int] = set()
        self.free: dict[int, float] = {}
        self.gone: list[int] = []

    def make(self, size: int) -> int:
        if not self.has_memory:
            raise OSError("no memory")
        self.made.append(size)
        return size

    def closed(self, piece: Piece[int]) -> None:
        assert piece.number in self.known
        self.gone.append(piece.number)

    def forget_gone(self) -> None:
        for number in self.gone:
            del self.free[number], self.known[number]
        self.gone.clear()

    @rule(size=st.integers(1, LIMIT * 5 // 4), has_memory=st.booleans())
    def acquire(self, size: int, has_memory: bool) -> None:
        """A free one of its size, else a new one, if what is held leaves room for it."""
        self.has_memory, needed, made = has_memory, piece_size(size), len(self.made)
        of_size = [each for each in self.free if self.known[each].size == needed]
        held = sum(self.known[each].size for each in self.holders)
        fits = held + needed <= LIMIT and len(self.holders) < COUNT
        try:
            found = self.pool.acquire(size)
        except OSError:
            assert not has_memory
            assert fits
            assert not of_size
            self.forget_gone()
            return
        if found is None:
            assert not of_size
            assert not fits
            return
        self.forget_gone()
        assert found.size == found.memory == needed
        if of_size:
            assert len(self.made) == made
            del self.free[found.number]
        else:
            assert len(self.made) == made + 1
            assert found.number not in self.known
            self.known[found.number] = found
        self.holders[found.number] = 1

    @precondition(lambda self: self.holders)
    @rule(which=WHICH)
    def hold(self, which: int) -> None:
        """Another receiver."""
        number = sorted(self.holders)[which % len(self.holders)]
        self.known[number].holders += 1
        self.holders[number] += 1

    @precondition(lambda self: self.holders)
    @rule(which=WHICH, is_lost=st.booleans())
    def release(self, which: int, is_lost: bool) -> None:
        """Free after the last holder; closed instead if one of them was lost."""
        number = sorted(self.holders)[which % len(self.holders)]
        piece = self.known[number]
        if is_lost:
            self.doomed.add(number)
            piece.is_reusable = False
        self.pool.release(piece, self.now)
        self.holders[number] -= 1
        is_last = not self.holders[number]
        assert self.gone == [number] * (is_last and number in self.doomed)
        if is_last:
            del self.holders[number]
            self.free[number] = self.now
            self.forget_gone()

    @rule(seconds=st.integers(0, 10))
    def wait(self, seconds: int) -> None:
        """Time passes."""
        self.now += seconds

    @rule(seconds=st.integers(0, 10))
    def trim(self, seconds: int) -> None:
        """Those that were not used for so long are closed, and no others."""
        before = self.now - seconds
        idle = {each for each, since in self.free.items() if since <= before}
        oldest = self.pool.trim(before)
        assert {*self.gone} == idle
        self.forget_gone()
        assert oldest == min(self.free.values(), default=None)

    @invariant()
    def it_knows_its_bytes(self) -> None:
        assert len(self.pool) == len(self.known) <= COUNT
        assert self.pool.total == sum(each.size for each in self.known.values()) <= LIMIT


TestPools = Pools.TestCase
TestPools.settings = settings(max_examples=50, stateful_step_count=50, deadline=None)


def acquired(pool: MemoryPool[int], size: int = 1) -> Piece[int]:
    found = pool.acquire(size)
    assert found is not None
    return found


def test_the_longest_unused_make_room() -> None:
    """The piece that was used last stays."""
    closed: list[int] = []
    pool = MemoryPool(4 * MIN_PIECE, int, lambda piece: closed.append(piece.number))
    pieces = [acquired(pool) for _ in range(4)]
    for now, piece in enumerate(reversed(pieces)):
        pool.release(piece, float(now))
    acquired(pool, 2 * MIN_PIECE)
    assert closed == [piece.number for piece in pieces[:1:-1]]


def test_what_was_used_last_is_used_again() -> None:
    """Its memory may still be in the processor's cache."""
    pool = MemoryPool(LIMIT, int)
    first, second = acquired(pool), acquired(pool)
    pool.release(second, 1.0)
    pool.release(first, 2.0)
    assert acquired(pool) is first


def test_a_closed_pool_gives_nothing() -> None:
    """What is held is freed when it is let go, and nobody is told."""
    pool = MemoryPool(LIMIT, int, lambda _: 1 / 0)
    held = acquired(pool)
    pool.release(acquired(pool), 1.0)
    pool.close()
    assert pool.acquire(1) is None
    pool.release(held, 2.0)
    assert pool.acquire(1) is None
    assert (len(pool), pool.total, pool.trim(9.0)) == (0, 0, None)


def test_what_a_closed_pool_has_given_is_not_taken_for_a_piece_of_another() -> None:
    """A peer names what it releases by its number."""
    first, second = MemoryPool(LIMIT, int), MemoryPool(LIMIT, int)
    old = acquired(first)
    first.close()
    held = acquired(second)
    assert old.number != held.number
    second.release(old, 1.0)
    assert (len(second), held.holders) == (1, 1)
    assert acquired(second) is not held
