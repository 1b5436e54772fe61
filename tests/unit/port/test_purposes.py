"""The first bytes of a connection."""

import contextlib
import ssl

import pytest
from hypothesis import given, strategies as st

from aiorpc_torch._port.purposes import (
    MAX_FIRST,
    PREFACE,
    PURPOSES,
    HelloReader,
    preface,
    read_preface,
    server_name,
)


def hello(name: str | None) -> bytes:
    """What a client of TLS sends first."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    received, sent = ssl.MemoryBIO(), ssl.MemoryBIO()
    with pytest.raises(ssl.SSLWantReadError):
        context.wrap_bio(received, sent, server_hostname=name).do_handshake()
    return sent.read()


@pytest.mark.parametrize("purpose", PURPOSES)
def test_a_purpose_arrives(purpose: str) -> None:
    """Also in parts, of which the first ones say nothing."""
    data = preface(purpose)
    assert len(data) == PREFACE
    assert [read_preface(data[:n]) for n in range(PREFACE)] == [None] * PREFACE
    assert read_preface(data) == purpose
    reader, first = HelloReader(), hello(server_name(purpose))
    assert [reader.read(first[:n]) for n in (0, 1, 5, 60, len(first) - 1)] == [None] * 5
    assert reader.read(first) == reader.read(first + b"rest") == purpose


@pytest.mark.parametrize(
    "data",
    [b"GET / HTTP/1.1\r\n\r\n", b"aiorpc2", b"aiorpc19", hello(None), b"\x16" * MAX_FIRST],
    ids=["http", "version", "purpose", "tls", "long"],
)
def test_others_are_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="it is no worker without TLS"):
        read_preface(data)
    with pytest.raises(ValueError, match="it is no worker with TLS"):
        HelloReader().read(data)


def test_a_name_of_another_service() -> None:
    with pytest.raises(ValueError, match="no worker"):
        HelloReader().read(hello("calls.example"))


@given(st.binary(max_size=MAX_FIRST))
def test_any_bytes(data: bytes) -> None:
    """They are refused, or more is awaited."""
    for read in (read_preface, HelloReader().read):
        with contextlib.suppress(ValueError):
            assert read(data) in (None, *PURPOSES)
