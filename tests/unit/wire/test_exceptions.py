"""Failures as they travel: what their text says, and what a caller raises from them."""

import asyncio
import pickle

import pytest

from aiorpc_torch import RemoteError
from aiorpc_torch._wire.exceptions import RemoteFailure, copy_exception, ensure_raisable
from aiorpc_torch.types import RemoteTraceback
from tests.support import odd_exceptions
from tests.support.odd_exceptions import Formatted, look


def raised(exc: BaseException) -> BaseException:
    """Return `exc` with a traceback, as a worker catches it."""
    try:
        raise exc  # the raising line
    except BaseException as caught:
        return caught


def travel(failure: RemoteFailure) -> BaseException:
    """Return what a caller gets: the failure is pickled, and opened elsewhere."""
    return pickle.loads(pickle.dumps(failure)).exception()


@pytest.mark.promise("exceptions.text")
def test_a_class_that_is_not_here_arrives_as_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the callee can import and the caller cannot."""
    sent = pickle.dumps(RemoteFailure.of(raised(Formatted(1, "far away")), "ps"))
    monkeypatch.delattr(odd_exceptions, "Formatted")
    got = pickle.loads(sent).exception()
    assert type(got) is RemoteError
    assert "Formatted: [1] far away" in str(got)


def test_never_raised_and_without_a_traceback() -> None:
    """An exception that was made and not raised crosses all the same."""
    got = travel(RemoteFailure.of(Formatted(1, "x"), "ps"))
    assert look(got) == look(Formatted(1, "x"))
    assert isinstance(got.__cause__, RemoteTraceback)


def test_each_look_makes_a_new_exception() -> None:
    """Two who raise the same failure do not write into one traceback."""
    failure = RemoteFailure.of(raised(ValueError("x")), "ps")
    assert failure.exception() is not failure.exception()
    with pytest.raises(ValueError, match="x") as caught:
        raise failure.exception()
    assert isinstance(caught.value.__cause__, RemoteTraceback)
    assert repr(failure) == "<RemoteFailure on ps: ValueError: x>"


@pytest.mark.promise("exceptions.exits")
def test_only_what_must_not_be_raised_is_changed() -> None:
    """`raisable` hands an exception back as it is, unless it would mean the caller's own task."""
    exc = ValueError("x")
    assert ensure_raisable(exc, "f") is exc
    assert exc.__cause__ is None
    stop = asyncio.CancelledError()
    changed = ensure_raisable(stop, "f")
    assert type(changed) is RemoteError
    assert changed.__cause__ is stop


def test_a_replica_of_a_stop_is_a_text() -> None:
    """It names the function that was running, and its cause is the exception itself."""
    sent = StopIteration("text of it")
    got = copy_exception(sent, "Agent.select")
    assert type(got) is RemoteError
    assert str(got).startswith("Agent.select raised StopIteration")
    assert got.__cause__ is sent
