"""Segments: what one process writes, another maps; nothing else is mapped."""

import ctypes
import gc
import mmap
import os
import subprocess
import sys
import tempfile

import pytest

from aiorpc_torch._aio import segments
from aiorpc_torch._aio.segments import (
    Probe,
    Segment,
    SegmentError,
    SegmentLost,
    SegmentName,
    map_segment,
    read_probe,
)
from tests.support.segment_files import mapped_segments, open_segments

SIZE = 4 * mmap.PAGESIZE


def write(segment: Segment, offset: int, data: bytes) -> None:
    content = ctypes.create_string_buffer(data)
    segment.write(offset, ctypes.addressof(content), len(data))


def test_what_is_written_is_mapped() -> None:
    """A shared mapping sees what is written later, too."""
    segment = Segment(SIZE)
    buffer = map_segment(segment.name, private=False).buffer()
    write(segment, 100, b"abc")
    assert bytes(buffer[100:103]) == b"abc"


def test_what_a_private_mapping_writes_is_its_own() -> None:
    """Neither the sender nor another receiver sees it."""
    segment = Segment(SIZE)
    write(segment, 0, b"abc")
    one, other = (map_segment(segment.name, private=True).buffer() for _ in range(2))
    one[0:3] = b"xyz"
    assert bytes(one[0:3]) == b"xyz"
    assert bytes(other[0:3]) == b"abc"
    assert bytes(map_segment(segment.name, private=False).buffer()[0:3]) == b"abc"


@pytest.mark.parametrize(("offset", "size"), [(-1, 1), (SIZE, 1), (SIZE - 1, 2), (0, SIZE + 1)])
def test_a_write_beyond_a_segment(offset: int, size: int) -> None:
    """It is refused before anything is copied."""
    segment = Segment(SIZE)
    with pytest.raises(ValueError, match="exceed"):
        segment.write(offset, 0, size)


def test_a_segment_cannot_shrink() -> None:
    """So no receiver gets a SIGBUS."""
    segment = Segment(SIZE)
    with pytest.raises(PermissionError):
        os.ftruncate(segment.name.descriptor, 0)


def test_nothing_is_left_of_a_segment() -> None:
    """Neither descriptor nor mapping, once the objects are gone."""
    gc.collect()  # what other tests have left
    before = open_segments(), mapped_segments()
    segment = Segment(SIZE)
    buffer = map_segment(segment.name, private=False).buffer()
    assert open_segments() == before[0] + 1
    assert mapped_segments() == before[1] + 2
    del segment, buffer
    assert (open_segments(), mapped_segments()) == before


def test_what_is_no_segment() -> None:
    """Another file, a smaller segment, a closed one, a file that may shrink."""
    segment = Segment(SIZE)
    name = segment.name
    with tempfile.TemporaryFile() as file:
        file.truncate(SIZE)
        plain = SegmentName(os.getpid(), file.fileno(), os.fstat(file.fileno()).st_ino, SIZE)
        for wrong in (
            plain,
            name._replace(size=SIZE + 1),
            name._replace(size=0),
            name._replace(inode=name.inode + 1),
            name._replace(descriptor=1 << 20),
            name._replace(pid=1 << 30),
        ):
            with pytest.raises((SegmentError, OSError)):
                map_segment(wrong, private=False)
    del segment
    with pytest.raises(SegmentError) as raised:
        map_segment(name, private=False)
    assert not isinstance(raised.value, SegmentLost)  # the process lives


@pytest.mark.parametrize("is_reaped", [False, True])
def test_a_segment_of_an_ended_process(is_reaped: bool) -> None:
    """Its loss differs from a wrong name, also while the process waits to be reaped."""
    making = (
        "from aiorpc_torch._aio.segments import Segment\n"
        f"print(*(segment := Segment({SIZE})).name, flush=True)\ninput()"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", making], text=True, **pipes) as process:
        assert process.stdout is not None
        name = SegmentName(*map(int, process.stdout.readline().split()))
        map_segment(name, private=False)
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | (0 if is_reaped else os.WNOWAIT))
        with pytest.raises(SegmentLost):
            map_segment(name, private=False)


def test_a_pipe_is_not_opened() -> None:
    """Opening one could wait for its other end."""
    reading, writing = os.pipe()
    try:
        inode = os.fstat(reading).st_ino
        with pytest.raises(SegmentError):
            map_segment(SegmentName(os.getpid(), reading, inode, 1), private=False)
    finally:
        os.close(reading)
        os.close(writing)


def test_a_probe_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its secret is read by whoever may map segments, and by no one else."""
    probe = Probe()
    assert read_probe(probe.name) == probe.secret
    assert Probe().secret != probe.secret
    assert read_probe(probe.name._replace(pid=1 << 30)) == b""
    monkeypatch.setenv(segments.SWITCH, "0")
    assert read_probe(probe.name) == b""


def test_without_memfd_nothing_is_supported(monkeypatch: pytest.MonkeyPatch) -> None:
    """On another system, for one."""
    assert segments.is_supported()
    monkeypatch.delattr(os, "memfd_create")
    assert not segments.is_supported()


def test_who_can_map_the_segments_of_whom(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes of one user in the same namespaces; none where segments are off or unknown."""
    script = "from aiorpc_torch._aio.segments import sharing_group; print(sharing_group())"
    group = segments.sharing_group()
    other = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert other.stdout.strip() == group != ""
    monkeypatch.setattr(os, "getuid", lambda: 1 << 30)
    assert segments.sharing_group() not in ("", group)
    with monkeypatch.context() as patch:
        patch.setenv(segments.SWITCH, "0")
        assert segments.sharing_group() == ""

    def missing(_: str) -> str:
        raise FileNotFoundError

    monkeypatch.setattr(os, "readlink", missing)
    assert segments.sharing_group() == ""
