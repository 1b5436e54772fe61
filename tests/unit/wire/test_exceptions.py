"""Failures as they travel: what their text says, and what a caller raises from them."""

import asyncio
import copy
import pickle
from collections.abc import Callable

import pytest

from aiorpc_torch import CallTimeout, RemoteError, WorkerLost
from aiorpc_torch._wire.exceptions import RemoteFailure, copy_exception, ensure_raisable
from aiorpc_torch.types import RemoteTraceback
from tests.support import odd_exceptions
from tests.support.odd_exceptions import UNPRINTABLE, BadStr, Formatted, look


def raised(exc: BaseException) -> BaseException:
    """Return `exc` with a traceback, as a worker catches it."""
    try:
        raise exc  # the raising line
    except BaseException as caught:
        return caught


def travel(failure: RemoteFailure) -> BaseException:
    """Return what a caller gets: the failure is pickled, and opened elsewhere."""
    return pickle.loads(pickle.dumps(failure)).exception()


def cross(exc: BaseException) -> BaseException:
    return travel(RemoteFailure.of(raised(exc), "ps"))


@pytest.mark.promise("exceptions.pickle")
def test_errors_of_calls_pickle_plainly() -> None:
    """They keep their text and attributes through `pickle` and `copy`."""
    late = CallTimeout("too late", worker="ps", method="PS.update")
    lost = WorkerLost("ps", "it was killed", method="PS.update")
    for sent in (late, lost, CallTimeout("too late"), CallTimeout(), WorkerLost("ps")):
        for got in (pickle.loads(pickle.dumps(sent)), copy.copy(sent)):
            assert look(got) == look(sent)
            assert str(got) == str(sent)
    assert (late.worker, late.method) == (lost.worker, lost.method) == ("ps", "PS.update")
    assert str(lost) == "worker 'ps' is lost: it was killed; PS.update may have run"
    assert CallTimeout("too late").method is WorkerLost("ps").method is None


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


def test_an_exception_that_cannot_be_printed() -> None:
    """A raising `__str__` stops nothing: the class crosses, and the text says what failed."""
    failure = RemoteFailure.of(raised(BadStr("arg")), "ps")
    got = travel(failure)
    assert type(got) is BadStr
    assert got.args == ("arg",)
    assert "BadStr" in failure.summary
    assert "BadStr" in failure.text


@pytest.mark.parametrize("make", UNPRINTABLE.values(), ids=UNPRINTABLE)
def test_describing_never_raises(make: Callable[[], BaseException]) -> None:
    """Python's own printing fails for some exceptions; the caller still hears of them."""
    failure = RemoteFailure.of(raised(make()), "ps")
    assert "raise exc  # the raising line" in failure.text
    assert failure.summary
    got = travel(failure)
    assert isinstance(got.__cause__, RemoteTraceback)
    assert isinstance(copy_exception(make(), "f"), Exception)


@pytest.mark.promise("exceptions.hops")
def test_a_second_hop_keeps_the_class() -> None:
    """What a worker passes on from another worker arrives as itself once more."""
    once = cross(Formatted(1, "x"))
    twice = travel(RemoteFailure.of(raised(once), "relay"))
    assert look(twice) == look(once)
    assert isinstance(twice.__cause__, RemoteTraceback)
    assert twice.__cause__.worker == "relay"
    assert "on worker 'ps':" in twice.__cause__.text


def test_a_replica_of_a_stop_is_a_text() -> None:
    """It names the function that was running, and its cause is the exception itself."""
    sent = StopIteration("text of it")
    got = copy_exception(sent, "Agent.select")
    assert type(got) is RemoteError
    assert str(got).startswith("Agent.select raised StopIteration")
    assert got.__cause__ is sent
