"""The choice of network interfaces and of the addresses to listen at."""

import os
import socket
from typing import Any

import psutil
import pytest
from hypothesis import given, strategies as st

from aiorpc_torch._port import network
from tests.support.example_programs import free_port

TENSORPIPE, GLOO = network.VARIABLES
LOOPBACK = next(name for name, has in network.addresses().items() if "127.0.0.1" in has)


@pytest.fixture(autouse=True)
def _nothing_requested(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AIORPC_INTERFACE", *network.VARIABLES):
        monkeypatch.delenv(name, raising=False)


# ── requested interfaces ────────────────────────────────────────────────────────────────────────


def test_addresses_are_those_of_psutil() -> None:
    """For the interfaces that are up."""
    up = {name for name, of in psutil.net_if_stats().items() if of.isup}
    families = (socket.AF_INET, socket.AF_INET6)
    expected = {
        name: sorted(each.address.partition("%")[0] for each in of if each.family in families)
        for name, of in psutil.net_if_addrs().items()
        if name in up
    }
    found = {name: sorted(of) for name, of in network.addresses().items()}
    assert found == {name: of for name, of in expected.items() if of}


@pytest.mark.promise("worlds.interface")
def test_the_order_of_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """The argument, AIORPC_INTERFACE, TensorPipe's variable, the first one of gloo's."""
    monkeypatch.setattr(network, "addresses", lambda: {name: ["10.0.0.1"] for name in "abcd"})
    assert network.requested_interface(None) is None
    monkeypatch.setenv(GLOO, "c,d")
    assert network.requested_interface(None) == "c"
    monkeypatch.setenv(TENSORPIPE, "d")
    assert network.requested_interface(None) == "d"
    monkeypatch.setenv("AIORPC_INTERFACE", "b")
    assert network.requested_interface(None) == "b"
    assert network.requested_interface("a") == "a"


names = st.sampled_from([None, "a", "b"])


@pytest.mark.promise("worlds.environment")
@given(before=st.tuples(names, names), choice=names)
def test_the_environment_is_restored(before: Any, choice: str | None) -> None:
    """For any variables and any interface."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in zip(network.VARIABLES, before, strict=True):
            if value is not None:
                patch.setenv(name, value)
        outside = dict(os.environ)
        with network.interface_env(choice):
            chosen = {} if choice is None else {TENSORPIPE: choice}
            assert dict(os.environ) == outside | chosen
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
def test_loopback_hosts(host: str, here: bool) -> None:
    """Names and addresses that mean the local machine on every machine."""
    assert network.is_loopback_host(host) == here
    if here:
        assert network.interface_towards(host) == network.loopback_only() == LOOPBACK


@pytest.mark.parametrize("host", [None, "0.0.0.0", "no such host.invalid", "a" * 70 + ".invalid"])
def test_torch_chooses_for_an_unknown_host(host: str | None) -> None:
    """An unknown host raises nothing."""
    assert network.interface_towards(host) is None


# ── sockets ─────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def port() -> int:
    return free_port()


def listener(host: str | None, port: int) -> tuple[str, int]:
    with network.listen(host, port) as listening:
        return listening.getsockname()[:2]


ALL = ("::", "0.0.0.0")


def test_listen(port: int) -> None:
    """At the address that the others know, else at all."""
    assert listener("127.0.0.1", port) == ("127.0.0.1", port)
    assert listener("localhost", port) == ("127.0.0.1", port)
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(OSError, match="in use"):
        network.listen("127.0.0.1", taken.getsockname()[1])
    for host in (None, "192.0.2.254", "0.0.0.0", "no such host.invalid"):
        assert listener(host, port)[0] in ALL, host


def test_own_address() -> None:
    """One at which other machines reach this one: none of the loopback interface."""
    assert network.own_address(LOOPBACK) is None
    for name, has in network.addresses().items():
        assert network.own_address(name) in (None, *has)
