"""Leaving a world: a worker serves as long as live peers are inside, and says for whom."""

import asyncio
import contextlib
import inspect
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

import aiorpc_torch as aiorpc
from tests.support import leavers
from tests.support.actors import Counter
from tests.support.example_programs import free_port

PATIENCE = 30.0


class Process:
    """A worker, and what it tells."""

    def __init__(self, target: Callable[..., None], *args: Any) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["aiorpc_torch"])
        self.pipe: Connection
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=target, args=(theirs, *args), daemon=True)
        self.process.start()
        theirs.close()

    def tell(self, command: str) -> None:
        self.pipe.send(command)

    def hear(self, *starts: str) -> str:
        """Return the first text that starts like one of these."""
        end = time.monotonic() + PATIENCE  # other texts do not prolong it
        while True:
            assert self.pipe.poll(max(0.0, end - time.monotonic())), starts
            text = self.pipe.recv()
            if str(text).startswith(starts):
                return str(text)

    def close(self) -> None:
        self.process.kill()
        self.process.join()
        self.process.close()
        self.pipe.close()


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Callable[..., list[Process]]]:
    with contextlib.ExitStack() as stack:

        def start(
            block: str,
            until: str | None = None,
            names: Sequence[str] = ("server", "t1", "t2"),
            store: str = "",
        ) -> Any:
            options = {"world_size": 3, "init_method": store or f"file://{tmp_path}/store"}
            options |= {"interface": "lo", "heartbeat": 2.0}
            found = []
            for rank, name in enumerate(names):
                is_server = name.startswith("server")
                target, args = (
                    (leavers.server, (block, until)) if is_server else (leavers.client, ())
                )
                found.append(Process(target, name, rank, options, *args))
                stack.callback(found[-1].close)
            return found

        yield start


def test_the_default_is_no_limit() -> None:
    assert inspect.signature(aiorpc.worker).parameters["stop_timeout"].default is None


def test_an_empty_block_is_a_server(started: Callable[..., list[Process]]) -> None:
    """Its log names who is awaited; when the last peer has left, it leaves."""
    server, first, second = started("")
    assert server.hear("server is serving until") == "server is serving until t1, t2 leave"
    first.tell("call")
    assert first.hear("8")
    first.tell("leave")
    server.hear("server is serving until t2 leaves")
    second.tell("call")
    assert second.hear("8")
    second.tell("leave")
    for each in (server, first, second):
        each.hear("left")


def test_a_dead_peer_is_not_waited_for(started: Callable[..., list[Process]]) -> None:
    server, first, second = started("")
    server.hear("server is serving until t1, t2 leave")
    first.tell("die")
    server.hear("server is serving until t2 leaves")
    second.tell("raise")
    server.hear("left")


@pytest.mark.slow
def test_a_frozen_peer_is_not_waited_for(started: Callable[..., list[Process]]) -> None:
    """It is lost after `heartbeat`, though nothing else asks for it."""
    server, first, second = started("")
    server.hear("server is serving until t1, t2 leave")
    assert first.process.pid is not None
    os.kill(first.process.pid, signal.SIGSTOP)
    server.hear("server is serving until t2 leaves")
    second.tell("leave")
    server.hear("left")


@pytest.mark.parametrize(
    ("number", "end"), [(signal.SIGTERM, "SystemExit: 143"), (signal.SIGINT, "KeyboardInterrupt")]
)
def test_a_signal_ends_the_wait(
    started: Callable[..., list[Process]], number: signal.Signals, end: str
) -> None:
    server, *_ = started("")
    server.hear("server is serving until t1, t2 leave")
    assert server.process.pid is not None
    os.kill(server.process.pid, number)
    assert server.hear("left", end).startswith(end)


def test_serving_until_all_have_left(started: Callable[..., list[Process]]) -> None:
    server, first, second = started("serve")
    server.hear("server is serving until t1, t2 leave")
    for each in (first, second):
        each.tell("call")
        assert each.hear("8")
        each.tell("leave")
    server.hear("served")
    for each in (server, first, second):
        each.hear("left")


@pytest.mark.parametrize(("command", "end"), [("leave", "served"), ("die", "WorkerLost")])
def test_serving_until_one_has_left(
    started: Callable[..., list[Process]], command: str, end: str
) -> None:
    server, first, second = started("serve", "t1")
    server.hear("server is serving until t1 leaves")
    first.tell(command)
    assert server.hear("served", "WorkerLost: worker 't1' is lost").startswith(end)
    second.tell("leave")


@pytest.mark.promise("worlds.servers")
@pytest.mark.parametrize("command", ["leave", "die"])
@pytest.mark.parametrize("rank", [2, 0])
def test_servers_and_a_driver_end_together(
    started: Callable[..., list[Process]], command: str, rank: int
) -> None:
    """Whichever rank the driver has, and also if it dies."""
    names = ["server1", "server2"]
    names.insert(rank, "t0")
    servers = started("serve", names=names)
    driver = servers.pop(rank)
    for each in servers:
        text = each.hear("server1 is serving until", "server2 is serving until")
        while not text.endswith("until t0 leaves"):  # the other one serves too
            text = each.hear("server1 is serving until", "server2 is serving until")
    driver.tell(command)
    for each in servers:
        each.hear("served")
    for each in servers:
        each.hear("left")


@pytest.mark.promise("supervised.left")
async def test_a_supervised_object_of_a_worker_that_has_left(tmp_path: Path) -> None:
    """Its calls raise WorkerLeft. Nothing is made again, since no loss has ended its worker."""
    options: Any = {"world_size": 2, "init_method": f"file://{tmp_path}/store", "interface": "lo"}
    left = Process(leavers.client, "a", 1, options | {"stop_timeout": 0.1})
    try:
        async with aiorpc.worker("main", rank=0, **options), asyncio.timeout(PATIENCE):
            counter = await aiorpc.supervised("a", Counter)
            assert await aiorpc.remote(counter).add() == 1
            left.tell("leave")
            await asyncio.to_thread(left.hear, "left")
            for calling in (
                lambda: aiorpc.remote(counter).add(),
                lambda: aiorpc.fetch(counter),
                lambda: aiorpc.remote(counter).aadd(),
            ):
                with pytest.raises(aiorpc.WorkerLeft):
                    await calling()
            with pytest.raises(aiorpc.GroupError) as raised:
                await aiorpc.remote(aiorpc.Group([counter])).add()
            assert isinstance(raised.value.exceptions[0], aiorpc.WorkerLeft)
            with pytest.raises((aiorpc.WorkerLeft, aiorpc.WorkerLost)):
                await aiorpc.remote(aiorpc.Group([counter]).any()).add()
            assert counter.incarnation == 0
    finally:
        left.close()


@pytest.mark.promise("rejoin.wait_ends", "supervised.waits")
async def test_waits_for_a_dead_peer_end_with_the_world(tmp_path: Path) -> None:
    """Nothing starts that peer again. `wait_for` and supervised objects raise WorkerLeft."""
    options: Any = {"world_size": 2, "init_method": f"file://{tmp_path}/store", "interface": "lo"}
    peer = Process(leavers.client, "a", 1, options)
    try:
        async with aiorpc.worker("main", rank=0, **options) as me, asyncio.timeout(PATIENCE):
            counter = await aiorpc.supervised("a", Counter)
            group = aiorpc.Group([counter])
            pending = asyncio.create_task(aiorpc.call("a", asyncio.sleep, 600))
            assert await aiorpc.remote(counter).add() == 1
            peer.tell("die")
            with pytest.raises(aiorpc.WorkerLost):
                await pending
            waits: list[Any] = [
                me.wait_for("a"),
                aiorpc.remote(counter).add(),
                aiorpc.remote(group.any()).add(),
                anext(group.map(Counter.add, [1])),
            ]
            waiting = [asyncio.ensure_future(waited(each)) for each in waits]
            await asyncio.sleep(0)
        async with asyncio.timeout(PATIENCE):
            assert [type(await each) for each in waiting] == [aiorpc.NotInWorld] * 4
            assert isinstance(await waited(aiorpc.remote(counter).add()), aiorpc.NotInWorld)
    finally:
        peer.close()


async def waited(awaitable: Any) -> BaseException | None:
    try:
        await awaitable
    except Exception as exc:
        return exc
    return None


def test_leaving_without_rank_0(started: Callable[..., list[Process]]) -> None:
    """Rank 0 dies with the directory: the others tell each other by torch that they leave."""
    server, first, second = started("serve", store=f"tcp://127.0.0.1:{free_port()}")
    server.hear("server is serving until t1, t2 leave")
    server.process.kill()
    for each in (first, second):
        each.tell("leave")
    for each in (first, second):
        each.hear("left")


@pytest.mark.promise("streams.cut_short")
async def test_changes_go_on_after_a_wait_that_was_cancelled() -> None:
    """None is missed, also of those since the call of `changes`."""
    async with aiorpc.local_world(1) as me:
        changes, name = aiter(me.changes()), me.peers[0]
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(changes), 0.01)
        await me.stop(name)
        assert (await anext(changes)).kind == "left"
    with pytest.raises(StopAsyncIteration):
        await anext(changes)


async def test_changes_have_one_reader_and_an_end() -> None:
    """As an async generator: a second task is refused, also `aclose` while one waits."""
    async with aiorpc.local_world(1) as me:
        changes: Any = me.changes()
        waiting = asyncio.ensure_future(anext(changes))
        await asyncio.sleep(0)
        for refused in (anext(changes), changes.aclose()):
            with pytest.raises(RuntimeError, match="another task waits for the next change"):
                await refused
        await me.stop(me.peers[0])
        assert (await waiting).kind == "left"
        await changes.aclose()
        with pytest.raises(StopAsyncIteration):
            await anext(changes)
