"""What is recorded in a context, and when all of it is answered: without calls."""

import asyncio

import torch

from aiorpc_torch._context.recording import ContextRecord, RecordedCall


def test_settled_when_all_is_answered() -> None:
    """Whatever the order, and each only once."""
    recording, among, told = ContextRecord(7), set[RecordedCall](), list[int]()
    recording.when_settled(lambda: told.append(0))
    assert told == [0]
    one, two = (recording.begin(name, "b", among) for name in ("one", "two"))
    assert one is not None
    assert two is not None
    recording.hold("key", "held")
    recording.when_settled(lambda: told.append(1))
    assert recording.pending == ["one of worker 'b'", "two of worker 'b'", "held"]
    two.answered(b"")
    one.failed("no answer")
    one.failed("again")
    assert told == [0]
    recording.release("key")
    recording.release("key")
    assert told == [0, 1]
    assert not among
    assert recording.lost == [], "it took no gradient along"
    assert recording.describe_calls() == "one of worker 'b' (1), two of worker 'b' (1)"


def test_lost_is_what_took_a_gradient_along() -> None:
    recording = ContextRecord(7)
    for answer in (None, b"without an end"):
        recorded = recording.begin("step", "b", set())
        assert recorded is not None
        (sent,) = recorded.attach_arguments([torch.ones(1, requires_grad=True)])
        assert sent.grad_fn is not None
        if answer is None:
            recorded.failed("lost")
        else:
            recorded.answered(answer)
        recorded.failed("it is known")
    assert recording.lost == [
        "step of worker 'b': lost",
        "step of worker 'b': was answered without being served",
    ]


def test_nothing_is_recorded_after_its_end() -> None:
    recording = ContextRecord(7)
    assert recording.begin("call", "b", set()) is not None
    recording.close()
    assert recording.begin("call", "b", set()) is None
    assert (recording.is_open, recording.pending) == (False, ["call of worker 'b'"])


def test_closed_as_soon_as_it_is_settled() -> None:
    """What is called between the last answer and the call's own would be waited for in vain."""
    for early in (True, False):
        recording, among = ContextRecord(7), set[RecordedCall]()
        late: list[RecordedCall | None] = []
        if not early:
            recording.hold("key", "held")
        recording.when_settled(lambda: late.append(recording.begin("late", "b", among)), close=True)  # noqa: B023
        assert recording.is_open is not early
        recording.release("key")
        assert late == [None]


def test_no_graph_is_kept_after_its_end() -> None:
    """A task that was started in a context keeps what it was a part of, as long as it lives."""
    recording = ContextRecord(7, torch.ones(()))
    recording.hold("key", "held")
    assert len(recording.recv_edges) == 1
    recording.close()
    recording.release("key", torch.ones(()))
    assert recording.recv_edges == []


async def test_a_backward_begins_when_all_is_settled() -> None:
    recording = ContextRecord(7, torch.ones(()))
    recording.hold("call", "call")
    holding = asyncio.ensure_future(recording.hold_when_settled("key", "backward"))
    await asyncio.sleep(0)
    assert recording.pending == ["call"]
    recording.release("call", torch.zeros(()))
    assert len(await holding) == 2
    assert recording.pending == ["backward"]
