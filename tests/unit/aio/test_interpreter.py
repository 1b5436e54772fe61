"""The check of the interpreter, which every import of the package makes."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

import aiorpc_torch
from aiorpc_torch._aio import interpreter
from tests.support.sources import parse


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


def test_a_private_name_of_an_object_of_a_module(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names it also if the object is gone."""
    gone = (*interpreter.PRIVATE_NAMES, (SimpleNamespace(), "_gone._part"))
    monkeypatch.setattr(interpreter, "PRIVATE_NAMES", gone)
    with pytest.raises(ImportError, match=r"without _gone\._part$"):
        interpreter.check_interpreter()


def standard_modules(tree: ast.AST) -> Iterator[str]:
    """Yield the names under which a module imports from the standard library."""
    for each in ast.walk(tree):
        if isinstance(each, ast.Import):
            sources = [alias.name for alias in each.names]
        elif isinstance(each, ast.ImportFrom) and not each.level and each.module:
            sources = [each.module] * len(each.names)
        else:
            continue
        for alias, source in zip(each.names, sources, strict=True):
            if source.partition(".")[0] in sys.stdlib_module_names:
                yield alias.asname or alias.name.partition(".")[0]


def private_names(path: Path) -> Iterator[str]:
    """Yield the private names of the standard library that a file uses, as "module._name"."""
    tree = parse(path)
    modules = {*standard_modules(tree)}
    for each in ast.walk(tree):
        if isinstance(each, ast.Attribute) and each.attr.startswith("_") and "__" not in each.attr:
            root = each.value
            while isinstance(root, ast.Attribute):
                root = root.value
            if isinstance(root, ast.Name) and root.id in modules:
                yield ast.unparse(each)


def test_every_private_name_is_checked() -> None:
    """The package uses no private name of the standard library that its import does not check."""
    package = Path(aiorpc_torch.__file__).parent
    used = {name for path in package.rglob("*.py") for name in private_names(path)} - {"os._exit"}
    assert "spawn._main" in used
    checked = {part for _, name in interpreter.PRIVATE_NAMES for part in name.split(".")}
    assert {name for name in used if name.rpartition(".")[2] not in checked} == set()
