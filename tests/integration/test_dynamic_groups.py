"""Groups of `rpc.init_rpc` without a world size: attached processes follow who comes and goes."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.distributed import rpc

import aiorpc_torch as aiorpc
from aiorpc_torch import RRef, call, create, remote
from tests.support import attached
from tests.support.attached import (
    Enter,
    Player,
    dynamic_group,
    enter,
    leave,
    set_event,
    wait_for,
)


@pytest.fixture(scope="module")
def group() -> Iterator[tuple[Enter, Player]]:
    """A function that starts a process in the group, and a server that is attached."""
    with dynamic_group() as start, start("ps") as ps:
        ps.run(enter)
        ps.run(follow)
        yield start, ps


# ── what runs in the processes ──────────────────────────────────────────────────────────────────

kept: dict[str, Any] = {}


class Counter:
    def __init__(self) -> None:
        self.total = 0

    async def add(self, x: int) -> int:
        self.total += x
        return self.total

    async def wait(self) -> None:
        set_event("waits")
        await asyncio.Event().wait()


async def double(x: Any) -> Any:
    return 2 * x


def follow() -> None:
    """Record the changes of this process's world, until it leaves."""
    kept["changes"], kept["changed"] = [], asyncio.Condition()

    async def read() -> None:
        async for change in attached.me.changes():
            async with kept["changed"]:
                kept["changes"].append((change.kind, change.name))
                kept["changed"].notify_all()

    async def begin() -> None:
        kept["reading"] = asyncio.create_task(read())
        await asyncio.sleep(0)

    attached.me.run(begin)


def changes_of(name: str, count: int) -> list[str]:
    """Return the first changes of a worker."""

    def found() -> list[str]:
        return [kind for kind, each in kept["changes"] if each == name]

    async def read() -> list[str]:
        async with asyncio.timeout(attached.PATIENCE), kept["changed"]:
            await kept["changed"].wait_for(lambda: len(found()) >= count)
        return found()

    return attached.me.run(read)  # type: ignore[no-any-return]


def members() -> tuple[tuple[str, ...], int]:
    async def read() -> tuple[tuple[str, ...], int]:
        return attached.me.peers, attached.me.world_size

    return attached.me.run(read)  # type: ignore[no-any-return]


def outcome(worker: Any, *args: Any) -> Any:
    """Return the result of a call, or the class and the text of its error."""

    async def main() -> Any:
        with aiorpc.timeout(attached.PATIENCE):
            return await call(worker, double, *args)

    try:
        return attached.me.run(main)
    except Exception as exc:
        return f"{type(exc).__name__}: {exc}"


def use(worker: str, rank: int) -> list[Any]:
    """Call a worker by its name, by its rank and by torch's reference, and an object there."""

    async def main() -> list[Any]:
        kept["counter"] = await create(worker, Counter)
        return [
            await call(worker, double, 1),
            await call(rank, double, 2),
            await call(rpc.get_worker_info(worker), double, 3),
            await remote(kept["counter"]).add(4),
            float((await call(worker, double, torch.ones(100_000))).sum()),
        ]

    return attached.me.run(main)  # type: ignore[no-any-return]


USED = [2, 4, 6, 4, 200_000.0]


def begin_call(worker: str) -> None:
    kept["task"] = asyncio.run_coroutine_threadsafe(
        call(worker, double, 4), attached.me._thread.loop
    )


def begin_wait(worker: str) -> None:
    """Call a method that never returns."""

    async def wait() -> None:
        await remote(await create(worker, Counter)).wait()

    kept["task"] = asyncio.run_coroutine_threadsafe(wait(), attached.me._thread.loop)


def begin_serving(until: str | None) -> None:
    kept["task"] = asyncio.run_coroutine_threadsafe(
        attached.me.serve(until), attached.me._thread.loop
    )


def end() -> Any:
    """Return how the call that was begun ends."""
    try:
        return kept.pop("task").result(attached.PATIENCE)
    except Exception as exc:
        return f"{type(exc).__name__}: {exc}"


def shut_down() -> None:
    rpc.shutdown()


def leave_all() -> None:
    leave()
    shut_down()


def shared_counter() -> "RRef[Counter]":
    return RRef(Counter())


# ── joining ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.promise("joining.group")
def test_a_worker_that_enters_later(group: tuple[Enter, Player]) -> None:
    """Both sides reach each other in every way; the changes and the peers follow."""
    start, ps = group
    with start("late") as late:
        assert "late" in ps.run(members)[0]
        ps.run(begin_call, "late")
        late.run(enter)
        assert ps.run(end) == 8
        rank = late.run(own_rank)
        assert ps.run(use, "late", rank) == USED
        assert late.run(use, "ps", 0) == USED
        assert late.run(members) == (("ps",), 2)
        late.run(leave_all)
        assert ps.run(members) == ((), 1)
        assert ps.run(changes_of, "late", 2) == ["joined", "left"]


def own_rank() -> int:
    return int(attached.me.rank)


def test_workers_that_enter_later_know_each_other(group: tuple[Enter, Player]) -> None:
    """An RRef of one, sent by another, serves at a third."""
    start, _ = group
    with start("first") as first, start("second") as second:
        first.run(enter)
        second.run(enter)
        assert first.run(relayed, "ps", "second") == 5
        assert first.run(members) == (("ps", "second"), 3)
        for each in (first, second):
            each.run(leave_all)


def relayed(by: str, owner: str) -> int:
    async def main() -> int:
        counter = await create(owner, Counter)
        return await call(by, add_there, counter, 5)

    return int(attached.me.run(main))


async def add_there(counter: "RRef[Counter]", x: int) -> int:
    return await remote(counter).add(x)


def test_a_name_that_does_not_exist(group: tuple[Enter, Player]) -> None:
    _, ps = group
    error = ps.run(outcome, "nobody", 1)
    assert error.startswith("UnknownWorker: no worker 'nobody' in this world; there are: ps")


def test_a_late_worker_without_the_package(group: tuple[Enter, Player]) -> None:
    """The error comes at once, although calls are held for a minute."""
    start, ps = group
    with start("bare", "bare") as bare:
        error = ps.run(outcome, "bare", 1)
        assert error.startswith(
            "WorkerUnreachable: worker 'bare' cannot be reached: it does not have"
        )
        bare.run(rpc.shutdown)


# ── leaving ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.promise("joining.group")
@pytest.mark.parametrize("inside", [True, False], ids=["inside attach", "after attach"])
def test_a_worker_that_leaves(group: tuple[Enter, Player], inside: bool) -> None:
    """A call that it runs fails, a later one too, and waits for it end."""
    start, ps = group
    name = f"leaver{inside:d}"
    with start(name) as leaver:
        leaver.run(_enter_briefly)
        ps.run(begin_wait, name)
        leaver.run(wait_for, "waits")
        leaver.run(shut_down if inside else leave_all)
        assert class_of(ps.run(end)) in ("WorkerLeft", "WorkerLost")
        error = ps.run(outcome, name, 1)
        left = f"WorkerLeft: worker {name!r} has left its world: it has left torch's group"
        assert error.startswith(left), error
        assert name not in ps.run(members)[0]
        assert ps.run(changes_of, name, 2) == ["joined", "left"]


def _enter_briefly() -> None:
    enter(stop_timeout=0.1)


def class_of(error: str) -> str:
    return error.partition(":")[0]


def test_calls_held_for_a_worker_that_leaves(group: tuple[Enter, Player]) -> None:
    """It never attaches: the call does not wait for its deadline."""
    start, ps = group
    with start("idle") as idle:
        ps.run(begin_call, "idle")
        idle.run(shut_down)
        left = "WorkerLeft: worker 'idle' has left its world: it has left torch's group"
        assert ps.run(end).startswith(left)


def test_serving_until_a_late_worker_leaves(group: tuple[Enter, Player]) -> None:
    start, ps = group
    with start("trainer") as late:
        late.run(enter)
        ps.run(begin_serving, "trainer")
        assert late.run(use, "ps", 0) == USED
        late.run(leave_all)
        assert ps.run(end) is None


def test_a_name_that_comes_again(group: tuple[Enter, Player]) -> None:
    """Under a new rank it is a new worker; RRefs of the old one are refused."""
    start, ps = group
    with start("again") as old:
        old.run(enter)
        ps.run(use, "again", old.run(own_rank))
        old.run(leave_all)
        assert ps.run(use_kept).startswith(
            "WorkerLeft: worker 'again' has left its world: create() the object"
        )
        assert ps.run(use_any_kept) == 1
    with start("again") as new:
        new.run(enter)
        assert ps.run(use, "again", new.run(own_rank)) == USED
        assert ps.run(changes_of, "again", 3) == ["joined", "left", "joined"]
        new.run(leave_all)


def use_kept() -> str:
    async def main() -> Any:
        return await remote(kept["counter"]).add(1)

    try:
        return str(attached.me.run(main))
    except Exception as exc:
        return f"{type(exc).__name__}: {exc}"


def use_any_kept() -> int:
    async def main() -> int:
        group = aiorpc.Group([kept["counter"], await create("ps", Counter)])
        return await remote(group.any()).add(1)

    return int(attached.me.run(main))


def test_a_worker_that_left_while_this_one_was_not_attached(group: tuple[Enter, Player]) -> None:
    """Its RRefs are refused as well."""
    start, ps = group
    with start("unseen") as unseen:
        unseen.run(enter)
        ps.run(use, "unseen", unseen.run(own_rank))
        ps.run(leave)
        unseen.run(leave_all)
        ps.run(enter)
    assert ps.run(use_kept).startswith("WorkerLeft: worker 'rank ")
    assert ps.run(outcome, "unseen", 1).startswith("UnknownWorker: no worker 'unseen'")
