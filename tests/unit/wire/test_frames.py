"""Frames: any split of any sequence is read back, and memory is bounded before it is reserved."""

import struct

import pytest
from hypothesis import example, given, strategies as st

from aiorpc_torch._wire.frames import (
    CALLS,
    CLOSE,
    HEADER,
    MAX_FRAME,
    RESULTS,
    WHERE,
    FrameReader,
    ProtocolError,
    frame,
)
from aiorpc_torch.errors import RpcError

Frame = tuple[int, bytes]

KINDS = range(CALLS, WHERE + 1)
IDLE = 1 << 16  # bytes of the buffer while no frame is larger

small = st.binary(max_size=50)
large = st.builds(
    lambda size, first: bytes([first]) * size,
    st.sampled_from([IDLE - 6, IDLE - 5, IDLE - 4, IDLE, 2 * IDLE, MAX_FRAME - 1, MAX_FRAME]),
    st.integers(0, 255),
)
frames = st.lists(st.tuples(st.sampled_from(KINDS), small | large), max_size=6)
strides = st.lists(st.sampled_from([1, 2, 3, 4, 5, 6, 7, 1000, IDLE, 1 << 21]), min_size=1)


def put(reader: FrameReader, data: bytes) -> int:
    """Write as much as the buffer takes, as a transport does; return how much that is."""
    buffer = reader.buffer()
    assert len(buffer) > 0, "asyncio refuses an empty buffer"
    count = min(len(buffer), len(data))
    buffer[:count] = data[:count]
    reader.end += count
    return count


def take_all(reader: FrameReader) -> list[Frame]:
    """The frames that are complete."""
    found = []
    while (each := reader.next()) is not None:
        found.append(each)
    return found


def feed(reader: FrameReader, data: bytes) -> list[Frame]:
    """What is read of all the bytes, given in as large pieces as the buffer takes."""
    found = []
    while data:
        data = data[put(reader, data) :]
        found += take_all(reader)
    return found


def capacity(reader: FrameReader) -> int:
    """Bytes of memory behind the buffer."""
    memory = reader.buffer().obj
    assert isinstance(memory, bytearray)
    return len(memory)


# ── what is sent is read ────────────────────────────────────────────────────────────────────────


@given(frames, strides)
@example([(CALLS, b"x" * MAX_FRAME), (RESULTS, b""), (CLOSE, b"y" * MAX_FRAME)], [1 << 21])
def test_any_split_is_read_back(sent: list[Frame], pieces: list[int]) -> None:
    """Frames come out as they went in, wherever the stream of bytes was cut."""
    rest = b"".join(frame(kind, data) for kind, data in sent)
    reader, found, turn = FrameReader(), [], 0
    while rest:
        # A stride of single bytes through a large frame would take all day.
        piece = pieces[turn % len(pieces)] if turn < 100 else len(rest)
        rest = rest[put(reader, rest[:piece]) :]
        found += take_all(reader)
        turn += 1
    assert found == sent
    assert reader.end == 0


@given(frames, st.data())
def test_frames_may_be_read_late(sent: list[Frame], data: st.DataObject) -> None:
    """Whole frames may stay unread in the buffer while more bytes come behind them."""
    rest = b"".join(frame(kind, content) for kind, content in sent)
    reader, found = FrameReader(), []
    while rest:
        rest = rest[put(reader, rest) :]
        if data.draw(st.booleans()) and (each := reader.next()) is not None:
            found.append(each)
    assert found + take_all(reader) == sent


@given(st.sampled_from(KINDS), small, st.data())
def test_a_part_of_a_frame_is_none(kind: int, content: bytes, data: st.DataObject) -> None:
    """Nothing is read until the last byte of a frame has come."""
    whole = frame(kind, content)
    cut = data.draw(st.integers(0, len(whole) - 1))
    reader = FrameReader()
    assert feed(reader, whole[:cut]) == []
    assert reader.end == cut
    assert feed(reader, whole[cut:]) == [(kind, content)]


def test_frames_that_were_read_do_not_change() -> None:
    """The data of a frame is a copy: the buffer is written again."""
    reader = FrameReader()
    (first,) = feed(reader, frame(CALLS, b"first"))
    feed(reader, frame(CALLS, b"other"))
    assert first == (CALLS, b"first")


# ── what is refused ─────────────────────────────────────────────────────────────────────────────


@pytest.mark.promise("security.long")
@pytest.mark.parametrize("length", [MAX_FRAME + 1, 1 << 31, (1 << 32) - 1])
def test_a_length_beyond_the_limit(length: int) -> None:
    """Its header is refused, and no memory was reserved for what it announces."""
    reader = FrameReader()
    put(reader, struct.pack("<IB", length, CALLS))
    assert capacity(reader) <= HEADER.size + MAX_FRAME
    with pytest.raises(ProtocolError, match=str(length)):
        reader.next()


@pytest.mark.promise("security.memory")
@given(st.integers(MAX_FRAME + 1, (1 << 32) - 1), st.integers(0, 255), frames)
def test_no_more_memory_than_one_frame_needs(length: int, kind: int, sent: list[Frame]) -> None:
    """Whatever a header says behind whatever frames, the buffer stays within one frame."""
    reader = FrameReader()
    rest = b"".join(frame(kind, data) for kind, data in sent) + HEADER.pack(length, kind)
    found = []
    while rest:
        rest = rest[put(reader, rest) :]
        if rest:
            found += take_all(reader)
        assert capacity(reader) <= max(HEADER.size + MAX_FRAME, 2 * IDLE)
    while len(found) < len(sent):
        each = reader.next()
        assert each is not None
        found.append(each)
    assert found == sent
    with pytest.raises(ProtocolError):
        reader.next()


@pytest.mark.promise("security.long")
@pytest.mark.parametrize("kind", [0, WHERE + 1, 255])
def test_an_unknown_kind(kind: int) -> None:
    """It is refused before its data has come, and before memory is reserved."""
    reader = FrameReader()
    put(reader, HEADER.pack(10, kind))
    with pytest.raises(ProtocolError, match=f"kind {kind}"):
        reader.next()
    assert issubclass(ProtocolError, RpcError)


def test_a_broken_stream_stays_broken() -> None:
    """A second attempt to read the same bytes is refused as the first."""
    reader = FrameReader()
    put(reader, HEADER.pack(1 << 31, CALLS))
    for _ in range(2):
        with pytest.raises(ProtocolError):
            reader.next()


def test_frames_that_are_too_large_are_not_made() -> None:
    """The limit itself is the largest frame that can be sent."""
    assert len(frame(CALLS, bytes(MAX_FRAME))) == HEADER.size + MAX_FRAME
    with pytest.raises(ValueError, match=str(MAX_FRAME)):
        frame(CALLS, bytes(MAX_FRAME + 1))


# ── the buffer ──────────────────────────────────────────────────────────────────────────────────


@given(st.lists(st.tuples(st.sampled_from(KINDS), small), max_size=6))
def test_small_frames_need_a_small_buffer(sent: list[Frame]) -> None:
    """The buffer is never empty, and does not grow for frames that fit into it."""
    reader = FrameReader()
    for kind, data in sent:
        feed(reader, frame(kind, data))
        assert capacity(reader) == IDLE


def test_the_buffer_shrinks_after_a_large_frame() -> None:
    """A connection that once carried a large frame does not keep memory for it."""
    reader = FrameReader()
    large = frame(CALLS, bytes(MAX_FRAME))
    put(reader, large[:100])
    assert capacity(reader) == len(large), "memory for the rest of it at once"
    assert feed(reader, large[100:]) == [(CALLS, bytes(MAX_FRAME))]
    assert capacity(reader) == IDLE


def test_a_large_frame_is_received_in_one_piece() -> None:
    """Once its header is known, the buffer takes the rest of it without being moved again."""
    reader = FrameReader()
    large = frame(CALLS, bytes(MAX_FRAME))
    put(reader, large[: HEADER.size])
    assert put(reader, large[HEADER.size :]) == MAX_FRAME
    assert reader.next() == (CALLS, bytes(MAX_FRAME))


@pytest.mark.parametrize("size", [IDLE - HEADER.size, MAX_FRAME])
def test_memory_for_a_large_frame_behind_a_small_one(size: int) -> None:
    """The header of the incomplete frame counts, and the room that is left behind its start."""
    reader = FrameReader()
    put(reader, frame(CALLS, b"x") + HEADER.pack(size, RESULTS))
    assert take_all(reader) == [(CALLS, b"x")]
    assert len(reader.buffer()) >= size


@given(frames, strides)
def test_the_buffer_holds_one_frame(sent: list[Frame], pieces: list[int]) -> None:
    """It is no larger than the frame that is being received needs, whatever came before."""
    rest = b"".join(frame(kind, data) for kind, data in sent)
    reader, found, turn = FrameReader(), 0, 0
    while rest:
        piece = pieces[turn % len(pieces)] if turn < 100 else len(rest)
        rest = rest[put(reader, rest[:piece]) :]
        found += len(take_all(reader))
        needed = HEADER.size + len(sent[found][1]) if found < len(sent) else 0
        assert capacity(reader) <= max(IDLE, needed)
        turn += 1
    assert capacity(reader) == IDLE
