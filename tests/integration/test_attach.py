"""Worlds of `rpc.init_rpc` whose processes attach: beside torch's own calls, late, never, again."""

import asyncio
import functools
import gc
import logging
import os
import re
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import autograd as dist_autograd, rpc

import aiorpc_torch as aiorpc
from aiorpc_torch import RRef, call, create, fetch, remote
from tests.support import attached, registered
from tests.support.attached import (
    PATIENCE,
    Player,
    cast,
    clear_event,
    enter,
    keep_leaving_to_itself,
    leave,
    set_event,
    speak,
    tell_again,
    wait_for,
)
from tests.support.slack import SLACK

Players = dict[str, Player]


@pytest.fixture(scope="module")
def shared() -> Iterator[Players]:
    with cast("ps", "t0", "t1", "bare", bare="bare") as players:
        yield players


@pytest.fixture
def players(shared: Players) -> Iterator[Players]:
    """No process is attached before the test, nor after it."""
    yield shared
    for name in ("ps", "t0", "t1"):
        shared[name].run(leave)


# ── what runs in the processes ──────────────────────────────────────────────────────────────────

kept: dict[str, Any] = {}


class Server:
    def __init__(self) -> None:
        self.total = 0.0
        self.ended = ""

    def add(self, x: float) -> float:
        self.total += x
        return self.total

    async def sleep(self, seconds: float) -> str:
        try:
            await asyncio.sleep(seconds)
        except asyncio.CancelledError:
            set_event("cancelled")
            raise
        return "slept"

    @aiorpc.batched(aiorpc.Round(2, timeout=30), stack=True)
    def mean(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean(0)


def double(x: float) -> float:
    return 2 * x


def error_of(step: Any) -> str:
    """Return the class and the text of what `step` raises in the attached thread."""
    try:
        value = attached.me.run(step)
    except Exception as exc:
        return f"{type(exc).__name__}: {exc}"
    return f"no error, but {value!r}"


# ── beside torch's own calls ────────────────────────────────────────────────────────────────────


def await_beside_rpc_sync() -> list[Any]:
    async def main() -> list[Any]:
        async with aiorpc.attach() as me:
            server = await create("ps", Server)
            plain = rpc.remote("ps", Server)
            found = [
                (me.name, me.rank, me.world_size, me.peers),
                await remote(server).add(1.0),
                rpc.rpc_sync("ps", double, (2,)),
                await call("ps", double, 3),
                plain.rpc_sync().add(4.0),
                await remote(plain).add(1.0),
                await call("ps", torch.add, torch.ones(100_000), 1),
                (await fetch(server)).total,
                await aiorpc.wrap_future(rpc.rpc_async("ps", double, (6,))),
            ]
            found[6] = float(found[6].sum())
            return found

    return asyncio.run(main())


def test_calls_are_replaced_one_after_another(players: Players) -> None:
    """`rpc_sync`, `rpc.remote`, `rpc_async` and `await` stand side by side."""
    players["ps"].run(enter)
    me = ("t0", 1, 4, ("ps", "t1", "bare"))
    found = players["t0"].run(await_beside_rpc_sync)
    assert found == [me, 1.0, 4, 6, 4.0, 5.0, 200_000.0, 1.0, 12]


def test_torchs_helpers_see_the_whole_world(players: Players) -> None:
    """Inside `attach` too, and beside a process that is not attached."""
    players["ps"].run(enter)
    for each in players.values():
        each.start(attached.gather_names)
    names = ["bare", "ps", "t0", "t1"]
    for each in players.values():
        assert each.result() == ({name: name for name in names}, names)


def mean_of(value: float) -> float:
    async def main() -> float:
        server = kept.setdefault("server", await aiorpc.call("ps", shared_server))
        return float((await remote(server).mean(torch.full((1,), value)))[0])

    return float(attached.me.run(main))


_server: Any = None


def shared_server() -> "RRef[Server]":
    global _server
    if _server is None:
        _server = RRef(Server())
    return _server  # type: ignore[no-any-return]


def test_a_parameter_server_collects_a_round(players: Players) -> None:
    """Batch processing of the tutorial: one call of the function for all trainers."""
    for name in ("ps", "t0", "t1"):
        players[name].run(enter)
    players["t0"].start(mean_of, 1.0)
    players["t1"].start(mean_of, 3.0)
    assert (players["t0"].result(), players["t1"].result()) == (2.0, 2.0)


def follow_members(count: int) -> list[str]:
    """Wait for so many members here; return what they answer, in rank order."""

    async def main() -> list[str]:
        envs = kept.setdefault("envs", aiorpc.members(registered.NAME))
        async with asyncio.timeout(PATIENCE):
            await envs.wait(count)
            while len(envs) > count:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        return await remote(envs).add(1)  # type: ignore[no-any-return]

    return attached.me.run(main)  # type: ignore[no-any-return]


def enlist(tag: str) -> None:
    attached.me.run(functools.partial(registered.enlist, tag))


@pytest.mark.promise("members.follow")
def test_members_of_processes_that_attach(players: Players) -> None:
    """Those that attach later are members once they have registered, and none once they leave."""
    for name in ("ps", "t1"):
        players[name].run(enter)
    players["t1"].run(enlist, "t1-")
    assert players["ps"].run(follow_members, 1) == ["t1-1"]
    players["t0"].run(enter)
    players["t0"].run(enlist, "t0-")
    assert players["ps"].run(follow_members, 2) == ["t0-1", "t1-1"]
    players["t1"].run(leave)
    assert players["ps"].run(follow_members, 1) == ["t0-1"]


class Decoder:
    def __init__(self) -> None:
        torch.manual_seed(0)
        self.layer = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)

    async def forward_soon(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)

    def gradient(self, context: int) -> torch.Tensor:
        return dist_autograd.get_gradients(context)[self.layer.weight]


def gradients() -> tuple[bool, list[list[float]]]:
    x = torch.ones(1, 3)

    async def main() -> tuple[bool, list[list[float]]]:
        decoder = await create("ps", Decoder)
        async with aiorpc.autograd.context() as context:
            await context.backward((await remote(decoder).forward_soon(x)).sum())
            ours = await remote(decoder).gradient(context.id)
        with dist_autograd.context() as number:  # as the tutorials do
            loss = decoder.rpc_sync().forward(x).sum()
            dist_autograd.backward(number, [loss])
            theirs = decoder.rpc_sync().gradient(number)
        return torch.equal(ours, theirs), ours.tolist()

    return attached.me.run(main)  # type: ignore[no-any-return]


def test_distributed_autograd(players: Players) -> None:
    """The gradients of a call in a context are those of torch's own."""
    players["ps"].run(enter)
    players["t0"].run(enter)
    assert players["t0"].run(gradients) == (True, [[1.0, 1.0, 1.0]] * 2)


# ── peers that attach late or never ─────────────────────────────────────────────────────────────


def begin(key: str, timeout: float | None = None) -> None:
    """Start a call to the worker `ps` in the attached thread."""

    async def main() -> Any:
        if timeout is None:
            return await call("ps", double, 4)
        with aiorpc.timeout(timeout):
            return await call("ps", double, 4)

    def run() -> None:
        kept[key] = error_of(main)

    kept["thread"] = threading.Thread(target=run)
    kept["thread"].start()
    while not aiorpc.observe.stats().in_flight and kept["thread"].is_alive():
        time.sleep(0.001)


def end(key: str) -> str:
    kept["thread"].join(attached.PATIENCE)
    assert not kept["thread"].is_alive(), f"{key} has not ended"
    return str(kept.pop(key))


def test_a_call_is_held_until_its_peer_attaches(players: Players) -> None:
    """It has waited at its caller, and then runs."""
    players["t0"].run(enter)
    players["t0"].run(begin, "held")
    players["ps"].run(enter)
    assert players["t0"].run(end, "held") == "no error, but 8"


@pytest.mark.parametrize("options", [{"start_timeout": 0.2}, {}], ids=["start_timeout", "deadline"])
def test_a_peer_that_never_attaches(players: Players, options: dict[str, float]) -> None:
    players["t0"].run(_enter_with, options)
    players["t0"].run(begin, "never", None if options else 0.2)
    error = players["t0"].run(end, "never")
    # Of a deadline, what is left when the call is made.
    assert re.match(
        r"WorkerUnreachable: worker 'ps' cannot .*: it is not attached after 0\.\d+ s", error
    )
    assert "was not sent" in error


def call_with_torchs_rref(worker: str, way: str) -> str:
    rref = rpc.remote(worker, Server)

    async def main() -> Any:
        with aiorpc.timeout(0.2):
            if way == "argument":
                return await call(worker, double, rref)
            if way == "lambda":
                return await call(rref, lambda server: server.add(1))
            return await remote(rref).add(1)

    return error_of(main)


def shut_torch_down() -> None:
    rpc.shutdown(timeout=PATIENCE / 2)  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("way", ["method", "argument", "lambda"])
def test_torch_shuts_down_after_a_call_with_its_rref_that_was_not_sent(way: str) -> None:
    """Its fork of the RRef, for which torch would wait, is given up."""
    with cast("ps", "t0") as players:
        players["t0"].run(enter)
        assert "was not sent" in players["t0"].run(call_with_torchs_rref, "ps", way)
        players["t0"].run(leave)
        for each in [each.start(shut_torch_down) for each in players.values()]:
            each.result()


def _enter_with(options: dict[str, Any]) -> None:
    enter(**options)


def call_error(worker: str) -> str:
    async def main() -> Any:
        return await call(worker, double, 1)

    return error_of(main)


def test_a_peer_without_the_package(players: Players) -> None:
    """The error comes at once, although calls are held for a minute."""
    players["t0"].run(enter)
    error = players["t0"].run(call_error, "bare")
    assert error.startswith("WorkerUnreachable: worker 'bare' cannot be reached: it does not have")


def test_another_version_of_the_protocol(players: Players) -> None:
    own = players["t1"].run(speak, b"aiorpc/0")
    try:
        players["t0"].run(enter)
        error = players["t0"].run(call_error, "t1")
    finally:
        players["t1"].run(speak, own)
    assert error.startswith("WorkerUnreachable: worker 't1' cannot be reached: it speaks aiorpc/0")


async def is_held(worker: str) -> bool:
    """Return whether calls from here to a worker wait."""
    try:
        with aiorpc.timeout(SLACK / 4):
            await call(worker, double, 1.0)
    except aiorpc.WorkerUnreachable:
        return True
    return False


def leave_before_the_end() -> list[object]:
    async def main() -> list[object]:
        async with aiorpc.attach() as me:
            assert not await call("ps", is_held, "t0")
            await me.leave()
            return [await call("ps", double, 2.0), await call("ps", is_held, "t0")]

    return asyncio.run(main())


@pytest.mark.promise("joining.drain")
def test_a_worker_that_leaves_before_its_block_ends(players: Players) -> None:
    """It may call, and calls to it are held, as for any that is not attached."""
    players["ps"].run(enter)
    assert players["t0"].run(leave_before_the_end) == [4.0, True]


def call_beside_a_blocked_loop() -> float:
    """Call from another event loop while that of `attach` is blocked."""

    async def main() -> float:
        async with aiorpc.attach():
            await call("ps", double, 0.0)  # it is attached, as is known from here on
            found: list[float] = []
            other = lambda: found.append(asyncio.run(call_once()))  # noqa: E731
            thread = threading.Thread(target=other)
            thread.start()
            thread.join(PATIENCE)
            return found[0]

    async def call_once() -> float:
        return await call("ps", double, 2.0)

    return asyncio.run(main())


def test_another_event_loop_needs_none(players: Players) -> None:
    """Calls to a peer that is attached are not held, whatever the loop of `attach` does."""
    players["ps"].run(enter)
    assert players["t0"].run(call_beside_a_blocked_loop) == 4.0


# ── again ───────────────────────────────────────────────────────────────────────────────────────


def two_epochs() -> list[float]:
    async def epoch() -> float:
        async with aiorpc.attach():
            if "rref" not in kept:
                kept["rref"] = await create("ps", Server)
            return await remote(kept["rref"]).add(1.0)

    return [asyncio.run(epoch()) for _ in range(3)]


def test_an_event_loop_for_each_epoch(players: Players) -> None:
    """RRefs of one epoch serve in the next."""
    players["ps"].run(enter)
    assert players["t0"].run(two_epochs) == [1.0, 2.0, 3.0]


def call_without_pause() -> None:
    """Call until the event `enough`, in the attached thread."""

    async def call_in_turn(server: RRef[Server]) -> None:
        while not attached.event("enough").is_set():
            await remote(server).add(1.0)
            await call("ps", double, 1)
            attached.set_event("going")

    async def main() -> None:
        server = await create("ps", Server)
        await asyncio.gather(*(call_in_turn(server) for _ in range(4)))

    attached.event("enough").clear()
    attached.event("going").clear()
    kept["thread"] = threading.Thread(target=lambda: kept.update(calls=error_of(main)))
    kept["thread"].start()
    wait_for("going")


def wait_until_going() -> None:
    clear_event("going")
    wait_for("going")


def leave_and_enter() -> None:
    leave()
    enter()


@pytest.mark.parametrize("is_told", [True, False])
def test_a_server_leaves_and_enters_between_calls(players: Players, is_told: bool) -> None:
    """Calls that meet the gap are held: none fails, though the caller never pauses.

    Also if torch's messages that it leaves come too late.
    """
    if not is_told:
        players["ps"].run(keep_leaving_to_itself)
    players["ps"].run(enter)
    players["t0"].run(enter)
    players["t0"].run(call_without_pause)
    for _ in range(5):
        players["ps"].run(leave_and_enter)
        players["t0"].run(wait_until_going)
    players["t0"].run(set_event, "enough")
    players["ps"].run(tell_again)
    assert players["t0"].run(end, "calls").startswith("no error")


# ── threads of torch ────────────────────────────────────────────────────────────────────────────

HEARTBEAT = 1.5


def occupy(worker: str) -> None:
    """Block all of torch's threads of `worker` until `free` there."""
    kept[worker] = [
        rpc.rpc_async(worker, wait_for, ("free",)) for _ in range(2 * attached.TORCH_THREADS)
    ]


def is_free(worker: str) -> None:
    for each in kept.pop(worker):
        each.wait()


def sleep_at_server(seconds: float) -> str:
    async def main() -> str:
        return await remote(await create("ps", Server)).sleep(seconds)

    return error_of(main)


def free(players: Players) -> None:
    players["ps"].run(set_event, "free")
    players["t0"].run(set_event, "free")


@pytest.mark.slow
def test_all_of_torchs_threads_are_blocked(players: Players) -> None:
    """A call that takes longer than the heartbeat ends well: event loops answer the pings."""
    for name in ("ps", "t0"):
        players[name].run(_enter_with, {"heartbeat": HEARTBEAT})
    assert players["t0"].run(call_error, "ps") == "no error, but 2"
    players["t0"].run(occupy, "ps")
    players["ps"].run(occupy, "t0")
    try:
        found = players["t0"].run(sleep_at_server, 2.5 * HEARTBEAT)
    finally:
        free(players)
    players["t0"].run(is_free, "ps")
    players["ps"].run(is_free, "t0")
    for name in ("ps", "t0"):
        players[name].run(clear_event, "free")
    assert found == "no error, but 'slept'"


@pytest.mark.slow
def test_an_introduction_waits_for_torchs_threads(players: Players) -> None:
    """The peer is not lost, though nothing of it answers for longer than the heartbeat."""
    players["ps"].run(_enter_with, {"heartbeat": HEARTBEAT})
    players["t0"].run(occupy, "ps")
    players["t0"].run(_enter_with, {"heartbeat": HEARTBEAT})
    players["t0"].run(begin, "late")
    time.sleep(2 * HEARTBEAT)
    players["ps"].run(set_event, "free")
    assert players["t0"].run(end, "late") == "no error, but 8"
    players["t0"].run(is_free, "ps")
    players["ps"].run(clear_event, "free")


# ── leaving ─────────────────────────────────────────────────────────────────────────────────────


def begin_sleep(seconds: float) -> None:
    async def main() -> Any:
        server = await create("ps", Server)
        sleep = asyncio.ensure_future(remote(server).sleep(seconds))
        await remote(server).add(0.0)
        set_event("sleeps")
        return await sleep

    attached.event("sleeps").clear()
    kept["thread"] = threading.Thread(target=lambda: kept.update(sleep=error_of(main)))
    kept["thread"].start()
    wait_for("sleeps")


@pytest.mark.parametrize(
    ("stop_timeout", "error"), [(10.0, "no error, but 'slept'"), (0.1, "WorkerLeft")]
)
def test_served_calls_when_leaving(players: Players, stop_timeout: float, error: str) -> None:
    """They get `stop_timeout`, and then are cancelled."""
    players["ps"].run(_enter_with, {"stop_timeout": stop_timeout})
    players["t0"].run(enter)
    players["t0"].run(begin_sleep, 0.3 if stop_timeout > 1 else 30.0)
    players["ps"].run(leave)
    assert players["t0"].run(end, "sleep").startswith(error)
    if stop_timeout < 1:
        players["ps"].run(wait_for, "cancelled")


def _outcome(main: Any) -> str:
    try:
        asyncio.run(main())
    except Exception as exc:
        return f"{type(exc).__name__}: {exc}"
    return "left"


def serve_until(until: str | None) -> str:
    async def main() -> None:
        async with aiorpc.attach() as me, asyncio.timeout(attached.PATIENCE):
            await me.serve(until)

    return _outcome(main)


def test_serving_until_peers_have_left(players: Players) -> None:
    """The server needs no timeout: it leaves after its trainers."""
    for name in ("t0", "t1"):  # first: a trainer of an earlier test has left
        players[name].run(enter)
    players["ps"].start(serve_until, None)
    for name in ("t0", "t1"):
        assert players[name].run(call_error, "ps") == "no error, but 2"
    for name in ("t0", "t1"):
        players[name].run(leave)
    assert players["ps"].result() == "left"
    assert players["ps"].run(serve_until, "t0") == "left"  # it has left before
    assert players["ps"].run(serve_until, "t9").startswith("UnknownWorker: until must be one of")


@pytest.mark.promise("worlds.servers")
def test_servers_that_serve_each_other_end_together(players: Players) -> None:
    players["t0"].run(enter)
    servers = [players[name].start(serve_until, None) for name in ("ps", "t1")]
    for each in servers:
        assert players["t0"].run(call_error, each.name) == "no error, but 2"
    players["t0"].run(leave)
    assert [each.result() for each in servers] == ["left", "left"]


# ── refusals ────────────────────────────────────────────────────────────────────────────────────


def refusals() -> list[str]:
    found = []

    async def again(enter: Any) -> None:
        try:
            async with enter:
                pass
        except Exception as exc:
            found.append(f"{type(exc).__name__}: {exc}")

    async def main() -> None:
        async with aiorpc.attach():
            await again(aiorpc.attach())
            await again(aiorpc.worker("a", rank=0, world_size=1))

    asyncio.run(main())
    with aiorpc.in_thread(aiorpc.attach()) as me:
        asyncio.run(again(aiorpc.attach()))

        async def inside() -> str:
            try:
                me.run(asyncio.sleep, 0)
            except RuntimeError as exc:
                return f"{type(exc).__name__}: {exc}"
            return ""

        found.append(me.run(inside))
    try:
        me.run(asyncio.sleep, 0)
    except aiorpc.NotInWorld as exc:
        found.append(f"{type(exc).__name__}: {exc}")
    return found


def attach_without_a_name() -> list[object]:
    async def main() -> list[object]:
        me = await aiorpc.attach().__aenter__()
        gc.collect()
        await asyncio.sleep(0)
        found: list[object] = [await call("t0", double, 2.0)]
        await me.world.__aexit__(None, None, None)
        try:
            await call("t0", double, 2.0)
        except aiorpc.NotInWorld:
            return [*found, "left"]
        return found

    return asyncio.run(main())


@pytest.mark.promise("worlds.open")
def test_an_attached_worker_without_a_name(players: Players) -> None:
    """It is attached until it is left."""
    assert players["t0"].run(attach_without_a_name) == [4.0, "left"]


def threads_of_torch() -> list[list[str]]:
    async def attached() -> list[str]:
        found: list[str] = []
        logger, handler = logging.getLogger("aiorpc_torch"), logging.Handler(logging.WARNING)
        handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
        logger.addHandler(handler)
        async with aiorpc.attach():
            pass
        logger.removeHandler(handler)
        return [each for each in found if "OMP_NUM_THREADS" in each]

    before, number = os.environ.pop("OMP_NUM_THREADS", None), torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        without = asyncio.run(attached())
        os.environ["OMP_NUM_THREADS"] = "2"
        return [without, asyncio.run(attached())]
    finally:
        torch.set_num_threads(number)
        os.environ["OMP_NUM_THREADS"] = before or "1"


def test_each_process_uses_all_cores(players: Players) -> None:
    """It is told where no launcher has set the number, as torchrun does."""
    [warning], none = players["t0"].run(threads_of_torch)
    assert warning.startswith("t0: OMP_NUM_THREADS is not set, so torch computes with 2 threads")
    assert none == []


def test_refusals(players: Players) -> None:
    twice, world, thread, own_loop, after = players["t0"].run(refusals)
    assert twice.startswith("RuntimeError: this process is attached")
    assert world.startswith("RuntimeError: this process is in a world already")
    assert thread.startswith("RuntimeError: this process is attached")
    assert own_loop.startswith("RuntimeError: run() and iterate() would block")
    assert after.startswith("NotInWorld: the block of in_thread() was left")


async def test_no_agent() -> None:
    with pytest.raises(aiorpc.NotInWorld, match=r"call rpc\.init_rpc"):
        async with aiorpc.attach():
            pass
    with pytest.raises(aiorpc.NotInWorld), aiorpc.in_thread(aiorpc.attach()):
        pass


# ── ends ────────────────────────────────────────────────────────────────────────────────────────


def end_agent() -> list[str]:
    async def main() -> list[str]:
        found = []
        async with aiorpc.attach() as me:
            server = await create("ps", Server)
            small = asyncio.ensure_future(remote(server).sleep(60.0))
            large = asyncio.ensure_future(call("ps", keep, torch.zeros(1_000_000)))
            held = asyncio.ensure_future(call("t1", double, 1))
            await remote(server).add(1.0)
            await asyncio.to_thread(rpc.shutdown, graceful=False)
            done, _ = await asyncio.wait((small, large, held), timeout=5)
            found += sorted(type(each.exception()).__name__ for each in done)
            try:
                await remote(server).add(1.0)
            except Exception as exc:
                found.append(f"{type(exc).__name__}: {exc}")
            await me.serve()
        return found

    return asyncio.run(main())


async def keep(_: torch.Tensor) -> None:
    await asyncio.sleep(60.0)


def shut_down() -> None:
    rpc.shutdown()


def be_passive() -> None:
    with aiorpc.in_thread(aiorpc.attach()):
        rpc.shutdown()


def use_and_shut_down() -> str:
    enter()
    found = call_error("ps")
    leave()
    rpc.shutdown()
    return found


def test_the_agent_ends_inside() -> None:
    with cast("ps", "t0", "t1") as players:
        players["ps"].run(enter)
        *errors, after = players["t0"].run(end_agent)
        assert errors == ["NotInWorld"] * 3
        assert after.startswith("NotInWorld: torch's RPC of this process has ended")


def test_a_passive_server() -> None:
    """It serves while it waits in `rpc.shutdown` for the others."""
    with cast("ps", "t0", "t1") as players:
        players["ps"].start(be_passive)
        for name in ("t0", "t1"):
            players[name].start(use_and_shut_down)
        assert [players[name].result() for name in ("t0", "t1")] == ["no error, but 2"] * 2
        players["ps"].result()


def test_a_killed_peer_is_lost() -> None:
    with cast("ps", "t0") as players:
        players["ps"].run(enter)
        players["t0"].run(enter)
        players["t0"].run(begin_sleep, 60.0)
        players["t0"].start(serve_in_thread, "ps")
        players["ps"].process.kill()
        assert players["t0"].result().startswith("WorkerLost: worker 'ps' is lost")
        assert players["t0"].run(end, "sleep").startswith("WorkerLost: worker 'ps' is lost")
        players["t0"].run(leave)


def serve_in_thread(until: str) -> str:
    return error_of(lambda: attached.me.serve(until))
