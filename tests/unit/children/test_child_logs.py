"""Lines of children with their names: splitting, printing, and pipes without children."""

import os
import pty
from collections.abc import Iterator

import pytest
from hypothesis import given, strategies as st

from aiorpc_torch._children import child_logs
from aiorpc_torch._children.child_logs import (
    LAST_LENGTH,
    LAST_LINES,
    LONGEST,
    STDERR,
    STDOUT,
    ChildOutput,
    Lines,
    LogReader,
    Printer,
)


@given(st.lists(st.binary(max_size=8)))
def test_lines_are_whole_however_they_come(chunks: list[bytes]) -> None:
    lines, found = Lines(), list[bytes]()
    for each in chunks:
        found += lines.feed(each.replace(b"\r", b""))
    text = b"".join(chunks).replace(b"\r", b"")
    assert b"\n".join([*found, lines.take_rest()]) == text


def test_what_a_terminal_shows_of_a_line() -> None:
    """A progress bar overwrites itself; Windows ends its lines with two characters."""
    assert Lines().feed(b" 10%\r 20%\r100%\nend\r\n") == [b"100%", b"end"]


def test_a_line_without_an_end_is_cut() -> None:
    [line] = Lines().feed(b"x" * (LONGEST + 1))
    assert len(line) == LONGEST + 1


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> dict[int, bytes]:
    """Return what is written to the streams of this process."""
    found = {STDOUT: b"", STDERR: b""}

    def write(stream: int, data: bytes) -> None:
        found[stream] += data

    monkeypatch.setattr(child_logs, "_write", write)
    return found


def test_each_line_has_the_name(written: dict[int, bytes]) -> None:
    printer = Printer()
    printer.print("a", STDOUT, [b"one", b""])
    printer.print("b", STDERR, [b"two"])
    assert written == {STDOUT: b"[a] one\n[a] \n", STDERR: b"[b] two\n"}


def test_a_line_without_its_end_goes_on_or_is_ended(written: dict[int, bytes]) -> None:
    printer = Printer()
    printer.print("a", STDOUT, [], b"sure? ")
    printer.print("a", STDOUT, [b"yes"])
    printer.print("a", STDOUT, [], b"again? ")
    printer.print("b", STDOUT, [b"no"])
    assert written[STDOUT] == b"[a] sure? yes\n[a] again? \n[b] no\n"


def test_a_stream_whose_reader_has_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    child_logs._write(writer, b"lost\n")
    os.close(writer)


@pytest.fixture
def reader() -> Iterator[LogReader]:
    found = LogReader()
    yield found
    found.close()


def write_and_end(output: ChildOutput, *texts: bytes) -> None:
    """Write to the streams of a child in turn, and end."""
    writers = output.writers
    for number, text in enumerate(texts):
        os.write(writers[number % len(writers)].fileno(), text)
    output.started()


@pytest.mark.promise("top.logs")
def test_nothing_is_lost_at_an_end(reader: LogReader, written: dict[int, bytes]) -> None:
    """Also the line without an end; the last lines are known at once."""
    output = reader.open("a")
    write_and_end(output, b"one\ntwo\nthree")
    assert output.note() == "the last lines of worker 'a':\n  one\n  two\n  three"
    reader.close()
    assert b"".join(written.values()) == b"[a] one\n[a] two\n[a] three\n"


def test_the_last_lines_are_bounded(reader: LogReader, written: dict[int, bytes]) -> None:
    output = reader.open("a")
    write_and_end(output, b"".join(b"%d %s\n" % (n, b"x" * 1000) for n in range(60)))
    note = output.note().splitlines()
    assert len(note) == 1 + LAST_LINES
    assert max(map(len, note[1:])) == 2 + LAST_LENGTH
    assert reader.open("b").note() == ""


def test_lines_that_come_with_the_end_while_others_are_printed(
    reader: LogReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread prints, and the end of the child is noted in another one: nothing is lost."""
    reader.close()  # its steps are taken here
    output, written = reader.open("a"), b""

    def write(stream: int, data: bytes) -> None:
        nonlocal written
        written += data
        if data == b"[a] one\n":
            write_and_end(output, b"two\n")
            output.note()

    monkeypatch.setattr(child_logs, "_write", write)
    os.write(output.writers[0].fileno(), b"one\n")
    for _ in range(2):
        reader._print()
    assert written == b"[a] one\n[a] two\n"


@pytest.mark.parametrize("same", [True, False])
def test_one_pipe_where_both_streams_are_one_file(
    same: bool, monkeypatch: pytest.MonkeyPatch, written: dict[int, bytes]
) -> None:
    """Else each stream keeps its place."""
    monkeypatch.setattr(child_logs, "_is_same_file", lambda *_: same)
    reader = LogReader()
    try:
        write_and_end(reader.open("a"), b"out\n", b"err\n")
    finally:
        reader.close()
    parts = {STDOUT: b"[a] out\n", STDERR: b"[a] err\n"}
    assert written == ({STDOUT: b"".join(parts.values()), STDERR: b""} if same else parts)


def test_a_process_that_keeps_the_pipe_delays_no_end(
    reader: LogReader, written: dict[int, bytes]
) -> None:
    output = reader.open("a")
    kept = os.dup(output.writers[0].fileno())
    write_and_end(output, b"one\n")
    reader.close()
    assert not reader._thread.is_alive()
    os.close(kept)


def test_a_prompt_is_shown_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, written: dict[int, bytes]
) -> None:
    """After a moment; in a file the line waits for its end."""
    monkeypatch.setattr(child_logs, "PROMPT_DELAY", 0.0)
    monkeypatch.setattr(child_logs, "_is_same_file", lambda *_: True)
    terminal, slave = pty.openpty()
    monkeypatch.setattr(child_logs, "STDOUT", slave)
    written[slave] = b""
    output = ChildOutput("a", lambda: None, is_one_file=True)
    [source] = output.sources
    os.write(output.writers[0].fileno(), b"sure? ")
    source.pump()
    assert source.awaits_end
    source.print(Printer())
    assert written[slave] == b"[a] sure? "
    assert not source.awaits_end
    for descriptor in (terminal, slave):
        os.close(descriptor)
    output.started()
    source.close()
