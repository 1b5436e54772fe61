"""Decide which samples and inserts of a replay buffer may go on, by their ratio: `SampleLimit`.

A state machine without a clock, an event loop or torch. (tests/unit/training/test_ratio.py)
"""

from .numbers import is_number


class SampleLimit:
    """A limit of the samples for each insert into a `Replay`.

        SampleLimit(samples_per_insert=8, min_size=1_000, slack=512)

    The first sample waits for `min_size` inserts. From then on, the items sampled are
    `samples_per_insert` × the inserts after these, give or take `slack` items: a sample waits if it
    would be above that, an insert if it would leave the samples below it. A sample that is too
    large for the slack waits until no insert may go on: neither waits for the other for ever.

    Args:
        samples_per_insert: items sampled for each item inserted.
        min_size: number of inserts before the first sample.
        slack: items by which the samples may be ahead or behind. It holds for samples of up to
            `2 * slack - samples_per_insert` items.

    Raises:
        ValueError: if an argument is invalid.
    """

    def __init__(self, samples_per_insert: float, min_size: int, slack: float) -> None:
        if not (is_number(samples_per_insert) and samples_per_insert > 0):
            raise ValueError(f"samples_per_insert must be positive, got {samples_per_insert!r}")
        if not (is_number(min_size) and min_size >= 1):
            raise ValueError(f"min_size must be at least 1, got {min_size!r}")
        if not (is_number(slack) and slack >= 0):
            raise ValueError(f"slack must be a number of items from 0 on, got {slack!r}")
        self._ratio = samples_per_insert
        self._min_size = min_size
        self._slack = slack
        self._inserted = 0
        self._sampled = 0

    def __repr__(self) -> str:
        rule = f"{self._ratio:g} samples for an insert, min_size={self._min_size}"
        return f"<SampleLimit of {rule}, slack={self._slack:g}>"

    @property
    def lead(self) -> float:
        """Return how many items the samples are ahead of the ratio; negative if behind."""
        return self._sampled - self._ratio * (self._inserted - self._min_size)

    def may_insert(self) -> bool:
        """Return whether an item may be inserted."""
        return self._inserted < self._min_size or self.lead - self._ratio >= -self._slack

    def may_sample(self, size: int) -> bool:
        """Return whether `size` items may be sampled."""
        if self._inserted < self._min_size:
            return False
        return self.lead + size <= self._slack or not self.may_insert()

    def insert(self) -> None:
        """Note an insert."""
        self._inserted += 1

    def sample(self, size: int) -> None:
        """Note a sample of `size` items."""
        self._sampled += size
