"""Workers at a directory: real sockets and files, no RPC."""

import asyncio
import gc
import logging
import socket
import threading
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch._C._distributed_c10d import TCPStore

from aiorpc_torch import WorkerLost, WorldTimeout
from aiorpc_torch._directory.directory_messages import Entering, Member, Registered
from aiorpc_torch._directory.directory_server import DirectoryServer
from aiorpc_torch._directory.meeting import Meeting
from aiorpc_torch._directory.record import Record
from aiorpc_torch._directory.registration import Registration
from aiorpc_torch._peers.peers import Event, Peers
from aiorpc_torch._torch.agent import PeerInfo
from aiorpc_torch._wire.plain import dump
from aiorpc_torch._world import directory_client
from aiorpc_torch._world.directory_client import DirectoryClient
from tests.support.example_programs import free_port
from tests.support.servers import serving
from tests.support.two_ends import until

SOON = 30.0
REGISTERED = 1.0  # seconds in which a worker has registered, whatever else runs


def registration(rank: int, size: int = 2, **changes: Any) -> Registration:
    """Return a valid registration, with those changes."""
    return replace(Registration(f"w{rank}", rank, size, "1.0"), **changes)


class Group:
    """Workers that meet at one place."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.clients: list[DirectoryClient] = []
        self.tasks: list[asyncio.Task[Registered | Entering]] = []

    def client(self, own: Registration, timeout: float = SOON) -> DirectoryClient:
        self.clients.append(DirectoryClient(Meeting(self.url, "lo"), own, timeout))
        return self.clients[-1]

    def register(
        self, own: Registration, timeout: float = SOON
    ) -> "asyncio.Task[Registered | Entering]":
        self.tasks.append(asyncio.create_task(self.client(own, timeout).register()))
        return self.tasks[-1]

    async def waits(self, rank: int) -> DirectoryClient:
        """Return the client of a worker once it waits at the directory."""
        client = next(each for each in self.clients if each.registration.rank == rank)
        while client._stream is None:  # noqa: ASYNC110 - nothing tells of it
            await asyncio.sleep(0)
        return client

    async def registered(self, count: int) -> None:
        """Wait until so many workers have registered at the directory."""
        servers: list[DirectoryServer] = []
        while not any(len(each._streams) >= count for each in servers):
            await asyncio.sleep(0)
            servers = [each._server for each in self.clients if each._server is not None]

    async def meet(self, *registrations: Registration) -> list[DirectoryClient]:
        """Let all of these start."""
        clients = [self.client(each) for each in registrations]
        await asyncio.gather(*(live(each) for each in clients))
        return clients

    async def close(self) -> None:
        """End all workers, as the ends of their processes do."""
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        for each in self.clients:
            await each.close()
        self.tasks.clear()
        self.clients.clear()


async def live(client: DirectoryClient) -> None:
    await client.register()
    await client.publish(f"at {client.registration.name}", {}, False)
    await client.confirm([], "")
    no_node: Any = None
    client.follow(no_node)


async def failure(task: "asyncio.Task[Any]") -> Exception:
    async with asyncio.timeout(SOON):
        await asyncio.wait((task,))
    exc = task.exception()
    assert isinstance(exc, Exception)
    return exc


def names(answer: Registered | Entering) -> list[str]:
    return [each.name for each in answer.registrations]


@pytest.fixture(params=["file", "tcp", "unix", "torchrun"])
async def group(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Group]:
    """Meet at a file, at a TCP address, in one machine, and beside torchrun's store."""
    store = None
    match request.param:
        case "file":
            url = f"file://{tmp_path}/world"
        case "tcp":
            url = f"tcp://127.0.0.1:{free_port()}"
        case "unix":
            url = f"unix://{tmp_path.name}"
        case _:
            # torch's own socket is an IPv6 one, of which it looks up the names of its clients.
            bare = socket.create_server(("127.0.0.1", 0))
            port, fd = bare.getsockname()[1], bare.detach()
            store = TCPStore(
                "127.0.0.1", port, None, True, wait_for_workers=False, master_listen_fd=fd
            )
            monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
            monkeypatch.setenv("MASTER_PORT", str(port))
            monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
            url = "env://"
    found = Group(url)
    yield found
    await found.close()
    del store


@pytest.fixture
async def tcp() -> AsyncIterator[Group]:
    found = Group(f"tcp://127.0.0.1:{free_port()}")
    yield found
    await found.close()


# ── start ───────────────────────────────────────────────────────────────────────────────────────


async def test_every_worker_learns_of_all(group: Group) -> None:
    """Each gets all registrations in rank order, then all addresses. Rank 0 may be the last."""
    clients = [group.client(registration(rank, 3)) for rank in (2, 1, 0)]
    answers = await asyncio.gather(*(each.register() for each in clients))
    assert [names(each) for each in answers] == [["w0", "w1", "w2"]] * 3
    found = await asyncio.gather(*(each.publish(str(each), {}, True) for each in clients))
    assert found[0] == found[1] == found[2]
    assert [(each.name, each.rank, each.worker_id) for each in found[0]] == [
        ("w0", 0, 0),
        ("w1", 1, 1),
        ("w2", 2, 2),
    ]


@pytest.mark.promise("worlds.missing")
async def test_missing_ranks_are_named_to_all(group: Group) -> None:
    """The first worker that times out names the missing ranks to the others too."""
    patient = group.register(registration(0, 4))
    await group.registered(1)
    hasty = group.register(registration(2, 4), timeout=REGISTERED)
    told, heard = await failure(hasty), await failure(patient)
    text = "2 of 4 workers did not register within 1 s: rank 1, 3"
    assert isinstance(told, WorldTimeout)
    assert isinstance(heard, WorldTimeout)
    assert (str(told), told.missing) == (text, (1, 3))
    assert str(heard).endswith(f"has given up: {text}")
    assert str(heard).startswith("'w2' (rank 2, process")
    assert heard.missing == (1, 3)


@pytest.mark.promise("worlds.again")
async def test_the_next_attempt_is_a_new_one(group: Group) -> None:
    """A failed attempt does not fail the next, whoever is first, nor one after another world."""
    assert isinstance(await failure(group.register(registration(0), 0.05)), WorldTimeout)
    await group.close()
    for quick in (1, 0):
        first = group.register(registration(quick))
        await asyncio.sleep(0)
        second = group.register(registration(1 - quick))
        async with asyncio.timeout(SOON):
            assert names(await first) == names(await second) == ["w0", "w1"]
        await group.close()


async def test_cancel_ends_the_wait_of_all(group: Group) -> None:
    """A cancelled start ends the start of all."""
    waiting, other = group.register(registration(0, 3)), group.register(registration(1, 3))
    await group.registered(2)
    (await group.waits(1)).give_up()
    assert "before it was stopped: rank 2" in str(await failure(other))
    assert "'w1' (rank 1" in str(await failure(waiting))


async def test_missing_ranks_are_logged(
    tcp: Group, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A long wait is logged as a warning, which names some of them."""
    monkeypatch.setattr(directory_client, "LOG_INTERVAL", 0.01)
    first = ", ".join(map(str, range(1, 21)))
    for size, missing in ((2, "1"), (30, f"{first} and 9 more")):
        caplog.clear()
        own = registration(0, size)
        with caplog.at_level(logging.WARNING, "aiorpc_torch"):
            assert isinstance(await failure(tcp.register(own, timeout=REGISTERED)), WorldTimeout)
        texts = {each.getMessage() for each in caplog.records}
        assert texts == {f"{own} waits for rank {missing} to register"}


@pytest.mark.promise("worlds.conflict")
async def test_every_worker_gets_the_conflict(group: Group) -> None:
    """As a ValueError, which names both."""
    both = [group.register(registration(0, 2)), group.register(registration(1, 3))]
    for each in both:
        exc = await failure(each)
        assert type(exc) is ValueError
        assert "with world_size=3" in str(exc)
        assert "with world_size=2" in str(exc)


async def test_a_registration_that_rank_0_cannot_read(group: Group) -> None:
    """Its worker fails at once, with the reason; rank 0 still waits."""
    waiting = group.register(registration(0))
    await group.registered(1)
    exc = await failure(group.register(registration(1, version=7)))
    assert type(exc) is ValueError
    assert str(exc).startswith("rank 0 cannot read the registration of this worker: Expected `str`")
    assert not waiting.done()


# ── rank 0 ──────────────────────────────────────────────────────────────────────────────────────


async def test_without_rank_0(group: Group) -> None:
    """A worker waits for its timeout; the error names the place."""
    exc = await failure(group.register(registration(1), timeout=0.1))
    assert isinstance(exc, WorldTimeout)
    assert exc.missing == (0,)
    assert str(exc).startswith(f"no rank 0 at {Meeting(group.url)} within 0.1 s (")


async def test_a_rank_0_that_dies_while_it_waits(group: Group) -> None:
    """Another process may be rank 0 then: the others still wait."""
    first = Group(group.url)
    first.register(registration(0, 3))
    await first.registered(1)
    quick = group.register(registration(1, 3))
    await first.registered(2)
    await first.close()
    group.register(registration(0, 3, pid=99))
    async with asyncio.timeout(SOON):
        assert names(await group.client(registration(2, 3)).register()) == ["w0", "w1", "w2"]
        assert (await quick).registrations[0].pid == 99


async def test_a_rank_0_that_dies_later(tcp: Group) -> None:
    """The error is raised at once."""
    clients = [tcp.client(registration(rank)) for rank in (0, 1)]
    await asyncio.gather(*(each.register() for each in clients))
    await clients[0].close()
    with pytest.raises(WorldTimeout, match=r"rank 0 at .* has given up or died") as raised:
        await clients[1].publish("here", {}, True)
    assert raised.value.missing == (0,)


@pytest.mark.promise("worlds.again")
async def test_a_directory_that_is_closing(group: Group) -> None:
    """A worker quicker than rank 0 meets the last world's, and goes on at the next one."""
    last = await group.meet(registration(0), registration(1))
    await asyncio.gather(*(each.exit_barrier([1 - n], SOON) for n, each in enumerate(last)))
    group.clients.clear()
    quick = group.register(registration(1))
    await group.waits(1)
    for each in last:
        await each.close()
    async with asyncio.timeout(SOON):
        assert names(await group.client(registration(0, worker_id=0)).register()) == ["w0", "w1"]
        assert names(await quick) == ["w0", "w1"]


@pytest.mark.promise("worlds.other_program")
@pytest.mark.parametrize(
    ("greeting", "text"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "it is no program of aiorpc_torch"),
        (b"aiorpc?!", "it is no program of aiorpc_torch"),
        (b"aiorpc:9" + b"0" * 32, "it runs another version of aiorpc_torch"),
    ],
)
async def test_another_program_at_that_address(greeting: bytes, text: str) -> None:
    """Is told from a world at once."""

    def greet(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(greeting)
        writer.close()

    async with serving(asyncio.start_server(greet, "127.0.0.1", 0)) as server:
        group = Group(f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        exc = await failure(group.register(registration(1)))
        await group.close()
    assert type(exc) is ValueError
    assert f"is not a world for this worker: {text}" in str(exc)


@pytest.mark.promise("worlds.other_program")
async def test_an_address_at_which_another_world_listens(tmp_path: Path) -> None:
    """A run that has died wrote it, and its port is in use again: that world is not disturbed."""
    other = Group(f"tcp://127.0.0.1:{free_port()}")
    waiting = other.register(registration(0, 2))
    await other.registered(1)
    port = int(other.url.rpartition(":")[2])
    stale = Record("0" * 32, "w0", "elsewhere", "127.0.0.1", port)
    (tmp_path / "world.rank0").write_bytes(dump(stale))
    group = Group(f"file://{tmp_path}/world")
    exc = await failure(group.register(registration(1, 5), timeout=0.2))
    assert isinstance(exc, WorldTimeout)
    assert "no rank 0 at file:///" in str(exc)
    assert not waiting.done()
    await group.close()
    await other.close()


async def test_another_program_that_hangs_up() -> None:
    """As the directory of the last world does when it closes: the next one may follow."""

    def hang_up(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    async with serving(asyncio.start_server(hang_up, "127.0.0.1", 0)) as server:
        group = Group(f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        exc = await failure(group.register(registration(1), timeout=0.2))
        await group.close()
    assert isinstance(exc, WorldTimeout)
    assert "no rank 0 at" in str(exc)


async def test_a_rank_0_that_no_longer_answers(tcp: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    """A link is cut, say: the timeout holds."""
    monkeypatch.setattr(directory_client, "ANSWER_GRACE", 0.01)
    tcp.register(registration(0, 3))
    await tcp.registered(1)
    waiting = tcp.register(registration(1, 3), timeout=REGISTERED)
    await tcp.registered(2)
    stream = (await tcp.waits(1))._stream
    assert stream is not None
    monkeypatch.setattr(stream, "send", lambda _: None)
    exc = await failure(waiting)
    assert isinstance(exc, WorldTimeout)
    assert str(exc).endswith("no longer answers")


# ── changes and exit ────────────────────────────────────────────────────────────────────────────


async def test_an_attempt_that_fails_after_the_end(
    tcp: Group, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that leaves while it connects again logs nothing of the attempt."""
    monkeypatch.setattr(directory_client, "CANCEL_TIMEOUT", 0.0)
    client, has_begun, may_fail = tcp.client(registration(0)), threading.Event(), threading.Event()

    def connect() -> None:
        has_begun.set()
        may_fail.wait(SOON)
        raise ConnectionRefusedError

    connecting = asyncio.create_task(client._in_thread(connect))
    await asyncio.to_thread(has_begun.wait, SOON)
    connecting.cancel()
    await asyncio.wait((connecting,))
    await client.close()
    attempt, client._attempt = client._attempt, None
    assert attempt is not None
    may_fail.set()
    await until(lambda: "aiorpc-blocking" not in {each.name for each in threading.enumerate()})
    del attempt, connecting
    gc.collect()
    assert caplog.text == ""


@pytest.mark.promise("joining.join")
async def test_a_worker_that_joins(group: Group) -> None:
    """It gets the next rank and a number of its own."""
    await group.meet(registration(0), registration(1))
    joining = group.client(registration(-1, -1, name="a", joined=True))
    answer = await joining.register()
    assert isinstance(answer, Entering)
    assert (answer.own.rank, answer.worker_id, names(answer)) == (2, 2, ["w0", "w1", "a"])


async def test_no_world_to_join(group: Group) -> None:
    """It waits for the world to be complete, for its timeout."""
    group.register(registration(0))
    await group.registered(1)
    own = registration(-1, -1, name="a", joined=True)
    exc = await failure(group.register(own, timeout=REGISTERED))
    assert isinstance(exc, WorldTimeout)
    assert "'a' joins a running world, and none is complete within 1 s" in str(exc)


@pytest.mark.promise("worlds.exit")
@pytest.mark.promise("joining.cut")
async def test_what_has_changed_while_there_was_no_connection(group: Group) -> None:
    """New members are added and announced; those that are not listed any more have left."""
    known = [PeerInfo(name, n, n, "") for n, name in enumerate(["w0", "w1", "left", "entering"])]
    told: list[tuple[Any, ...]] = []
    node: Any = SimpleNamespace(
        members=Peers("w0", known),
        peers=lambda: ("w1", "left", "entering"),
        add=lambda member: told.append(("add", member.name)),
        membership=SimpleNamespace(
            announce=lambda name: told.append(("announce", name)),
            on_leave_message=lambda *leave: told.append(leave),
            probe=lambda name: told.append(("probe", name)),
        ),
    )
    node.members.apply(node.members.peers["w1"], Event.LOSS, WorkerLost("w1"))
    node.members.admit(PeerInfo("added", 5, 5, ""))  # its announcement was lost
    numbers = {"w0": 0, "w1": 1, "added": 5, "new": 4}
    listed = [Member(registration(n, 9, name=name), n, "", {}, "") for name, n in numbers.items()]
    group.client(registration(0))._update(node, listed, ["entering"])
    entered = [("announce", "added"), ("add", "new"), ("announce", "new")]
    assert told == [("probe", "w1"), *entered, ("left", 2, "left", "")]


async def test_the_barrier_of_the_exit_times_out(group: Group) -> None:
    """A worker that does not reach it is waited for no longer."""
    first, second = await group.meet(registration(0), registration(1))
    await first.exit_barrier([1], 0.01)
    await second.exit_barrier([0], SOON)
