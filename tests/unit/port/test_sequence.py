"""Two ends of a connection, and flows between them that are lost at any byte, in virtual time."""

from typing import Any

import pytest
from hypothesis import given, strategies as st

from aiorpc_torch._port.sequence import (
    _ACKNOWLEDGEMENT,
    _HEAD,
    _PING,
    COUNT,
    OPENING,
    TICKS,
    Sequence,
    format_opening,
    read_opening,
)

WINDOW = 64
LARGEST = 40  # bytes that are put at once


class End:
    """One end, what it was given, and what has come to it."""

    def __init__(self) -> None:
        self.sequence = Sequence(WINDOW)
        self.given, self.found = b"", b""
        self.wire = b""  # bytes on their way from here

    def put(self, data: bytes) -> None:
        if self.sequence.has_room:
            self.given += data
            self.sequence.put(data)

    def send(self) -> None:
        while parts := self.sequence.next():
            self.wire += b"".join(parts)

    def feed(self, data: bytes) -> None:
        self.found += b"".join(self.sequence.feed(data))

    @property
    def kept(self) -> int:
        return sum(map(len, self.sequence._kept))


class Pair:
    """Both ends, and a flow."""

    def __init__(self) -> None:
        self.ends = End(), End()

    def both(self) -> Any:
        return (self.ends, self.ends[::-1])

    def carry(self, side: int, size: int) -> None:
        near, far = self.both()[side]
        near.send()
        data, near.wire = near.wire[:size], near.wire[size:]
        if data:
            far.feed(data)

    def lose(self) -> None:
        """Both directions, with what is on its way; the next flow begins."""
        numbers = [each.sequence.received for each in self.ends]
        for end, number in zip(self.ends, reversed(numbers), strict=True):
            end.wire = b""
            end.sequence.resume(number)

    def check(self) -> None:
        for near, far in self.both():
            assert near.given.startswith(far.found)
            assert near.kept <= WINDOW + LARGEST
            if far.sequence.is_over:
                assert near.sequence.is_ended
                assert far.found == near.given

    def settle(self) -> None:
        for _ in range(4):
            for side in (0, 1):
                self.carry(side, 1 << 20)
            for each in self.ends:
                assert each.sequence.tick(is_reading=True)


sides = st.integers(0, 1)
steps = st.one_of(
    st.tuples(st.just("put"), sides, st.binary(min_size=1, max_size=LARGEST)),
    st.tuples(st.just("put"), sides, st.just(b"")),
    st.tuples(st.just("carry"), sides, st.integers(1, 60)),
    st.tuples(st.just("carry"), sides, st.integers(1, 60)),
    st.tuples(st.just("tick"), sides, st.booleans()),
    st.tuples(st.just("lose")),
)


@given(st.lists(steps, max_size=80))
def test_nothing_is_lost_doubled_or_reordered(taken: list[tuple[Any, ...]]) -> None:
    """Whatever is lost, and when; and no end keeps more than its window."""
    pair = Pair()
    for name, *args in taken:
        if name == "put":
            pair.ends[args[0]].put(args[1])
        elif name == "tick":
            pair.ends[args[0]].sequence.tick(is_reading=args[1])
        else:
            getattr(pair, name)(*args)
        pair.check()
    pair.lose()
    pair.settle()
    pair.check()
    for near, far in pair.both():
        assert far.found == near.given
        assert far.sequence.is_over == near.sequence.is_ended == near.sequence.has_arrived
        assert near.kept == 0


@given(
    st.lists(st.tuples(sides, st.binary(max_size=3)), max_size=20),
    st.sampled_from([(0,), (1,), (0, 1)]),
)
def test_a_flow_that_carries_nothing_in_a_direction(
    before: list[tuple[int, bytes]], cut: tuple[int, ...]
) -> None:
    """An end notices it within a heartbeat; a flow that carries is never dead."""
    pair = Pair()
    for side, data in before:
        pair.ends[side].put(data)
        pair.settle()
    for _ in range(3 * TICKS):
        assert all(each.sequence.tick(is_reading=True) for each in pair.ends)
        for side in (0, 1):
            pair.carry(side, 1 << 20)
    ticks, is_alive = 0, True
    while is_alive:
        ticks += 1
        is_alive = min([each.sequence.tick(is_reading=True) for each in pair.ends])
        for side in (0, 1):
            pair.carry(side, 0 if side in cut else 1 << 20)
    assert TICKS // 2 < ticks < TICKS


def test_an_end_that_does_not_read_shows_that_it_lives() -> None:
    pair = Pair()
    for _ in range(3 * TICKS):
        pair.ends[0].sequence.tick(is_reading=False)
        assert pair.ends[1].sequence.tick(is_reading=True)
        pair.carry(0, 1 << 20)


def test_a_window_that_is_full_and_acknowledged() -> None:
    """By bytes alone: no tick has to come."""
    pair = Pair()
    for _ in range(200):
        pair.ends[0].put(bytes(LARGEST))
        pair.carry(0, 1 << 20)
        pair.carry(1, 1 << 20)
    assert len(pair.ends[1].found) == 200 * LARGEST


def test_what_an_end_sends_and_when() -> None:
    """Bytes at once. An acknowledgement for each eighth of the window, or by a tick; a ping rarely.

    A reader that stands is not asked whether it lives, and is never dead.
    """
    near, far = Sequence(WINDOW), Sequence(WINDOW)

    def sent(end: Sequence) -> bytes:
        return b"".join(part for parts in iter(end.next, []) for part in parts)

    def number(end: Sequence) -> int:
        kind, found = _HEAD.unpack(sent(end))
        assert kind == _ACKNOWLEDGEMENT
        return int(found)

    assert sent(near) == b""
    near.put(bytes(7))
    far.feed(sent(near))
    assert sent(far) == b"", "seven of 64 bytes"
    near.put(b"8")
    far.feed(sent(near))
    assert number(far) == 8
    near.put(b"9")
    far.feed(sent(near))
    assert sent(far) == b"", "one since the last"
    assert far.tick(is_reading=True)
    assert number(far) == 9
    assert far.tick(is_reading=True)
    assert sent(far) == _HEAD.pack(_PING, 0), "nothing to acknowledge"
    assert all(far.tick(is_reading=False) for _ in range(TICKS))
    assert number(far) == 9, "no ping, but a sign of life"


@given(st.lists(st.binary(min_size=1, max_size=8), min_size=1, max_size=4), st.data())
def test_frames_that_come_in_two_parts(puts: list[bytes], data: st.DataObject) -> None:
    """Cut at any byte, in a head too."""
    near = Sequence()
    for each in puts:
        near.put(each)
    wire = b"".join(part for parts in iter(near.next, []) for part in parts)
    cut = data.draw(st.integers(0, len(wire)))
    far = Sequence()
    assert b"".join(far.feed(wire[:cut]) + far.feed(wire[cut:])) == b"".join(puts)


@pytest.mark.parametrize(
    "frame",
    [
        b"\x04" + bytes(8),
        b"\xff" + bytes(8),
        b"\x02" + (1).to_bytes(8, "little"),
        b"\x01" + bytes(8) + b"\x00" + bytes(8),
        b"\x01" + bytes(8) + b"\x01" + bytes(8),
    ],
)
def test_an_end_that_breaks_the_rules(frame: bytes) -> None:
    """An unknown frame, bytes that were never sent, bytes after the end."""
    with pytest.raises(ValueError, match=r"unexpected frame|1 bytes acknowledged, of 0"):
        Sequence().feed(frame)
    for number in (1, 1 << 63):
        with pytest.raises(ValueError, match="acknowledged, of 0"):
            Sequence().resume(number)


@given(st.binary(max_size=100))
def test_any_bytes(data: bytes) -> None:
    """They are taken, or refused; what they announce takes no memory."""
    sequence = Sequence()
    try:
        found = sequence.feed(data)
    except ValueError:
        return
    assert sum(map(len, found)) <= len(data)


@given(st.binary(min_size=16, max_size=16), st.integers(0, 2**64 - 1), st.booleans())
def test_openings(identity: bytes, number: int, is_new: bool) -> None:
    opening = format_opening(identity, number, is_new=is_new)
    assert len(opening) == OPENING
    if is_new and number:
        with pytest.raises(ValueError, match=f"a new connection that has brought {number} bytes"):
            read_opening(opening)
    else:
        assert read_opening(opening) == (identity, is_new, number)
    assert COUNT.unpack(COUNT.pack(number)) == (number,)
