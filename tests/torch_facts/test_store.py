"""torch's TCPStore: how a key is read from its server."""

import socket

import pytest

from aiorpc_torch._torch.store import NoStoreError, StoreClient
from tests.support.store_servers import server


@pytest.mark.parametrize("use_libuv", [True, False])
def test_a_key_is_read(use_libuv: bool) -> None:
    """By the protocol of torch's client, from either of its servers."""
    store = server(use_libuv)
    with socket.create_connection(("127.0.0.1", store.port), 30) as connected:
        client = StoreClient(connected)
        for expected in (None, b"here"):
            assert client.read("aiorpc") == expected
            store.set("aiorpc", "here")
            store.get("aiorpc")  # `set` does not wait


@pytest.mark.parametrize("answer", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\x15\x03"])
def test_another_program_answers(answer: bytes) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(answer)
        theirs.shutdown(socket.SHUT_WR)
        with pytest.raises(NoStoreError) as raised:
            StoreClient(ours).read("key")
    assert answer.startswith(raised.value.first)


@pytest.mark.parametrize("sent", [b"", bytes([3, 0, 0, 0, 0, 0, 0, 0, 1])])
def test_the_connection_ends(sent: bytes) -> None:
    """Before the answer, or in it."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(sent)
        theirs.shutdown(socket.SHUT_WR)
        with pytest.raises(ConnectionResetError):
            StoreClient(ours).read("key")


def test_an_answer_that_is_late() -> None:
    """As a frozen process, for which the system accepts connections."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = silent.getsockname()
        with socket.create_connection(address, 0.1) as ours:
            client = StoreClient(ours)
            with pytest.raises(TimeoutError):
                client.read("key")
            thawed, _ = silent.accept()
            with thawed:
                thawed.sendall(bytes([1, 0, 0, 0]))
                with pytest.raises(TimeoutError):
                    client.read("key")
                thawed.sendall(bytes([0, 0, 0, 0]) + b"x")
                assert client.read("key") == b"x"
