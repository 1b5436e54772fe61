"""Values that several swap: one wins, and whoever dies or freezes with the lock hinders nobody."""

import contextlib
import fcntl
import os
import socket
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from aiorpc_torch._directory import shared_values
from aiorpc_torch._directory.shared_values import FileValue, SharedValue, StoreValue
from aiorpc_torch._torch.store import NoStoreError, StoreClient
from tests.support.dropped_packets import drop_incoming


class Place:
    """A place, and as many clients of its value as a test needs."""

    def __init__(self, kind: str, folder: Path) -> None:
        self._path = folder / "value"
        self._store: TCPStore | None = None
        if kind == "store":
            # torch's own socket is an IPv6 one, of which it looks up the names of its clients.
            bare = socket.create_server(("127.0.0.1", 0))
            self._address, fd = bare.getsockname(), bare.detach()
            self._store = TCPStore(*self._address, None, True, master_listen_fd=fd)
        self._clients: list[SharedValue] = []

    def client(self) -> SharedValue:
        connect = lambda: StoreClient(socket.create_connection(self._address, 30))  # noqa: E731
        found = StoreValue("key", connect) if self._store is not None else FileValue(self._path)
        self._clients.append(found)
        return found

    def close(self) -> None:
        for each in self._clients:
            each.close()


@pytest.fixture(params=["file", "store"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    found = Place(request.param, tmp_path)
    yield found
    found.close()


def test_a_value(place: Place) -> None:
    """Only who knows it changes it."""
    one, other = place.client(), place.client()
    assert one.read() is None
    assert not one.swap(b"a", b"b"), "there is none"
    assert one.swap(None, b"\0a")
    assert not other.swap(None, b"b")
    assert other.read() == b"\0a"
    assert other.swap(b"\0a", b"b")
    assert not one.swap(b"\0a", b"c")
    one.clear(b"\0a")
    assert one.read() == b"b"
    one.clear(b"b")
    assert other.read() is None
    assert one.swap(None, b"d")


def test_one_of_many_wins(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """A number that all count up loses no step."""
    monkeypatch.setattr(shared_values, "LOCK_TIMEOUT", 30.0)  # the machine may be busy
    clients = [place.client() for _ in range(8)]
    start = threading.Barrier(len(clients))

    def count(number: int) -> None:
        start.wait(30)
        done = 0
        while done < 20:
            old = clients[number].read()
            count = int((old or b"0").split()[0]) + 1
            done += clients[number].swap(old, b"%d by %d" % (count, number))  # all are different

    with ThreadPoolExecutor(len(clients)) as pool:
        [*pool.map(count, range(len(clients)))]
    assert (clients[0].read() or b"").startswith(b"160 ")


def test_a_lock_that_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a frozen process: an error in time. By one that has died: none."""
    monkeypatch.setattr(shared_values, "LOCK_TIMEOUT", 0.05)
    value = FileValue(tmp_path / "value")
    assert value.swap(None, b"a")
    with (tmp_path / "value.lock").open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(OSError, match=r"another process keeps .*value\.lock locked"):
            value.swap(b"a", b"b")
        assert value.read() == b"a"
    assert value.swap(b"a", b"b")
    value.clear(b"b")
    assert os.listdir(tmp_path) == []


def test_a_file_of_another_program(tmp_path: Path) -> None:
    """However large it is, little of it is read."""
    path = tmp_path / "value"
    with path.open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(ValueError, match=r"value has more than 65536 bytes: remove it, or give"):
        FileValue(path).read()


def test_what_is_removed_stays_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two remove it at once, and one may end at any step: it makes no lock behind the other."""
    value, made = FileValue(tmp_path / "value"), list[Path]()
    opened = shared_values.open_regular

    def open_regular(path: Path, flags: int) -> int:
        if flags & os.O_CREAT and not path.exists():
            made.append(path)
        return opened(path, flags)

    assert value.swap(None, b"a")
    monkeypatch.setattr(shared_values, "open_regular", open_regular)
    with (tmp_path / "value.lock").open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        tries = threading.Event()
        sleep = shared_values.time.sleep
        monkeypatch.setattr(shared_values.time, "sleep", lambda _: (tries.set(), sleep(0.001)))
        other = threading.Thread(target=value.clear, args=(b"a",))
        other.start()
        assert tries.wait(30.0)
        (tmp_path / "value").unlink()
        (tmp_path / "value.lock").unlink()
    other.join(30.0)
    assert not other.is_alive()
    value.clear(b"a")
    assert made == []
    assert os.listdir(tmp_path) == []


def test_a_directory_that_is_not_there(tmp_path: Path) -> None:
    """A mistake in the path is none of a world that has not started."""
    value = FileValue(tmp_path / "nowhere" / "value")
    with pytest.raises(FileNotFoundError, match=r"mount it, or make it: .*nowhere"):
        value.read()
    with pytest.raises(FileNotFoundError, match=r"mount it, or make it: .*nowhere"):
        value.swap(None, b"a")


@pytest.mark.promise("worlds.place")
@pytest.mark.parametrize("suffix", ["", ".lock", ".new"])
@pytest.mark.parametrize("kind", ["a FIFO", "a socket", "a directory", "a device"])
def test_what_is_not_a_file(tmp_path: Path, suffix: str, kind: str) -> None:
    """It is not opened, which may block or act."""
    path = tmp_path / f"value{suffix}"
    if kind == "a socket":
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(str(path))
    elif kind == "a directory":
        path.mkdir()
    elif kind == "a FIFO":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/null")
    value = FileValue(tmp_path / "value")
    with pytest.raises(ValueError, match=f"{path} is {kind}, not a file: remove it, or give"):
        value.swap(None, b"a")
    if not suffix:
        with pytest.raises(ValueError, match=f"{path} is {kind}"):
            value.read()


def test_a_store_that_is_closed_while_it_is_asked() -> None:
    """The close does not wait for the answer, and no connection stays."""
    ours, theirs = socket.socketpair()
    value = StoreValue("key", lambda: StoreClient(ours))
    with ThreadPoolExecutor(1) as pool, theirs:
        reading = pool.submit(value.read)
        theirs.recv(1)
        value.close()
        assert not reading.done()
        theirs.sendall((0).to_bytes(8, "little"))
        assert reading.result(30) is None
        assert ours.fileno() == -1


def test_a_store_that_ends() -> None:
    """An error for the call; the next one connects again."""
    connections: list[socket.socket] = []

    def connect() -> StoreClient:
        ours, theirs = socket.socketpair()
        connections.append(theirs)
        theirs.sendall(b"H") if len(connections) == 2 else None
        theirs.shutdown(socket.SHUT_WR)
        return StoreClient(ours)

    value = StoreValue("key", connect)
    with pytest.raises(ConnectionResetError):
        value.read()
    with pytest.raises(NoStoreError):
        value.swap(None, b"a")
    assert len(connections) == 2
    for each in connections:
        each.close()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux tells of paths")
@pytest.mark.promise("worlds.cut")
def test_a_store_beyond_a_cut() -> None:
    """Its connection would work again long after the link: the next call connects again."""
    with socket.create_server(("127.0.0.1", 0)) as listening, contextlib.ExitStack() as stack:

        def connect() -> StoreClient:
            ours = socket.create_connection(listening.getsockname(), 0.1)
            accepted.append(stack.enter_context(listening.accept()[0]))
            return StoreClient(ours)

        accepted: list[socket.socket] = []
        value = StoreValue("key", connect)
        for _ in range(2):  # the process does not answer, and its kernel acknowledges
            with pytest.raises(TimeoutError):
                value.read()
        drop_incoming(accepted[0])
        assert len(accepted) == 1
        for _ in range(2):
            with pytest.raises(TimeoutError):
                value.swap(None, b"a")
        assert len(accepted) == 2
        value.close()


def test_an_answer_that_comes_late() -> None:
    """It is not taken for that of the next question."""
    ours, theirs = socket.socketpair()
    ours.settimeout(0.05)
    client = StoreClient(ours)
    with ours, theirs:
        with pytest.raises(TimeoutError):
            client.swap("key", b"a", b"b")
        with pytest.raises(TimeoutError):
            client.read("key")
        answer = lambda text: len(text).to_bytes(8, "little") + text  # noqa: E731
        theirs.sendall(answer(b"b") + answer(b"c"))
        assert client.read("key") == b"c"
