"""The state machine of a supervised object, on generated calls, losses and replacements."""

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from aiorpc_torch._client.supervision import Supervision


class Lives(RuleBasedStateMachine):
    """A driver that takes any allowed step; calls are numbers, in the order of their awaits."""

    @initialize()
    def begin(self) -> None:
        self.machine: Supervision[int] = Supervision()
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

    @rule()
    def lose(self) -> None:
        self.machine.lose(self.machine.incarnation)
        assert self.machine.state != "alive"
        self.recover()

    @precondition(lambda self: self.machine.incarnation)
    @rule()
    def lose_an_old_one(self) -> None:
        """A late failure of a call of an earlier incarnation changes nothing."""
        state = self.machine.state
        self.machine.lose(self.machine.incarnation - 1)
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
        self.machine.make()
        self.replacements += 1

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
        self.fail_waiting(self.machine.fail())
        assert self.machine.state == "lost"

    @precondition(lambda self: self.is_recovering)
    @rule()
    def give_up(self) -> None:
        self.fail_waiting(self.machine.end())
        assert self.machine.state == "ended"

    @rule()
    def reopen(self) -> None:
        before = self.machine.state
        self.machine.reopen()
        assert self.machine.state == ("lost" if before == "ended" else before)

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
    def each_incarnation_has_a_process(self) -> None:
        assert self.machine.incarnation <= self.replacements
        assert self.machine.is_open == (self.machine.state == "alive" and not self.released)


TestLives = Lives.TestCase


def test_a_call_does_not_overtake_released_ones() -> None:
    """Until they have started, a new call waits behind them."""
    machine = lost()
    machine.wait("first")
    machine.make()
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


def lost() -> Supervision[str]:
    """Return the machine of an object that is lost and whose recovery has begun."""
    machine: Supervision[str] = Supervision()
    machine.lose(0)
    assert machine.begin_recovery()
    return machine


def test_it_is_made_as_often_as_its_process_is_replaced() -> None:
    """Also if a process is lost while it makes the object, and if a factory has raised."""
    machine = lost()
    machine.wait("call")
    for _ in range(10):
        machine.make()
        assert machine.state == "making"
        machine.lose_again()
        assert machine.state == "lost"
        assert not machine.begin_recovery(), "the same recovery goes on"
    machine.make()
    assert machine.fail() == ["call"]
    assert machine.begin_recovery(), "the next call tries again"
    machine.make()
    machine.made()
    assert (machine.state, machine.incarnation) == ("alive", 1)


def test_a_worker_that_is_not_started_again_ends_it() -> None:
    """Calls that wait fail, and later ones too."""
    machine = lost()
    machine.wait("first")
    assert machine.end() == ["first"]
    assert not machine.begin_recovery()
    machine.lose(0)
    assert machine.state == "ended"
    machine.wait("second")
    assert machine.end() == ["second"]
    machine.reopen()
    assert machine.begin_recovery(), "it was started all the same"
    machine.reopen()
    assert machine.state == "lost"


def test_incarnations_are_counted() -> None:
    """Each has its own loss, and one recovery; a late failure of an earlier one changes nothing."""
    machine = lost()
    for incarnation in (1, 2, 3):
        machine.make()
        machine.made()
        assert (machine.state, machine.incarnation) == ("alive", incarnation)
        machine.lose(incarnation - 1)
        assert machine.state == "alive"
        machine.lose(incarnation)
        assert machine.begin_recovery()
