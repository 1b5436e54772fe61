"""The work and the results of one measurement of `benchmarks.cartpole`."""

from typing import NamedTuple


class Sizes(NamedTuple):
    """The size of a world and of its work."""

    processes: int  # of observers
    each: int = 1  # environments in each of these
    steps: int = 500  # of an environment in a round, at least
    warm: int = 50  # the same in the warm-up rounds
    rounds: int = 1  # of each variant; the variants alternate
    transports: list[str] | None = None  # of TensorPipe
    device: str = "cpu"  # of the agent's network


Times = dict[str, list[tuple[int, float, float]]]
"""Steps, seconds and the agent's CPU seconds of each round, by variant.

Learning is included.
"""
