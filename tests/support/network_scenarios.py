"""What the workers of tests/network/test_two_hosts.py run.

`python network_scenarios.py scenario rank '{"its": "arguments"}'` starts one.

They tell what happens in lines of JSON, `[event, value]`, and where one says `told()` it waits for
a line.
"""

import asyncio
import ctypes
import gc
import json
import logging
import os
import signal
import socket
import sys
import threading
import time
import traceback
import weakref
from collections.abc import AsyncIterator, Awaitable
from typing import Any

import psutil
import torch
from torch.distributed import rpc

import aiorpc_torch as aiorpc
from aiorpc_torch import Group, create, remote
from aiorpc_torch._carrier import socket_threads
from aiorpc_torch._carrier.tensor_sockets import TensorSockets
from aiorpc_torch._client import introduction, pool
from aiorpc_torch._endpoint import entry_points
from aiorpc_torch._torch.transport import ping, wrap_future
from aiorpc_torch.testing import Gate
from aiorpc_torch.training import Weights, follow
from tests.support import actors
from tests.support.tensor_shelf import TensorShelf

HEARTBEAT = 1.0
STOP_TIMEOUT = 2.0


def tell(event: str, value: Any = None) -> None:
    sys.stdout.write(json.dumps([event, value]) + "\n")
    sys.stdout.flush()


async def told() -> None:
    await asyncio.to_thread(sys.stdin.readline)


async def outcome(name: str, awaitable: Awaitable[Any]) -> list[Any]:
    """What came of it, and the seconds until then."""
    start = time.monotonic()
    try:
        value = repr(await awaitable)
    except Exception as exc:
        value = repr(exc)
    return [name, value, time.monotonic() - start]


def listening() -> list[str]:
    """The addresses at which this process waits for connections."""
    found = psutil.Process().net_connections("tcp")
    return sorted({c.laddr.ip for c in found if c.status == psutil.CONN_LISTEN})


# ── scenarios ───────────────────────────────────────────────────────────────────────────────────


async def starts(rank: int, *, attempts: list[dict[str, Any]]) -> None:
    """Whatever comes of starting, again and again."""
    for attempt in attempts:
        tell("starts")
        await told()
        begin = time.monotonic()
        mine = {
            name: each[rank] if isinstance(each, list) else each for name, each in attempt.items()
        }
        try:
            async with aiorpc.worker(rank=rank, **mine):
                tell("started")
        except Exception as exc:
            text = "".join(traceback.format_exception_only(exc))
            tell("failed", [type(exc).__name__, text, time.monotonic() - begin])


async def calls(rank: int | None, **world: Any) -> None:
    """Calls one after another, many at once, large tensors and a stream."""
    size = None if rank is None else 2
    async with aiorpc.worker(rank=rank, world_size=size, **world) as me:
        tell("ready", [me.rank, listening()])
        if me.rank == 0:
            await _call(*me.peers)
    tell("left", me.rank)


async def _call(peer: str) -> None:
    counter, streams = await create(peer, actors.Counter), await create(peer, actors.Streams)
    for _ in range(20):
        await remote(counter).aadd()
    for _ in range(20):
        await asyncio.gather(*(remote(counter).aadd() for _ in range(20)))
    large = torch.arange(250_000.0)
    result = await remote(counter).scale(large)
    assert aiorpc.observe.stats().socket_messages == 1
    items = [item async for item in remote(streams).count(500)]
    tell("called", [await remote(counter).aadd(0), torch.equal(result, 420 * large), items])


async def grows(rank: int | None, **world: Any) -> None:
    """Call all that are in the world when told to; without a rank, join it."""
    size = {} if rank is None else {"world_size": 2}
    async with aiorpc.worker(rank=rank, join=rank is None, **size, **world) as me:
        tell("ready", [me.rank, listening()])
        await told()
        large = torch.arange(250_000.0)
        for peer in me.peers:
            counter = await create(peer, actors.Counter, 1)
            assert torch.equal(await remote(counter).scale(large), large)
        tell("called", me.peers)
        await told()


async def cut(rank: int, *, cuts: int, **world: Any) -> None:
    """A world that works, whose link is cut a number of times, and once more while it stops."""
    async with aiorpc.worker(
        rank=rank, world_size=2, heartbeat=HEARTBEAT, stop_timeout=STOP_TIMEOUT, **world
    ) as me:
        tell("ready", listening())
        if rank == 0:
            await _call(*me.peers)
            for _ in range(cuts):
                await _work(*me.peers)
        await told()
        start = time.monotonic()
    tell("left", time.monotonic() - start)


async def _work(peer: str) -> None:
    gate, streams, counter = [
        await create(peer, each) for each in (Gate, actors.Streams, actors.Counter)
    ]
    waiting = [
        asyncio.create_task(outcome("call", remote(gate).passed())),
        asyncio.create_task(outcome("call with a timeout", remote(gate, timeout=0.4).passed())),
        asyncio.create_task(outcome("stream", actors.iterate_on(streams, "follow"))),
    ]
    await remote(gate).entered(2)
    await remote(streams).followed()
    tell("waiting")
    await told()  # the link is cut
    for each in await asyncio.gather(*waiting):
        tell("ended", each)
    short = remote(counter, timeout=0.2).aadd(1)
    tell("ended", await outcome("new call with a timeout", short))
    tell("ended", await outcome("new call", remote(counter).aadd(10)))
    tell("lost")
    await told()  # the link is whole
    start, tries = time.monotonic(), 1
    while not (await outcome("try", remote(counter, timeout=0.3).aadd(100)))[1].isdigit():
        tries += 1
    tell("resumed", time.monotonic() - start)
    start = time.monotonic()
    await wrap_future(ping(pool.current()._members.peers[peer].member.info))
    tell("torch", time.monotonic() - start)
    tell("counted", [tries, await remote(counter).aadd(0)])
    tell("cancelled", [await remote(gate).cancelled(2), await remote(streams).closed()])


async def moves(rank: int, **world: Any) -> None:
    """A call to a worker whose host gets another address, calls from there, and its replacement."""
    introduction.DIAL_TIMEOUT = 1.0  # seconds
    options: Any = {"rank": rank, "world_size": 2, "heartbeat": HEARTBEAT, **world}
    async with aiorpc.worker(**options) as me:
        (peer,) = me.peers
        tell("ready", [me.restarts, listening()])
        if rank:
            await aiorpc.call(peer, os.getpid)  # introduces it, by torch RPC
            await told()  # its host has the other address, and it is lost
            tell("called", await outcome("call", aiorpc.call(peer, os.getpid)))
        else:
            await _call_moved(peer)
        await told()
    tell("left")


async def _call_moved(peer: str) -> None:
    gate = await create(peer, Gate)
    waiting = asyncio.ensure_future(outcome("call", remote(gate).passed()))
    await remote(gate).entered(1)
    tell("waiting")
    for call in (waiting, outcome("new call", remote(gate).passed())):
        tell("ended", await call)
    await told()  # calls from there have worked
    tell("ended", await outcome("new call", remote(gate).passed()))
    await told()  # the replacement process is in
    counter = await create(peer, actors.Counter, 1)
    large = torch.arange(250_000.0)
    tell("called", torch.equal(await remote(counter).scale(large), large))


async def vanishes(rank: int, *, old: str, **world: Any) -> None:
    """Torch's connections to a host that is gone without a word, once a process elsewhere is in."""
    options: Any = {"rank": rank, "world_size": 2, "heartbeat": HEARTBEAT, **world}
    async with aiorpc.worker(**options) as me:
        (peer,) = me.peers
        await asyncio.to_thread(rpc.rpc_sync, peer, os.getpid)  # opens them
        tell("ready")
        await told()
        if rank == 0:
            assert await aiorpc.call(peer, os.getpid) != os.getpid()
            while sockets_to(old):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
            tell("closed")
            await told()
    tell("left")


def sockets_to(address: str) -> int:
    """Return how many sockets are connected with a host, without the directory's."""
    connected = [each for each in psutil.Process().net_connections("tcp") if each.raddr]
    return sum(each.raddr.ip == address and each.laddr.port != 29500 for each in connected)


PATH_HEARTBEAT = 2.0


async def paths(rank: int, *, rounds: int, **world: Any) -> None:
    """Calls on paths that fail one at a time, between workers that live on."""
    options: Any = {"rank": rank, "world_size": 2, "heartbeat": PATH_HEARTBEAT, **world}
    async with aiorpc.worker(**options) as me:
        changes = asyncio.create_task(kinds_of_changes(me))
        tell("ready")
        if rank == 0:
            (peer,) = me.peers
            shelf = remote(await create(peer, TensorShelf))
            gate = await create(peer, Gate)
            await until_sockets([peer])
            await shelf.keep(torch.ones(1 << 16))  # opens the sockets
            for number in range(rounds):
                await _lose_path(peer, shelf, gate, number)
        await told()
    tell("changes", await changes)


async def kinds_of_changes(me: Any) -> list[str]:
    return [each.kind async for each in me.changes()]


async def _lose_path(peer: str, shelf: Any, gate: Any, number: int) -> None:
    """Tell the port of the connection for calls, and what comes of calls once it is cut."""
    transport = pool.current().connection(peer).transport
    waiting = asyncio.ensure_future(outcome("call", remote(gate).passed()))
    await remote(gate).entered(number + 1)
    tell("port", transport.get_extra_info("sockname")[1])
    await told()  # the path is cut, or carries no large packets
    large = asyncio.ensure_future(outcome("large", shelf.echo(torch.ones(1 << 18))))
    tell("ended", [await waiting, await large])
    tell("next", await outcome("next", shelf.echo(number)))
    tell("next", await outcome("next", shelf.echo(torch.ones(1 << 18))))
    await told()  # it is whole


async def forgotten(rank: int, **world: Any) -> None:
    """Calls of both workers, small ones and tensors, once the connections that are open carry
    nothing any more."""
    options: Any = {"rank": rank, "world_size": 2, "heartbeat": PATH_HEARTBEAT, **world}
    async with aiorpc.worker(**options) as me:
        (peer,) = me.peers
        shelf, x = remote(await create(peer, TensorShelf)), torch.ones(1 << 18)
        await until_sockets([peer])
        await shelf.keep(x)  # opens the sockets
        tell("ready")
        await told()
        for value in (rank, x) if rank == 0 else (x, rank):
            start, tries = time.monotonic(), []
            while not tries or tries[-1].startswith("Worker"):
                tries.append((await outcome("call", shelf.echo(value)))[1])
            tell("works", [tries, time.monotonic() - start])
        await told()
    tell("left")


async def raw(rank: int, *, losses: int, files: list[str] | None, **world: Any) -> None:
    """Calls of plain torch, and of a torch RRef, each after the flows of torch were lost."""
    options: Any = {"rank": rank, "world_size": 2, "heartbeat": PATH_HEARTBEAT, **world}
    options["tls"] = None if files is None else aiorpc.Tls(*files)
    async with aiorpc.worker(**options) as me:
        changes = asyncio.create_task(kinds_of_changes(me))
        (peer,) = me.peers
        kept = await asyncio.to_thread(rpc.remote, peer, torch.add, (torch.ones(2), 0))
        await asyncio.to_thread(_call_raw, peer, kept)
        tell("ready")
        for _ in range(losses):
            await told()
            start = time.monotonic()
            await asyncio.to_thread(_call_raw, peer, kept)
            tell("called", time.monotonic() - start)
        await told()
    tell("changes", await changes)


def _call_raw(peer: str, kept: Any) -> None:
    one = torch.ones(1 << 18)
    assert torch.equal(rpc.rpc_sync(peer, torch.add, (one, 1), timeout=PATIENCE), one + 1)
    assert torch.equal(kept.to_here(timeout=PATIENCE), torch.ones(2))


PATIENCE = 20.0  # seconds for a call of torch's


CALLS = 4000  # at once: more than a connection sends before it has answers


async def closed(rank: int, **world: Any) -> None:
    """Calls whose connection is closed by what is between two workers that live on."""
    async with aiorpc.worker(rank=rank, world_size=2, heartbeat=HEARTBEAT, **world) as me:
        changes = asyncio.create_task(kinds_of_changes(me))
        if rank:
            await me.serve(until="worker0")
        else:
            (peer,) = me.peers
            for _ in range(3):
                await _close_connection(peer, remote(await create(peer, ClosedCounter)))
            await _close_while_all_wait(peer, await create(peer, ClosedCounter))
            await _close_full_connection(peer, await create(peer, HeldLog))
    tell("changes", await changes)


class ClosedCounter(actors.Counter):
    """A counter that closes the connections of its callers, as a router may."""

    async def cut(self) -> None:
        server: Any = entry_points.serving()
        for session in server.sessions.of_peers():
            session.transport.abort()


async def _close_connection(peer: str, counter: Any) -> None:
    """Tell how many calls had a result, which errors others had, and the count."""
    start = time.monotonic()
    calls = [outcome("call", counter.cut() if n == 9 else counter.aadd(1)) for n in range(CALLS)]
    found = [value for _, value, _ in await asyncio.gather(*calls)]
    errors = [each for each in found if not each.isdigit()]
    seconds = time.monotonic() - start
    tell("closed", [CALLS - len(errors), sorted({*errors}), await counter.aadd(0), seconds])


async def _close_while_all_wait(peer: str, counter: Any) -> None:
    """Tell what comes of a map, and of waits for names and versions, over a closed connection."""
    await aiorpc.call(peer, publish, 0.0)
    policy = await follow("policy", on=peer)
    looked, named = asyncio.ensure_future(aiorpc.lookup("late", on=peer)), aiorpc.members("late")
    version = asyncio.ensure_future(policy.wait(1))
    found = []
    async for value in Group([counter]).map(ClosedCounter.aadd, [1] * 300, in_flight=20):
        found.append(value)
        if len(found) == 100:
            await outcome("cut", remote(counter).cut())
    await aiorpc.call(peer, aiorpc.register, "late", counter)
    await named.wait()
    await aiorpc.call(peer, publish, 1.0)
    tell("went on", [len(found), await remote(await looked).aadd(0), await version])
    await policy.aclose()


class HeldLog:
    """It holds its event loop, so that the sockets of its callers get full, then closes them."""

    def __init__(self) -> None:
        self.log: list[Any] = []

    async def hold(self) -> None:
        held.set()
        assert goes_on.wait(30.0)
        await ClosedCounter.cut(self)  # type: ignore[arg-type]

    async def add(self, x: Any, _: bytes = b"") -> Any:
        self.log.append(x)
        return x

    async def items(self, x: Any) -> AsyncIterator[Any]:
        self.log.append(x)
        yield x

    async def logged(self) -> list[Any]:
        return self.log


held, goes_on = threading.Event(), threading.Event()


def wait_until_held() -> bool:
    return held.wait(30.0)


def go_on() -> None:
    goes_on.set()


async def _close_full_connection(peer: str, log: Any) -> None:
    """Tell what comes of calls of each kind that were not sent, and of the order of all."""
    rlog = remote(log)
    holding = asyncio.create_task(outcome("hold", rlog.hold()))
    await asyncio.sleep(0)  # it is sent
    assert await wrap_future(rpc.rpc_async(peer, wait_until_held))
    large = b"x" * 100_000
    tasks = [asyncio.create_task(outcome("call", rlog.add(n, large))) for n in range(300)]
    await asyncio.sleep(0)
    while not aiorpc.observe.stats().unsent:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    others = {
        "stream": _first(rlog.items("stream")),
        "group": remote(Group([log])).add("group"),
        "any": remote(Group([log]).any()).add("any"),
        "map": _listed(Group([log]).map(HeldLog.add, ["map"], retries=0)),
        "timeout": remote(log, timeout=60.0).add("timeout"),
    }
    kinds = [asyncio.create_task(outcome(*each)) for each in others.items()]
    await asyncio.sleep(0)
    await wrap_future(rpc.rpc_async(peer, go_on))
    while not holding.done():  # before the connection ends, while the peer is pinged, and after
        tasks.append(asyncio.create_task(outcome("call", rlog.add(len(tasks)))))
        await asyncio.sleep(0.001)
    errors = [value for _, value, _ in await asyncio.gather(*tasks) if not value.isdigit()]
    kinds_told = [(await each)[:2] for each in kinds]
    tell("full", [kinds_told, await rlog.logged(), sorted({*errors}), len(tasks)])


async def _first(items: AsyncIterator[Any]) -> Any:
    async for item in items:
        return item


async def _listed(items: AsyncIterator[Any]) -> list[Any]:
    return [item async for item in items]


weights = Weights({"w": torch.zeros(1)})


async def publish(value: float) -> None:
    if value:
        await weights.publish({"w": torch.full((1,), value)})
    else:
        aiorpc.register("policy", weights)


MEMBERS = 4
ELEMENTS = 4 << 20  # of float32: 16 MB


async def shared(rank: int, **world: Any) -> None:
    """A group whose members share another host, one of which is killed."""
    async with aiorpc.worker(f"worker{rank}", rank=rank, world_size=MEMBERS + 1, **world) as me:
        if rank:
            tell("serves", [f"worker{rank}", os.getpid()])
            await me.serve()
        else:
            await _share(sorted(me.peers))


async def apart(rank: int, **world: Any) -> None:
    """A tensor for two workers of one machine whose links differ; that of the first one is cut."""
    name = f"worker{rank}"
    async with aiorpc.worker(name, rank=rank, world_size=3, heartbeat=60.0, **world) as me:
        if rank:
            await me.serve(until="worker0")
            return
        peers = sorted(me.peers)
        shelves = [await create(each, TensorShelf) for each in peers]
        await until_sockets(peers)
        x = torch.ones(ELEMENTS)
        await remote(Group(shelves)).keep(x)
        tell("ready")
        await told()  # the link is cut
        first, other = [asyncio.ensure_future(remote(each).keep(x)) for each in shelves]
        tell("called", await outcome("other", other))
        tell("waiting", not first.done())
        await told()  # the link is whole
        tell("first", await outcome("first", first))


async def cut_transfer(rank: int, **world: Any) -> None:
    """A transfer whose link is cut for longer than its sockets bear."""
    socket_threads.SILENCE = 2.0  # seconds
    async with aiorpc.worker(rank=rank, world_size=2, heartbeat=HEARTBEAT, **world) as me:
        if rank == 0:
            (peer,) = me.peers
            await _lose_transfer(peer, remote(await create(peer, TensorShelf)))
        else:
            while not transfer_threads():  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            await until_no_threads()
            tell("gone")


async def _lose_transfer(peer: str, shelf: Any) -> None:
    await until_sockets([peer])
    x = torch.ones(4 * ELEMENTS)
    freed = weakref.ref(x.untyped_storage())
    running = asyncio.ensure_future(shelf.keep(x))
    del x
    while not is_sending(links_of([peer])[peer]):  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    tell("sending")
    (lost,) = await asyncio.gather(running, return_exceptions=True)
    tell("ended", type(lost).__name__)
    del running, lost
    await until_no_threads()
    while freed() is not None:  # the event loop has yet to hear that a thread has ended
        gc.collect()
        await asyncio.sleep(0.01)
    tell("gone", True)
    await told()  # the link is whole
    while (await outcome("try", shelf.echo(7)))[1] != "7":
        pass
    await until_sockets([peer])
    await shelf.echo(torch.ones(ELEMENTS))
    tell("resumed", aiorpc.observe.stats().socket_messages)


def transfer_threads() -> set[str]:
    return {each.name for each in threading.enumerate()} & {"aiorpc-send", "aiorpc-receive"}


async def until_no_threads() -> None:
    """Wait until no thread sends or receives tensors."""
    while transfer_threads():  # noqa: ASYNC110
        await asyncio.sleep(0.01)


def fork_members() -> int:
    """Return the rank of a member, in a process of its own that ends with this one."""
    for rank in range(1, MEMBERS + 1):
        if not os.fork():
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
            return rank
    for _ in range(MEMBERS):
        os.wait()
    sys.exit()


async def _share(peers: list[str]) -> None:
    group = Group([await create(each, TensorShelf) for each in peers])
    x = torch.ones(ELEMENTS)
    await until_sockets(peers)
    await remote(group).keep(x[: 1 << 16])  # opens the sockets of one
    tell("ready")
    await told()
    await remote(group).keep(x)
    tell("sums", await remote(group).sums())
    tell("sent", aiorpc.observe.stats().socket_messages)
    chunks, may_send = hold_chunks()
    running = asyncio.ensure_future(remote(group).keep(x))
    await asyncio.to_thread(chunks.acquire)
    (lead,) = (name for name, link in links_of(peers).items() if is_sending(link))
    tell("sending", lead)
    await told()  # it was killed
    may_send.set()
    outcomes = (await asyncio.gather(running, return_exceptions=True))[0]
    tell("outcomes", [type(each).__name__ for each in outcomes.results])
    tell("kept", [await remote(each).keep(0) for each in group if each.owner_name() != lead])


async def until_sockets(peers: list[str]) -> None:
    """Wait until the connections know that they may use sockets."""
    while not all(each.can_send for each in links_of(peers).values()):  # noqa: ASYNC110
        await asyncio.sleep(0.01)


def links_of(peers: list[str]) -> dict[str, TensorSockets]:
    return {each: pool.current().connection(each).carriers.sockets for each in peers}


def is_sending(link: TensorSockets) -> bool:
    return any(each.started for each in link._jobs.values())


def hold_chunks() -> tuple[threading.Semaphore, threading.Event]:
    """Count the chunks that are about to be sent, and hold them back until the event is set."""
    waiting, may_send, send = threading.Semaphore(0), threading.Event(), socket_threads._send_all

    def held(sock: socket.socket, buffers: list[Any]) -> None:
        waiting.release()
        may_send.wait()
        send(sock, buffers)

    socket_threads._send_all = held
    return waiting, may_send


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    _, scenario, rank, arguments = sys.argv
    number = fork_members() if rank == "members" else int(rank) if rank else None
    asyncio.run(globals()[scenario](number, **json.loads(arguments)))
