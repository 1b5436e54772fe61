"""The check of the interpreter, which every import of the package makes."""

import sys
from types import SimpleNamespace

import pytest

from aiorpc_torch._aio import interpreter


def without_gil(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python 3.11 and 3.12 do not have the function."""
    monkeypatch.setattr(sys, "_is_gil_enabled", lambda: False, raising=False)


def test_without_the_gil_the_import_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error says what to do."""
    monkeypatch.delenv(interpreter.SWITCH, raising=False)
    without_gil(monkeypatch)
    with pytest.raises(ImportError, match=r"PYTHON_GIL=1, or AIORPC_TORCH_FREE_THREADED=1"):
        interpreter.check_interpreter()


def test_without_the_gil_on_demand(monkeypatch: pytest.MonkeyPatch) -> None:
    """A variable permits it."""
    without_gil(monkeypatch)
    monkeypatch.setenv(interpreter.SWITCH, "1")
    interpreter.check_interpreter()


def test_a_private_name_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names it and the supported versions."""
    gone = (*interpreter.PRIVATE_NAMES, (SimpleNamespace(), "_gone"))
    monkeypatch.setattr(interpreter, "PRIVATE_NAMES", gone)
    with pytest.raises(ImportError, match=r"supports CPython 3\.11 to 3\.14.*without _gone$"):
        interpreter.check_interpreter()
