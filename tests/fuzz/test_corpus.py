"""What fuzzing has found, read again; and bytes of every kind of message, which seed it."""

import tracemalloc
from pathlib import Path

import pytest

from tests.fuzz.readers import READERS, read_any
from tests.support.malformed import BYTES

MAX_FRAME = 1 << 20  # bytes of a frame
CORPUS = sorted((Path(__file__).parent / "corpus").iterdir())


@pytest.mark.promise("security.memory")
def test_the_corpus() -> None:
    """Each file is refused or read, and takes memory in proportion to its length.

    The reader of frames reserves the length that a header declares, which is limited.
    """
    assert CORPUS
    read_any(b"\0")  # what is made once
    for file in CORPUS:
        data = file.read_bytes()
        tracemalloc.start()
        try:
            read_any(data)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        is_frames = data[0] % len(READERS) == [*READERS].index("frames")
        assert peak < 300_000 + 200 * len(data) + is_frames * MAX_FRAME, file.name


@pytest.mark.promise("security.memory")
@pytest.mark.parametrize("what", BYTES)
@pytest.mark.parametrize("reader", range(len(READERS)), ids=READERS)
def test_bytes_that_declare_much(reader: int, what: str) -> None:
    """Every reader refuses them."""
    read_any(bytes([reader]) + BYTES[what][:MAX_FRAME])
