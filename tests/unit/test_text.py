"""Text of other processes, made printable: by one function, and where it comes in."""

import logging
from typing import Any

import pytest
from msgspec import msgpack

from aiorpc_torch._aio import waiting
from aiorpc_torch._aio.slow_steps import SlowSteps
from aiorpc_torch._aio.waiting import WaitReport
from aiorpc_torch._client.answers import error_of_close
from aiorpc_torch._directory.directory_messages import (
    Failed,
    GiveUp,
    Register,
    Resume,
    read_from_worker,
    read_to_worker,
)
from aiorpc_torch._directory.registration import Registration
from aiorpc_torch._peers.peers import reason_of
from aiorpc_torch._server.calls import ServerCall
from aiorpc_torch._text import printable, printable_parts
from aiorpc_torch.errors import RemoteError, WorkerLost

EVIL = "\x1b]0;title\x07\nWARNING forged \u202etxet"
SHOWN = r"\x1b]0;title\x07\nWARNING forged \u202etxet"


@pytest.mark.promise("security.text")
@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("env:7 of größe, 名前", "env:7 of größe, 名前"),
        ("\x1b[2J\x07\x9b31m", r"\x1b[2J\x07\x9b31m"),  # escape codes, of one byte too
        ("a\nWARNING b\r\tc\u2028d\x85", r"a\nWARNING b\r\tc\u2028d\x85"),
        ("user\u202egpj.exe\u2066", r"user\u202egpj.exe\u2066"),  # bidirectional marks
        ("\udc80\U000e0041\u200b", r"\udc80\U000e0041\u200b"),
    ],
)
def test_what_is_not_printable_is_escaped(text: str, shown: str) -> None:
    assert printable(text) == shown
    assert shown.isprintable()


@pytest.mark.promise("security.text")
def test_the_length_is_bounded() -> None:
    """Also that of the escapes."""
    assert printable("x" * 10, 10) == "x" * 10
    assert printable("x" * 11, 10) == "x" * 9 + "…"
    assert printable("\0" * 10, 10) == r"\x00\x00\…"
    assert len(printable("\U000e0041" * 10**6)) == 4096


def test_parts() -> None:
    found = printable_parts({"\x1b": ["\n", {"a": "\r"}], "n": 1, "x": None})
    assert found == {r"\x1b": [r"\n", {"a": r"\r"}], "n": 1, "x": None}


# ── where it comes in ───────────────────────────────────────────────────────────────────────────


def changed(message: object, **fields: Any) -> bytes:
    """Return the bytes of a message whose registration was changed on its way."""
    found = msgpack.decode(msgpack.encode(message))
    found[1] |= fields
    return msgpack.encode(found)


OWN = Registration("w", 0, 1, "1.0")
FIRST = [Register(OWN, "key"), Resume(OWN, 0, "key", 0, True, "world")]


@pytest.mark.promise("security.text")
@pytest.mark.parametrize("first", FIRST, ids=["register", "resume"])
@pytest.mark.parametrize("name", [EVIL, "", "w\n", "w" * 128, "é"])
def test_a_registration_with_another_name_is_refused(first: object, name: str) -> None:
    with pytest.raises(ValueError, match="a worker's name must be 1 to 127 letters") as caught:
        read_from_worker(changed(first, name=name))
    assert str(caught.value).isprintable()


@pytest.mark.promise("security.text")
def test_the_text_of_a_registration_is_printable() -> None:
    fields = dict.fromkeys(("host", "version", "endpoint", "namespace"), EVIL)
    message: Any = read_from_worker(changed(FIRST[0], **fields, device_maps={EVIL: {EVIL: EVIL}}))
    own = message.registration
    assert str(own) == f"'w' (rank 0, process {own.pid} on {SHOWN})"
    assert (own.version, own.endpoint, own.namespace) == (SHOWN, SHOWN, SHOWN)
    assert own.device_maps == {SHOWN: {SHOWN: SHOWN}}


@pytest.mark.promise("security.text")
def test_the_text_of_messages_of_and_to_the_directory_is_printable() -> None:
    """Names in lists too."""
    assert read_from_worker(msgpack.encode(["GiveUp", EVIL])) == GiveUp(SHOWN)
    assert read_to_worker(msgpack.encode(["Failed", EVIL, None])) == Failed(SHOWN)
    announced: Any = read_to_worker(msgpack.encode(["Announce", EVIL, 1, [EVIL]]))
    assert (announced.name, announced.silent) == (SHOWN, [SHOWN])


@pytest.mark.promise("security.text")
def test_the_reason_of_a_close_is_one_line() -> None:
    """That of a failure is the first line; its traceback is a cause."""
    for what in ("broken", "left", "replaced"):
        assert SHOWN in str(error_of_close("w", what, EVIL))
    failed = error_of_close("w", "failed", EVIL)
    assert str(failed) == r"worker 'w' is lost: \x1b]0;title\x07"


@pytest.mark.promise("security.text")
def test_the_reason_of_a_loss_is_one_line() -> None:
    assert reason_of(WorkerLost("w", EVIL)) == SHOWN
    assert reason_of(RemoteError(EVIL)) == SHOWN


@pytest.mark.promise("security.text")
def test_the_name_of_a_call_is_printable() -> None:
    """A function that travels by value has any name."""

    def function() -> None:
        pass

    function.__qualname__ = EVIL
    assert ServerCall(function, ((), {})).name == SHOWN


@pytest.mark.promise("security.text")
def test_lines_of_the_log_are_lines(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a slow step, and of a wait for peers."""
    monkeypatch.setattr(waiting, "_is_terminal", lambda: False)
    with caplog.at_level(logging.DEBUG, "aiorpc_torch"), WaitReport(logging.INFO, 0.0) as report:
        report.tell(EVIL)
        SlowSteps().note(EVIL, 1.0, 100.0)
    first, second = caplog.messages
    assert first == SHOWN
    assert second.startswith(f"{SHOWN} held the event loop")
