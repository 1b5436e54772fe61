"""Worlds of several processes: start, calls across processes, end."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch.distributed import rpc

import aiorpc_torch as aiorpc
from aiorpc_torch import RemoteError, WorkerLost, WorldTimeout, call, create, fetch, remote
from aiorpc_torch.testing import kill, world
from aiorpc_torch.types import RemoteTraceback
from tests.support import actors
from tests.support.actors import Batching, Counter, Sleeper
from tests.support.scripts import program, run, started
from tests.support.slack import SLACK

# ── what crosses ────────────────────────────────────────────────────────────────────────────────

CROSSES = [
    (ValueError("wrong"), "ValueError"),
    (KeyError("k", 2), "KeyError"),
    (OSError(2, "No such file", "x.bin"), "FileNotFoundError"),
    (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid"), "UnicodeDecodeError"),
    (actors.TwoArguments(7, "several"), "TwoArguments"),
    (actors.KeywordOnly(path="größe π 🙂"), "KeywordOnly"),
    (ValueError(r"C:\users\xyz \N{nothing}"), "ValueError"),
    (TimeoutError("theirs"), "TimeoutError"),
    (ExceptionGroup("both", [ValueError(1), actors.TwoArguments(1, "b")]), "ExceptionGroup"),
    (actors.Stop("a BaseException of one's own"), "Stop"),
]

STAYS = [
    (actors.raise_local, (), "nobody else knows this class"),
    (actors.raise_it, (actors.HoldsLock, "has a lock"), "has a lock"),
    (actors.raise_it, (actors.UnpicklesBadly, "ünreadable"), "ünreadable"),
    (actors.raise_it, (SystemExit, 3), "SystemExit: 3"),
    (actors.raise_it, (KeyboardInterrupt,), "KeyboardInterrupt"),
    (actors.araise_it, (SystemExit, 4), "SystemExit: 4"),
    (actors.araise_it, (KeyboardInterrupt,), "KeyboardInterrupt"),
    (actors.araise_it, (asyncio.CancelledError, "theirs"), "CancelledError"),
    (actors.raise_it, (StopIteration, 1), "StopIteration"),
    (actors.raise_it, (GeneratorExit,), "GeneratorExit"),
]


@pytest.mark.promise("exceptions.itself")
async def test_exceptions_cross() -> None:
    """Own class, own arguments, own attributes, and the remote traceback as the cause."""
    async with world(["callee"]):
        for exc, name in CROSSES:
            for raiser in (raise_object, araise_object):
                with pytest.raises(type(exc)) as raised:
                    await call("callee", raiser, exc)
                assert type(raised.value) is type(exc)
                assert repr(raised.value) == repr(exc)
                assert str(raised.value) == str(exc)
                assert repr(vars(raised.value)) == repr(vars(exc))
                cause = raised.value.__cause__
                assert isinstance(cause, RemoteTraceback)
                assert cause.worker == "callee"
                assert name in cause.text
                assert "raise exc" in cause.text, "the line that raised"
        for function, args, text in STAYS:
            with pytest.raises(RemoteError) as raised:
                await call("callee", function, *args)
            assert text in str(raised.value)
            assert isinstance(raised.value.__cause__, RemoteTraceback)
        assert await call("callee", actors.pid) != os.getpid(), "the callee survived all of it"


def raise_object(exc: BaseException) -> None:
    raise exc


async def araise_object(exc: BaseException) -> None:
    raise exc


@pytest.mark.promise("exceptions.hops")
async def test_exception_through_three_workers() -> None:
    """What C raised and B let through arrives at A as itself, both tracebacks in its cause."""
    async with world(["b", "c"]):
        with pytest.raises(actors.TwoArguments) as raised:
            await call("b", actors.raise_from_third, "c")
        assert raised.value.code == 7
        assert "on worker 'c'" in str(raised.value.__cause__)


async def test_objects_in_another_process() -> None:
    """RRefs, tensors, batches, and calls back to the caller."""
    async with world(["ps"]) as me:
        assert (me.name, me.rank, me.world_size, me.peers) == ("main", 0, 2, ("ps",))
        counter = await create("ps", Counter, start=1)
        assert counter.owner_name() == "ps"
        assert (await fetch(counter)).value == 1
        big = torch.randn(1000, 1000)
        assert torch.equal(await remote(counter).scale(big), big)
        assert await call("ps", actors.ask_back, "main") == "main"
        batching = await create("ps", Batching)
        assert await asyncio.gather(*(remote(batching).total(n) for n in (1, 2, 3))) == [6, 6, 6]


# ── nothing blocks ──────────────────────────────────────────────────────────────────────────────


@pytest.mark.promise("calls.nesting")
async def test_deep_nesting_with_two_threads() -> None:
    """200 nested calls between two workers: torch's own deadlock at twice the threads."""
    async with world(["b"], threads=2), asyncio.timeout(30.0):
        a, b = await create("main", actors.PingPong), await create("b", actors.PingPong)
        await remote(a).meet(b)
        await remote(b).meet(a)
        assert await remote(b).bounce(200) == 200


@pytest.mark.promise("calls.coroutines_need_no_thread")
async def test_three_thousand_sleeps_on_two_threads() -> None:
    """75 s of sleep for two blocked threads, a fraction of it for coroutines."""
    async with world(["b"], threads=2):
        sleeper = await create("b", Sleeper)
        start = time.monotonic()
        results = await asyncio.gather(*(remote(sleeper).sleep(0.05) for _ in range(3000)))
        took = time.monotonic() - start
    assert results == [0.05] * 3000
    assert took < 37.5


async def test_a_childs_process_has_its_name() -> None:
    """In `ps -o comm`, which shows 15 bytes."""
    async with world(["environment_of_17", "b"]):
        for name, shown in (("environment_of_17", "environment_of_"), ("b", "b")):
            assert psutil.Process(await call(name, actors.pid)).name() == shown


# ── lives ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.promise("worlds.again")
async def test_worlds_in_a_row() -> None:
    """A process may leave a world and enter another with fresh peers, of any size."""
    for names in (["a"], [], ["a", "b"]):
        async with world(names) as me:
            pids = [await call(name, actors.pid) for name in ("main", *me.peers)]
            assert len(set(pids)) == len(names) + 1


@pytest.mark.promise("worlds.failure")
async def test_exception_inside_ends_the_world() -> None:
    """It propagates, quickly, and the children are gone."""
    with pytest.raises(LookupError):  # noqa: PT012
        async with world(["a"]):
            child = psutil.Process(await call("a", actors.pid))
            start = time.monotonic()
            raise LookupError("inside")
    assert time.monotonic() - start < 2.5 + SLACK
    assert not child.is_running()


@pytest.mark.promise("lost.dead")
async def test_killed_peer_is_lost() -> None:
    """Pending and new calls raise WorkerLost, and leaving does not wait for the dead."""
    async with world(["a", "b"]):
        sleeper = await create("a", Sleeper)
        pending = asyncio.create_task(remote(sleeper).sleep(600))
        kill("a")
        with pytest.raises(WorkerLost) as raised:
            await pending
        assert raised.value.worker == "a"
        with pytest.raises(WorkerLost):
            await remote(sleeper).sleep(0)
        assert await call("b", actors.pid)
        start = time.monotonic()
    assert time.monotonic() - start < 5 + SLACK


@pytest.mark.slow
@pytest.mark.promise("worlds.child_dies")
def test_child_that_dies_at_its_start(tmp_path: Path) -> None:
    """It is reported at once, not after the whole start_timeout."""
    path = program(
        tmp_path,
        """
        if __name__ == "__mp_main__":
            os._exit(7)
        async def main():
            async with aiorpc.local_world(["ps"], start_timeout=3600.0):
                pass
        if __name__ == "__main__":
            asyncio.run(main())
        """,
    )
    done = run(path)  # `start_timeout` is longer than this waits
    assert done.stderr.splitlines()[-1] == (
        "aiorpc_torch.WorkerLost: worker 'ps' is lost: its process ended with exit code 7"
    )


@pytest.mark.promise("worlds.missing")
async def test_missing_rank_is_named(tmp_path: Path) -> None:
    """`start_timeout` holds, and the error names the missing ranks."""
    with pytest.raises(WorldTimeout, match=r"rank 1, 2") as raised:
        async with aiorpc.worker(
            rank=0, world_size=3, init_method=f"file://{tmp_path}/store", start_timeout=1.0
        ):
            pass
    assert raised.value.missing == (1, 2)


@pytest.mark.promise("worlds.loopback")
async def test_only_loopback_listens() -> None:
    """A local world has no TCP directory, and its sockets are on the loopback interface."""
    before = {c.laddr for c in psutil.Process().net_connections("tcp")}
    async with world(["a"]):
        found = psutil.Process().net_connections("tcp")
        found += psutil.Process(await call("a", actors.pid)).net_connections("tcp")
    listening = [c.laddr for c in found if c.status == "LISTEN" and c.laddr not in before]
    assert all(address.ip in ("127.0.0.1", "::1") for address in listening), listening


@pytest.mark.promise("worlds.run_local")
def test_run_local(tmp_path: Path) -> None:
    """Every process runs main, the first one's result is returned, and nothing is printed by us.

    But on a busy machine, whom the first process waits for.
    """
    path = program(
        tmp_path,
        """
        async def main(me, greeting):
            answer = await aiorpc.call(me.peers[0], os.getpid)
            assert answer != os.getpid()
            return greeting, me.name, me.rank, me.world_size
        if __name__ == "__main__":
            print(aiorpc.run_local(main, ["ps", "trainer"], args=("hello",)))
        """,
    )
    done = run(path)
    said = [line for line in done.stderr.splitlines() if "waits for rank 1 to reg" not in line]
    assert (done.returncode, said) == (0, [])
    assert done.stdout.strip() == "('hello', 'ps', 0, 2)"


@pytest.mark.slow
def test_a_child_ends_its_threads_first(tmp_path: Path) -> None:
    """What it has given to an executor is done before its process ends."""
    path = program(
        tmp_path,
        """
        import concurrent.futures, pathlib, sys, time
        pool = concurrent.futures.ThreadPoolExecutor()
        def write(path):
            time.sleep(0.3)
            path.write_text("done")
        async def main(me, folder):
            pool.submit(write, pathlib.Path(folder) / me.name)
        if __name__ == "__main__":
            folder = pathlib.Path(sys.argv[0]).parent
            aiorpc.run_local(main, ["ps", "trainer"], args=(str(folder),))
            assert (folder / "trainer").read_text() == "done"
        """,
    )
    done = run(path)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.slow
def test_a_child_that_fails_waits_for_no_thread(tmp_path: Path) -> None:
    """Its exception is raised at once, though a thread of it would never end."""
    path = program(
        tmp_path,
        """
        import threading
        async def main(me):
            if me.rank == 1:
                threading.Thread(target=threading.Event().wait).start()
                raise ValueError("boom")
            await asyncio.sleep(600)
        if __name__ == "__main__":
            aiorpc.run_local(main, 2)
        """,
    )
    done = run(path)
    assert done.returncode == 1
    assert "ValueError: boom" in done.stderr


@pytest.mark.slow
@pytest.mark.promise("worlds.failure")
def test_run_local_raises_a_childs_exception(tmp_path: Path) -> None:
    """A class of the child's own `__main__`, its traceback as the cause, a non-zero exit code."""
    path = program(
        tmp_path,
        """
        class Boom(Exception):
            def __init__(self, a, b):
                super().__init__(f"{a} and {b}")
        async def main(me):
            if me.rank == 1:
                raise Boom("this", "that")
            await asyncio.sleep(600)
        if __name__ == "__main__":
            try:
                aiorpc.run_local(main, 2)
            except Boom as exc:
                print(exc, "|", exc.__cause__.worker)
                raise
        """,
    )
    done = run(path)
    assert done.stdout.strip() == "this and that | worker1"
    assert done.returncode == 1
    assert done.stderr.count("raise Boom(") == 1, done.stderr


@pytest.mark.slow
def test_exception_defined_in_main(tmp_path: Path) -> None:
    """What a child raises in a call, defined in the script itself, arrives as itself.

    An exception that ends the block ends the output, too: torch's C++ log adds no line.
    """
    path = program(
        tmp_path,
        """
        class Boom(Exception):
            pass
        if __name__ == "__mp_main__":
            class Hidden(Exception):
                "Defined in the child's main module only."
        def boom(name):
            raise globals()[name]("from the child")
        async def main():
            async with aiorpc.local_world(["a"]):
                for name in ("Boom", "Hidden"):
                    try:
                        await aiorpc.call("a", boom, name)
                    except Exception as exc:
                        print(type(exc).__name__, exc)
                kept = await aiorpc.create("a", list)
                raise Boom("at the end")
        if __name__ == "__main__":
            asyncio.run(main())
        """,
    )
    done = run(path)
    lines = done.stdout.splitlines()
    assert lines[0] == "Boom from the child", done.stderr
    assert [line for line in done.stderr.splitlines() if line.startswith(("[W", "Leaking"))] == []
    assert done.stderr.splitlines()[-1] == "Boom: at the end"
    assert lines[1].startswith("RemoteError")
    assert "Hidden: from the child" in lines[1]


@pytest.mark.promise("worlds.parent")
def test_children_die_with_a_killed_parent(tmp_path: Path) -> None:
    """kill -9 leaves no child behind, though they are busy."""
    path = program(
        tmp_path,
        """
        import time
        async def main():
            async with aiorpc.local_world(2):
                pids = [await aiorpc.call(n, os.getpid) for n in (1, 2)]
                busy = asyncio.create_task(aiorpc.call(1, time.sleep, 600))
                await asyncio.sleep(0)
                print(*pids, flush=True)
                await busy
        if __name__ == "__main__":
            asyncio.run(main())
        """,
    )
    with started(path) as parent:
        assert parent.stdout is not None
        children = [psutil.Process(int(pid)) for pid in parent.stdout.readline().split()]
        assert len(children) == 2
        parent.kill()
        parent.communicate()
        _, alive = psutil.wait_procs(children, timeout=5)
        assert not [p for p in alive if p.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.promise("worlds.signals")
def test_interrupt_is_graceful(tmp_path: Path) -> None:
    """Ctrl-C, which the whole group gets: all end within two seconds, without a traceback."""
    path = program(
        tmp_path,
        """
        async def main(me):
            os.write(1, b"ready\\n")
            await asyncio.sleep(600)
        if __name__ == "__main__":
            try:
                aiorpc.run_local(main, 3)
            except KeyboardInterrupt:
                os._exit(130)
        """,
    )
    with started(path) as parent:
        assert parent.stdout is not None
        assert [parent.stdout.readline() for _ in range(3)] == ["ready\n"] * 3
        start = time.monotonic()
        os.killpg(parent.pid, signal.SIGINT)
        _, errors = parent.communicate(timeout=500)
        assert time.monotonic() - start < 2.0 + SLACK
    assert parent.returncode == 130
    assert "Traceback" not in errors


@pytest.mark.promise("worlds.torchrun")
@pytest.mark.slow
def test_torchrun_environment(tmp_path: Path) -> None:
    """RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are understood, as torchrun sets them."""
    path = program(
        tmp_path,
        """
        async def main():
            async with aiorpc.worker() as me:
                ok = await aiorpc.call(me.peers[0], os.getpid) != os.getpid()
                sys.stdout.write(f"{me.name} {ok}\\n")
        asyncio.run(main())
        """,
    )
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"),
            *("--nnodes=1", "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", str(path)),
        ],
        capture_output=True,
        text=True,
        timeout=500,
        env={**os.environ, "GLOO_SOCKET_IFNAME": "lo", "TP_SOCKET_IFNAME": "lo"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.split("\n")) == ["", "worker0 True", "worker1 True"]


async def test_worker_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a description of the world, the error names the variable."""
    launchers = ["SLURM_JOB_ID", "SLURM_STEP_NODELIST", "JOB_COMPLETION_INDEX"]
    for variable in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", *launchers):
        monkeypatch.delenv(variable, raising=False)
    with pytest.raises(ValueError, match="RANK"):
        async with aiorpc.worker("a"):
            pass
    with pytest.raises(ValueError, match="MASTER_ADDR and MASTER_PORT"):
        async with aiorpc.worker("a", rank=0, world_size=2):
            pass
    with pytest.raises(ValueError, match="rank must be from 0"):
        async with aiorpc.worker("a", rank=2, world_size=2, init_method="file:///nowhere"):
            pass
    with pytest.raises(TypeError, match="list of names"):
        async with aiorpc.local_world("ps"):
            pass
    with pytest.raises(ValueError, match="must be a number from 0"):
        async with aiorpc.local_world(-1):
            pass
    with pytest.raises(ValueError, match="one name"):
        async with aiorpc.local_world(["main"]):
            pass


async def test_a_world_of_one_needs_nothing() -> None:
    """`worker` with rank 0 of 1 has no peers, so it needs no address."""
    async with aiorpc.worker("solo", rank=0, world_size=1) as me:
        assert await call("solo", actors.name_of_worker) == me.name


@pytest.mark.promise("worlds.exit")
async def test_leaving_ends_calls_that_are_still_awaited() -> None:
    """A task that outlives the block learns that the world is over, and leaving stays quick.

    Both workers leave: whichever closes the connection first says so.
    """
    async with world(["a"]):
        sleeper = await create("a", Sleeper)
        waiting = asyncio.create_task(remote(sleeper).sleep(600))
        await remote(sleeper).sleep(0)
        start = time.monotonic()
    assert time.monotonic() - start < 4 + SLACK
    with pytest.raises((aiorpc.NotInWorld, aiorpc.WorkerGone)) as raised:
        await waiting
    assert not isinstance(raised.value.__cause__, RemoteTraceback)


@pytest.mark.slow
@pytest.mark.promise("worlds.exit")
@pytest.mark.parametrize("how", ["blocks", "works", "ignores", "batch"])
def test_what_never_returns_does_not_keep_a_process(tmp_path: Path, how: str) -> None:
    """A `def` in a thread, coroutines that swallow their cancellation: all are left."""
    path = program(
        tmp_path,
        """
        import atexit, contextlib, logging, threading, time
        import torch
        atexit.register(print, "exit")
        log = logging.getLogger("works")
        log.addHandler(logging.FileHandler(os.devnull))
        log.propagate = False
        begun = threading.Event()
        async def ignores(number):
            begun.set()
            while True:
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.Event().wait()
        def blocks(number):
            begun.set()
            threading.Event().wait()
        def works(number):
            begun.set()
            while True:
                if number % 2:
                    log.warning("still here")
                else:
                    torch.ones(200, 200) @ torch.ones(200, 200)
        @aiorpc.batched(max_size=1)
        async def batch(items):
            await ignores(1)
        async def main(function, count):
            async with aiorpc.local_world(0):
                calls = [
                    asyncio.create_task(aiorpc.call("main", function, number))
                    for number in range(count)
                ]
                while not begun.is_set():
                    await asyncio.sleep(0.01)
                start = time.monotonic()
            errors = {type(each.exception()).__name__ for each in calls}
            print(time.monotonic() - start < 10.0, *errors)
        if __name__ == "__main__":
            asyncio.run(main(globals()[sys.argv[1]], 4 if sys.argv[1] == "works" else 1))
            sys.exit(3)
        """,
    )
    done = run(path, how)
    assert (done.returncode, done.stdout.split()) == (3, ["True", "NotInWorld", "exit"]), (
        done.stderr
    )
    said = (
        "still run on worker main" if how in ("blocks", "works") else "did not end when its worker"
    )
    assert said in done.stderr
    assert "Traceback" not in done.stderr


async def test_blocking_rpc_on_a_loop_that_is_called_back() -> None:
    """Ends with torch's timeout: the call back needs the loop that the blocking call holds."""
    async with world(["a"]):
        await check_blocking_rpc()


async def check_blocking_rpc() -> None:
    assert await call("a", actors.pid)  # torch would not wait until it may make calls
    with pytest.raises(RuntimeError, match="RPCErr:1:"):
        rpc.rpc_sync("a", actors.call_back_on_a_new_loop, args=("main",), timeout=1.0)
    assert await call("a", actors.pid)


# ── torch's own ways of asking about a world ────────────────────────────────────────────────────


def gather(value: Any) -> Any:
    return rpc.api._all_gather(value, timeout=20)


async def test_torch_gathers_from_all_workers() -> None:
    """torch's `_all_gather` knows every worker, as after `init_rpc`."""
    async with world(["b"]):
        found = await asyncio.gather(asyncio.to_thread(gather, 1), aiorpc.call("b", gather, 2))
    assert found == [{"main": 1, "b": 2}] * 2


@pytest.mark.slow
@pytest.mark.promise("calls.script")
def test_a_function_that_only_the_parents_script_has(tmp_path: Path) -> None:
    """By name as the target of a call, and pickled in its arguments."""
    path = program(
        tmp_path,
        """
        async def main(f, cls):
            async with aiorpc.local_world(["w"]):
                for call in (
                    aiorpc.call("w", f), aiorpc.create("w", cls), aiorpc.call("w", len, [cls()])
                ):
                    try:
                        await call
                    except AttributeError as exc:
                        print("Put it into a module that both processes import" in str(exc))

        if __name__ == "__main__":
            def f(): pass
            class C: pass
            asyncio.run(main(f, C))
        """,
    )
    done = run(path)
    assert (done.returncode, done.stdout) == (0, "True\n" * 3), done.stderr
