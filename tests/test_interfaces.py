"""Which network interface is chosen, and what is said if there is no such one."""

import asyncio
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from clocks import SLACK
from hypothesis import given
from hypothesis import strategies as st
from machines import LINK, Machine, pair

import aiorpc_torch as aiorpc
from aiorpc_torch import WorldTimeout
from aiorpc_torch._world import network
from aiorpc_torch._world.environment import all_are_here

GLOO, TENSORPIPE = network.VARIABLES
LOOPBACK = next(name for name, has in network.addresses().items() if "127.0.0.1" in has)


@pytest.fixture(autouse=True)
def _nothing_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AIORPC_INTERFACE", *network.VARIABLES):
        monkeypatch.delenv(name, raising=False)


# ── what is asked for ───────────────────────────────────────────────────────────────────────────


def test_addresses_are_those_that_others_see() -> None:
    """The same as psutil's, of the interfaces that are up."""
    up = {name for name, of in psutil.net_if_stats().items() if of.isup}
    families = (socket.AF_INET, socket.AF_INET6)
    expected = {
        name: sorted(each.address.partition("%")[0] for each in of if each.family in families)
        for name, of in psutil.net_if_addrs().items()
        if name in up
    }
    found = {name: sorted(of) for name, of in network.addresses().items()}
    assert found == {name: of for name, of in expected.items() if of}


def test_who_asks_is_heard_in_this_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """The argument, AIORPC_INTERFACE, the variables; one of these stands in for the other."""
    monkeypatch.setattr(network, "addresses", lambda: {name: ["10.0.0.1"] for name in "abcd"})
    assert network.asked(None) == {}
    monkeypatch.setenv(TENSORPIPE, "d")
    assert network.asked(None) == {GLOO: "d", TENSORPIPE: "d"}
    monkeypatch.setenv(GLOO, "c,d")
    assert network.asked(None) == {GLOO: "c,d", TENSORPIPE: "d"}
    monkeypatch.delenv(TENSORPIPE)
    assert network.asked(None) == {GLOO: "c,d", TENSORPIPE: "c"}
    monkeypatch.setenv("AIORPC_INTERFACE", "b")
    assert network.asked(None) == {GLOO: "b", TENSORPIPE: "b"}
    assert network.asked("a") == {GLOO: "a", TENSORPIPE: "a"}


async def test_a_wrong_one_is_an_error_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It lists the right ones; a variable that is wrong by itself is named."""
    where: dict[str, Any] = {"rank": 0, "world_size": 2, "init_method": "tcp://127.0.0.1:1"}
    with pytest.raises(ValueError, match=rf"'nosuch' is up here: .*{LOOPBACK} \(127\.0\.0\.1"):
        async with aiorpc.worker(interface="nosuch", **where):
            pass
    monkeypatch.setenv(GLOO, LOOPBACK)
    monkeypatch.setenv(TENSORPIPE, "nosuch")
    with pytest.raises(ValueError, match="'nosuch' is up here, as TP_SOCKET_IFNAME says:"):
        async with aiorpc.worker(**where):
            pass


names = st.sampled_from([None, "a", "b,c"])


choices = st.dictionaries(st.sampled_from([GLOO, TENSORPIPE]), names.filter(bool))


@given(before=st.tuples(names, names), choice=choices)
def test_the_environment_is_put_back(before: Any, choice: Any) -> None:
    """Whatever was set and is chosen."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in zip(network.VARIABLES, before, strict=True):
            if value is not None:
                patch.setenv(name, value)
        outside = dict(os.environ)
        with network.bound(choice):
            assert dict(os.environ) == outside | choice
        assert dict(os.environ) == outside


@pytest.mark.parametrize(
    ("host", "here"),
    [
        ("localhost", True),
        ("localhost.localdomain", True),
        ("127.0.0.1", True),
        ("127.0.1.1", True),
        ("::1", True),
        ("10.0.0.1", False),
        ("fd00::1", False),
        ("0.0.0.0", False),
        ("localhosts", False),
    ],
)
def test_what_means_this_machine(host: str, here: bool) -> None:
    """Names and addresses that every machine understands as itself."""
    assert network.is_here(host) == here
    if here:
        assert network.found(host) == {GLOO: LOOPBACK, TENSORPIPE: LOOPBACK}


@pytest.mark.parametrize("host", [None, "0.0.0.0", "no such host.invalid", "a" * 70 + ".invalid"])
def test_where_nothing_is_known_torch_chooses(host: str | None) -> None:
    """No name, no address, no exception."""
    assert network.found(host) == {}


def test_whether_all_are_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """A world of one without an address; torchrun's, if it says that all its workers are."""
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert all_are_here(None, 1)
    assert not all_are_here("tcp://10.0.0.1:1", 1)
    assert not all_are_here(None, 2)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert all_are_here(None, 2)
    assert not all_are_here(None, 4)
    assert not all_are_here("tcp://10.0.0.1:1", 2)


async def test_a_world_of_one_listens_on_the_loopback_interface(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Whatever this machine's name resolves to."""
    with caplog.at_level("INFO", logger="aiorpc_torch"):
        async with aiorpc.worker(rank=0, world_size=1):
            found = psutil.Process().net_connections("tcp")
    listening = {c.laddr.ip for c in found if c.status == psutil.CONN_LISTEN}
    assert listening <= {"127.0.0.1", "::1"}
    assert f"worker0 speaks through {LOOPBACK} (127.0.0.1" in caplog.text


# ── sockets ─────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def port() -> int:
    """Nobody listens there."""
    with socket.socket() as held:
        held.bind(("", 0))
        return held.getsockname()[1]


def listener(host: str, port: int) -> tuple[str, int] | None:
    descriptor = network.listener(host, port)
    if descriptor is None:
        return None
    with socket.socket(fileno=descriptor) as bound:
        return bound.getsockname()[:2]


def test_listener(port: int) -> None:
    """Bound to the address that others were told, or left to torch."""
    assert listener("127.0.0.1", port) == ("127.0.0.1", port)
    assert listener("localhost", port) == ("127.0.0.1", port)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert listener("127.0.0.1", taken.getsockname()[1]) is None
    assert listener("192.0.2.254", port) is None, "not an address of this machine"
    assert listener("0.0.0.0", port) is None
    assert listener("no such host.invalid", port) is None


def test_await_listener(port: int) -> None:
    """Until somebody listens, or the time is up, or nobody waits any more."""
    left = threading.Event()
    start = time.monotonic()
    assert isinstance(network.await_listener("127.0.0.1", port, 0.2, left), ConnectionRefusedError)
    assert 0.2 <= time.monotonic() - start < 1.0 + SLACK
    opened = threading.Timer(0.2, lambda: server.listen())
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        opened.start()
        assert network.await_listener(*server.getsockname(), 10.0, left) is None
        opened.join()
    left.set()
    start = time.monotonic()
    assert network.await_listener("127.0.0.1", port, 600.0, left) is not None
    assert time.monotonic() - start < 1.0 + SLACK


@pytest.mark.parametrize(
    ("init_method", "master", "where"),
    [
        ("tcp://127.0.0.1:{}", None, {"127.0.0.1"}),
        ("tcp://localhost:{}", None, {"127.0.0.1"}),
        (None, "localhost", {"::", "0.0.0.0"}),  # as launchers of many machines tell rank 0
    ],
)
async def test_where_rank_0_keeps_the_store(
    init_method: str | None,
    master: str | None,
    where: set[str],
    port: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At the address that it was told, and on any interface only if that cannot be known."""
    if master is not None:
        monkeypatch.setenv("MASTER_ADDR", master)
        monkeypatch.setenv("MASTER_PORT", str(port))
    method = init_method and init_method.format(port)

    async def start() -> None:
        async with aiorpc.worker(rank=0, world_size=2, init_method=method, start_timeout=0.3):
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


# ── on other machines ───────────────────────────────────────────────────────────────────────────


@pytest.fixture
def machine() -> Iterator[Machine]:
    with pair() as (one, _):
        yield one


def there(machine: Machine, expression: str) -> Any:
    """What the room says on that machine; it is plain Python, so torch is not needed there."""
    room = Path(network.__file__)
    program = f"""
import json, socket
import {room.stem} as room

def resolves_to(address):
    # In a room of its own, so nobody else's names are changed.
    ask = socket.getaddrinfo
    socket.getaddrinfo = lambda host, *rest, **more: ask(
        address if host == "its-name" else host, *rest, **more
    )
    return room

def error_of(name):
    try:
        room.asked(name)
    except ValueError as exc:
        return str(exc)

print(json.dumps({expression}))
"""
    command = machine.inside(sys.executable, "-c", program)
    environment = {**os.environ, "PYTHONPATH": str(room.parent)}
    return json.loads(subprocess.check_output(command, env=environment, text=True))


def both_variables(name: str) -> dict[str, str]:
    return {GLOO: name, TENSORPIPE: name}


@pytest.mark.network
def test_the_interface_that_leads_there(machine: Machine) -> None:
    """Of several the one that routes to rank 0 or has its address."""
    for name, address in (
        ("left", "10.1.0.1/24"),
        ("right", "10.2.0.1/24"),
        ("six", "fd00:9::1/64"),
    ):
        machine.ip("link", "add", name, "type", "veth", "peer", "name", f"{name}_far")
        machine.ip("link", "set", f"{name}_far", "up")
        machine.gets(address, name)
    leads = {
        "10.1.0.1": "left",
        "10.1.0.2": "left",
        "10.2.0.1": "right",
        "10.2.0.99": "right",
        "fd00:9::1": "six",
        "fd00:9::2": "six",
        "127.0.0.1": "lo",
    }
    found = there(machine, f"[room.found(host) for host in {[*leads]}]")
    assert found == [both_variables(name) for name in leads.values()]
    assert there(machine, "[room.found('10.3.0.1'), room.found('its-name')]") == [{}, {}]

    machine.ip("route", "add", "default", "via", "10.2.0.2")
    assert there(machine, "room.found('10.3.0.1')") == both_variables("right")
    # Its own name, as many machines resolve it: others see what the default route leaves through.
    own = "resolves_to('127.0.1.1')"
    assert there(machine, f"{own}.found('its-name')") == both_variables("right")
    assert there(machine, f"{own}.listener('its-name', 29500)") is None, "any interface"
    assert there(machine, "resolves_to('10.1.0.1').found('its-name')") == both_variables("left")
    assert there(machine, "resolves_to('10.1.0.1').listener('its-name', 29500)") is not None

    machine.ip("link", "set", "right", "down")
    said = there(machine, "error_of('right')")
    assert said.startswith("no network interface 'right' is up here: there are lo (127.0.0.1")
    assert "left (10.1.0.1" in said
    assert "right (" not in said


@pytest.mark.network
def test_whether_there_is_a_way(machine: Machine) -> None:
    """None once the link is down: to connect nevertheless would end the process."""
    machine.ip("link", "add", LINK, "type", "veth", "peer", "name", "far")
    machine.ip("link", "set", "far", "up")
    machine.gets("10.1.0.1/24")
    ways = "[room.has_way(f'uv://{host}:29500') for host in ('10.1.0.2', '127.0.0.1', '10.3.0.1')]"
    assert there(machine, ways) == [True, True, False]
    machine.unplug()
    assert there(machine, ways) == [False, True, False]
    assert there(machine, "room.has_way('shm://somewhere')")


def test_a_machine_of_ipv6_alone(machine: Machine) -> None:
    """Nothing here needs IPv4."""
    machine.ip("address", "del", "127.0.0.1/8", "dev", "lo")
    machine.ip("link", "add", LINK, "type", "veth", "peer", "name", "far")
    machine.ip("link", "set", "far", "up")
    machine.gets("fd00:9::1/64")
    found = there(machine, "[room.found('fd00:9::2'), room.found('::1'), room.found('10.0.0.1')]")
    assert found == [both_variables(LINK), both_variables("lo"), {}]
    assert there(machine, "room.only_here()") == both_variables("lo")
    assert there(machine, "room.in_words(room.found('fd00:9::2'))").startswith("v0 (fd00:9::1")
    assert there(machine, "room.listener('fd00:9::1', 29500)") is not None
