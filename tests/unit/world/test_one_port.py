"""The directory of rank 0, where each worker has one port."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import torch

import aiorpc_torch as aiorpc
from aiorpc_torch._directory import directory_messages as wire, meeting as meeting_module
from aiorpc_torch._directory.meeting import Meeting
from aiorpc_torch._directory.registration import Registration
from aiorpc_torch._node.config import WorkerConfig
from aiorpc_torch._port.port import Port
from aiorpc_torch._port.tls import Tls
from aiorpc_torch._world import directory_client
from aiorpc_torch._world.directory_client import DirectoryClient
from aiorpc_torch._world.startup import OnePort, channels_at_port, host_of_port
from tests.support.certificates import Authority
from tests.support.example_programs import free_port

SOON = 30.0
STARTED = Registration("w0", 0, 2, "1")


@contextlib.asynccontextmanager
async def client(
    rank: int, url: str, tls: Tls | None, *, has_port: bool = True, seconds: float = SOON
) -> AsyncIterator[tuple[DirectoryClient, Port | None]]:
    """The connection of a worker to the directory, as `worker` makes it."""
    one_port = OnePort(WorkerConfig(f"w{rank}", rank, 2, url, tls=tls), "127.0.0.1")
    meeting, registration = Meeting(url), Registration(f"w{rank}", rank, 2, "1")
    port = one_port.port if has_port else None
    if has_port:
        meeting.port, registration = port, one_port.registration(registration)
    found = DirectoryClient(meeting, registration, seconds, port)
    try:
        yield found, port
    finally:
        await found.close()
        await asyncio.to_thread(one_port.port.close)


@pytest.fixture(params=["tcp", "file"])
def url(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Where others find rank 0, as from another host."""
    monkeypatch.setattr(meeting_module, "network_namespace", iter("abcdefgh").__next__)
    monkeypatch.setattr(meeting_module.network, "is_loopback_host", lambda _: False)
    return f"file://{tmp_path}/w" if request.param == "file" else f"tcp://127.0.0.1:{free_port()}"


@pytest.mark.promise("security.tls")
@pytest.mark.parametrize("is_secure", [False, True], ids=["clear", "tls"])
async def test_workers_meet(url: str, tmp_path: Path, is_secure: bool) -> None:
    tls = Authority(tmp_path).tls() if is_secure else None
    async with client(0, url, tls) as (first, port), client(1, url, tls) as (second, _):
        answers = await asyncio.gather(first.register(), second.register())
        assert all(isinstance(each, wire.Registered) for each in answers)
        assert port is not None
        own = answers[1].registrations[0]
        assert (own.endpoint, own.is_secure) == (port.endpoint, is_secure)


@pytest.mark.promise("security.tls")
async def test_workers_that_do_not_get_in(url: str, tmp_path: Path) -> None:
    """A certificate of another authority, or none: each is told at once, and disturbs nobody."""
    authority, other = Authority(tmp_path), Authority(tmp_path, "other")
    tls = authority.tls()
    cert, key, _ = other.files()
    async with client(0, url, tls) as (first, _), client(1, url, tls) as (second, _):
        starting = asyncio.create_task(first.register())
        while first._stream is None:  # noqa: ASYNC110 - it listens
            await asyncio.sleep(0)
        for strange, text in (
            (
                Tls(cert, key, other.ca),
                "no connection to rank 0: the certificate of rank 0 at .* is",
            ),
            (None, "it uses TLS, and this worker has no tls="),
        ):
            is_plain = strange is None
            if is_plain and url.startswith("file"):
                continue  # such a worker meets a port that it does not know
            async with client(1, url, strange, has_port=not is_plain) as (refused, _):
                with pytest.raises(ValueError, match=text):
                    await refused.register()
        assert isinstance(await second.register(), wire.Registered)
        await starting


@pytest.mark.promise("security.tls")
async def test_rank_0_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that is stopped, say: the system accepts connections for it.

    The first attempts are short, so that another worker may take its place.
    """
    monkeypatch.setattr(directory_client, "RESUME_TIMEOUT", 0.1)
    monkeypatch.setattr(directory_client, "GREETING_TIMEOUT", 2 * SOON)
    tls = Authority(tmp_path).tls()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"tcp://127.0.0.1:{silent.getsockname()[1]}"
        async with client(1, url, tls, seconds=0.3) as (found, _), asyncio.timeout(SOON):
            with pytest.raises(aiorpc.WorldTimeout, match="what listens there does not answer"):
                await found.register()


def test_an_expired_certificate(tmp_path: Path) -> None:
    config = WorkerConfig("w", 0, 1, "unix://x", tls=Authority(tmp_path).expired())
    with pytest.raises(ValueError, match=r"the certificate in .*expired.pem has expired on"):
        OnePort(config, "127.0.0.1")


def test_workers_that_differ() -> None:
    """The error names both."""
    port = Registration("w1", 1, 2, "1", endpoint="10.0.0.2:29600")
    tls = Registration("w1", 1, 2, "1", endpoint="10.0.0.2:29600", is_secure=True)
    for other, text in ((port, "port="), (tls, "tls=")):
        conflict = STARTED.conflict_with(other)
        assert conflict.startswith(f"every worker must be given {text}, or none: 'w1' (rank 1, ")
        assert conflict.endswith("has it, " + f"{STARTED} has not")
        assert other.conflict_with(STARTED) == conflict
    assert not port.conflict_with(Registration("w0", 0, 2, "1", endpoint="10.0.0.1:29600"))


def test_the_address_of_a_port() -> None:
    assert host_of_port("lo", None) in ("127.0.0.1", "::1")
    assert host_of_port(None, "localhost") in ("127.0.0.1", "::1")


def test_transports_that_reach_no_other_host() -> None:
    with pytest.raises(ValueError, match=r'the last one of transports must be "uv", .* .*shm'):
        WorkerConfig("w", 0, 1, "unix://x", port=29600, transports=["shm"])
    WorkerConfig("w", 0, 1, "unix://x", port=29600, transports=["shm", "uv"])


def test_a_port_that_is_no_number() -> None:
    port: Any = "29600"
    with pytest.raises(TypeError, match="port must be an int, got '29600'"):
        WorkerConfig("w", 0, 1, "unix://x", port=port)


@pytest.mark.parametrize("port", [0, -1, 65536])
def test_a_number_that_is_no_port(port: int) -> None:
    with pytest.raises(ValueError, match="port must be from 1 to 65535, got"):
        WorkerConfig("w", 0, 1, "unix://x", port=port)


@pytest.mark.parametrize("cuda", [None, "13.2"])
def test_channels_that_torch_knows(monkeypatch: pytest.MonkeyPatch, cuda: str | None) -> None:
    """A build without CUDA has no channels for it."""
    monkeypatch.setattr(torch.version, "cuda", cuda)
    of_cuda = [] if cuda is None else ["cuda_ipc", "cuda_basic"]
    assert sorted(channels_at_port(None)) == sorted(["basic", "cma", *of_cuda])
    assert channels_at_port(["basic", "cuda_gdr"]) == ["basic"]


@pytest.mark.promise("security.tls")
async def test_rank_0_has_no_certificate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker with one is told at once; so is one that finds a process group at the address."""
    monkeypatch.setattr(meeting_module, "_BIND_TIMEOUT", 0.1)
    monkeypatch.setattr(directory_client, "RESUME_TIMEOUT", 0.5)
    tls, where = Authority(tmp_path).tls(), f"tcp://127.0.0.1:{free_port()}"
    async with client(0, where, None, has_port=False) as (first, _):
        starting = asyncio.create_task(first.register())
        while first._stream is None:  # noqa: ASYNC110 - it listens
            await asyncio.sleep(0)
        async with client(1, where, tls) as (second, _):
            with pytest.raises(ValueError, match="it does not use TLS, and this worker has tls="):
                await second.register()
        starting.cancel()
        await asyncio.wait((starting,))
        async with client(0, where, tls) as (late, _):  # the address is taken
            with pytest.raises(OSError, match="with tls= give the group another"):
                await late.register()
