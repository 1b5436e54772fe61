"""The interfaces that worlds use, and the errors for a wrong one."""

import asyncio
from typing import Any

import psutil
import pytest

import aiorpc_torch as aiorpc
from aiorpc_torch import WorldTimeout
from tests.support.example_programs import free_port

VARIABLES = "TP_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"
LOOPBACK = next(
    name
    for name, has in psutil.net_if_addrs().items()
    if "127.0.0.1" in {each.address for each in has}
)
ALL = ("::", "0.0.0.0")


@pytest.fixture(autouse=True)
def _nothing_requested(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AIORPC_INTERFACE", *VARIABLES):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.promise("worlds.interface")
async def test_a_wrong_interface_is_an_error_before_the_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It lists the existing interfaces; if one variable is wrong, it names the variable."""
    where: dict[str, Any] = {"rank": 0, "world_size": 2, "init_method": "tcp://127.0.0.1:1"}
    with pytest.raises(
        ValueError, match=rf"'nosuch' is up on this machine: .*{LOOPBACK} \(127\.0\.0\.1"
    ):
        async with aiorpc.worker(interface="nosuch", **where):
            pass
    monkeypatch.setenv(VARIABLES[1], LOOPBACK)
    monkeypatch.setenv(VARIABLES[0], "nosuch")
    with pytest.raises(
        ValueError, match="'nosuch' is up on this machine, as TP_SOCKET_IFNAME says:"
    ):
        async with aiorpc.worker(**where):
            pass


@pytest.mark.promise("worlds.loopback")
async def test_a_local_world_takes_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's variables say how other machines reach this one; a local world has none."""
    for name in VARIABLES:
        monkeypatch.setenv(name, "nosuch")
    async with aiorpc.local_world(0) as me:
        assert not me.peers


@pytest.mark.promise("worlds.loopback")
async def test_a_world_of_one_listens_on_the_loopback_interface(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Whatever this machine's name resolves to."""
    with caplog.at_level("INFO", logger="aiorpc_torch"):
        async with aiorpc.worker("main", rank=0, world_size=1):
            found = psutil.Process().net_connections("tcp")
    listening = {c.laddr.ip for c in found if c.status == psutil.CONN_LISTEN}
    assert listening <= {"127.0.0.1", "::1"}
    assert f"main uses {LOOPBACK} (127.0.0.1" in caplog.text


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.mark.parametrize(
    ("init_method", "master", "where"),
    [
        ("tcp://127.0.0.1:{}", None, {"127.0.0.1"}),
        ("tcp://localhost:{}", None, {"127.0.0.1"}),
        (None, "localhost", {*ALL}),  # as launchers of many machines tell rank 0
    ],
)
async def test_where_rank_0_listens(
    init_method: str | None,
    master: str | None,
    where: set[str],
    port: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At the given address; on all interfaces only if the address is unknown."""
    if master is not None:
        monkeypatch.setenv("MASTER_ADDR", master)
        monkeypatch.setenv("MASTER_PORT", str(port))
    method = init_method and init_method.format(port)

    async def start() -> None:
        async with aiorpc.worker(rank=0, world_size=2, init_method=method, start_timeout=1.5):
            pass

    starting = asyncio.create_task(start())
    found: set[str] = set()
    while not found and not starting.done():
        await asyncio.sleep(0.01)
        sockets = psutil.Process().net_connections("tcp")
        found = {c.laddr.ip for c in sockets if c.laddr.port == port and not c.raddr}
    with pytest.raises(WorldTimeout, match="rank 1"):
        await starting
    assert found
    assert found <= where
