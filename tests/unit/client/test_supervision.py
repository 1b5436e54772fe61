"""The state machine of a supervised object, on generated calls, losses and replacements."""

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from aiorpc_torch._client.supervision import Supervision


class Lives(RuleBasedStateMachine):
    """A driver that takes any allowed step; calls are numbers, in the order of their awaits."""

    @initialize(restarts=st.integers(0, 3))
    def begin(self, restarts: int) -> None:
        self.machine: Supervision[int] = Supervision(restarts)
        self.restarts = restarts
        self.replacements = 0  # processes in which the object was, or was to be, made
        self.next = 0
        self.waiting: list[int] = []
        self.released: list[int] = []
        self.started: list[int] = []
        self.failed: list[int] = []
        self.is_recovering = False

    # ── calls ───────────────────────────────────────────────────────────────────────────────────

    @rule()
    def call(self) -> None:
        number, self.next = self.next, self.next + 1
        if self.machine.is_open:
            self.started.append(number)
            return
        self.machine.wait(number)
        self.waiting.append(number)
        if self.machine.state == "ended":
            self.failed += self.machine.end()
            self.waiting.clear()
        self.recover()
        self.release()

    @precondition(lambda self: self.released)
    @rule()
    def start(self) -> None:
        """A released call starts; the event loop keeps their order."""
        self.machine.leave(self.released[0])
        self.started.append(self.released.pop(0))

    @precondition(lambda self: self.waiting or self.released)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(self.waiting + self.released))
        self.machine.leave(number)
        (self.waiting if number in self.waiting else self.released).remove(number)

    def release(self) -> None:
        found = self.machine.release()
        assert not found or self.machine.state == "alive"
        assert found in ([], self.waiting), "all of them, in their order"
        if found:
            self.released, self.waiting = self.released + found, []

    def recover(self) -> None:
        if self.machine.begin_recovery():
            assert not self.is_recovering, "one recovery at a time"
            assert self.machine.state == "lost"
            self.is_recovering = True

    # ── losses and recoveries ───────────────────────────────────────────────────────────────────

    @rule(is_replaced=st.booleans())
    def lose(self, is_replaced: bool) -> None:
        may_wait = self.machine.lose(self.machine.incarnation, is_replaced=is_replaced)
        assert may_wait == (self.machine.state != "alive")
        if not may_wait:
            assert self.replacements == self.restarts, "as an RRef"
        self.recover()

    @precondition(lambda self: self.machine.incarnation)
    @rule()
    def lose_an_old_one(self) -> None:
        """A late failure of a call of an earlier incarnation changes nothing."""
        state = self.machine.state
        assert self.machine.lose(self.machine.incarnation - 1, is_replaced=True)
        assert self.machine.state == state

    @precondition(lambda self: self.is_recovering and self.machine.state == "lost")
    @rule()
    def was_silent(self) -> None:
        before = self.machine.incarnation
        self.machine.resume()
        self.is_recovering = False
        assert self.machine.incarnation == before
        self.release()

    @precondition(lambda self: self.is_recovering and self.machine.state == "lost")
    @rule()
    def make(self) -> None:
        may_make = self.machine.make()
        assert may_make == (self.replacements < self.restarts)
        self.replacements += may_make
        if not may_make:
            self.fail_waiting(self.machine.end())

    @precondition(lambda self: self.machine.state == "making")
    @rule()
    def made(self) -> None:
        self.machine.made()
        self.is_recovering = False
        self.release()

    @precondition(lambda self: self.machine.state == "making")
    @rule()
    def lost_while_making(self) -> None:
        self.machine.lose_again()

    @precondition(lambda self: self.is_recovering)
    @rule()
    def fail(self) -> None:
        self.replacements -= self.machine.state == "making"  # a factory that raises
        self.fail_waiting(self.machine.fail())
        assert self.machine.state == "lost"

    @precondition(lambda self: self.is_recovering)
    @rule()
    def give_up(self) -> None:
        self.fail_waiting(self.machine.end())
        assert self.machine.state == "ended"

    def fail_waiting(self, tokens: list[int]) -> None:
        assert tokens == self.waiting
        self.failed += tokens
        self.waiting = []
        self.is_recovering = False

    # ── always ──────────────────────────────────────────────────────────────────────────────────

    @invariant()
    def calls_start_in_order(self) -> None:
        assert self.started == sorted(self.started)
        assert len({*self.started, *self.failed}) == len(self.started) + len(self.failed)

    @invariant()
    def no_call_is_forgotten(self) -> None:
        """A call waits only while a recovery will release it."""
        if self.waiting:
            assert self.is_recovering

    @invariant()
    def restarts_are_limited(self) -> None:
        assert self.machine.incarnation <= self.replacements <= self.restarts
        assert self.machine.is_open == (self.machine.state == "alive" and not self.released)


TestLives = Lives.TestCase


def test_a_call_does_not_overtake_released_ones() -> None:
    """Until they have started, a new call waits behind them."""
    machine: Supervision[str] = Supervision(1)
    assert machine.lose(0, is_replaced=True)
    assert machine.begin_recovery()
    machine.wait("first")
    assert machine.make()
    machine.made()
    assert machine.release() == ["first"]
    assert not machine.is_open
    machine.wait("second")
    assert machine.release() == ["second"]
    machine.leave("first")
    assert not machine.is_open
    machine.leave("second")
    assert machine.is_open
    assert machine.incarnation == 1


def test_the_loss_after_the_last_restart_ends_it() -> None:
    """A silent worker does not: its calls fail as those of an RRef."""
    machine: Supervision[str] = Supervision(0)
    assert not machine.lose(0, is_replaced=False)
    assert machine.is_open
    assert machine.lose(0, is_replaced=True)
    assert machine.state == "ended"
    assert not machine.begin_recovery()
    machine.wait("call")
    assert machine.end() == ["call"]


def lost(restarts: int) -> Supervision[str]:
    """Return the machine of an object that is lost and whose recovery has begun."""
    machine: Supervision[str] = Supervision(restarts)
    assert machine.lose(0, is_replaced=True)
    assert machine.begin_recovery()
    return machine


def test_each_attempt_to_make_it_uses_a_restart() -> None:
    """Also one whose process is lost meanwhile; the attempt after the last one ends it."""
    machine = lost(2)
    machine.wait("call")
    for _ in range(2):
        assert machine.make()
        assert machine.state == "making"
        machine.lose_again()
        assert machine.state == "lost"
        assert not machine.begin_recovery()
    assert not machine.make()
    assert machine.state == "ended"
    assert not machine.begin_recovery()
    assert machine.end() == ["call"]


def test_a_factory_that_raises_uses_none() -> None:
    """A recovery that fails before its process is there gives none back."""
    machine = lost(2)
    for _ in range(3):
        machine.wait("call")
        assert machine.make()
        assert machine.fail() == ["call"]
        assert machine.state == "lost"
        assert machine.begin_recovery()
    machine.fail()
    assert machine.begin_recovery()
    for _ in range(2):
        assert machine.make()
        machine.lose_again()
    assert not machine.make()


def test_incarnations_are_counted() -> None:
    """Each has its own loss, and one recovery; a late failure of an earlier one changes nothing."""
    machine = lost(3)
    for incarnation in (1, 2, 3):
        assert machine.make()
        machine.made()
        assert (machine.state, machine.incarnation) == ("alive", incarnation)
        assert machine.lose(incarnation - 1, is_replaced=True)
        assert machine.state == "alive"
        assert machine.lose(incarnation, is_replaced=True)
        assert machine.begin_recovery() == (incarnation < 3)
    assert machine.state == "ended"
