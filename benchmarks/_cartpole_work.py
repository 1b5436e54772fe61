"""What a turn of `benchmarks.cartpole` is to do, and what it found."""

from typing import NamedTuple


class Sizes(NamedTuple):
    """One world and its work."""

    processes: int  # of observers
    each: int = 1  # environments in one of them
    steps: int = 500  # of an environment in a round, at least
    warm: int = 50  # the same in the rounds that come first
    rounds: int = 1  # of each variant, which take turns
    transports: list[str] | None = None  # of TensorPipe


Times = dict[str, list[tuple[int, float, float]]]
"""For "batched" and "unbatched": each round's steps, seconds, and CPU seconds of the agent.

Learning is included.
"""
