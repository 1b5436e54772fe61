"""Worlds over two machines: start, lossy and cut links, end."""

import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from tests.support.network_namespaces import (
    ADDRESSES,
    HERE,
    LINK,
    Line,
    Machine,
    Node,
    Packet,
    both,
    line,
    machines as machines,
    running,
    why_not,
)
from tests.support.network_scenarios import (
    CALLS,
    ELEMENTS,
    HEARTBEAT,
    MEMBERS,
    PATH_HEARTBEAT,
    STOP_TIMEOUT,
)
from tests.support.slack import SLACK

WHERE = f"tcp://{ADDRESSES[0]}:29500"
HEALED = 2.0  # seconds
PATIENCE = 1.5  # seconds: start_timeout where it is to fail


async def test_torchrun_on_two_machines(machines: tuple[Machine, Machine]) -> None:
    """Without a request, workers use and listen on the interface towards rank 0 only."""
    command = [
        "-m",
        "torch.distributed.run",
        "--nnodes=2",
        "--nproc-per-node=1",
        "--master-port=29500",
    ]
    command.append(f"--master-addr={ADDRESSES[0]}")
    async with contextlib.AsyncExitStack() as stack:
        nodes = [
            await stack.enter_async_context(
                running(
                    machine,
                    *command,
                    f"--node-rank={rank}",
                    str(HERE / "network_scenarios.py"),
                    "calls",
                    "",
                    "{}",
                )
            )
            for rank, machine in enumerate(machines)
        ]
        await check_calls(nodes)


async def check_calls(nodes: list[Node]) -> None:
    for rank, node in enumerate(nodes):
        assert await node.hears("ready") == [rank, [ADDRESSES[rank]]]
    assert await nodes[0].hears("called") == [420, True, [*range(500)]]
    for rank, node in enumerate(nodes):
        assert await node.hears("left") == rank
        code, errors = await node.end()
        assert code == 0, errors
        assert f"uses {LINK} ({ADDRESSES[rank]}" in errors


@pytest.mark.promise("worlds.launchers")
async def test_a_step_of_slurm_on_two_machines(machines: tuple[Machine, Machine]) -> None:
    """Rank 0 is on the first host of the list, and no other address is listened at."""
    step = {"SLURM_NTASKS": "2", "SLURM_STEP_NODELIST": "10.93.7.[1-2]", "SLURM_JOB_ID": "7"}
    scenario = (str(HERE / "network_scenarios.py"), "calls", "", "{}")
    async with contextlib.AsyncExitStack() as stack:
        nodes = [
            await stack.enter_async_context(
                running(machine, *scenario, **step, SLURM_PROCID=str(rank))
            )
            for rank, machine in enumerate(machines)
        ]
        await check_calls(nodes)


def grows(machine: Machine, rank: int | None, **arguments: Any) -> Any:
    """Return a worker of a world that others join; without a rank, one that joins."""
    number = "" if rank is None else str(rank)
    options = json.dumps({"init_method": WHERE, **arguments})
    return running(machine, str(HERE / "network_scenarios.py"), "grows", number, options)


@pytest.mark.promise("joining.hosts")
async def test_a_worker_of_another_machine_joins(machines: tuple[Machine, Machine]) -> None:
    """The first workers, all on one machine, listen on the network from then on."""
    async with contextlib.AsyncExitStack() as stack:
        nodes = [await stack.enter_async_context(grows(machines[0], rank)) for rank in (0, 1)]
        for rank, node in enumerate(nodes):
            assert await node.hears("ready") == [rank, [ADDRESSES[0]]]
        nodes.append(await stack.enter_async_context(grows(machines[1], None, name="late")))
        assert await nodes[2].hears("ready") == [2, [ADDRESSES[1]]]
        for node in nodes:
            node.tell()
            assert len(await node.hears("called")) == 2
        for node in reversed(nodes):
            node.tell()
        for node in nodes:
            code, errors = await node.end()
            assert code == 0, errors


@pytest.mark.promise("joining.hosts")
async def test_a_world_on_the_loopback_interface(machines: tuple[Machine, Machine]) -> None:
    """No other machine can join it: that is said at once, and the world goes on."""
    async with contextlib.AsyncExitStack() as stack:
        nodes = [
            await stack.enter_async_context(grows(machines[0], rank, interface="lo"))
            for rank in (0, 1)
        ]
        for node in nodes:
            await node.hears("ready")
        refused = await stack.enter_async_context(grows(machines[1], None, name="late"))
        code, errors = await refused.end()
        assert code == 1
        assert "ValueError: worker 'worker0' listens at 127.0.0.1 only" in errors
        for node in nodes:
            node.tell()
            assert len(await node.hears("called")) == 1
            node.tell()
        for node in nodes:
            assert (await node.end())[0] == 0


@pytest.mark.promise("worlds.cut")
async def test_poor_and_cut_lines() -> None:
    """Everything arrives over a poor one. Whoever waits for a cut one is told in time, it works
    again once it is whole, and leaving ends."""
    with line() as (machines, way):
        way.delay, way.loss = 0.02, 0.02
        async with both(machines, "cut", cuts=2, init_method=WHERE, interface=LINK) as nodes:
            for node, address in zip(nodes, ADDRESSES, strict=True):
                assert await node.hears("ready") == [address]
            await check_poor(nodes[0], way)
            await check_interface_down(nodes[0], machines[0])
            await check_silence(nodes[0], way)
            await check_leaving(nodes, way)


async def check_poor(node: Node, way: Line) -> None:
    """20 ms and 2 % loss each way: everything arrives, once."""
    start = time.monotonic()
    assert await node.hears("called") == [420, True, [*range(500)]]
    print(f"a poor line: {time.monotonic() - start:.1f} s, {way.lost} packets lost since the start")
    assert way.lost > 0
    await node.hears("waiting")
    way.delay = way.loss = 0.0


async def check_interface_down(node: Node, machine: Machine) -> None:
    cut_at = time.monotonic()
    machine.unplug()
    await check_lost(node)
    machine.plug()
    await check_resumed(node, time.monotonic() - cut_at)
    await node.hears("waiting")


async def check_silence(node: Node, way: Line) -> None:
    cut_at = time.monotonic()
    way.loss = 1.0
    await check_lost(node)
    way.loss = 0.0
    await check_resumed(node, time.monotonic() - cut_at)


async def check_leaving(nodes: tuple[Node, Node], way: Line) -> None:
    way.loss = 1.0
    for node in nodes:
        node.tell()
    for rank, node in enumerate(nodes):
        took = await node.hears("left")
        print(f"rank {rank} left a cut line after {took:.2f} s")
        assert took < STOP_TIMEOUT + SLACK  # sooner, once it has lost the other one
        code, errors = await node.end()
        assert code == 0, errors
        assert f"worker{rank} did not wait for worker{1 - rank}" in errors
        assert "terminate" not in errors


def has_short_pauses() -> bool:
    """Return whether Linux can bound the pauses between two attempts of TCP."""
    with socket.socket() as sock:
        try:
            sock.getsockopt(socket.IPPROTO_TCP, 44)  # TCP_RTO_MAX_MS, of Linux 6.15
        except OSError:
            return False
    return True


async def check_lost(node: Node) -> None:
    """Pending calls and new calls while the link is cut fail in time."""
    node.tell()
    ends: dict[str, tuple[str, float]] = {}
    for _ in range(5):
        name, outcome, seconds = await node.hears("ended")
        ends[name] = outcome, seconds
    for name, (outcome, seconds) in ends.items():
        if "timeout" in name:
            assert outcome.startswith("CallTimeout"), (name, outcome)
            assert seconds < 0.4 + SLACK
        else:
            assert "'worker1' is lost: no sign of life for" in outcome, (name, outcome)
            assert seconds < HEARTBEAT + SLACK
    await node.hears("lost")


async def check_left(nodes: Sequence[Node]) -> None:
    """Each leaves once it is told, and its program ends without an error."""
    for node in nodes:
        node.tell()
    for node in nodes:
        await node.hears("left")
        code, errors = await node.end()
        assert code == 0, errors


async def check_resumed(node: Node, cut: float) -> None:
    """TCP tries again at intervals that grow as the cut lasts. Another connection works at once."""
    node.tell()
    resumed = await node.hears("resumed")
    print(f"works again {resumed:.2f} s after a cut of {cut:.2f} s")
    assert resumed < HEALED + SLACK
    by_torch = await node.hears("torch")
    print(f"torch's own connection works again {by_torch:.2f} s later")
    assert by_torch < (HEALED if has_short_pauses() else cut) + SLACK
    tries, counted = await node.hears("counted")
    # A call that failed may have run or not, but none ran twice.
    assert counted % 100 in (0, 1, 10, 11)
    assert 1 <= counted // 100 <= tries
    assert await node.hears("cancelled") == [2, 1], "calls of a caller that gave up are cancelled"


@pytest.mark.promise("sockets.hosts")
async def test_a_group_on_one_remote_host(machines: tuple[Machine, Machine]) -> None:
    """Its argument crosses the network once. If a receiver is killed, the others get it."""
    async with contextlib.AsyncExitStack() as stack:
        words = [str(HERE / "network_scenarios.py"), "shared"]
        arguments = json.dumps({"init_method": WHERE, "interface": LINK})
        nodes = [
            await stack.enter_async_context(running(machine, *words, rank, arguments))
            for machine, rank in zip(machines, ("0", "members"), strict=True)
        ]
        pids = dict([await nodes[1].hears("serves") for _ in range(MEMBERS)])
        await nodes[0].hears("ready")
        before = received(machines[1])
        nodes[0].tell()
        assert await nodes[0].hears("sums") == [[float(1 << 16), float(ELEMENTS)]] * MEMBERS
        assert await nodes[0].hears("sent") == 2 * MEMBERS
        crossed = received(machines[1]) - before
        print(f"{crossed / (4 * ELEMENTS):.3f} times the size has crossed")
        assert 1 <= crossed / (4 * ELEMENTS) < 1.1
        os.kill(pids[await nodes[0].hears("sending")], signal.SIGKILL)
        nodes[0].tell()
        outcomes = await nodes[0].hears("outcomes")
        assert sorted(outcomes) == ["WorkerLost", *["int"] * (MEMBERS - 1)]
        assert await nodes[0].hears("kept") == [4] * (MEMBERS - 1)


@pytest.mark.promise("sockets.hosts")
async def test_two_links_of_one_machine() -> None:
    """A call does not wait for a transfer to another network namespace, whose link is cut."""
    if reason := why_not():
        pytest.skip(f"no network namespaces here: {reason}")
    async with contextlib.AsyncExitStack() as stack:
        machines = [
            stack.enter_context(contextlib.closing(Machine(each))) for each in ("one", "b", "c")
        ]
        bridge = machines[0]
        bridge.ip("link", "add", "br0", "type", "bridge")
        bridge.gets(f"{ADDRESSES[0]}/24", "br0")
        for rank, machine in enumerate(machines[1:], 1):
            end = ("netns", str(machine.pid))
            port = f"p{rank}"
            bridge.ip("link", "add", port, "type", "veth", "peer", "name", LINK, *end)
            bridge.ip("link", "set", port, "master", "br0", "up")
            machine.gets(f"10.93.7.{rank + 1}/24")
        script = str(HERE / "network_scenarios.py")
        nodes = []
        for rank, machine in enumerate(machines):
            where = {"init_method": WHERE, "interface": LINK if rank else "br0"}
            words = [script, "apart", str(rank), json.dumps(where)]
            nodes.append(await stack.enter_async_context(running(machine, *words)))
        await nodes[0].hears("ready")
        machines[1].unplug()
        nodes[0].tell()
        _, value, seconds = await nodes[0].hears("called")
        assert value == "2"
        assert seconds < SLACK
        assert await nodes[0].hears("waiting")
        machines[1].plug()
        nodes[0].tell()
        assert (await nodes[0].hears("first"))[1] == "2"
        for node in nodes:
            code, errors = await node.end()
            assert code == 0, errors


@pytest.mark.promise("sockets.lost")
async def test_a_transfer_over_a_line_that_is_cut_for_long() -> None:
    """Its call is told in time. Later neither end has a thread or a tensor of it."""
    with line() as (machines, way):
        async with both(machines, "cut_transfer", init_method=WHERE, interface=LINK) as nodes:
            await nodes[0].hears("sending")
            way.loss = 1.0
            assert await nodes[0].hears("ended") == "WorkerLost"
            assert await nodes[0].hears("gone")
            await nodes[1].hears("gone")
            way.loss = 0.0
            nodes[0].tell()
            assert await nodes[0].hears("resumed") == 1


@pytest.mark.slow
@pytest.mark.promise("worlds.cut")
async def test_a_link_that_is_cut_for_long() -> None:
    """However long it is cut, calls work as soon as it is whole."""
    with line() as (machines, way):
        async with both(machines, "cut", cuts=1, init_method=WHERE, interface=LINK) as nodes:
            for node in nodes:
                await node.hears("ready")
            assert (await nodes[0].hears("called"))[0] == 420
            await nodes[0].hears("waiting")
            cut_at = time.monotonic()
            way.loss = 1.0
            await check_lost(nodes[0])
            await asyncio.sleep(LONG_CUT)  # what is measured
            way.loss = 0.0
            await check_resumed(nodes[0], time.monotonic() - cut_at)
            await check_left(nodes)


LONG_CUT = 4 * SLACK


@pytest.mark.slow
@pytest.mark.promise("worlds.cut")
async def test_an_interface_that_is_down_for_long(machines: tuple[Machine, Machine]) -> None:
    """What could not be sent at all is sent later: torch's connections do not end."""
    async with both(machines, "cut", cuts=1, init_method=WHERE, interface=LINK) as nodes:
        for node in nodes:
            await node.hears("ready")
        assert (await nodes[0].hears("called"))[0] == 420
        await nodes[0].hears("waiting")
        cut_at = time.monotonic()
        machines[0].unplug()
        await check_lost(nodes[0])
        await asyncio.sleep(LONG_CUT)  # what is measured
        machines[0].plug()
        await check_resumed(nodes[0], time.monotonic() - cut_at)
        await check_left(nodes)


@pytest.mark.slow
@pytest.mark.promise("worlds.address")
async def test_a_host_that_keeps_another_address(machines: tuple[Machine, Machine]) -> None:
    """Calls to it end in time, those from it work, and a replacement process there is called."""
    async with contextlib.AsyncExitStack() as stack:

        async def start(rank: int) -> Node:
            arguments = json.dumps({"init_method": WHERE, "interface": LINK})
            words = [str(HERE / "network_scenarios.py"), "moves", str(rank), arguments]
            return await stack.enter_async_context(running(machines[rank], *words))

        nodes = [await start(rank) for rank in (0, 1)]
        for node, address in zip(nodes, ADDRESSES, strict=True):
            assert await node.hears("ready") == [0, [address]]
        await nodes[0].hears("waiting")
        machines[1].loses(f"{ADDRESSES[1]}/24")
        machines[1].gets(f"{ANOTHER}/24")
        await check_not_reached(nodes[0], "WorkerLost", HEARTBEAT)
        await check_not_reached(nodes[0], "WorkerLost", HEARTBEAT)
        nodes[1].tell()
        _, value, _ = await nodes[1].hears("called")
        assert value.isdigit(), value
        nodes[0].tell()  # its call finds a living peer, and nothing at the old address
        await check_not_reached(nodes[0], "WorkerUnreachable", 2 * HEARTBEAT)
        await nodes[1].close()
        nodes[1] = await start(1)
        assert await nodes[1].hears("ready") == [1, [ANOTHER]]
        nodes[0].tell()
        assert await nodes[0].hears("called") is True
        nodes[1].tell()
        assert (await nodes[1].hears("called"))[1].isdigit()
        await check_left(nodes)


@pytest.mark.slow
async def test_a_host_that_is_gone_without_a_word(machines: tuple[Machine, Machine]) -> None:
    """Torch's connections to it are closed once its worker's replacement is in."""
    async with contextlib.AsyncExitStack() as stack:

        async def start(rank: int) -> Node:
            options = {"init_method": WHERE, "interface": LINK, "old": ADDRESSES[1]}
            words = [str(HERE / "network_scenarios.py"), "vanishes", str(rank), json.dumps(options)]
            return await stack.enter_async_context(running(machines[rank], *words))

        nodes = [await start(rank) for rank in (0, 1)]
        for node in nodes:
            await node.hears("ready")
        machines[1].loses(f"{ADDRESSES[1]}/24")
        await nodes[1].close()
        machines[1].gets(f"{ANOTHER}/24")
        nodes[1] = await start(1)
        await nodes[1].hears("ready")
        nodes[0].tell()
        await nodes[0].hears("closed")
        for node in nodes:
            node.tell()
        await check_left(nodes)


ANOTHER = "10.93.7.3"


async def check_not_reached(node: Node, kind: str, within: float) -> None:
    name, outcome, seconds = await node.hears("ended")
    print(f"{name}: {outcome} after {seconds:.2f} s")
    assert outcome.startswith(kind), outcome
    assert seconds < within + SLACK


@pytest.mark.slow
@pytest.mark.promise("worlds.path")
async def test_a_path_that_carries_nothing() -> None:
    """A router forgets one connection: calls on it end in time, the next ones work, and no worker
    is lost. So it is if large packets do not pass."""
    with line() as (machines, way):
        rounds = 4
        options = {"rounds": rounds, "init_method": WHERE, "interface": LINK}
        async with both(machines, "paths", **options) as nodes:
            for node in nodes:
                await node.hears("ready")
            for number in range(rounds):
                port = await nodes[0].hears("port")
                ways: list[Callable[[Packet], bool]] = [
                    lambda packet, port=port: port in (packet.source, packet.target),
                    lambda packet, port=port: packet.source == port,
                    lambda packet, port=port: packet.target == port,
                    lambda packet: packet.size > MTU,
                ]
                way.drops = ways[number]
                nodes[0].tell()
                await check_path(nodes[0], is_large=number == 3)
                way.drops = lambda _: False
                nodes[0].tell()
            for node in nodes:
                node.tell()
            for node in nodes:
                assert "lost" not in await node.hears("changes")
                code, errors = await node.end()
                assert code == 0, errors


@pytest.mark.slow
@pytest.mark.promise("worlds.path")
@pytest.mark.parametrize("port", [None, 29600])
async def test_a_router_forgets_all_connections(port: int | None) -> None:
    """Torch's own too, which nothing replaces. New ones work: so do calls and tensors, in time."""
    flows: set[tuple[int, int]] = set()

    def remember(packet: Packet) -> bool:
        flows.add((packet.source, packet.target))
        return False

    with line() as (machines, way):
        way.drops = remember
        options = {"port": port, "init_method": WHERE, "interface": LINK}
        async with both(machines, "forgotten", **options) as nodes:
            for node in nodes:
                await node.hears("ready")
            way.drops = lambda packet: (packet.source, packet.target) in flows
            for node in nodes:
                node.tell()
            for node in nodes:
                for _ in range(2):
                    tries, seconds = await node.hears("works")
                    assert tries[-1].startswith(("0", "1", "tensor")), tries
                    assert not any(each.startswith("WorkerLost") for each in tries), tries
                    assert seconds < PATH_HEARTBEAT + 1 + SLACK
            way.drops = lambda _: False
            await check_left(nodes)


@pytest.mark.promise("worlds.path")
async def test_a_firewall_of_this_machine_drops_a_connection(
    machines: tuple[Machine, Machine],
) -> None:
    """Its packets are not sent at all, so none lacks an acknowledgement. It ends all the same."""
    if shutil.which("iptables") is None:
        pytest.skip("no iptables here")
    async with both(machines, "paths", rounds=1, init_method=WHERE, interface=LINK) as nodes:
        for node in nodes:
            await node.hears("ready")
        machines[0].drop(await nodes[0].hears("port"))
        nodes[0].tell()
        await check_path(nodes[0], is_large=False)
        nodes[0].tell()
        for node in nodes:
            node.tell()
        for node in nodes:
            assert "lost" not in await node.hears("changes")
            code, errors = await node.end()
            assert code == 0, errors


@pytest.mark.promise("worlds.closed")
async def test_a_connection_that_is_closed(machines: tuple[Machine, Machine]) -> None:
    """By a router, say: the worker is not lost, and calls that were not sent go over the next one.

    The others may have run, each once.
    """
    async with both(machines, "closed", init_method=WHERE, interface=LINK) as nodes:
        for _ in range(3):
            results, errors, count, seconds = await nodes[0].hears("closed")
            print(f"{results} results, {count} counted, {seconds:.2f} s: {errors}")
            for each in errors:
                assert "WorkerUnreachable" in each
                assert "may have run" in each
            assert 0 < results <= count < CALLS
            assert results > CALLS / 2  # a window of calls was under way
        results, count, version = await nodes[0].hears("went on")
        assert (results, version) == (300, 1)
        assert count >= 300  # a few ran twice: the map says so
        kinds, logged, errors, calls = await nodes[0].hears("full")
        assert [(name, value.strip("[']")) for name, value in kinds] == [
            *zip(KINDS, KINDS, strict=True)
        ]
        for each in errors:
            assert "WorkerUnreachable" in each
            assert "may have run" in each
        assert sorted(each for each in logged if each in KINDS) == sorted(KINDS)
        assert (numbers := [each for each in logged if each not in KINDS]) == sorted({*numbers})
        assert numbers[-1] == calls - 1
        for node in nodes:
            assert "lost" not in await node.hears("changes")
            code, errors = await node.end()
            assert code == 0, errors


KINDS = ["stream", "group", "any", "map", "timeout"]
MTU = 700  # bytes of the largest packets that pass


async def check_path(node: Node, *, is_large: bool) -> None:
    start = time.monotonic()
    for name, outcome, seconds in await node.hears("ended"):
        print(f"{name}: {outcome} after {seconds:.2f} s")
        assert seconds < PATH_HEARTBEAT + 1 + SLACK
        if name == "large" and not outcome.startswith("Worker"):
            assert outcome.startswith("tensor")  # it was not sent, and goes over the next one
        elif not is_large or name == "call":
            assert "WorkerUnreachable" in outcome
            assert "may have run" in outcome
    _, outcome, seconds = await node.hears("next")
    assert not outcome.startswith("Worker"), outcome
    print(f"works again {time.monotonic() - start:.2f} s after the path was lost")
    _, outcome, _ = await node.hears("next")
    assert is_large or outcome.startswith("tensor"), outcome


def received(machine: Machine) -> int:
    """Return the bytes that have come to a machine."""
    path = f"/sys/class/net/{LINK}/statistics/rx_bytes"
    words = machine.inside("unshare", "--mount", "sh", "-c", f"mount -t sysfs s /sys; cat {path}")
    return int(subprocess.run(words, capture_output=True, check=True).stdout)


async def test_starts_that_fail() -> None:
    """Each fails on both workers, in time, with a reason; the process may try again."""
    attempts = [
        attempt(29501),
        attempt(29502, world_size=3),
        attempt(29503, interface=[LINK, "eth7"]),
        attempt(29504, interface=[LINK, "lo"]),
    ]
    with line() as (machines, way):
        async with both(machines, "starts", attempts=attempts) as nodes:
            await check_unreachable(nodes, machines)
            await check_cut_off(nodes, way)
            await check_no_interface(nodes)
            await check_wrong_interface(nodes)
            for node in nodes:
                code, errors = await node.end()
                assert (code, "terminate" in errors, "Traceback" in errors) == (0, False, False), (
                    errors
                )


async def check_unreachable(nodes: tuple[Node, Node], machines: tuple[Machine, Machine]) -> None:
    for machine in machines:
        machine.unplug()
    await begin(nodes)
    await check_failed(nodes[0], "WorldTimeout", "did not register within 1.5 s: rank 1", PATIENCE)
    text = f"no rank 0 at {ADDRESSES[0]}:29501 within 1.5 s ("
    await check_failed(nodes[1], "WorldTimeout", text, PATIENCE)
    for machine in machines:
        machine.plug()


async def check_cut_off(nodes: tuple[Node, Node], way: Line) -> None:
    await begin(nodes)
    await way.rests()  # both wait for rank 2, and send nothing
    way.loss = 1.0
    await check_failed(nodes[0], "WorldTimeout", "did not register within 1.5 s: rank", PATIENCE)
    text = f"rank 0 at {ADDRESSES[0]}:29502 no longer answers"
    await check_failed(nodes[1], "WorldTimeout", text, PATIENCE)
    way.loss = 0.0


async def check_no_interface(nodes: tuple[Node, Node]) -> None:
    await begin(nodes)
    await check_failed(nodes[0], "WorldTimeout", "did not register within 1.5 s: rank 1", PATIENCE)
    text = f"'eth7' is up on this machine: it has lo (127.0.0.1, ::1), {LINK} ({ADDRESSES[1]}"
    await check_failed(nodes[1], "ValueError", text, 0.0)


async def check_wrong_interface(nodes: tuple[Node, Node]) -> None:
    """The interface exists, but others do not reach it."""
    await begin(nodes)
    found = {"worker0": f"{LINK} ({ADDRESSES[0]}", "worker1": "lo (127.0.0.1"}
    for node in nodes:
        _, message, seconds = await node.hears("failed")
        # The first error, which the other worker may have been told.
        used = next(way for name, way in found.items() if f"{name!r} does not reach" in message)
        assert f"This worker uses {used}" in message
        assert "Give each worker() the interface=" in message
        assert seconds < PATIENCE + SLACK


def attempt(port: int, **more: Any) -> dict[str, Any]:
    where = f"tcp://{ADDRESSES[0]}:{port}"
    return {"world_size": 2, "init_method": where, "start_timeout": PATIENCE, **more}


async def begin(nodes: tuple[Node, Node]) -> None:
    for node in nodes:
        await node.hears("starts")
    for node in nodes:
        node.tell()


async def check_failed(node: Node, kind: str, text: str, after: float) -> None:
    name, message, seconds = await node.hears("failed")
    assert name == kind, message
    assert text in message
    assert after <= seconds + 0.01
    assert seconds < after + SLACK
