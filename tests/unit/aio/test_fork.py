"""The exit of a fork of a process, which ends beside its parent's event loop."""

import os
import sys
from collections.abc import Callable, Iterator

import pytest

from aiorpc_torch import NotInWorld
from aiorpc_torch._aio import fork
from aiorpc_torch._aio.fork import check_not_forked, forks_exit_here, run_in_method


@pytest.mark.parametrize(("reason", "code"), [(None, 0), (3, 3), ("no data", 1)])
def test_a_fork_ends_where_it_exits(reason: object, code: int) -> None:
    """With the code of `sys.exit`, and unwinds no frame beyond the block."""
    owner = os.getpid()
    try:
        with forks_exit_here():
            if (pid := os.fork()) == 0:
                sys.exit(reason)  # type: ignore[arg-type]
    finally:
        if os.getpid() != owner:
            os._exit(99)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == code


@pytest.mark.parametrize(("error", "code"), [(None, 0), (ValueError("no data"), 1)])
def test_a_fork_that_leaves_the_block_otherwise(
    error: Exception | None, code: int, capfd: pytest.CaptureFixture[str]
) -> None:
    """Ends there too, and prints the traceback of an error."""
    owner = os.getpid()
    try:
        with forks_exit_here():
            if (pid := os.fork()) == 0 and error is not None:
                raise error
    finally:
        if os.getpid() != owner:
            os._exit(99)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == code
    assert ("ValueError: no data" in capfd.readouterr().err) is (error is not None)


def test_the_process_itself_exits_as_ever() -> None:
    with pytest.raises(SystemExit), forks_exit_here():
        sys.exit(3)


@pytest.fixture
def worker() -> Iterator[None]:
    """This process is worker `w`."""
    fork.begin_worker("w")
    yield
    fork.end_worker()


def exit_code(code: Callable[[], object]) -> int:
    """That of a fork that runs some code."""
    if (pid := os.fork()) == 0:
        try:
            code()
        finally:
            os._exit(99)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def forked(error: BaseException | None) -> int:
    """Fork; the fork raises or returns, this process returns its exit code."""
    if pid := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if error is not None:
        raise error
    return 0


@pytest.mark.parametrize(
    ("error", "code"),
    [(None, 0), (ValueError("no data"), 1), (SystemExit(3), 3), (StopIteration(), 0)],
)
def test_a_fork_ends_with_its_method(
    worker: None, error: BaseException | None, code: int, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run_in_method(forked, error) == code
    assert ("ValueError: no data" in capfd.readouterr().err) is isinstance(error, ValueError)


def test_a_fork_runs_methods_of_its_own(worker: None) -> None:
    """Only the method that has forked ends it, and those that fork it again."""

    def code() -> None:
        assert run_in_method(abs, -3) == 3
        os._exit(run_in_method(forked, SystemExit(4)))

    assert exit_code(code) == 4


def test_a_fork_is_not_a_worker(worker: None) -> None:
    """A fork of a process that is no worker any more has no restrictions."""

    def check() -> None:
        try:
            check_not_forked()
        except NotInWorld as exc:
            os._exit(4 if "forked from worker 'w'" in str(exc) else 5)
        os._exit(0)

    check_not_forked()
    assert exit_code(check) == 4
    fork.end_worker()
    assert exit_code(check) == 0
