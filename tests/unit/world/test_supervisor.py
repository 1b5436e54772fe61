"""Texts for failures of the children of a local world."""

import pytest

from aiorpc_torch import WorkerLost
from aiorpc_torch._world.supervisor import _reason


@pytest.mark.parametrize(
    ("failure", "reason"),
    [
        (WorkerLost("a", "it died"), "it died"),
        (WorkerLost("b", "it died"), "worker 'b' is lost: it died"),
        (ValueError("no data"), "no data"),
    ],
)
def test_the_reason_of_a_failure(failure: Exception, reason: str) -> None:
    """The death of a child is said without its name, that of a peer which it met with its name."""
    assert _reason("a", failure) == reason
