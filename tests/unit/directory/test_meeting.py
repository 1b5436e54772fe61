"""The place at which workers find the directory of rank 0."""

import os
import socket
import time
from pathlib import Path

import pytest

from aiorpc_torch._aio.awaited import awaited
from aiorpc_torch._directory import meeting
from aiorpc_torch._directory.meeting import Listening, Meeting, Seen
from aiorpc_torch._directory.record import Record
from aiorpc_torch._wire.plain import dump
from tests.support.example_programs import free_port

NOTHING = Seen(None, None)


def listen(meeting: Meeting, seen: Seen = NOTHING) -> Listening:
    made = meeting.listen("a", 2.0, seen)
    assert made is not None
    return made


def close(listening: list[socket.socket]) -> None:
    for each in listening:
        each.close()


def test_a_file_of_an_earlier_run(tmp_path: Path) -> None:
    """Its address is refused, and replaced by the next run; its owner removes it."""
    url = f"file://{tmp_path}/world"
    first, others = Meeting(url, "lo"), Meeting(url)
    with pytest.raises(OSError, match="has not written its address"):
        others.connect()
    made = listen(first)
    found = others.connect()
    assert found.world == made.world
    close([*found.sockets, *made.sockets])
    with pytest.raises(ConnectionRefusedError):
        others.connect()
    second = Meeting(url, "lo")
    other = listen(second, second.look())
    assert made.claim is not None
    made.claim.clear()
    found = others.connect()
    assert found.world == other.world
    close([*found.sockets, *other.sockets])
    assert other.claim is not None
    other.claim.clear()
    assert os.listdir(tmp_path) == []
    (tmp_path / "world.rank0").write_bytes(b"\xc1")
    with pytest.raises(OSError, match="has not written its address"):
        others.connect()
    close(listen(first, first.look()).sockets)


def test_one_of_two_gets_the_place(tmp_path: Path) -> None:
    """The other one's sockets are closed. Numbers of entries stay."""
    first, second = (Meeting(f"file://{tmp_path}/world", "lo") for _ in range(2))
    seen = second.look()
    made = listen(first, seen)
    assert made.claim is not None
    assert made.claim.renew(time.monotonic(), 5, 3)
    assert second.listen("b", 2.0, seen) is None
    claimed = listen(second, second.look())
    assert not made.claim.renew(time.monotonic(), 6, 3)
    record = second.look().record
    assert record is not None
    assert (record.entries, record.joins, record.number) == (5, 3, 2)
    close([*made.sockets, *claimed.sockets])


def test_a_world_on_one_machine_listens_at_no_port(tmp_path: Path) -> None:
    """Of a private URL, and of a file if rank 0 uses the loopback interface."""
    for url in ("unix://here", f"file://{tmp_path}/world"):
        made = listen(Meeting(url, "lo"))
        assert [each.family for each in made.sockets] == [socket.AF_UNIX]
        close(made.sockets)


def test_an_address_on_another_machine(tmp_path: Path) -> None:
    """It is reached by TCP, if rank 0 listens there."""
    path = tmp_path / "world.rank0"
    others = Meeting(f"file://{tmp_path}/world")
    with socket.create_server(("127.0.0.1", 0)) as server:
        path.write_bytes(dump(Record("id", "w0", "elsewhere", *server.getsockname())))
        world, connected = others.connect()
        assert world == "id"
        assert connected[0].getpeername() == server.getsockname()
        close(connected)
    path.write_bytes(dump(Record("id", "w0", "elsewhere")))
    with pytest.raises(OSError, match="'w0', which keeps it, listens on its own machine only"):
        others.connect()
    path.write_bytes(dump(Record("id", "w0", "elsewhere", is_closed=True)))
    with pytest.raises(OSError, match="'w0' kept it, and has left"):
        others.connect()


def test_an_address_that_is_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """The directory of the last world may still close there; another program does not."""
    monkeypatch.setattr(meeting, "_BIND_TIMEOUT", 0.01)
    port = free_port()
    with socket.create_server(("127.0.0.1", port)):
        with pytest.raises(OSError, match=f"another process listens at 127.0.0.1:{port}"):
            Meeting(f"tcp://127.0.0.1:{port}").listen("a")
    free = Meeting(f"tcp://127.0.0.1:{port}", "lo")
    close(listen(free).sockets)
    free.withdraw()


def test_a_process_of_another_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """That listens at the abstract socket is not taken for rank 0."""
    made = listen(Meeting("unix://other"))
    monkeypatch.setattr(meeting, "is_same_user", lambda _: False)
    with pytest.raises(OSError, match="another user"):
        Meeting("unix://other").connect()
    close(made.sockets)


@pytest.mark.parametrize(
    ("url", "master", "host"),
    [
        ("tcp://10.0.0.1:7", None, "10.0.0.1"),
        ("file:///x", None, None),
        ("unix://x", None, None),
        ("env://", "node1", "node1"),
        ("env://", "localhost", None),
    ],
)
def test_the_host_of_rank_0(
    url: str, master: str | None, host: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is unknown if the environment says `localhost`."""
    if master is not None:
        monkeypatch.setenv("MASTER_ADDR", master)
        monkeypatch.setenv("MASTER_PORT", "7")
    assert Meeting(url).host == host


def test_a_socket_that_is_connected_to_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Linux may choose the port that is asked for: nobody listens, and the port is free again."""
    connect, address = socket.create_connection, ("127.0.0.1", free_port())

    def chosen_by_chance(where: tuple[str, int], timeout: float) -> socket.socket:
        return connect(where, timeout, source_address=where)

    monkeypatch.setattr(socket, "create_connection", chosen_by_chance)
    with pytest.raises(ConnectionRefusedError):
        Meeting(f"tcp://{address[0]}:{address[1]}").connect()
    socket.create_server(address).close()


def test_an_address_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """No lookup of a name is blamed: the network is waited for."""
    waited: list[str] = []
    token = awaited.set(waited)
    looked_up: list[object] = []

    def lookup(*_: object) -> None:
        looked_up.append([*waited])

    def connect(*_: object) -> None:
        assert waited == []
        raise TimeoutError("timed out")

    monkeypatch.setattr(socket, "getaddrinfo", lookup)
    monkeypatch.setattr(socket, "create_connection", connect)
    with pytest.raises(TimeoutError):
        meeting._connect_tcp(("192.0.2.1", 29500))
    [[text]] = looked_up
    assert text.startswith("the lookup of the name '192.0.2.1' does not end")
    awaited.reset(token)
