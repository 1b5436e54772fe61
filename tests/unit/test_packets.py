"""A captured stream is whole however its packets came, and over the end of the numbers."""

import pytest
from hypothesis import given, strategies as st

from tests.support.packets import Stream

LAST = (1 << 32) - 1


@given(
    st.sampled_from([0, 7, LAST - 20, LAST]),
    st.lists(st.integers(1, 9), min_size=1, max_size=9),
    st.data(),
)
def test_whole(initial: int, sizes: list[int], data: st.DataObject) -> None:
    sent = bytes(range(sum(sizes)))
    starts = [sum(sizes[:each]) for each in range(len(sizes))]
    packets = [(at, sent[at : at + size]) for at, size in zip(starts, sizes, strict=True)]
    again = data.draw(st.lists(st.sampled_from(packets)))  # and the beginning of some
    stream = Stream(initial)
    for at, part in data.draw(st.permutations([*packets, *((at, part[:1]) for at, part in again)])):
        stream.take((initial + 1 + at) & LAST, part)
    assert stream.joined() == sent


def test_a_lost_packet() -> None:
    stream = Stream(0)
    stream.take(1, b"ab")
    stream.take(4, b"d")
    with pytest.raises(AssertionError, match="no packet with the bytes 2 to 3 was seen"):
        stream.joined()
