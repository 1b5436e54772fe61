"""Propagated variables and interceptors of one test: both are of the process."""

import pytest

from aiorpc_torch._protocol import interception, propagation


@pytest.fixture
def hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start with no variables and no interceptors; forget those of the test."""
    monkeypatch.setattr(propagation, "variables", {})
    monkeypatch.setattr(propagation, "used", False)
    monkeypatch.setattr(interception, "interceptors", ())
