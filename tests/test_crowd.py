"""Through what the workers of a world on one machine speak."""

import os
from typing import Any

import pytest

from aiorpc_torch import _local

TIMES = {"start_timeout": 1.0, "stop_timeout": 1.0, "heartbeat": 1.0}


@pytest.mark.parametrize(
    ("workers", "cores", "given", "used"),
    [
        (4, 2, None, None),
        (5, 2, None, ["uv"]),
        (5, 2, ["shm"], ["shm"]),
        (128, 64, None, None),
        (2, 1, ["uv"], ["uv"]),
    ],
)
def test_those_who_poll_are_no_more_than_the_cores_bear(
    monkeypatch: Any, workers: int, cores: int, given: Any, used: Any
) -> None:
    """Of more than two workers for each core none polls, unless it was asked for."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {*range(cores)})
    names = [f"w{rank}" for rank in range(workers)]
    with _local._places(names, 2, given, None, exports=None, **TIMES) as places:
        assert [place.transports for place in places] == [used] * workers
