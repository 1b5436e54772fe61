"""Requests to etcd whose answers are lost, late or endless, and what a URL of etcd means."""

import contextlib
import http.server
import socket
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from aiorpc_torch._directory import etcd_value
from aiorpc_torch._directory.etcd_place import Place
from aiorpc_torch._directory.etcd_value import CALL_TIMEOUT, EtcdValue
from tests.support.certificates import Authority
from tests.support.etcd_servers import START, Cluster, Member, needs_etcd, running
from tests.support.slack import SLACK

from .test_etcd_value import Named, alone, until

__all__ = ["alone"]

pytestmark = pytest.mark.slow


@needs_etcd
def test_a_world_that_died_leaves_nothing(alone: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """The key goes with its lease, and can be made again."""
    monkeypatch.setattr(etcd_value, "LEASE_TTL", 2)
    value = alone.value()
    assert value.swap(None, b"1")
    until(lambda: value.read() is None)
    assert not value.swap(b"1", b"2")
    assert value.swap(None, b"3")


class Gateway:
    """A port before a member that runs transactions, and closes without an answer."""

    def __init__(self, member: Member) -> None:
        self.member = member
        self.is_held = False
        """Keep a transaction instead of running it."""
        self.held: list[bytes] = []
        self.then: Callable[[], object] = bool
        """Called when a transaction has run."""
        gateway = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                data = self.rfile.read(int(self.headers["Content-Length"]))
                self.close_connection = True
                is_transaction = self.path.endswith("/txn")
                if is_transaction and gateway.is_held:
                    gateway.held.append(data)
                    return
                answer = gateway.forward(self.path, data)
                if is_transaction:
                    gateway.then()
                    return
                self.send_response(200)
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *args: object) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)

    def forward(self, path: str, data: bytes) -> bytes:
        url = urllib.request.Request(self.member.client + path, data)
        with urllib.request.urlopen(url, timeout=START) as answer:
            return bytes(answer.read())

    def value(self) -> EtcdValue:
        """Return a value whose first member is this port, and whose second one is etcd."""
        port = self.server.server_address[1]
        return EtcdValue(f"etcd://127.0.0.1:{port},{self.member.host}/world")


@pytest.fixture
def gateway(alone: Cluster) -> Iterator[Gateway]:
    found = Gateway(alone.members[0])
    thread = threading.Thread(target=found.server.serve_forever, args=(0.05,))
    thread.start()
    yield found
    found.server.shutdown()
    thread.join()
    found.server.server_close()


@needs_etcd
def test_a_swap_whose_answer_is_lost(gateway: Gateway, alone: Cluster) -> None:
    """It is sent again, and finds that it has written."""
    assert gateway.value().swap(None, b"1")
    assert gateway.value().swap(b"1", b"2")
    gateway.value().clear(b"2")
    assert alone.value().read() is None


@needs_etcd
def test_a_value_that_was_replaced_before_the_answer(gateway: Gateway, alone: Cluster) -> None:
    """Whether it was written is known for the first value of a key, by the lease."""
    other = alone.value()
    gateway.then = lambda: other.swap(b"1", b"2")
    assert gateway.value().swap(None, b"1")
    assert other.read() == b"2"
    gateway.then = lambda: other.swap(b"3", b"4")
    with pytest.raises(OSError, match="may have been written"):
        gateway.value().swap(b"2", b"3")
    assert other.read() == b"4"


@needs_etcd
def test_a_request_that_arrives_late(gateway: Gateway, alone: Cluster) -> None:
    """It does not create the key again, once another attempt has."""
    gateway.is_held = True
    assert gateway.value().swap(None, b"1")
    value = alone.value()
    value.clear(b"1")
    [late] = gateway.held
    with pytest.raises(urllib.request.HTTPError) as refused:
        gateway.forward("/v3/kv/txn", late)
    with refused.value:
        assert b"lease not found" in refused.value.read()
    assert value.read() is None


def test_a_name_that_is_not_resolved(monkeypatch: pytest.MonkeyPatch) -> None:
    """The lookup itself has no time limit; the call has one."""
    answered = threading.Event()

    def wait(*_: object, **__: object) -> None:
        answered.wait()
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", wait)
    value = EtcdValue("etcd://db.invalid:2379/world")
    begin = time.monotonic()
    with pytest.raises(OSError, match="no answer from etcd"):
        value.read()
    assert time.monotonic() - begin < CALL_TIMEOUT + SLACK
    answered.set()
    with pytest.raises(OSError, match="Name or service not known"):
        value.read()


HEAD = b"HTTP/1.0 200 OK\r\nX: "
BODY = b"HTTP/1.0 200 OK\r\nContent-Length: 100000000000\r\n\r\n{"


@pytest.mark.parametrize(
    ("first", "more", "pause"),
    [
        (HEAD, b"x", 0.05),
        (BODY, b" ", 0.05),
        (BODY, bytes(1 << 20), 0.0),
    ],
    ids=["head", "body", "large"],
)
def test_an_answer_that_never_ends(first: bytes, more: bytes, pause: float) -> None:
    """A byte now and then, or many, hold no call up. No connection of it is left, nor memory."""
    began, ended, sent = threading.Semaphore(0), threading.Semaphore(0), list[int]()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            began.release()
            written = 0
            with contextlib.suppress(OSError):
                self.wfile.write(first)
                while True:
                    written += self.wfile.write(more)
                    time.sleep(pause)
            sent.append(written)
            ended.release()

        def log_message(self, *args: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        begin = time.monotonic()
        with pytest.raises(OSError, match="no answer from etcd"):
            EtcdValue(f"etcd://127.0.0.1:{server.server_address[1]}/world").swap(b"1", b"2")
        assert time.monotonic() - begin < CALL_TIMEOUT + SLACK
        while began.acquire(blocking=False):
            assert ended.acquire(timeout=START)
        assert max(sent) < 1 << 25  # what the system buffers
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("answer", ["{}", "[]", "hello", '{"header": 1'])
def test_another_program(answer: str) -> None:
    """What answers and is not etcd is named."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.end_headers()
            self.wfile.write(answer.encode())

        def log_message(self, *args: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        with pytest.raises(OSError, match="no answer of etcd's JSON gateway"):
            EtcdValue(f"etcd://127.0.0.1:{server.server_address[1]}/world").read()
        server.shutdown()
        thread.join()


@needs_etcd
def test_tls(tmp_path: Path) -> None:
    """The certificate of etcd is that of the authority in the URL, for the host in the URL."""
    cert, key, ca = Named(tmp_path).files()
    other = Authority(tmp_path, "another one")
    options = ("--cert-file", cert, "--key-file", key)
    with running(Member(tmp_path / "m0", options, "https"), query=f"?ca={ca}") as cluster:
        value = cluster.value(query=f"?ca={ca}")
        assert value.swap(None, b"1")
        assert value.read() == b"1"
        [member] = cluster.members
        named = EtcdValue(f"etcd://localhost:{member.port}/world?ca={ca}")
        for refused in (cluster.value(query=f"?ca={other.ca}"), cluster.value(query="?tls=1")):
            with pytest.raises(OSError, match=r"certificate is refused.*ca="):
                refused.read()
        with pytest.raises(OSError, match="certificate is refused"):
            named.read()
        with pytest.raises(OSError, match=r"\?ca="):
            cluster.value().read()


def test_parts_of_a_url() -> None:
    """Each is percent-decoded; the password is in no text."""
    found = Place.parse("etcd://me:p%40%2F%3F@a:1,[fe80::1]:2/my/world%20?tls=1&ca=/a+b%26c")
    assert found.members == (("a", 1), ("fe80::1", 2))
    assert (found.user, found.password, found.name) == ("me", "p@/?", "my/world ")
    assert (found.has_tls, found.ca, found.cert) == (True, "/a+b&c", "")
    assert str(found) == "etcd://a:1,[fe80::1]:2/my/world "
    assert "p@" not in repr(found)
    assert not Place.parse("etcd://a:1/b").has_tls
