"""Programs are no longer than the tutorials that they replace, and what counts as a line."""

import importlib.util

import pytest

from benchmarks.lines import LIMITS, TUTORIALS, code_lines, limit, program_lines

pytestmark = pytest.mark.skipif(importlib.util.find_spec("ruff") is None, reason="needs ruff")

SOURCE = '''
"""A module."""

import os  # counts


def main() -> None:
    """Print a text."""

    # A comment.
    print(
        os.name, """of two
lines"""
    )
'''


def test_what_is_a_line() -> None:
    """Neither docstrings, nor comments, nor blanks; a text of two lines is two."""
    assert code_lines(SOURCE) == 2 + 5


@pytest.mark.parametrize("program", [*TUTORIALS, *LIMITS])
def test_a_program_is_no_longer_than_its_tutorial(program: str) -> None:
    """With every helper that it imports."""
    assert program_lines(program) <= limit(program)
