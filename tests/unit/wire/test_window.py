"""Unanswered calls stay within the window's bounds, in any order of calls and answers."""

from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from aiorpc_torch._wire.window import BYTES_PER_CREDIT, FlowWindow, credit_cost

sizes = st.one_of(st.integers(0, 60), st.integers(0, 1000))


class Sending(RuleBasedStateMachine):
    """A model that keeps the sizes of unanswered calls."""

    @initialize(calls=st.integers(1, 5), size=st.integers(1, 200))
    def bounds(self, calls: int, size: int) -> None:
        self.calls = calls
        self.bytes = size
        self.window = FlowWindow(calls, size)
        self.open: dict[int, int] = {}
        self.answers = 0
        self.next = 0
        self.forced: set[int] = set()  # sent although the window was full

    def send(self, size: int) -> None:
        self.window.sent(self.next, size)
        self.open[self.next] = size
        self.next += 1

    @rule(size=sizes)
    def call(self, size: int) -> None:
        """Admitted calls stay within the bounds; a single call is always admitted."""
        was_empty = not self.open
        if self.window.admits(size):
            self.send(size)
            if not self.forced:
                assert len(self.open) <= self.calls
                assert was_empty or sum(self.open.values()) <= self.bytes
        else:
            full = len(self.open) >= self.calls or sum(self.open.values()) + size > self.bytes
            assert not was_empty
            assert full

    @rule(size=sizes)
    def trickle(self, size: int) -> None:
        """A call that is sent into a full window counts as any other."""
        if not self.window.admits(size):
            self.forced.add(self.next)
        self.send(size)

    @rule(which=st.integers(0, 20))
    def answer(self, which: int) -> None:
        """An answer releases a call once; an unknown answer releases nothing."""
        number = self.next - 1 - which
        self.answers += self.open.pop(number, None) is not None
        self.forced.discard(number)
        self.window.answered((number, number))
        assert number not in self.window

    @rule()
    def lose(self) -> None:
        """Every unanswered call is returned, in the order of sending."""
        assert self.window.release_all() == [*self.open]
        self.open.clear()
        self.forced.clear()

    @invariant()
    def it_holds_what_is_open(self) -> None:
        """The window counts calls, bytes and answers; an empty window admits any call."""
        if not hasattr(self, "window"):
            return
        assert len(self.window) == len(self.open)
        assert repr(self.window) == f"<Window {len(self.open)} calls, {self._total()} bytes>"
        assert self.window.answers == self.answers
        assert all(number in self.window for number in self.open)
        assert self.next not in self.window
        if not self.open:
            assert self.window.admits(10**12)

    def _total(self) -> int:
        return sum(self.open.values())

    def teardown(self) -> None:
        """Sizes balance."""
        if hasattr(self, "window"):
            self.window.answered(self.open)
            assert repr(self.window) == "<Window 0 calls, 0 bytes>"


TestSending = Sending.TestCase
TestSending.settings = settings(stateful_step_count=25)


def test_a_single_call_may_have_any_size() -> None:
    """A call larger than the window is sent if no other is unanswered."""
    window = FlowWindow(4, 100)
    assert window.admits(10**9)
    window.sent(0, 10**9)
    assert not window.admits(0)
    window.answered([0])
    assert window.admits(10**9)


def test_the_bounds_are_reached() -> None:
    """Exactly so many calls, exactly so many bytes."""
    window = FlowWindow(2, 100)
    window.sent(0, 40)
    assert window.admits(60)
    assert not window.admits(61)
    window.sent(1, 0)
    assert not window.admits(0)


def test_the_credit_of_an_item() -> None:
    """One for a small item, and one more for each whole block of bytes."""
    sizes = [0, BYTES_PER_CREDIT - 1, BYTES_PER_CREDIT, 3 * BYTES_PER_CREDIT + 1]
    assert [credit_cost(size) for size in sizes] == [1, 1, 2, 4]


def test_a_lost_window_is_as_new() -> None:
    """After `release_all` all bytes are free again."""
    window = FlowWindow(4, 100)
    window.sent(0, 100)
    assert window.release_all() == [0]
    window.sent(1, 1)
    assert window.admits(99)
    assert not window.admits(100)
