"""The exit of a fork of a process, which ends beside its parent's event loop."""

import os
import sys

import pytest

from aiorpc_torch._aio.fork import forks_exit_here


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


def test_the_process_itself_exits_as_ever() -> None:
    with pytest.raises(SystemExit), forks_exit_here():
        sys.exit(3)
