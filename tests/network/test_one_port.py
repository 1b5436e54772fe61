"""Workers with one port each, on two machines: in clear text, and by TLS."""

import asyncio
import contextlib
import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.certificates import Authority
from tests.support.network_namespaces import (
    ADDRESSES,
    HERE,
    LINK,
    Machine,
    Node,
    machines as machines,
    running,
)
from tests.support.one_port_scenarios import MARKER
from tests.support.packets import Packets, is_tls, packets_at

MASTER = 29500
FIXED = f"tcp://{ADDRESSES[0]}:{MASTER}"
LOOK_INTERVAL = 5.0  # seconds between two looks at the files of a certificate
PORTS = {"first": 29600, "second": 29601, "third": 29602}
# Processes that see each other's memory would not be on two hosts.
APART = ("unshare", "--pid", "--ipc", "--fork", "--kill-child", "--mount-proc")


@pytest.fixture
def hosts(machines: tuple[Machine, Machine]) -> tuple[Machine, Machine]:
    for each in machines:
        each.prefix = APART
    return machines


@contextlib.asynccontextmanager
async def started(
    machine: Machine, scenario: str, files: tuple[str, ...] | None, **arguments: Any
) -> AsyncIterator[Node]:
    """A scenario of one_port_scenarios.py, whose worker has its name if it is in PORTS."""
    given = {"tls": files}
    if scenario in PORTS:
        given |= {"name": scenario, "port": PORTS[scenario]}
    words = [str(HERE / "one_port_scenarios.py"), scenario, json.dumps(given | arguments)]
    async with running(machine, *words) as node:
        yield node


@pytest.mark.promise("security.encryption")
@pytest.mark.parametrize(
    ("is_secure", "where"),
    [(False, FIXED), (True, FIXED), (True, "file")],
    ids=["clear", "tls", "tls-file"],
)
async def test_a_world(
    hosts: tuple[Machine, Machine], tmp_path: Path, is_secure: bool, where: str
) -> None:
    """Start, calls, large tensors, a worker that joins and dies, and the end."""
    authority = Authority(tmp_path) if is_secure else None
    files = {each: authority.files(each) if authority else None for each in PORTS}
    url = where if where == FIXED else f"file://{tmp_path}/world"
    with packets_at(hosts[0]) as packets:
        async with contextlib.AsyncExitStack() as stack:

            async def start(name: str, host: int, **more: Any) -> Node:
                node = started(
                    hosts[host], name, files[name], init_method=url, interface=LINK, **more
                )
                return await stack.enter_async_context(node)

            first = await start("first", 0, rank=0, world_size=2)
            second = await start("second", 1, rank=1, world_size=2)
            await check_start(first, second, where)
            third = await start("third", 1)
            await check_joined(first, third)
            for node in (first, second):
                await node.hears("left")
                code, errors = await node.end()
                assert (code, "Traceback" in errors) == (0, False), errors
    check_connections(packets, where)
    check_contents(packets, is_secure)


async def check_start(first: Node, second: Node, where: str) -> None:
    host, other = ADDRESSES
    of_directory = [[host, MASTER]] if where == FIXED else []
    assert await first.hears("ready") == [*of_directory, [host, PORTS["first"]]]
    assert await second.hears("ready") == [[other, PORTS["second"]]]
    [sent] = await first.hears("used")
    assert sent >= 7
    await first.hears("used by torch")


async def check_joined(first: Node, third: Node) -> None:
    assert await third.hears("ready") == [[ADDRESSES[1], PORTS["third"]]]
    assert await first.hears("joined") == "third"
    assert "'third' is lost" in await first.hears("lost")
    assert ["lost", "third"] in await first.hears("changes")


def check_connections(packets: Packets, where: str) -> None:
    """Nobody dials another port."""
    dialled = {far for _, far in packets.connected}
    host, other = ADDRESSES
    allowed = {(host, MASTER), (host, PORTS["first"]), (other, PORTS["second"])}
    assert dialled <= allowed | {(other, PORTS["third"])}
    assert ((host, MASTER) in dialled) is (where == FIXED)
    assert (other, PORTS["second"]) in dialled


def check_contents(packets: Packets, is_secure: bool) -> None:
    streams = packets.streams()
    assert sum(len(stream) for _, stream in streams) > 10_000_000
    told = [flow for flow, stream in streams if MARKER.encode() in stream]
    assert bool(told) is not is_secure, told
    assert all(is_tls(stream) for _, stream in streams) is is_secure


@pytest.mark.promise("security.renewal")
async def test_certificates_that_are_renewed(
    hosts: tuple[Machine, Machine], tmp_path: Path
) -> None:
    """The authority is replaced during a run; a worker that knows the new one alone joins then."""
    old, new = Authority(tmp_path, "old"), Authority(tmp_path, "new")
    files = {each: old.files(each) for each in ("first", "second")}
    more: dict[str, Any] = {"init_method": FIXED, "interface": LINK}
    async with contextlib.AsyncExitStack() as stack:
        first, second = [
            await stack.enter_async_context(
                started(hosts[rank], name, files[name], rank=rank, world_size=2, **more)
            )
            for rank, name in enumerate(files)
        ]
        await check_start(first, second, FIXED)
        old.ca.write_text(old.ca.read_text() + new.ca.read_text())  # of both workers
        for name, (cert, key, _) in files.items():
            renewed = new.files(name)
            shutil.copy(renewed[0], cert)
            shutil.copy(renewed[1], key)
        await asyncio.sleep(LOOK_INTERVAL)
        third = await stack.enter_async_context(
            started(hosts[1], "third", new.files("third"), **more)
        )
        await check_joined(first, third)
        for node in (first, second):
            await node.hears("left")
            code, errors = await node.end()
            assert (code, "Traceback" in errors) == (0, False), errors


@pytest.mark.promise("worlds.launchers")
async def test_torchrun(hosts: tuple[Machine, Machine], tmp_path: Path) -> None:
    """The port and the certificate of the environment; the store is torchrun's own."""
    files = Authority(tmp_path).files()
    names = [f"AIORPC_TORCH_TLS_{each}" for each in ("CERT", "KEY", "CA")]
    environment = {**dict(zip(names, files, strict=True)), "AIORPC_TORCH_PORT": "29600"}
    launcher = ["-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"]
    launcher += ["--master-port=29500", f"--master-addr={ADDRESSES[0]}"]
    scenario = [str(HERE / "network_scenarios.py"), "calls", "", "{}"]
    with packets_at(hosts[0]) as packets:
        async with contextlib.AsyncExitStack() as stack:
            nodes = []
            for rank, host in enumerate(hosts):
                command = [*launcher, f"--node-rank={rank}", *scenario]
                node = running(host, *command, **environment)
                nodes.append(await stack.enter_async_context(node))
            for rank, node in enumerate(nodes):
                assert await node.hears("ready") == [rank, [ADDRESSES[rank], "127.0.0.1"]]
            assert await nodes[0].hears("called") == [420, True, [*range(500)]]
            for rank, node in enumerate(nodes):
                assert await node.hears("left") == rank
                code, errors = await node.end()
                assert code == 0, errors
    dialled = {far for _, far in packets.connected}
    assert dialled <= {(ADDRESSES[0], MASTER), (ADDRESSES[0], 29600), (ADDRESSES[1], 29600)}
    of_workers = [stream for ends, stream in packets.streams() if not is_of_store(ends)]
    assert of_workers
    assert all(map(is_tls, of_workers))


def is_of_store(ends: tuple[tuple[str, int], tuple[str, int]]) -> bool:
    """Whether this is the store of torchrun, which uses no TLS."""
    return MASTER in (ends[0][1], ends[1][1])
