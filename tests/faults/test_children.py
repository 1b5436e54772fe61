"""Each fault at the steps of a child's life: all of it ends, and the world goes on."""

import pytest

from .children import FAULTS, STEPS, Run

QUICK = [("start", "cancel")]
# Callbacks between two of the steps that are tried: all of them, in `make test-rest`, and of the
# quick ones in `make test`.
STRIDE, REST_STRIDE, QUICK_STRIDE = 9, 80, 100
MARKS = {STRIDE: pytest.mark.exhaustive, REST_STRIDE: pytest.mark.slow, QUICK_STRIDE: ()}


def _cases() -> list[object]:
    return [
        pytest.param(step, fault, stride, marks=marks, id=f"{step}-{fault}-{stride}")
        for step in STEPS
        for fault in FAULTS
        for stride, marks in MARKS.items()
        if (step, fault) in QUICK or stride != QUICK_STRIDE
    ]


@pytest.mark.worlds
@pytest.mark.promise("joining.faults")
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("step", "fault", "stride"), _cases())
def test_a_fault_at_a_step_of_a_child(step: str, fault: str, stride: int) -> None:
    """The step ends, the others serve, the name serves again, and nothing outlives the world."""
    found = {}
    at, is_hit = 0, True
    while is_hit:
        run = Run(step, fault, at)
        run.run()
        is_hit = run.is_hit
        if run.findings:
            found[at] = run.findings
        # A frozen server is waited for some seconds each time.
        at += stride * (5 if fault == "the server is frozen" else 1)
    assert not found
