"""SIGTERM and Ctrl-C, sent to programs as terminals, supervisors and schedulers send them."""

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import threading
import time
from importlib import util
from pathlib import Path

import psutil
import pytest

import aiorpc_torch as aiorpc
from tests.support import samples
from tests.support.scripts import program, run, started
from tests.support.slack import SLACK

PATIENT = """
    async def main(me):
        os.write(1, f"{me.name} {os.getpid()}\\n".encode())
        await asyncio.sleep(600)
    if __name__ == "__main__":
        aiorpc.run_local(main, 3)
"""

STUBBORN = """
    async def main(me):
        os.write(1, f"{me.name} {os.getpid()}\\n".encode())
        while me.rank == 0:
            try:
                await asyncio.sleep(600)
            except asyncio.CancelledError:
                os.write(1, b"not yet\\n")
        await asyncio.sleep(600)
    if __name__ == "__main__":
        aiorpc.run_local(main, 3)
"""


def processes(parent: "subprocess.Popen[str]", count: int = 3) -> list[psutil.Process]:
    """Return the processes that wrote their pid."""
    assert parent.stdout is not None
    return [psutil.Process(int(parent.stdout.readline().split()[1])) for _ in range(count)]


def all_gone(found: list[psutil.Process]) -> bool:
    _, alive = psutil.wait_procs(found, timeout=2.0 + SLACK)
    return not [each for each in alive if each.status() != psutil.STATUS_ZOMBIE]


BACKGROUND = """
    import signal
    signal.signal(signal.SIGINT, signal.SIG_IGN)
"""

LOGGED = """
    import logging
    logging.basicConfig(level="INFO")
"""

UVLOOP = """
    import uvloop  # in the children too: they run the file
    asyncio.events.new_event_loop = uvloop.new_event_loop
"""
on_uvloop = pytest.mark.skipif(not util.find_spec("uvloop"), reason="no uvloop")


@pytest.mark.promise("worlds.signals")
@pytest.mark.parametrize(
    ("whom", "how"),
    [
        pytest.param("parent", "", id="one"),
        pytest.param("all", "", id="all", marks=pytest.mark.slow),
        pytest.param("parent", BACKGROUND, id="&", marks=pytest.mark.slow),
        pytest.param("all", UVLOOP, id="uvloop", marks=on_uvloop),
    ],
)
def test_sigterm_is_graceful(tmp_path: Path, whom: str, how: str) -> None:
    """To the parent alone, or to all as systemd does: code 143, in two seconds, no traceback.

    A script's background process ignores Ctrl-C, so SIGTERM is the only way to stop it.
    """
    with started(program(tmp_path, LOGGED + how + PATIENT)) as parent:
        found = processes(parent)
        start = time.monotonic()
        (os.killpg if whom == "all" else os.kill)(parent.pid, signal.SIGTERM)
        _, errors = parent.communicate(timeout=500)
        took = time.monotonic() - start
        assert all_gone(found)
    assert took < 2.0 + SLACK
    assert parent.returncode == 143
    assert f"SIGTERM: process {parent.pid} ends its block" in errors  # else its log just stops
    assert "Traceback" not in errors
    assert "terminate" not in errors


@pytest.mark.slow
def test_sigterm_of_one_worker(tmp_path: Path) -> None:
    """Its peer gets WorkerLost; its own clean-up runs, and its exit code is 143."""
    path = program(
        tmp_path,
        """
        async def main(rank, where):
            try:
                async with aiorpc.worker(rank=rank, world_size=2, init_method=where) as me:
                    if rank == 1:
                        await aiorpc.call(0, os.getpid)
                        os.write(1, f"worker {os.getpid()}\\n".encode())
                        await asyncio.sleep(600)
                    try:
                        await aiorpc.call(1, asyncio.sleep, 600)
                    except aiorpc.WorkerLost as lost:
                        print(lost)
            finally:
                print(f"cleaned up {rank}")
        if __name__ == "__main__":
            asyncio.run(main(int(sys.argv[1]), sys.argv[2]))
        """,
    )
    where = f"file://{tmp_path}/store"
    with started(path, "1", where) as one, started(path, "0", where) as zero:
        processes(one, 1)[0].terminate()
        said, errors = one.communicate(timeout=500)
        assert (one.returncode, said) == (143, "cleaned up 1\n"), errors
        heard, errors = zero.communicate(timeout=500)
        assert zero.returncode == 0, errors
    # Worker 0 may not have sent its call yet.
    assert re.sub("; sleep (may have run|was not sent)", "", heard) == (
        "worker 'worker1' is lost: its block was cancelled\ncleaned up 0\n"
    )


@pytest.mark.slow
@pytest.mark.promise("worlds.signals")
@pytest.mark.parametrize("how", ["", pytest.param(UVLOOP, id="uvloop", marks=on_uvloop)])
def test_a_second_interrupt_ends_at_once(tmp_path: Path, how: str) -> None:
    """Also if the program ignores the first: its children are gone too."""
    with started(program(tmp_path, how + STUBBORN)) as parent:
        found = processes(parent)
        assert parent.stdout is not None
        os.killpg(parent.pid, signal.SIGINT)
        assert parent.stdout.readline() == "not yet\n"
        start = time.monotonic()
        os.killpg(parent.pid, signal.SIGINT)
        _, errors = parent.communicate(timeout=500)
        assert time.monotonic() - start < 1.0 + SLACK
        assert all_gone(found)
    assert parent.returncode == 130
    assert "terminate" not in errors


CLEANING = """
    from aiorpc_torch import call

    async def main():
        print("begin", flush=True)
        async with aiorpc.local_world(["a", "b"], max_restarts=9) as me:
            pids = [await call(each, os.getpid) for each in "ab"]
            print("pids", *pids, flush=True)
            try:
                while True:
                    await asyncio.sleep(0.01)
                    if sys.argv[1] == "restarts":
                        await me.restart("a")
                    if sys.argv[1] == "starts":
                        await me.start("c")
                        await me.stop("c")
            finally:
                await asyncio.sleep(0.7)  # longer than the parent gives a child that got SIGTERM
                print("cleaned", await call("b", os.getpid) == pids[1], flush=True)

    if __name__ == "__main__":
        asyncio.run(main())
"""


def session_of(parent: "subprocess.Popen[str]") -> set[int]:
    """Return the processes of a program that run; it was started in a session of its own."""
    found = set()
    for each in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
            if os.getsid(each.pid) == parent.pid and each.status() != psutil.STATUS_ZOMBIE:
                found.add(each.pid)
    return found


def none_left(parent: "subprocess.Popen[str]") -> bool:
    end = time.monotonic() + 2.0 + SLACK
    while session_of(parent) and time.monotonic() < end:
        time.sleep(0.02)
    return not session_of(parent)


@pytest.mark.slow
@pytest.mark.promise("worlds.stop_in_order")
@pytest.mark.parametrize("what", ["waits", "restarts"])
def test_sigterm_to_a_group_twice(tmp_path: Path, what: str) -> None:
    """The parent's `finally` calls its children, none of which is restarted."""
    with started(program(tmp_path, CLEANING), what) as parent:
        assert parent.stdout is not None
        while not parent.stdout.readline().startswith("pids"):
            pass
        os.killpg(parent.pid, signal.SIGTERM)
        time.sleep(0.1)
        os.killpg(parent.pid, signal.SIGTERM)
        said, errors = parent.communicate(timeout=500)
        assert none_left(parent)
    assert (parent.returncode, said) == (143, "cleaned True\n"), errors
    assert "killed by SIGTERM" not in errors
    assert "Traceback" not in errors


@pytest.mark.promise("worlds.stop_in_order")
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("number", "whom", "what"),
    samples.cells(
        [signal.SIGTERM, signal.SIGINT, signal.SIGKILL],
        ["all", "parent"],
        ["waits", "restarts", "starts"],
        of=3,
    ),
)
def test_a_signal_at_any_moment(
    tmp_path: Path, number: signal.Signals, whom: str, what: str
) -> None:
    """Of the start, of the run and of restarts: the program ends, and leaves no process."""
    path = program(tmp_path, CLEANING)
    # SIGKILL is the same at every moment.
    for moment in range(1 if number == signal.SIGKILL else 3):
        with started(path, what) as parent:
            assert parent.stdout is not None
            line = parent.stdout.readline()
            if moment:
                line = parent.stdout.readline()
            time.sleep((0.3, 0.0, 0.2)[moment])
            (os.killpg if whom == "all" else os.kill)(parent.pid, number)
            said, errors = parent.communicate(timeout=100)
            assert none_left(parent)
        assert parent.returncode in (-number, 128 + number), errors
        if number != signal.SIGKILL and line.startswith("pids"):
            assert said == "cleaned True\n", errors


@pytest.mark.promise("worlds.stop_in_order")
async def test_sigterm_to_one_child() -> None:
    """Its parent got none, so the child ends, and is restarted."""
    async with aiorpc.local_world(["a"], max_restarts=1) as me:
        pid = await aiorpc.call("a", os.getpid)
        os.kill(pid, signal.SIGTERM)
        with pytest.raises(aiorpc.WorkerLost, match="its process was killed by SIGTERM"):
            await aiorpc.call("a", asyncio.sleep, 600)
        await me.wait_for("a")
        assert await aiorpc.call("a", os.getpid) != pid


@pytest.mark.slow
@pytest.mark.promise("worlds.handlers")
def test_a_programs_own_handlers_stay(tmp_path: Path) -> None:
    """A program's own handler stays; afterwards all handlers are as before."""
    path = program(
        tmp_path,
        """
        import signal
        async def main():
            before = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]
            async with aiorpc.local_world(0):
                changed = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]
                os.kill(os.getpid(), signal.SIGTERM)
                await asyncio.sleep(0.05)
            after = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]
            print(after == before, changed[1] is before[1], changed[0] is before[0])
        if __name__ == "__main__":
            signal.signal(signal.SIGTERM, lambda *_: print("mine"))
            asyncio.run(main())
        """,
    )
    done = run(path)
    assert (done.stdout, done.stderr) == ("mine\nTrue True False\n", "")


def test_a_world_in_a_thread() -> None:
    """Signals belong to the main thread: in others no handler is changed."""
    before = signal.getsignal(signal.SIGTERM)
    seen = []

    async def live() -> None:
        async with aiorpc.local_world(0) as me:
            seen.append((me.name, signal.getsignal(signal.SIGTERM) is before))

    thread = threading.Thread(target=lambda: asyncio.run(live()))
    thread.start()
    thread.join()
    assert seen == [("main", True)]


@pytest.mark.slow
def test_a_world_that_is_never_left(tmp_path: Path) -> None:
    """The program ends, without "terminate called" or an abort."""
    path = program(
        tmp_path,
        """
        async def main():
            context = aiorpc.local_world(["a"])
            await context.__aenter__()
            globals()["kept"] = context
            print(await aiorpc.call("a", os.getpid) > 0)
        if __name__ == "__main__":
            loop = asyncio.new_event_loop()
            loop.run_until_complete(main())
        """,
    )
    with started(path) as process:
        said, errors = process.communicate(timeout=500)
    assert (process.returncode, said) == (0, "True\n")
    assert "terminate" not in errors


BUSY = """
    import signal, time, torch
    from aiorpc_torch import call, remote
    from aiorpc_torch.autograd import context

    class Slow(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            os.kill(Server.caller, signal.SIGKILL)
            time.sleep(float(sys.argv[1]))
            return gradient

    class Server:
        def forward(self, x):
            return Slow.apply(x)

    async def main(me):
        if me.rank:
            await asyncio.Event().wait()
        Server.caller = await call("a", os.getpid)
        await call("a", go, aiorpc.RRef(Server()))

    async def go(server):
        async with context() as ctx:
            found = await remote(server).forward(torch.ones(3, requires_grad=True))
            await ctx.backward([found.sum()])

    if __name__ == "__main__":
        aiorpc.run_local(main, ["main", "a"])
"""


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [1.2, 3600])
def test_a_backward_without_a_caller(tmp_path: Path, seconds: float) -> None:
    """It runs in a thread of torch when the process ends: no abort."""
    with started(program(tmp_path, BUSY), str(seconds)) as process:
        said, errors = process.communicate(timeout=500)
    assert (process.returncode, said) == (1, "")
    assert "WorkerLost: worker 'a' is lost" in errors
    assert "terminate" not in errors
