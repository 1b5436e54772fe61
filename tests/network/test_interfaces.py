"""The choice of network interfaces on machines of several, each a network namespace."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from aiorpc_torch._port import network
from tests.support.network_namespaces import LINK, Machine, pair


@pytest.fixture(autouse=True)
def _nothing_requested(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AIORPC_INTERFACE", *network.VARIABLES):
        monkeypatch.delenv(name, raising=False)


# ── on other machines ───────────────────────────────────────────────────────────────────────────


@pytest.fixture
def machine() -> Iterator[Machine]:
    with pair() as (one, _):
        yield one


def there(machine: Machine, expression: str) -> Any:
    """Evaluate an expression with the module on that machine, which needs no torch."""
    package = Path(network.__file__).parents[1]
    program = f"""
import json, socket, sys, types
package = sys.modules["aiorpc_torch"] = types.ModuleType("aiorpc_torch")  # without its __init__
package.__path__ = [{str(package)!r}]
from aiorpc_torch._port import network

def resolves_to(address):
    # The process runs one expression only, so the patch affects nothing else.
    ask = socket.getaddrinfo
    socket.getaddrinfo = lambda host, *rest, **more: ask(
        address if host == "its-name" else host, *rest, **more
    )
    return network

def error_of(name):
    try:
        network.requested_interface(name)
    except ValueError as exc:
        return str(exc)

print(json.dumps({expression}))
"""
    command = machine.inside(sys.executable, "-c", program)
    return json.loads(subprocess.check_output(command, text=True))


def test_the_interface_towards_a_host(machine: Machine) -> None:
    """Of several, the one with the route to rank 0 or with its address."""
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
    found = there(machine, f"[network.interface_towards(host) for host in {[*leads]}]")
    assert found == [*leads.values()]
    towards = "network.interface_towards"
    assert there(machine, f"[{towards}('10.3.0.1'), {towards}('its-name')]") == [None, None]

    machine.ip("route", "add", "default", "via", "10.2.0.2")
    assert there(machine, "network.interface_towards('10.3.0.1')") == "right"
    # Many machines resolve their own name so. Others reach them at the default route's interface.
    own = "resolves_to('127.0.1.1')"
    assert there(machine, f"{own}.interface_towards('its-name')") == "right"
    where = "listen('its-name', 0).getsockname()[0]"
    assert there(machine, f"{own}.{where}") in ("::", "0.0.0.0"), "any interface"
    left = "resolves_to('10.1.0.1')"
    assert there(machine, f"{left}.interface_towards('its-name')") == "left"
    assert there(machine, f"{left}.{where}") == "10.1.0.1"

    machine.ip("link", "set", "right", "down")
    said = there(machine, "error_of('right')")
    assert said.startswith(
        "no network interface 'right' is up on this machine: it has lo (127.0.0.1"
    )
    assert "left (10.1.0.1" in said
    assert "right (" not in said


def test_has_route(machine: Machine) -> None:
    """It is false once the link is down: a connection would then end the process."""
    machine.ip("link", "add", LINK, "type", "veth", "peer", "name", "far")
    machine.ip("link", "set", "far", "up")
    machine.gets("10.1.0.1/24")
    hosts = ("10.1.0.2", "127.0.0.1", "10.3.0.1")
    routes = f"[network.has_route('uv://' + host + ':29500') for host in {hosts}]"
    assert there(machine, routes) == [True, True, False]
    machine.unplug()
    assert there(machine, routes) == [False, True, False]
    assert there(machine, "network.has_route('shm://somewhere')")


def test_a_machine_of_ipv6_alone(machine: Machine) -> None:
    """No function needs IPv4."""
    machine.ip("address", "del", "127.0.0.1/8", "dev", "lo")
    machine.ip("link", "add", LINK, "type", "veth", "peer", "name", "far")
    machine.ip("link", "set", "far", "up")
    machine.gets("fd00:9::1/64")
    hosts = ("fd00:9::2", "::1", "10.0.0.1")
    found = there(machine, f"[network.interface_towards(host) for host in {hosts}]")
    assert found == [LINK, "lo", None]
    assert there(machine, "network.loopback_only()") == "lo"
    text = there(machine, "network.describe(network.interface_towards('fd00:9::2'))")
    assert text.startswith("v0 (fd00:9::1")
    where = "network.listen('fd00:9::1', 0).getsockname()[0]"
    assert there(machine, where) == "fd00:9::1"
