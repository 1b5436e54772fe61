"""The classes of errors: what catches what, what they say, and that they travel."""

import copy
import pickle

import pytest

import aiorpc_torch as aiorpc
from aiorpc_torch import errors

GONE = [aiorpc.WorkerLost, aiorpc.WorkerLeft, aiorpc.WorkerUnreachable]
ALL = [
    each
    for each in vars(errors).values()
    if isinstance(each, type) and issubclass(each, aiorpc.RpcError)
]


@pytest.mark.promise("exceptions.classes")
@pytest.mark.parametrize(
    ("error", "bases"),
    [
        (aiorpc.NotInWorld, (RuntimeError,)),
        (aiorpc.UnknownWorker, (ValueError,)),
        (aiorpc.NoMembers, (LookupError,)),
        (aiorpc.WorkerGone, (ConnectionError,)),
        (aiorpc.WorkerLost, (aiorpc.WorkerGone,)),
        (aiorpc.WorkerLeft, (aiorpc.WorkerGone,)),
        (aiorpc.WorkerUnreachable, (aiorpc.WorkerGone,)),
        (aiorpc.CallTimeout, (TimeoutError,)),
    ],
)
def test_an_error_is_what_python_calls_it(error: type, bases: tuple[type, ...]) -> None:
    """Code that does not know this library catches it by the usual class."""
    assert issubclass(error, (aiorpc.RpcError, *bases))
    assert all(issubclass(error, base) for base in bases)


@pytest.mark.promise("exceptions.classes")
def test_a_peer_that_has_left_is_not_a_process_without_a_world() -> None:
    """`except WorkerGone` means a peer, and does not hide that this process is in no world."""
    assert not issubclass(aiorpc.NotInWorld, aiorpc.WorkerGone | ConnectionError)
    assert not any(issubclass(each, aiorpc.NotInWorld) for each in GONE)


@pytest.mark.promise("exceptions.may_have_run")
def test_every_error_says_whether_the_call_may_have_run() -> None:
    """As an attribute of the class, which an instance may correct."""
    assert {each.__name__ for each in ALL if each.may_have_run} == {
        "RpcError",
        "CallTimeout",
        "WorkerGone",
        "WorkerLost",
        "WorkerLeft",
        "RemoteError",
        "BatchContractError",
    }


def test_which_workers_may_return() -> None:
    """A lost one may; one that has left does not, nor one that this process cannot connect to."""
    assert [each("w").may_return for each in GONE] == [True, False, False]
    cut = aiorpc.WorkerUnreachable("w", "cut", may_return=True)
    assert pickle.loads(pickle.dumps(cut)).may_return


@pytest.mark.parametrize("kind", GONE)
def test_who_is_gone_and_why(kind: type[aiorpc.WorkerGone]) -> None:
    """The text names the worker, the reason, the call, and whether it may have run."""
    error = kind("w", "it fell", method="Net.forward", may_have_run=True)
    assert (error.worker, error.reason, error.method) == ("w", "it fell", "Net.forward")
    assert str(error).startswith("worker 'w' ")
    assert str(error).endswith(": it fell; Net.forward may have run")
    assert str(kind("w", "x", method="f", may_have_run=False)).endswith(": x; f was not sent")
    assert not str(kind("w", "it fell")).endswith("sent")


def test_a_worker_that_has_left_needs_no_reason() -> None:
    """It left."""
    assert str(aiorpc.WorkerLeft("w")) == "worker 'w' has left its world"
    assert aiorpc.WorkerLost("w").reason == "the connection broke"


@pytest.mark.parametrize("kind", GONE)
@pytest.mark.parametrize("again", [copy.copy, lambda error: pickle.loads(pickle.dumps(error))])
def test_an_error_travels_with_what_it_says(kind: type[aiorpc.WorkerGone], again: object) -> None:
    """Class, text and attributes, also those that a program has added."""
    error = kind("w", "it fell", method="f", may_have_run=False)
    error.add_note("a note")
    read = again(error)  # type: ignore[operator]
    assert (type(read), str(read), vars(read)) == (kind, str(error), vars(error))


@pytest.mark.parametrize(
    ("error", "may_have_run"),
    [
        (aiorpc.NotInWorld("no", may_have_run=True), True),
        (aiorpc.NotInWorld("no"), False),
        (aiorpc.UnknownWorker("no"), False),
        (aiorpc.NoMembers("no"), False),
    ],
)
def test_other_errors_travel(error: aiorpc.RpcError, may_have_run: bool) -> None:
    """With whether the call may have run."""
    read = pickle.loads(pickle.dumps(error))
    assert (type(read), read.args, read.may_have_run) == (type(error), ("no",), may_have_run)
