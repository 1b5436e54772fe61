"""The place at which workers find the directory of rank 0."""

import os
import socket
from pathlib import Path

import pytest

from aiorpc_torch._directory import meeting
from aiorpc_torch._directory.meeting import Meeting, Published
from aiorpc_torch._wire.plain import dump
from tests.support.example_programs import free_port


def close(listening: list[socket.socket]) -> None:
    for each in listening:
        each.close()


def test_a_file_of_an_earlier_run(tmp_path: Path) -> None:
    """Its address is refused, and replaced by the next run in one step; its owner removes it."""
    url = f"file://{tmp_path}/world"
    first, others = Meeting(url, "lo"), Meeting(url)
    with pytest.raises(FileNotFoundError):
        others.connect()
    world, listening = first.listen()
    found, connected = others.connect()
    assert found == world
    close([*connected, *listening])
    with pytest.raises(ConnectionRefusedError):
        others.connect()
    second = Meeting(url, "lo")
    world, listening = second.listen()
    first.withdraw()
    found, connected = others.connect()
    assert found == world
    close([*connected, *listening])
    second.withdraw()
    assert os.listdir(tmp_path) == []
    (tmp_path / "world.rank0").write_bytes(b"\xc1")
    with pytest.raises(OSError, match="no address of rank 0"):
        others.connect()


def test_a_world_on_one_machine_listens_at_no_port(tmp_path: Path) -> None:
    """Of a private URL, and of a file if rank 0 uses the loopback interface."""
    for url in ("unix://here", f"file://{tmp_path}/world"):
        _, listening = Meeting(url, "lo").listen()
        assert [each.family for each in listening] == [socket.AF_UNIX]
        close(listening)


def test_an_address_on_another_machine(tmp_path: Path) -> None:
    """It is reached by TCP, if rank 0 listens there."""
    path = tmp_path / "world.rank0"
    others = Meeting(f"file://{tmp_path}/world")
    with socket.create_server(("127.0.0.1", 0)) as server:
        path.write_bytes(dump(Published("id", "elsewhere", *server.getsockname())))
        world, connected = others.connect()
        assert world == "id"
        assert connected[0].getpeername() == server.getsockname()
        close(connected)
    path.write_bytes(dump(Published("id", "elsewhere", "", 0)))
    with pytest.raises(OSError, match="rank 0 listens on its own machine only"):
        others.connect()


def test_an_address_that_is_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """The directory of the last world may still close there; another program does not."""
    monkeypatch.setattr(meeting, "_BIND_TIMEOUT", 0.01)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=f"another process listens at 127.0.0.1:{port}"):
            Meeting(f"tcp://127.0.0.1:{port}").listen()
    free = Meeting(f"tcp://127.0.0.1:{port}", "lo")
    _, listening = free.listen()
    close(listening)
    free.withdraw()


def test_a_process_of_another_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """That listens at the abstract socket is not taken for rank 0."""
    _, listening = Meeting("unix://other").listen()
    monkeypatch.setattr(meeting, "is_same_user", lambda _: False)
    with pytest.raises(OSError, match="another user"):
        Meeting("unix://other").connect()
    close(listening)


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
