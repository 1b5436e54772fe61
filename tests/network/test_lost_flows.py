"""torch's own connections between hosts with one port each: their flows are lost, and replaced."""

import asyncio
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.certificates import Authority
from tests.support.network_namespaces import (
    ADDRESSES,
    LINK,
    Machine,
    Node,
    Packet,
    both,
    line,
    machines as machines,
)
from tests.support.network_scenarios import PATH_HEARTBEAT
from tests.support.slack import SLACK

WHERE = f"tcp://{ADDRESSES[0]}:29500"
PORT = 29600
# Processes that see each other's memory would copy from it.
APART = ("unshare", "--pid", "--ipc", "--fork", "--kill-child", "--mount-proc")


@pytest.fixture(params=["clear", "tls"])
def options(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    files = [str(each) for each in Authority(tmp_path).files()] if request.param == "tls" else None
    return {"port": PORT, "files": files, "init_method": WHERE, "interface": LINK}


def apart(machines: tuple[Machine, Machine]) -> tuple[Machine, Machine]:
    for each in machines:
        each.prefix = APART
    return machines


async def check_calls(nodes: tuple[Node, Node], within: float) -> None:
    """A call of plain torch and one of its RRefs work, at both."""
    for node in nodes:
        node.tell()
    for node in nodes:
        seconds = await node.hears("called")
        print(f"{seconds:.2f} s")
        assert seconds < within + SLACK


async def check_left(nodes: tuple[Node, Node]) -> None:
    """No worker was lost."""
    for node in nodes:
        node.tell()
    for node in nodes:
        assert "lost" not in await node.hears("changes")
        code, errors = await node.end()
        assert (code, "Traceback" in errors) == (0, False), errors


@pytest.mark.slow
@pytest.mark.promise("worlds.tunnels")
async def test_a_router_forgets_connections(options: dict[str, Any]) -> None:
    """In one direction, in the other, or both: calls of torch work again in time."""
    flows: set[tuple[int, int]] = set()

    def passes(packet: Packet) -> bool:
        flows.add((packet.source, packet.target))
        return False

    # By the port of the host that was connected to.
    ways: list[Callable[[Packet], bool]] = [
        lambda packet: packet.target == PORT,
        lambda packet: packet.source == PORT,
        lambda packet: True,
    ]
    with line() as (machines, way):
        way.drops = passes
        async with both(apart(machines), "raw", losses=len(ways), **options) as nodes:
            for node in nodes:
                await node.hears("ready")
            for each in ways:
                lost = frozenset(flows)
                way.drops = lambda packet, lost=lost, each=each: (
                    passes(packet) or ((packet.source, packet.target) in lost and each(packet))
                )
                await check_calls(nodes, PATH_HEARTBEAT + 1.0)
            way.drops = passes
            await check_left(nodes)


@pytest.mark.slow
@pytest.mark.promise("worlds.tunnels")
async def test_a_firewall_resets_connections(
    machines: tuple[Machine, Machine], options: dict[str, Any]
) -> None:
    async with both(apart(machines), "raw", losses=2, **options) as nodes:
        for node in nodes:
            await node.hears("ready")
        for machine in machines:
            flows = f"( sport = :{PORT} or dport = :{PORT} )"
            words = machine.inside("ss", "-K", "state", "established", flows)
            await asyncio.to_thread(subprocess.run, words, check=True, capture_output=True)
            await check_calls(nodes, PATH_HEARTBEAT + 1.0)
        await check_left(nodes)


@pytest.mark.slow
@pytest.mark.promise("worlds.tunnels")
async def test_a_link_that_is_cut_for_longer_than_a_heartbeat(options: dict[str, Any]) -> None:
    """From its heal calls of torch work within two seconds."""
    with line() as (machines, way):
        async with both(apart(machines), "raw", losses=1, **options) as nodes:
            for node in nodes:
                await node.hears("ready")
            way.loss = 1.0
            for node in nodes:
                node.tell()
            await asyncio.sleep(2 * PATH_HEARTBEAT)  # what is tested
            way.loss = 0.0
            for node in nodes:
                assert await node.hears("called") < 2 * PATH_HEARTBEAT + 2.0 + SLACK
            for node in nodes:
                node.tell()
            for node in nodes:
                await node.hears("changes")
                assert (await node.end())[0] == 0
