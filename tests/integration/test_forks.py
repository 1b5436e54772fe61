"""Forks of a worker's process: their end, and the calls that they cannot make."""

import asyncio
import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import aiorpc_torch as aiorpc
from aiorpc_torch import call, remote
from aiorpc_torch.testing import Workers, kill
from aiorpc_torch.types import LocalWorker
from tests.support import forks
from tests.support.forks import Caller, Forker, Source
from tests.support.scripts import program, run

CODES = {"return": 0, "raise": 1, "exit": 3}
METHODS = ["plain", "coroutine", "items", "async_items", "batch", "async_batch", "made"]


def new_uvloop() -> asyncio.AbstractEventLoop:
    import uvloop

    return uvloop.new_event_loop()


async def codes(forker: Any, method: str, *hows: str) -> list[Any]:
    """The exit codes of the forks that a method makes, one after the other."""
    made = [getattr(remote(forker), method)(how) for how in hows]
    if not method.endswith("items"):
        return [await each for each in made]
    return [item for each in made async for item in each]


@pytest.fixture(params=[asyncio.new_event_loop, new_uvloop], ids=["asyncio", "uvloop"])
async def me(request: pytest.FixtureRequest, workers: Workers) -> LocalWorker:
    """A world of this process, `a` and `b`, whose children run on that loop."""
    if request.param is new_uvloop:
        pytest.importorskip("uvloop")
    return await workers(["a", "b"], loop_factory=request.param, max_restarts=3)


# ── the end of a fork ───────────────────────────────────────────────────────────────────────────


@pytest.mark.promise("worlds.forks_end")
async def test_a_fork_ends_with_its_method(me: LocalWorker) -> None:
    """With the exit code of its own end; the call is answered by the worker alone."""
    async with asyncio.timeout(120):
        forker = await aiorpc.create("a", Forker)
        for method in METHODS:
            assert await codes(forker, method, *CODES) == [*CODES.values()], method
        assert await call("a", abs, -3) == 3


@pytest.mark.promise("worlds.forks_end")
async def test_a_fork_takes_no_part_in_the_event_loop(me: LocalWorker) -> None:
    """That of an `async def`, or of a task that it has started, ends at its first await."""
    async with asyncio.timeout(60):
        forker = await aiorpc.create("a", Forker)
        assert await codes(forker, "coroutine", "await") == [0]
        assert await codes(forker, "task", "await", "return", "exit") == [0, 0, 3]
        assert await call("a", abs, -3) == 3


async def test_a_fork_of_an_initializer_is_no_second_worker(
    workers: Workers, tmp_path: Path
) -> None:
    path = tmp_path / "codes"
    await workers(["a"], initializer=functools.partial(forks.fork_at_start, str(path)))
    assert path.read_text() == "0\n"


# ── the end of the worker ───────────────────────────────────────────────────────────────────────


async def left(worker: str, path: Path, function: Callable[..., Any], **how: str) -> int:
    """Let a worker leave a fork behind; return a descriptor that ends with the fork."""
    os.mkfifo(path)
    opening = asyncio.ensure_future(asyncio.to_thread(os.open, path, os.O_RDONLY))
    await call(worker, function, str(path), **how)
    return await opening


@pytest.mark.promise("worlds.forks_die")
async def test_a_fork_ends_with_the_process_of_its_worker(workers: Workers, tmp_path: Path) -> None:
    """Also after `kill -9`, and though a fork never lets another thread run."""
    await workers(["a"])
    async with asyncio.timeout(60):
        readers = [
            await left("a", tmp_path / how, forks.leave_a_fork, how=how)
            for how in ("fork", "of a fork", "multiprocessing")
        ]
        readers.append(await left("a", tmp_path / "loop", forks.leave_a_fork_on_the_loop))
        await call("a", abs, -3)
        kill("a")
        for reader in readers:
            assert await asyncio.to_thread(os.read, reader, 1) == b""
            os.close(reader)


@pytest.mark.promise("worlds.forks_die")
@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_sigterm_ends_a_fork_and_not_its_worker(loop: str, tmp_path: Path) -> None:
    """Though the event loop of this process handles the signal, and a fork inherits handlers."""
    pytest.importorskip(loop)
    path = program(
        tmp_path,
        f"""
        import {loop}
        from tests.support import forks

        async def main():
            async with aiorpc.local_world(0):
                print(forks.terminated())
                await asyncio.sleep(0.1)
                print(await asyncio.to_thread(forks.terminated))

        with asyncio.Runner(loop_factory={loop}.new_event_loop) as runner:
            runner.run(main())
        """,
    )
    ended = run(path)
    assert (ended.stdout, ended.returncode) == ("-15\n-15\n", 0), ended.stderr


# ── calls of a fork ─────────────────────────────────────────────────────────────────────────────


@pytest.fixture
async def caller(me: LocalWorker) -> Any:
    """An object of `a` that has made calls, and whose forks make more."""
    aiorpc.register("counter", Source())
    found = remote(await aiorpc.create("a", Caller))
    await found.prepare()
    return found


@pytest.mark.promise("worlds.forks_call")
async def test_each_call_of_a_fork_is_refused_at_once(caller: Any) -> None:
    """Whatever its size, its kind and its callee; the worker's own calls work as before."""
    async with asyncio.timeout(120):
        assert await caller.call_all() == []
        assert await caller.value() == 0
        assert await caller.next_item() == 1


@pytest.mark.promise("worlds.forks_call")
async def test_what_a_fork_drops_stays_with_its_worker(caller: Any) -> None:
    async with asyncio.timeout(60):
        assert await caller.drop_all() == 0
        assert await caller.value() == 0
        assert await caller.next_item() == 1


@pytest.mark.slow
@pytest.mark.promise("worlds.forks_call")
def test_the_worker_that_a_fork_inherits(tmp_path: Path) -> None:
    """What `in_thread` yields waits for nothing in a fork, which ends with the block."""
    path = program(
        tmp_path,
        """
        async def one():
            return 1

        def tried(make):
            try:
                print("returned", make())
            except aiorpc.NotInWorld as exc:
                print("refused" if "forked from worker 'main'" in str(exc) else exc)

        def main():
            with aiorpc.in_thread(aiorpc.local_world(["a"])) as me:
                changes = me.changes()
                if not (pid := os.fork()):
                    tried(lambda: me.run(aiorpc.call("a", abs, -1)))
                    tried(lambda: me.run(one))
                    tried(lambda: [*me.iterate(changes)])
                    for wait in (
                        lambda: me.wait_for("a"), lambda: me.serve(), lambda: me.serve("a"),
                        lambda: me.leave(), lambda: me.start("b"), lambda: me.stop("a"),
                        lambda: anext(me.changes()),
                    ):
                        tried(lambda: asyncio.run(asyncio.wait_for(wait(), 5)))
                    print(me.peers, me)
                    return
                assert os.waitpid(pid, 0) == (pid, 0)
                assert me.run(aiorpc.call("a", abs, -1)) == 1
            print("left")

        if __name__ == "__main__":
            main()
            print("ended")
        """,
    )
    ended = run(path)
    texts = ended.stdout.splitlines()
    assert texts[:10] == ["refused"] * 10, ended.stdout + ended.stderr
    assert texts[11:] == ["left", "ended"]


async def test_a_fork_uses_its_copies_of_objects(caller: Any) -> None:
    """A batched method that is called locally needs no world, in a fork either."""
    assert await caller.batch_in_a_fork() == 42


@pytest.mark.promise("worlds.forks_call")
async def test_a_dataloader_in_a_method(me: LocalWorker) -> None:
    """Its forked processes load while the worker lives; a call of theirs raises."""
    async with asyncio.timeout(60):
        for function in (forks.loaded, forks.loaded_on_the_loop):
            assert await call("a", function, 2) == [45.0, 45.0]
