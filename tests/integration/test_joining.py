"""Worlds whose membership changes: workers join, leave, are lost and return."""

import asyncio
import contextlib
import functools
import gc
import os
import socket
from pathlib import Path
from typing import Any

import pytest
import torch

import aiorpc_torch as aiorpc
from aiorpc_torch import Group, WorkerLost, call, create, each, remote
from aiorpc_torch.testing import kill, world
from aiorpc_torch.types import Change
from tests.support import actors, joiners
from tests.support.example_programs import free_port
from tests.support.joiners import (
    MAX_STRANGERS,
    Env,
    cut_from_rank_0,
    growing,
    strangers_of_directories,
)
from tests.support.two_ends import until

SOON = 30.0


async def follow(me: aiorpc.types.Worker) -> list[Change]:
    """Return the changes of a world once this worker has left it."""
    return [change async for change in me.changes()]


@pytest.mark.promise("rejoin.changes")
async def test_changes_of_a_child_that_is_killed() -> None:
    """It is lost and returns, for this process and for the other child; then all leave."""
    async with world(["a", "b"], max_restarts=1) as me:
        following = asyncio.create_task(follow(me))
        assert await call("b", actors.ask_back, "a") == "a"  # b has a connection to it
        pending = asyncio.create_task(call("a", asyncio.sleep, 600))
        kill("a")
        with pytest.raises(WorkerLost):
            await pending
        async with asyncio.timeout(SOON):
            await me.wait_for("a")
    changes = await following
    lost, returned = changes[:2]
    assert (lost.kind, lost.name, lost.rank) == ("lost", "a", 1)
    assert lost.reason == "its process was killed by SIGKILL"
    assert returned == Change("returned", "a", 1)
    assert {each.kind for each in changes[2:]} <= {"left"}


# ── a local world ───────────────────────────────────────────────────────────────────────────────


@pytest.mark.promise("joining.local", "rejoin.changes")
async def test_children_are_started_and_stopped() -> None:
    """Also one of the start. The others go on, and a name is free when its worker has left."""
    async with asyncio.timeout(2 * SOON), world(["a"]) as me:
        following = asyncio.create_task(follow(me))
        await asyncio.gather(me.start("b"), me.start("c"))
        assert sorted(me.peers) == ["a", "b", "c"]
        assert await call("b", actors.ask_back, "c") == "c"
        assert await call("a", actors.ask_back, "b") == "b"
        with pytest.raises(ValueError, match="two workers have the name 'b'"):
            await me.start("b")
        ending = asyncio.create_task(call("b", asyncio.sleep, 0.2, "ended"))
        await call("b", actors.pid)
        await me.stop("b")
        assert await ending == "ended"
        await me.stop("a")
        assert me.peers == ("c",)
        with pytest.raises(ValueError, match="'a' is not a child of this world; there are: c"):
            await me.stop("a")
        for name in ("a", "b"):
            await me.start(name)
            assert await call("c", actors.ask_back, name) == name
        assert me.peers == ("c", "a", "b")
    changes = [(change.kind, change.name) for change in await following]
    assert changes[2:6] == [("left", "b"), ("left", "a"), ("joined", "a"), ("joined", "b")]


@pytest.mark.promise("joining.local")
async def test_a_child_of_a_world_of_one_is_restarted() -> None:
    """It joins anew, and may be stopped; once it may not be restarted, it may be started."""
    async with asyncio.timeout(2 * SOON), world(max_restarts=1) as me:
        await me.start("a")
        for _ in range(2):
            pending = asyncio.create_task(call("a", asyncio.sleep, 600))
            kill("a")
            with pytest.raises(WorkerLost):
                await pending
            with contextlib.suppress(WorkerLost):
                await me.wait_for("a")
        await me.start("a")
        await me.wait_for("a")
        assert await call("a", actors.ask_back, "main") == "main"
        await me.stop("a")


@pytest.mark.promise("joining.local")
async def test_a_child_that_does_not_start() -> None:
    """Its error is raised where it is started, and the world goes on."""
    async with asyncio.timeout(2 * SOON), world() as me:
        with pytest.raises(ValueError, match="a worker's name must be"):
            await me.start("no name")
        await me.start("a")
        assert await call("a", actors.ask_back, "main") == "main"


async def hold(name: str, owner: str) -> None:
    """Keep a reference to an object, until this process ends."""
    joiners.kept.append(await aiorpc.lookup(name, on=owner))


@pytest.mark.parametrize("end", ["stop", "kill"])
async def test_references_of_processes_that_ended(
    end: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """They delay the end of the world by a second at most, and torch logs nothing about them."""
    async with asyncio.timeout(2 * SOON), world(max_restarts=1) as me:
        aiorpc.register("object", Env())
        await me.start("a")
        await call("a", hold, "object", "main")
        if end == "stop":
            await me.stop("a")
        else:
            pending = asyncio.create_task(call("a", asyncio.sleep, 600))
            kill("a")
            with pytest.raises(WorkerLost):
                await pending
            with contextlib.suppress(WorkerLost):
                await me.wait_for("a")
    assert "OwnerRRefs" not in capfd.readouterr().err


# ── joining ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.promise("joining.join", "joining.everything")
@pytest.mark.parametrize("store", ["file", "tcp"])
async def test_two_join_at_once(tmp_path: Path, store: str) -> None:
    """They see each other. All that works with the first workers works with them."""
    where = f"file://{tmp_path}/store" if store == "file" else f"tcp://127.0.0.1:{free_port()}"
    async with asyncio.timeout(2 * SOON), growing(where) as (me, them):
        assert (me.peers, me.world_size) == ((), 1)
        await them.enter("a", "b")
        while sorted(me.peers) != ["a", "b"]:  # noqa: ASYNC110 - they may know before this worker
            await asyncio.sleep(0.01)
        assert me.world_size == 3
        for name, other in (("a", "b"), ("b", "a")):
            peers, size = await call(name, joiners.peers)
            assert (set(peers), size) == ({"main", other}, 3)
            assert await call(name, actors.ask_back, other) == other
            assert await call(name, actors.ask_back, "main") == "main"
        group: Group[Env] = await create(["a", "b"], Env)
        large = torch.arange(1 << 18, dtype=torch.float32)  # in shared memory
        assert all(torch.equal(got, large + 1) for got in await remote(group).step(large))
        assert await remote(group).number(each([1, 2])) == [1, 2]
        mapped = [value async for value in group.map(Env.number, range(50))]
        assert sorted(mapped) == [*range(50)]
        [first, second] = group
        assert [item async for item in remote(first).count(3)] == [0, 1, 2]
        sums = await asyncio.gather(
            remote(first).both(1), call("b", actors.call_on, first, "both", 2)
        )
        assert sums == [3, 3]
        assert await call("a", actors.call_on, second, "number", 7) == 7
        for name in ("a", "b"):
            await call(name, joiners.leave)


@pytest.mark.promise("joining.undisturbed")
async def test_calls_while_others_join(tmp_path: Path) -> None:
    """None of them is lost, and each runs once."""
    async with asyncio.timeout(2 * SOON), growing(f"file://{tmp_path}/store") as (_, them):
        await them.enter("a")
        counter, stop, done = await create("a", actors.Counter), asyncio.Event(), 0

        async def work() -> None:
            nonlocal done
            while not stop.is_set():
                await asyncio.gather(*(remote(counter).aadd(1) for _ in range(200)))
                done += 200

        working = asyncio.create_task(work())
        await them.enter("b", "c")
        stop.set()
        await working
        assert await remote(counter).aadd(0) == done > 0
        for name in ("a", "b", "c"):
            await call(name, joiners.leave)


@pytest.mark.promise("joining.leave", "joining.names", "joining.left", "rejoin.changes")
async def test_a_joiner_leaves_and_another_has_its_name(tmp_path: Path) -> None:
    """No peer has to end for it. The changes, and the peers, are the same at every worker."""
    async with asyncio.timeout(2 * SOON), growing(f"file://{tmp_path}/store") as (me, them):
        following = asyncio.create_task(follow(me))
        first, _ = await them.enter("a"), await them.enter("b")
        env = await create("a", Env)
        for name, text in (("a", "alive"), ("main", "that name is of rank 0")):
            refused = await them.start(name)
            kind, error = await refused.hear()
            assert kind == "ValueError"
            assert text in error
        await call("a", joiners.leave)
        assert await first[0].hear() == ("left",)
        assert (me.peers, me.world_size) == (("b",), 2)
        assert await call("b", joiners.peers) == (("main",), 2)
        calls = remote(env).number, functools.partial(call, "a", abs)
        for calling in (*calls, functools.partial(call, "b", actors.call_abs, "a")):
            with pytest.raises(aiorpc.WorkerLeft, match="worker 'a' has left its world"):
                await calling(1)
        await them.enter("a")
        assert me.peers == ("b", "a"), "in rank order"
        assert (await call("b", joiners.peers))[0] == ("main", "a")
        assert await call("b", actors.ask_back, "a") == "a"
        with pytest.raises(WorkerLost, match="old process"):
            await remote(env).number(1)
        assert await remote(await create("a", Env)).number(1) == 1
        for name in ("a", "b"):
            await call(name, joiners.leave)
            await until(lambda name=name: name not in me.peers)
    changes = [(change.kind, change.name) for change in await following]
    a, b = [("joined", "a"), ("left", "a")], [("joined", "b"), ("left", "b")]
    assert [change for change in changes if change[1] == "a"] == a * 2
    assert [change for change in changes if change[1] == "b"] == b


@pytest.mark.promise("joining.death")
@pytest.mark.parametrize("step", ["register", "publish"])
async def test_a_joiner_that_dies_while_it_joins(tmp_path: Path, step: str) -> None:
    """It is no peer; another joins under its name, and none waits for it when all leave."""
    # A second of silence: the one that died is lost by then.
    async with (
        asyncio.timeout(2 * SOON),
        growing(f"file://{tmp_path}/store", heartbeat=1.0) as (
            me,
            them,
        ),
    ):
        await them.enter("b", heartbeat=1.0)
        dying = await them.start("a", stop_at=step)
        assert await dying.hear() == ("at", step)
        assert me.peers == ("b",)
        dying.kill()
        await them.enter("c", heartbeat=1.0)
        assert await call("c", actors.ask_back, "b") == "b"
        await them.enter("a")
        assert await call("c", actors.ask_back, "a") == "a"
        await call("a", joiners.leave)
        await call("b", joiners.leave)
        await call("c", joiners.leave)


@pytest.mark.promise("joining.serve")
async def test_a_joiner_is_waited_for(tmp_path: Path) -> None:
    """As any peer: this worker's `serve` ends when it leaves, and not before."""
    async with asyncio.timeout(2 * SOON), growing(f"file://{tmp_path}/store") as (me, them):
        await them.enter("a", "b")
        serving = [asyncio.create_task(me.serve(until)) for until in (None, "a", "b")]
        await call("a", joiners.leave)
        await serving[1]
        assert not serving[0].done()
        assert not serving[2].done()
        await call("b", joiners.leave)
        await asyncio.gather(*serving)


@pytest.mark.promise("joining.death")
async def test_a_joiner_that_is_killed_is_lost(tmp_path: Path) -> None:
    """As any peer. A process may join under its name."""
    async with asyncio.timeout(2 * SOON), growing(f"file://{tmp_path}/store") as (me, them):
        following = asyncio.create_task(follow(me))
        [killed] = await them.enter("a")
        pending = asyncio.create_task(call("a", asyncio.sleep, 600))
        await call("a", joiners.pid)
        killed.kill()
        with pytest.raises(WorkerLost):
            await pending
        assert me.peers == ("a",)
        await them.enter("a")
        assert await call("a", joiners.pid) != os.getpid()
        await call("a", joiners.leave)
        await until(lambda: not me.peers)
    kinds = [change.kind for change in await following]
    assert kinds == ["joined", "lost", "returned", "left"]


@pytest.mark.promise("joining.join")
async def test_joining_beside_the_store_of_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    """By MASTER_ADDR alone, beside a launcher that keeps a store, on which its agents agree.

    An agent counts the restarts of its own workers only.
    """
    listening = socket.create_server(("127.0.0.1", 0))  # torch's own looks up names of addresses
    port = listening.getsockname()[1]
    agent = torch.distributed.TCPStore(
        "127.0.0.1", port, None, True, wait_for_workers=False, master_listen_fd=listening.detach()
    )
    environment = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(agent.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    options: dict[str, Any] = {"world_size": 2}
    async with asyncio.timeout(2 * SOON):
        them = joiners.Joiners({"init_method": None, "interface": "lo"})
        try:
            first = []
            for rank in range(2):
                options["environment"] = environment | {"TORCHELASTIC_RESTART_COUNT": str(rank)}
                first.append(await them.start(f"w{rank}", rank=rank, **options))
            assert [(await each.hear())[:2] for each in first] == [("in", 0), ("in", 1)]
            joined = await them.start("w2", environment=environment)
            assert await joined.hear() == ("in", 2, ("w0", "w1"))
        finally:
            them.close()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({}, "needs a name"),
        ({"name": "a", "rank": 1}, "takes no rank and no world_size"),
        ({"name": "a", "world_size": 2}, "takes no rank and no world_size"),
    ],
)
async def test_arguments_of_a_joiner(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        async with aiorpc.worker(join=True, init_method="file:///nowhere/store", **arguments):
            pass


async def test_a_process_joins_in_its_first_world(tmp_path: Path) -> None:
    async with world():
        pass
    with pytest.raises(RuntimeError, match="in no world before"):
        async with aiorpc.worker("a", join=True, init_method=f"file://{tmp_path}/store"):
            pass


# ── the connection to rank 0 ────────────────────────────────────────────────────────────────────


async def next_change() -> Change:
    """To be called in a child: return its next change."""
    [me] = [each for each in gc.get_objects() if isinstance(each, aiorpc.types.Worker)]
    async for change in me.changes():
        return change
    raise AssertionError


@pytest.mark.promise("rejoin.at_once")
async def test_a_death_is_known_without_a_connection() -> None:
    """A worker that has never called another learns at once that its process has died."""
    async with asyncio.timeout(SOON), world(["a", "b"], heartbeat=600.0):
        following = asyncio.create_task(call("b", next_change))
        await call("b", actors.pid)
        kill("a")
        change = await following
        assert (change.kind, change.name) == ("lost", "a")


@pytest.mark.promise("security.directory")
async def test_joining_among_strangers() -> None:
    """More than rank 0 keeps of them stay connected to it meanwhile, and say nothing."""
    address = ("127.0.0.1", free_port())
    loop = asyncio.get_running_loop()
    async with (
        asyncio.timeout(2 * SOON),
        growing(f"tcp://{address[0]}:{address[1]}", freeze_gc=False) as (me, them),
        contextlib.AsyncExitStack() as stack,
    ):
        for number in range(MAX_STRANGERS + 64):
            stranger = stack.enter_context(socket.socket())
            stranger.setblocking(False)
            await loop.sock_connect(stranger, address)
            if number % 2:
                await loop.sock_sendall(stranger, b"GET / HTTP/1.1\r\n\r\n")
        assert strangers_of_directories() <= MAX_STRANGERS
        await them.enter("a")
        assert me.peers == ("a",)
        assert await call("a", actors.ask_back, "main") == "main"
        await call("a", joiners.leave)


@pytest.mark.promise("joining.cut", "joining.refused")
@pytest.mark.parametrize("refusals", [0, 3])
async def test_a_link_that_is_cut_to_rank_0_alone(refusals: int) -> None:
    """Excludes no worker: it connects again, and knows who joins later."""
    async with asyncio.timeout(2 * SOON), world(["a", "b"], freeze_gc=False) as me:
        following = asyncio.create_task(follow(me))
        assert await call("a", cut_from_rank_0, refusals)
        await me.start("c")
        assert await call("a", actors.ask_back, "c") == "c"
        assert await call("b", actors.ask_back, "a") == "a"
    assert {change.kind for change in await following if change.name == "a"} <= {"left"}
