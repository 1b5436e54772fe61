"""Children that are forked from one process: as fresh as spawned ones, and nothing is left."""

import asyncio
import gc
import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import aiorpc_torch as aiorpc
from aiorpc_torch import call, local_world
from tests.support import actors
from tests.support.fork_servers import inherited, server, torch_runs
from tests.support.scripts import ROOT, program, run, started


async def test_children_come_from_a_process_with_one_thread() -> None:
    """The import of torch starts no thread (2.13, 2.15), so a fork after it is safe."""
    async with local_world(["a"]):
        process = psutil.Process(await call("a", actors.pid))
        parent = server()
        assert process.ppid() == parent.pid
        assert parent.ppid() == os.getpid()
        assert parent.num_threads() == 1
        assert "libtorch" in "".join(each.path for each in parent.memory_maps()), "it was imported"


# ── what a child has ────────────────────────────────────────────────────────────────────────────


def numbers() -> tuple[float, float, int]:
    import numpy as np

    return random.random(), float(np.random.random()), int(torch.randint(1 << 60, ()))


# readline changes the environment without `os.environ`, which only new interpreters see.
OF_READLINE = {"COLUMNS", "LINES"}
STOP_SIGNALS = {signal.SIGINT, signal.SIGTERM}  # of which each process has its own handler


def what_is_seen() -> dict[str, Any]:
    """Return what a process has from the one that started it."""
    return {
        "environment": {k: v for k, v in os.environ.items() if k not in OF_READLINE},
        "folder": os.getcwd(),
        "path": sys.path,
        "arguments": sys.argv,
        "handlers": {n: str(signal.getsignal(n)) for n in set(signal.Signals) - STOP_SIGNALS},
        "mask": signal.pthread_sigmask(signal.SIG_BLOCK, ()),
        "threads": torch.get_num_threads(),
        "frozen": gc.get_freeze_count() > 10_000,
        "collects": gc.isenabled(),
        **inherited("limits", "umask", "interpreter"),
        "streams": [os.readlink(f"/proc/self/fd/{number}") for number in (1, 2)],
        "is_main": __name__,
    }


@pytest.mark.slow
@pytest.mark.promise("worlds.forked")
async def test_a_forked_child_is_as_a_spawned_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that a new interpreter inherits is the same, as it is when the child starts."""
    async with local_world(["a"]):  # the server runs
        pass
    monkeypatch.setenv("AIORPC_TEST", "now")
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["other", "arguments"])
    monkeypatch.syspath_prepend(str(tmp_path))
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    seen = []
    try:
        for start in ("forkserver", "spawn"):
            async with local_world(["a"], start=start, start_timeout=500.0):  # type: ignore[arg-type]
                seen.append(await call("a", what_is_seen))
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})
    forked, spawned = seen
    for each in seen:
        assert each["environment"].pop("AIORPC_TORCH_CHILD")  # its pid
    assert forked.pop("environment") == spawned.pop("environment")
    assert forked == spawned


async def test_children_draw_different_numbers() -> None:
    """None has the state of a random generator from the process that forked it."""
    async with local_world(2):
        one, other = await call(1, numbers), await call(2, numbers)
        assert not set(one) & set(other)


@pytest.mark.slow
async def test_a_variable_that_torch_reads_starts_another_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another variable does not; the server that is not used any more ends."""
    async with local_world(["a"]):
        first = server()
        assert await call("a", torch.get_num_threads) == 1
    monkeypatch.setenv("AIORPC_TEST", "1")
    async with local_world(["a"]):
        assert server() == first
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    async with local_world(["a"]):
        assert server() != first
        assert await call("a", torch.get_num_threads) == 2
    gc.collect()
    assert not first.is_running()


@pytest.mark.slow
def test_a_program_as_a_daemon(tmp_path: Path) -> None:
    """It has closed its streams, and it ignores the ends of its children."""
    path = program(
        tmp_path,
        """
        import signal, traceback
        async def main(file):
            async with aiorpc.local_world(1):
                print(await aiorpc.call(1, abs, -1), file=file)
        if __name__ == "__main__":
            signal.signal(signal.SIGCHLD, signal.SIG_IGN)
            with open(sys.argv[1], "w") as file:
                try:
                    asyncio.run(main(file))
                except BaseException:
                    traceback.print_exc(file=file)
        """,
    )
    result = tmp_path / "result"
    command = [sys.executable, path, result]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    line = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", *command]
    assert subprocess.run(line, env=environment, timeout=500, check=False).returncode == 0
    assert result.read_text() == "1\n"


# ── forks of workers ────────────────────────────────────────────────────────────────────────────


FORKS = """
    async def main():
        async with aiorpc.local_world(0):
            await aiorpc.call("main", os.getpid)
            if (pid := os.fork()) == 0:
                sys.exit(3)
            _, status = await asyncio.to_thread(os.waitpid, pid, 0)
            print(os.waitstatus_to_exitcode(status))
            assert await aiorpc.call("main", os.getpid) == os.getpid()
    asyncio.run(main())
"""


@pytest.mark.slow
def test_a_fork_of_the_program_that_exits(tmp_path: Path) -> None:
    """`sys.exit` in it ends it there, and the world of its parent goes on."""
    done = run(program(tmp_path, FORKS))
    assert (done.stdout, done.stderr, done.returncode) == ("3\n", "", 0)


def fork_sleeper() -> tuple[int, int]:
    if (pid := os.fork()) == 0:
        os.setsid()  # else it would end with this process
        signal.pause()
    return os.getpid(), pid


@pytest.mark.slow
async def test_a_worker_is_replaced_though_its_fork_lives() -> None:
    """A process that it forked does not hold the pipe that tells its death."""
    async with local_world(["a"], max_restarts=1, start_timeout=500.0) as me:
        killed, sleeper = await call("a", fork_sleeper)
        try:
            os.kill(killed, signal.SIGKILL)
            with pytest.raises(aiorpc.WorkerLost):
                await call("a", asyncio.sleep, 600)
            async with asyncio.timeout(60.0):
                await me.wait_for("a")
            assert await call("a", actors.pid) != killed
        finally:
            os.kill(sleeper, signal.SIGKILL)


# ── preload ─────────────────────────────────────────────────────────────────────────────────────

HEAVY = "import threading\nimported_in = __import__('os').getpid()\n"


def imported_in(module: str) -> int:
    return int(sys.modules[module].imported_in)


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Write a module that the server can import; each has a name of its own."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(name: str, text: str) -> str:
        (tmp_path / f"{name}.py").write_text(text)
        return name

    return write


@pytest.mark.slow
@pytest.mark.promise("worlds.preload")
async def test_preloaded_modules_are_imported_once(module: Any) -> None:
    """The server imports them, for this world and for later ones."""
    name = module("preloaded_once", HEAVY)
    async with local_world(2, preload=(name,)):
        assert {await call(rank, imported_in, name) for rank in (1, 2)} == {server().pid}
    before = server()
    async with local_world(["a"]):
        assert server() == before


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "error", "match"),
    [
        ("import nothing_here", ImportError, "'bad_0' of preload= cannot be imported: Mod"),
        (
            "import threading\nthreading.Thread(target=threading.Event().wait, name='own').start()",
            RuntimeError,
            "preload= started threads, which a fork does not copy: own; do that in a function, or",
        ),
        (
            "import torch\ntorch.cuda.is_initialized = lambda: True",
            RuntimeError,
            "preload= initialized CUDA, which forked children cannot use then; do that in a fun",
        ),
        (
            "import os\nos._exit(3)",
            RuntimeError,
            "the process that forks the children of local worlds has died",
        ),
    ],
    ids=["missing", "thread", "CUDA", "exit"],
)
async def test_a_module_that_cannot_be_preloaded(
    module: Any, text: str, error: type[Exception], match: str, request: pytest.FixtureRequest
) -> None:
    """The error names it and what to do."""
    name = module(f"bad_{len(text) if error is RuntimeError else 0}", text)
    with pytest.raises(error, match=match):
        async with local_world(["a"], preload=(name,)):
            pass


@pytest.mark.slow
async def test_an_import_without_end(module: Any) -> None:
    """`start_timeout` holds, and the next world has another server."""
    name = module("without_end", "import signal\nsignal.pause()\n")
    with pytest.raises(aiorpc.WorldTimeout, match=r"did not import torch, without_end within 0\.1"):
        async with local_world(["a"], preload=(name,), start_timeout=0.1):
            pass
    stuck = server()
    async with local_world(["a"]):
        assert server() != stuck
    gc.collect()
    assert not stuck.is_running()


@pytest.mark.slow
async def test_the_world_after_a_server_that_failed() -> None:
    """It has another server."""
    with pytest.raises(ImportError, match="nothing_of_this_name"):
        async with local_world(["a"], preload=("nothing_of_this_name",)):
            pass
    async with local_world(["a"]):
        assert await call("a", actors.pid)


# ── its end ─────────────────────────────────────────────────────────────────────────────────────

RARE = ("forked", "killed inside")
RAREST = ("killed", "exit")

LIVES = """
    from aiorpc_torch._children import forkserver
    async def main(end):
        async with aiorpc.local_world(1):
            print(os.getpid(), forkserver.server_pid(), await aiorpc.call(1, os.getpid), flush=True)
            if end == "forked" and os.fork() == 0:
                signal.pause()
            if end in ("forked", "killed inside"):
                print("ready", flush=True)
                await asyncio.sleep(600)
        if end == "killed":
            print("ready", flush=True)
            signal.pause()
        if end == "exit":
            os._exit(3)
    if __name__ == "__main__":
        import signal
        asyncio.run(main(sys.argv[1]))
"""


@pytest.mark.promise("worlds.server_ends")
@pytest.mark.parametrize(
    "end",
    [
        "normal",
        *(pytest.param(end, marks=pytest.mark.slow) for end in RARE),
        *(pytest.param(end, marks=pytest.mark.exhaustive) for end in RAREST),
    ],
)
def test_the_server_ends_with_the_program(
    tmp_path: Path, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However the program ends, and though a fork of it lives; no process, no socket is left."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with started(program(tmp_path, LIVES), end) as parent:
        assert parent.stdout is not None
        found = [psutil.Process(int(pid)) for pid in parent.stdout.readline().split()[1:]]
        if end not in ("normal", "exit"):
            assert parent.stdout.readline() == "ready\n"
            parent.kill()
        parent.wait(timeout=500)
        _, alive = psutil.wait_procs(found, timeout=30)
        assert not [each for each in alive if each.status() != psutil.STATUS_ZOMBIE]
    assert not [each for each in tmp_path.rglob("*") if each.is_socket()]


async def test_no_descriptor_is_left() -> None:
    """Worlds in a row leave none here, and no child of the server."""
    async with local_world(2):
        pass
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(2):
        async with local_world(2):
            pass
    async with asyncio.timeout(30.0):  # other threads may close theirs now
        while len(os.listdir("/proc/self/fd")) > before:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert not server().children(), "it reaps a child before it reports its end"
    assert server().num_fds() < 12


@pytest.mark.slow
async def test_a_killed_server_ends_no_worker() -> None:
    """Children live on; one that dies then is replaced; the next world has another server."""
    async with local_world(["a"], max_restarts=1, start_timeout=500.0) as me:
        before, killed = server(), await call("a", actors.pid)
        before.kill()
        before.wait()
        assert await call("a", actors.pid) == killed
        os.kill(killed, signal.SIGKILL)
        with pytest.raises(aiorpc.WorkerLost):
            await call("a", asyncio.sleep, 600)
        await me.wait_for("a")
        assert await call("a", actors.pid) != killed
    async with local_world(["a"]):
        assert server() != before


@pytest.mark.slow
@pytest.mark.parametrize("when", ["inside", "between"])
async def test_a_frozen_server_holds_up_no_world(when: str) -> None:
    """It is killed: neither the end of a world nor the start of a child waits for it."""
    async with local_world(["a"]):
        frozen = server()
        if when == "inside":
            frozen.suspend()
    if when == "between":
        frozen.suspend()
    async with local_world(["a"]):
        assert server() != frozen


@pytest.mark.slow
@pytest.mark.parametrize("way", ["aiorpc.run_local(main, 2)", "asyncio.run(enter())"])
def test_a_script_without_its_guard(tmp_path: Path, way: str) -> None:
    """Its start ends at once, and says what is wrong; its children print nothing."""
    path = program(
        tmp_path,
        f"""
        async def main(me):
            pass
        async def enter():
            async with aiorpc.local_world(1):
                pass
        {way}
        """,
    )
    done = run(path)
    assert done.returncode == 1
    assert "the proper idiom" not in done.stderr
    *_, last = done.stderr.splitlines()
    assert "which starts a world then" in last
    assert last.endswith('`if __name__ == "__main__":`')


@pytest.mark.slow
def test_a_program_without_a_file() -> None:
    """No name of the server stands in its children for one of the program's `__main__`."""
    done = run(
        Path("-c"),
        """if True:
        import asyncio
        import aiorpc_torch as aiorpc
        async def main():
            async with aiorpc.local_world(1):
                names = await aiorpc.call(1, eval, "[*vars(__import__('__main__'))]")
                print([name for name in names if not name.startswith("__")])
        asyncio.run(main())
        """,
    )
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr


# ── initializers ────────────────────────────────────────────────────────────────────────────────

_initialized: list[tuple[str, bool, bool, bool]] = []  # in each process


def note_start(name: str) -> None:
    """An initializer: the name, and whether this process has a world, a loop, CUDA by now."""
    has_loop = asyncio._get_running_loop() is not None
    _initialized.append((name, torch_runs(), has_loop, torch.cuda.is_initialized()))


def noted_start() -> list[tuple[str, bool, bool, bool]]:
    return _initialized


def fail_in_a(name: str) -> None:
    if name == "a":
        raise LookupError("no device for a")


@pytest.mark.promise("worlds.initializer")
async def test_children_are_initialized_before_their_world() -> None:
    """Each once, with its name, also one that is added later; CUDA is not used by then."""
    async with local_world(["a"], initializer=note_start) as me:
        await me.start("b")
        for name in "ab":
            assert await call(name, noted_start) == [(name, False, False, False)]
    assert not _initialized, "this process is the program's own"
    with pytest.raises(LookupError, match="no device for a"):
        async with local_world(["a"], initializer=fail_in_a):
            pass


async def tell_start(me: aiorpc.types.Worker) -> list[Any]:
    return [await call(peer, noted_start) for peer in me.peers] + _initialized


async def test_run_local_initializes_every_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """This one included, before its event loop."""
    monkeypatch.setattr(sys.modules[__name__], "_initialized", [])
    found = await asyncio.to_thread(
        aiorpc.run_local, tell_start, ["b", "a"], initializer=note_start, handle_signals=False
    )
    assert found == [[("a", False, False, False)], ("b", False, False, False)]


# ── event loops ─────────────────────────────────────────────────────────────────────────────────


async def loop_class() -> str:
    return type(asyncio.get_running_loop()).__module__.partition(".")[0]


@pytest.mark.promise("worlds.loops")
async def test_the_loops_of_children() -> None:
    """uvloop's where it is installed, or those of `loop_factory`; this process keeps its own."""
    import importlib.util

    has_uvloop = importlib.util.find_spec("uvloop") is not None
    mine = asyncio.get_running_loop()
    async with local_world(["a"]):
        assert await call("a", loop_class) == ("uvloop" if has_uvloop else "asyncio")
        assert asyncio.get_running_loop() is mine
    async with local_world(["a"], loop_factory=asyncio.new_event_loop):
        assert await call("a", loop_class) == "asyncio"


@pytest.mark.slow
def test_run_local_has_one_kind_of_loop(tmp_path: Path) -> None:
    """In every process, `main` runs on the loop of `loop_factory`."""
    path = program(
        tmp_path,
        """
        class Loop(asyncio.SelectorEventLoop):
            pass
        async def main(me):
            assert type(asyncio.get_running_loop()).__name__ == "Loop"
            return "all"
        if __name__ == "__main__":
            print(aiorpc.run_local(main, 2, loop_factory=Loop))
        """,
    )
    done = run(path)
    assert (done.returncode, done.stdout) == (0, "all\n"), done.stderr
