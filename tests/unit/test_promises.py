"""Every promise of the documentation is held by a test, and docs/promises.md says by which."""

import ast
from pathlib import Path

import pytest

from tests.support.promises import PAGE, find_marks, load, marked, page, problems

SECTIONS = {
    "calls": {"title": "Calls", "page": "calls.md", "promises": {"order": "In order.", "b": "B."}}
}
MARKS = {"calls.order": ["tests/test_a.py::test_a"], "calls.b": ["tests/test_a.py::test_b"]}


def test_each_promise_is_held() -> None:
    """No promise is without a test, no test names an unknown one, and the page is not stale."""
    assert problems(load(), find_marks(), PAGE.read_text()) == []


def test_what_is_reported() -> None:
    """Each kind of problem is named; without one there is no report."""
    written = page(SECTIONS, MARKS)
    assert "| In order. | `test_a.py::test_a` |" in written
    assert problems(SECTIONS, MARKS, written) == []
    assert problems(SECTIONS, MARKS, written + "x") == [
        "docs/promises.md is stale: run `python -m tests.support.promises --write`"
    ]
    bad = {"calls.order": ["test_a"], "calls.other": ["test_c"]}
    assert problems(SECTIONS, bad, page(SECTIONS, bad)) == [
        "promise calls.b has no test",
        "test_c names the unknown promise calls.other",
    ]


def test_marks_of_functions_and_classes() -> None:
    """Marks on tests, on classes and on their methods are found; other decorators are not."""
    source = """
@pytest.mark.promise("a.b", "a.c")
@other("a.d")
async def test_one(): ...

@pytest.mark.promise("a.e")
class TestTwo:
    @pytest.mark.promise("a.f")
    def test_it(self): ...
"""
    assert list(marked(ast.parse(source))) == [
        ("test_one", ["a.b", "a.c"]),
        ("TestTwo", ["a.e"]),
        ("TestTwo::test_it", ["a.f"]),
    ]
    with pytest.raises(ValueError, match="helper has a promise and is no test"):
        list(marked(ast.parse('@pytest.mark.promise("a.b")\ndef helper(): ...')))
    left = '@pytest.mark.exhaustive\n@pytest.mark.promise("a.b")\ndef test_c(): ...'
    with pytest.raises(ValueError, match="test_c has a promise, and `make test-rest` leaves it"):
        list(marked(ast.parse(left)))


def test_every_test_has_a_tier() -> None:
    """Each file lies in the folder of a tier, from which it gets its mark."""
    tiers = {"unit", "loopback", "faults", "fuzz", "torch_facts"}
    tiers |= {"integration", "network", "cluster", "gpu", "examples"}
    tests = Path(__file__).parents[1]
    assert {path.relative_to(tests).parts[0] for path in tests.rglob("test_*.py")} == tiers
