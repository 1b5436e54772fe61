"""The answers of a link, as a protocol of two state machines without torch or a loop.

A model of the caller keeps the one promise the desk relies on: while it waits for anything, a
message is outstanding. Messages and answers are delayed and reordered at will.
"""

from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from aiorpc_torch._desk import Carrier, Desk


class Exchange(RuleBasedStateMachine):
    """Every call is answered exactly once, whatever is delayed, and none is left behind."""

    running = Bundle("running")

    def __init__(self) -> None:
        super().__init__()
        self.desk: Desk[int] = Desk(self.answer)
        self.on_its_way: list[tuple[int, list[int]]] = []  # messages: number, calls
        self.answers: list[tuple[int, list[int]]] = []  # answers: message, results
        self.answered_messages: set[int] = set()
        self.outstanding: set[int] = set()
        self.waiting: set[int] = set()
        self.settled: list[int] = []
        self.calls = self.messages = 0
        self.at_work: set[int] = set()

    def answer(self, reply: Any, results: list[int]) -> None:
        assert reply not in self.answered_messages, "a message is answered once"
        self.answered_messages.add(reply)
        self.answers.append((reply, results))

    def send(self, calls: list[int]) -> None:
        self.on_its_way.append((self.messages, calls))
        self.outstanding.add(self.messages)
        self.messages += 1

    @rule(count=st.integers(1, 4))
    def call(self, count: int) -> None:
        calls = list(range(self.calls, self.calls + count))
        self.calls += count
        self.waiting.update(calls)
        self.send(calls)

    @rule()
    def cancel_message(self) -> None:
        """A message with no calls that is no poll: answered at once."""
        self.on_its_way.append((self.messages, []))
        self.outstanding.add(self.messages)
        number = self.messages
        self.messages += 1
        self.on_its_way.pop()
        self.desk.admit(number, 0, poll=False)
        assert number in self.answered_messages

    @rule(target=running, data=st.data())
    def arrive(self, data: st.DataObject) -> list[tuple[Carrier[int], int]]:
        if not self.on_its_way:
            return []
        index = data.draw(st.integers(0, len(self.on_its_way) - 1))
        number, calls = self.on_its_way.pop(index)
        carrier = self.desk.admit(number, len(calls), poll=not calls)
        self.at_work.update(calls)
        return [(carrier, call) for call in calls]

    @rule(target=running, jobs=consumes(running), flush=st.booleans(), count=st.integers(1, 3))
    def work(
        self, jobs: list[tuple[Carrier[int], int]], flush: bool, count: int
    ) -> list[tuple[Carrier[int], int]]:
        for carrier, call in jobs[:count]:
            self.at_work.discard(call)
            wanted = self.desk.done(carrier, call)
            if wanted and flush:
                self.desk.flush()
        return jobs[count:]

    @rule()
    def flush(self) -> None:
        self.desk.flush()

    @rule(data=st.data())
    def come_back(self, data: st.DataObject) -> None:
        if not self.answers:
            return
        index = data.draw(st.integers(0, len(self.answers) - 1))
        number, results = self.answers.pop(index)
        self.outstanding.discard(number)
        self.settled += results
        self.waiting.difference_update(results)
        if self.waiting and not self.outstanding:
            self.send([])  # the caller's promise: a poll

    @invariant()
    def once(self) -> None:
        assert len(set(self.settled)) == len(self.settled)

    @invariant()
    def a_message_is_outstanding_while_anything_is_awaited(self) -> None:
        assert not self.waiting or self.outstanding

    def teardown(self) -> None:
        """Nothing more happens but what must: every call that was worked on is answered."""
        for _ in range(4 * (self.calls + self.messages) + 4):
            while self.on_its_way:
                number, calls = self.on_its_way.pop()
                carrier = self.desk.admit(number, len(calls), poll=not calls)
                for call in calls:
                    self.desk.done(carrier, call)
            self.desk.flush()
            while self.answers:
                number, results = self.answers.pop()
                self.outstanding.discard(number)
                self.settled += results
                self.waiting.difference_update(results)
                if self.waiting and not self.outstanding:
                    self.send([])
        self.once()
        assert self.waiting == self.at_work, "only what is still at work is still awaited"


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
