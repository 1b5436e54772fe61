"""Places that do not answer, as a network file system does that hangs: the start and the end."""

import asyncio
import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

import aiorpc_torch as aiorpc
from aiorpc_torch import WorldTimeout
from aiorpc_torch._directory import shared_values
from aiorpc_torch._directory.meeting import Meeting
from aiorpc_torch._directory.registration import Registration
from aiorpc_torch._port import network
from aiorpc_torch._world import directory_client
from aiorpc_torch._world.directory_client import DirectoryClient
from tests.support.example_programs import free_port

SOON = 30.0
QUICK = 15.0  # seconds for what must not wait for the place

pytestmark = pytest.mark.promise("worlds.place")


class Place:
    """Files and names, which do not answer while they hang."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, url: str) -> None:
        self.url = url
        self.asked = threading.Event()
        self._answers = threading.Event()
        self._answers.set()
        self.threads: set[threading.Thread] = set()
        for module, name in ((shared_values, "open_regular"), (socket, "getaddrinfo")):
            monkeypatch.setattr(module, name, self._slow(getattr(module, name)))
        monkeypatch.setattr(shared_values, "read_regular", self._slow(shared_values.read_regular))

    def _slow(self, function: Any) -> Any:
        def ask(*args: Any, **options: Any) -> Any:
            if not self._answers.is_set():
                self.threads.add(threading.current_thread())
                self.asked.set()
                assert self._answers.wait(SOON)
            return function(*args, **options)

        return ask

    def hang(self) -> None:
        self._answers.clear()

    def answer(self) -> None:
        self._answers.set()

    def client(self, rank: int, timeout: float = SOON, size: int = 2) -> DirectoryClient:
        registration = Registration(f"w{rank}", rank, size, "1.0")
        return DirectoryClient(Meeting(self.url, "lo"), registration, timeout, lease=1.5)


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Place]:
    found = Place(monkeypatch, f"file://{tmp_path}/world")
    yield found
    found.answer()


@contextlib.asynccontextmanager
async def closed_soon(client: DirectoryClient) -> AsyncIterator[DirectoryClient]:
    """Close a client in bounded time."""
    try:
        yield client
    finally:
        async with asyncio.timeout(QUICK):
            await client.close()


async def live(client: DirectoryClient) -> None:
    await client.register()
    await client.publish(f"at {client.registration.name}", {}, False)
    await client.confirm([], "")


# ── the start ───────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("rank", [0, 1])
async def test_a_file_that_does_not_answer(place: Place, tmp_path: Path, rank: int) -> None:
    place.hang()
    async with closed_soon(place.client(rank, 0.2)) as client, asyncio.timeout(QUICK):
        text = rf"no rank 0 at .* within 0\.2 s: the file {tmp_path}/world\.rank0 does not answer"
        with pytest.raises(WorldTimeout, match=text):
            await client.register()
    assert len(place.threads) == 1


@pytest.mark.parametrize("rank", [0, 1])
async def test_a_name_that_is_not_found_out(place: Place, rank: int) -> None:
    place.url = f"tcp://node1:{free_port()}"
    place.hang()
    async with closed_soon(place.client(rank, 0.2)) as client, asyncio.timeout(QUICK):
        with pytest.raises(WorldTimeout, match="the lookup of the name 'node1' does not end"):
            await client.register()


@pytest.mark.parametrize("options", [{}, {"port": free_port()}], ids=["", "one port"])
@pytest.mark.parametrize("rank", [0, 1])
async def test_a_worker(place: Place, rank: int, options: dict[str, Any]) -> None:
    """The lookups of its own interface too."""
    place.hang()
    url = f"tcp://node1:{free_port()}"
    where: dict[str, Any] = {"rank": rank, "world_size": 2, "init_method": url}
    async with asyncio.timeout(QUICK):
        with pytest.raises(WorldTimeout, match="the lookup of the name 'node1' does not end"):
            async with aiorpc.worker(start_timeout=0.2, **where, **options):
                pass


@pytest.mark.parametrize("variable", ["AIORPC_TORCH_TLS_CERT", "etcd"])
async def test_a_certificate_that_is_not_read(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    """Of the environment, or of etcd's URL."""
    from aiorpc_torch._directory import etcd_place
    from aiorpc_torch._port import tls

    url = f"file://{tmp_path}/world"
    files = [str(tmp_path / name) for name in ("cert", "key", "ca")]
    if variable == "etcd":
        url = f"etcd://127.0.0.1:1/x?ca={files[2]}"
        monkeypatch.setattr(etcd_place, "read_regular", place._slow(etcd_place.read_regular))
    else:
        for name, file in zip(("CERT", "KEY", "CA"), files, strict=True):
            monkeypatch.setenv(f"AIORPC_TORCH_TLS_{name}", file)
        slow = place._slow(tls.read_regular)
        monkeypatch.setattr(tls, "read_regular", slow)
    place.hang()
    async with asyncio.timeout(QUICK):
        with pytest.raises(WorldTimeout, match=r"(ca=|tls: ).* does not answer"):
            async with aiorpc.worker(rank=0, world_size=2, start_timeout=0.2, init_method=url):
                pass


async def test_a_start_that_is_cancelled(place: Place) -> None:
    place.hang()
    async with closed_soon(place.client(0)) as client:
        starting = asyncio.create_task(client.register())
        await asyncio.to_thread(place.asked.wait, SOON)
        starting.cancel()
        async with asyncio.timeout(QUICK):
            await asyncio.wait((starting,))
        assert starting.cancelled()


async def test_a_place_that_is_claimed_late(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a worker that has given up: the next one claims it at once."""
    look = Meeting.look

    def look_and_hang(self: Meeting) -> Any:
        found = look(self)
        place.hang()
        return found

    monkeypatch.setattr(Meeting, "look", look_and_hang)
    async with closed_soon(place.client(0, 0.2)) as client, asyncio.timeout(QUICK):
        with pytest.raises(WorldTimeout, match=r"world\.rank0 does not answer"):
            await client.register()
    monkeypatch.undo()
    place.answer()
    for thread in place.threads:
        await asyncio.to_thread(thread.join, SOON)
    assert os.listdir(tmp_path) == []


# ── the running world ───────────────────────────────────────────────────────────────────────────


async def test_the_keeper_leaves(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    """Its directory ends with the lease, and names the file."""
    async with closed_soon(place.client(0, size=1)) as client:
        await live(client)
        place.hang()
        server = client._server
        assert server is not None
        with caplog.at_level(logging.WARNING, "aiorpc_torch"):
            await asyncio.to_thread(server._thread._thread.join, SOON)
        assert "it does not reach its place: the file " in caplog.text
        assert "world.rank0 does not answer" in caplog.text


async def test_the_keeper_leaves_while_it_renews(place: Place) -> None:
    async with closed_soon(place.client(0, size=1)) as client:
        await live(client)
        place.hang()
        await asyncio.to_thread(place.asked.wait, SOON)


async def test_a_member_that_looks(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """The event loop runs, one thread waits, and the member goes on when the place answers."""
    monkeypatch.setattr(directory_client, "STEP_TIMEOUT", 0.1)
    keeper, member = place.client(0), place.client(1)
    async with closed_soon(keeper), closed_soon(member):
        await asyncio.gather(live(keeper), live(member))
        node: Any = Node()
        member.follow(node)
        place.hang()
        assert keeper._stream is not None
        keeper._stream.abort()
        await keeper._end_server()
        await asyncio.to_thread(place.asked.wait, SOON)
        longest = last = 0.0
        end = time.monotonic() + 1.0
        while (now := time.monotonic()) < end:
            longest = max(longest, now - last if last else 0.0)
            last = now
            await asyncio.sleep(0.01)
        assert longest < QUICK
        assert len(place.threads) <= 2  # with that of the keeper's claim
        place.answer()
        async with asyncio.timeout(SOON):
            while member._server is None:  # noqa: ASYNC110
                await asyncio.sleep(0.01)


async def test_a_member_that_leaves_while_it_looks(place: Place) -> None:
    keeper, member = place.client(0), place.client(1)
    async with closed_soon(keeper):
        async with closed_soon(member):
            await asyncio.gather(live(keeper), live(member))
            node: Any = Node()
            member.follow(node)
            place.hang()
            await keeper._end_server()
            await asyncio.to_thread(place.asked.wait, SOON)


class Node:
    """What a member needs of its node to take the directory over."""

    def __init__(self) -> None:
        self.members = self.departures = self.membership = self.registry = self
        self.own, self.is_done, self.is_closed = self, False, False
        self.peers: dict[str, Any] = {}
        self.name = self.coordinator = "w1"

    def probe(self, name: str) -> None: ...

    def move(self, name: str) -> None: ...

    def lost(self) -> dict[str, Any]:
        return {}


def test_the_own_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is looked up here before torch looks it up."""
    asked: list[str] = []
    monkeypatch.setattr(network, "_resolve", asked.append)
    network.look_up_own_name()
    assert asked == [socket.gethostname()]
