"""What is recorded in a context, and when all of it is answered: without calls."""

import torch

from aiorpc_torch._recording import Recorded, Recording


def test_settled_when_all_is_answered() -> None:
    """Whatever the order, and each only once."""
    recording, among, told = Recording(7), set[Recorded](), list[int]()
    recording.when_settled(lambda: told.append(0))
    assert told == [0]
    one, two = recording.begin("one", among), recording.begin("two", among)
    assert one is not None
    assert two is not None
    recording.hold("key", "held")
    recording.when_settled(lambda: told.append(1))
    assert recording.pending == ["one", "two", "held"]
    two.answered(b"")
    one.failed("no answer")
    one.failed("again")
    assert told == [0]
    recording.ended("key")
    recording.ended("key")
    assert told == [0, 1]
    assert not among
    assert recording.lost == [], "it took no gradient along"
    assert recording.made() == "one (1), two (1)"


def test_lost_is_what_took_a_gradient_along() -> None:
    recording = Recording(7)
    for answer in (None, b"without an end"):
        recorded = recording.begin("step", set())
        assert recorded is not None
        sent = recorded.leave([torch.ones(1, requires_grad=True)])
        assert len(sent) == 2
        if answer is None:
            recorded.failed("lost")
        else:
            recorded.answered(answer)
        recorded.failed("it is known")
    assert recording.lost == ["step: lost", "step: was answered without having been served"]


def test_nothing_is_recorded_after_its_end() -> None:
    recording = Recording(7)
    assert recording.begin("call", set()) is not None
    recording.close()
    assert recording.begin("call", set()) is None
    assert "closed, 1 calls pending" in repr(recording)
