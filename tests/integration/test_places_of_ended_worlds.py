"""What a world leaves at its place when all its workers have ended."""

import pytest

from aiorpc_torch._directory.meeting import Meeting

from .test_succession import Place, place, world

__all__ = ["place"]


@pytest.mark.slow
@pytest.mark.promise("succession.record")
@pytest.mark.parametrize("end", ["kill", "leave"])
def test_the_last_workers_end_at_once(place: Place, end: str) -> None:
    """No record is left for a successor, for which the next world there would wait.

    The event loop of the last one is blocked until the coordinator has ended.
    """
    if not place.is_movable:
        pytest.skip("there is no record at a fixed address")
    first, last = world(place, 2)
    last.ask("block")
    first.end_by(end)
    assert last.end() == 0, last.errors()
    meeting = Meeting(place.more["init_method"])
    try:
        assert meeting.look() == (None, None)
    finally:
        meeting.withdraw()
