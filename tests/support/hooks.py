"""Propagated variables and interceptors of one test: both are of the process."""

import contextlib
from collections.abc import Iterator

import pytest

from aiorpc_torch._context import interception, propagation


@contextlib.contextmanager
def no_hooks() -> Iterator[None]:
    """Start with no variables and no interceptors; forget those of the block."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(propagation, "variables", {})
        patch.setattr(propagation, "used", False)
        patch.setattr(interception, "interceptors", ())
        patch.setattr(interception, "_is_tracing", False)
        yield


def are_looked_for() -> bool:
    """Return whether calls look for variables, interceptors or spans."""
    return propagation.used


@pytest.fixture
def hooks() -> Iterator[None]:
    """Start with no variables and no interceptors; forget those of the test."""
    with no_hooks():
        yield
