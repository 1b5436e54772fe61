"""The answers of a link, as a protocol of two state machines without torch or a loop.

A model of the caller keeps the one promise the desk relies on: while it waits for anything, a
message is outstanding. Messages and answers are delayed and reordered at will.
"""

from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from aiorpc_torch._desk import Carrier, Desk

Result = int | tuple[str, int]
"""A call's, or an item of a call that goes on."""

Working = tuple[Carrier[Result], int]
"""A call at work, and the message that it came in."""


class Exchange(RuleBasedStateMachine):
    """Every call is answered exactly once, whatever is delayed, and none is left behind."""

    running = Bundle("running")

    def __init__(self) -> None:
        super().__init__()
        self.desk: Desk[Result] = Desk(self.answer)
        self.on_its_way: list[int] = []  # messages
        self.answers: list[tuple[int, list[Result]]] = []  # answers: message, results
        self.calls_of: dict[int, list[int]] = {}  # by message
        self.own: set[int] = set()  # messages whose answers must carry all their calls' results
        self.answered_messages: set[int] = set()
        self.outstanding: set[int] = set()
        self.waiting: set[Result] = set()
        self.settled: list[Result] = []
        self.calls = self.items = 0
        self.at_work: set[Result] = set()
        self.is_released = False

    def answer(self, reply: Any, results: list[Result]) -> None:
        assert reply not in self.answered_messages, "a message is answered once"
        self.answered_messages.add(reply)
        self.answers.append((reply, results))
        if reply in self.own and not self.is_released:
            assert {*self.calls_of[reply]} <= {*results}

    def send(self, calls: list[int], *, own: bool = False) -> int:
        message = len(self.calls_of)
        self.calls_of[message] = calls
        self.on_its_way.append(message)
        self.outstanding.add(message)
        if own:
            self.own.add(message)
        return message

    def admit(self, message: int) -> Carrier[Result]:
        calls = self.calls_of[message]
        return self.desk.admit(message, len(calls), poll=not calls, own=message in self.own)

    def take(self, results: list[Result]) -> None:
        """What the caller does with an answer."""
        self.settled += results
        self.waiting.difference_update(results)
        if self.waiting and not self.outstanding - self.own:
            self.send([])  # its promise: a poll

    @rule(count=st.integers(1, 4), own=st.booleans())
    def call(self, count: int, own: bool) -> None:
        calls = list(range(self.calls, self.calls + count))
        self.calls += count
        self.waiting.update(calls)
        self.send(calls, own=own)

    @rule()
    def cancel_message(self) -> None:
        """A message with no calls that is no poll: answered at once."""
        message = self.send([])
        self.on_its_way.remove(message)
        self.desk.admit(message, 0, poll=False)
        assert message in self.answered_messages

    @rule(target=running, data=st.data())
    def arrive(self, data: st.DataObject) -> list[Working]:
        if not self.on_its_way:
            return []
        message = self.on_its_way.pop(data.draw(st.integers(0, len(self.on_its_way) - 1)))
        carrier, calls = self.admit(message), self.calls_of[message]
        self.at_work.update(calls)
        return [(carrier, call) for call in calls]

    @rule(target=running, jobs=consumes(running), flush=st.booleans(), count=st.integers(1, 3))
    def work(self, jobs: list[Working], flush: bool, count: int) -> list[Working]:
        for carrier, call in jobs[:count]:
            self.at_work.discard(call)
            wanted = self.desk.done(carrier, call)
            if wanted and flush:
                self.desk.flush()
        return jobs[count:]

    @rule(jobs=running, flush=st.booleans())
    def go_on(self, jobs: list[Working], flush: bool) -> None:
        """Calls that are at work have items."""
        for _, call in jobs:
            if call in self.at_work:
                self.desk.more(("item", self.items))
                self.items += 1
                if flush:
                    self.desk.flush()

    @rule()
    def flush(self) -> None:
        self.desk.flush()

    @rule()
    def release(self) -> None:
        """All that is open is answered now; what is not done then is an orphan."""
        self.is_released = True
        self.desk.release()
        self.is_released = False

    @rule(data=st.data())
    def come_back(self, data: st.DataObject) -> None:
        if not self.answers:
            return
        message, results = self.answers.pop(data.draw(st.integers(0, len(self.answers) - 1)))
        self.outstanding.discard(message)
        self.take(results)

    @invariant()
    def once(self) -> None:
        assert len(set(self.settled)) == len(self.settled)

    @invariant()
    def a_message_is_outstanding_while_anything_is_awaited(self) -> None:
        assert not self.waiting or self.outstanding

    def teardown(self) -> None:
        """Nothing more happens but what must: every call that was worked on is answered."""
        for _ in range(4 * (self.calls + len(self.calls_of)) + 4):
            while self.on_its_way:
                message = self.on_its_way.pop()
                carrier = self.admit(message)
                for call in self.calls_of[message]:
                    self.desk.done(carrier, call)
            self.desk.flush()
            while self.answers:
                message, results = self.answers.pop()
                self.outstanding.discard(message)
                self.take(results)
        self.once()
        held = {call for message in self.own & self.outstanding for call in self.calls_of[message]}
        assert self.waiting == self.at_work | held, "only what is still at work is still awaited"
        for message in self.own & self.outstanding:
            assert self.at_work & {*self.calls_of[message]}, "one of its calls is"
        if self.waiting:
            arrived = {result for result in self.settled if isinstance(result, tuple)}
            assert len(arrived) == self.items, "items do not wait for the call to end"


TestExchange = Exchange.TestCase


def desk() -> tuple[Desk[str], list[tuple[str, list[str]]]]:
    sent: list[tuple[str, list[str]]] = []
    return Desk(lambda reply, results: sent.append((reply, results))), sent


def test_a_message_is_answered_when_its_calls_are_done() -> None:
    """Without a flush: a lone call costs no turn of a loop."""
    answers, sent = desk()
    carrier = answers.admit("m", 2, poll=False)
    assert answers.done(carrier, "a")
    assert sent == []
    assert not answers.done(carrier, "b")
    assert sent == [("m", ["a", "b"])]


def test_a_slow_call_holds_back_nobody() -> None:
    """A flush answers with what is done; the rest goes with the poll."""
    answers, sent = desk()
    carrier = answers.admit("m", 2, poll=False)
    answers.done(carrier, "quick")
    answers.flush()
    assert sent == [("m", ["quick"])]
    answers.admit("poll", 0, poll=True)
    assert answers.done(carrier, "slow")
    answers.flush()
    assert sent == [("m", ["quick"]), ("poll", ["slow"])]


def test_a_late_poll_takes_what_waits_for_it() -> None:
    """Results that found no message to go with."""
    answers, sent = desk()
    carrier = answers.admit("m", 2, poll=False)
    answers.done(carrier, "a")
    answers.flush()
    answers.done(carrier, "b")
    answers.flush()
    answers.admit("poll", 0, poll=True)
    assert sent[-1] == ("poll", ["b"])


def test_release_answers_all() -> None:
    """Whoever leaves keeps no message."""
    answers, sent = desk()
    answers.admit("m", 1, poll=False)
    answers.admit("poll", 0, poll=True)
    answers.release()
    assert sent == [("m", []), ("poll", [])]
    assert repr(answers) == "<Desk 0 messages open, 0 orphans>"


def test_an_own_message_waits_for_all_its_calls() -> None:
    """A flush leaves it alone, whatever of it is done; it takes orphans along when it goes."""
    answers, sent = desk()
    carrier = answers.admit("own", 2, poll=False, own=True)
    answers.done(carrier, "a")
    answers.more("item")
    answers.flush()
    assert sent == []
    assert not answers.done(carrier, "b")
    assert sent == [("own", ["a", "b", "item"])]


def test_items_go_with_the_message_that_has_least_to_wait_for() -> None:
    """A poll, if there is one; never with one that waits for its own calls."""
    answers, sent = desk()
    answers.admit("own", 1, poll=False, own=True)
    answers.admit("calls", 3, poll=False)
    answers.admit("poll", 0, poll=True)
    for item in ("first", "second", "third"):
        answers.more(item)
        answers.flush()
    assert sent == [("poll", ["first"]), ("calls", ["second"])]
    answers.admit("late poll", 0, poll=True)
    assert sent[-1] == ("late poll", ["third"])


def test_items_come_together() -> None:
    """Those of one turn of the loop, and with the results of the turn."""
    answers, sent = desk()
    carrier = answers.admit("m", 2, poll=False)
    answers.admit("poll", 0, poll=True)
    for item in ("first", "second"):
        answers.more(item)
    answers.done(carrier, "a")
    answers.flush()
    assert sent == [("m", ["a", "first", "second"])]
