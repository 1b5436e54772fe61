"""The level of torch's C++ log inside a world."""

import pytest

from aiorpc_torch._torch.compat import (
    CPP_WARNING,
    cpp_log_level,
    find_cpp_log_level,
    hide_in_cpp_log,
)

pytestmark = pytest.mark.skipif(cpp_log_level is None, reason="this torch exports no log level")


def levels() -> tuple[int, int, int]:
    """Return the level before, in and after the block."""
    assert cpp_log_level is not None
    before = cpp_log_level.value
    with hide_in_cpp_log(CPP_WARNING):
        inside = cpp_log_level.value
    return before, inside, cpp_log_level.value


def test_warnings_are_hidden_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCH_CPP_LOG_LEVEL", raising=False)
    assert levels() == (1, 2, 1)


@pytest.mark.parametrize("level", [0, 1, 3])
def test_a_level_that_was_chosen_stays(monkeypatch: pytest.MonkeyPatch, level: int) -> None:
    """By the environment, or by the program."""
    assert cpp_log_level is not None
    if level == 1:
        monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", "WARNING")
    monkeypatch.setattr(cpp_log_level, "value", level)
    assert levels() == (level, level, level)


def test_a_torch_without_the_level() -> None:
    assert find_cpp_log_level("libm.so.6") is None
    assert find_cpp_log_level("no such library") is None
