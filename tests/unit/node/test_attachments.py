"""The error for calls to a worker of torch's world that cannot attach."""

import pytest

from aiorpc_torch import WorkerUnreachable
from aiorpc_torch._node.attachments import _refusal

NOT_THERE = "On WorkerInfo(id=1, name=w):\nModuleNotFoundError(\"No module named 'aiorpc_torch"


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        (f"{NOT_THERE}'\")", "it does not have aiorpc_torch: install it there"),
        (f"{NOT_THERE}._endpoint'\")", "it has another version of aiorpc_torch"),
        ("AttributeError: no attribute 'attach_message'", "it has another version"),
    ],
)
def test_why_a_worker_cannot_attach(text: str, remedy: str) -> None:
    """Without the package, or with one whose modules and functions have other names."""
    error = _refusal("w", RuntimeError(text))
    assert isinstance(error, WorkerUnreachable)
    assert error.reason.startswith(remedy)
