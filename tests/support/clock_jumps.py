"""A wall clock that jumps: each time it is read, it is an hour late or an hour fast, in turn."""

import itertools
import time

HOUR = 3600.0

_true_time = time.time
_offsets = itertools.cycle((-HOUR, HOUR))


def jumping() -> float:
    return _true_time() + next(_offsets)


def jump(_: str) -> None:
    """From now on in this process: an initializer."""
    time.time = jumping


def offsets() -> list[float]:
    """What two reads of the clock are wrong by."""
    return [time.time() - _true_time() for _ in range(2)]
