"""`python -m aiorpc_torch top` beside worlds: what it names, and that it never hangs."""

import asyncio
import contextlib
import importlib
import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

import aiorpc_torch as aiorpc
from aiorpc_torch import call, create, remote
from tests.support import attached, guides
from tests.support.attached import cast
from tests.support.scripts import ROOT
from tests.support.slow_programs import straggler, unbounded
from tests.support.top_looks import command_line, look_at, look_once, rows_until, verdict_of

SOON = 60.0  # seconds after which something will never happen


class Holder:
    """Blocks its event loop until a file is there."""

    async def hold(self, path: str) -> None:
        while not Path(path).exists():  # noqa: ASYNC240
            time.sleep(0.01)  # noqa: ASYNC251

    async def pid(self) -> int:
        return os.getpid()


@pytest.mark.promise("top.states")
async def test_a_blocked_a_stopped_and_a_lost_worker(tmp_path: Path) -> None:
    """Each has its row. The lost one has no process; the others answer, or are known without."""
    free = tmp_path / "free"
    async with aiorpc.local_world(["held", "stopped", "dead", "well"]) as me:
        holder = await create("held", Holder)
        pids = {name: await call(name, os.getpid) for name in me.peers}
        holding = asyncio.ensure_future(remote(holder).hold(str(free)))
        os.kill(pids["stopped"], signal.SIGSTOP)
        os.kill(pids["dead"], signal.SIGKILL)
        try:
            rows = await rows_until(  # a busy machine may hold another one too, for a moment
                lambda row: (row.name, row.state) == ("dead", "lost"),
                lambda row: (row.name, row.state) == ("well", "ok"),
                lambda row: (row.name, row.state) == ("stopped", "stopped") and row.cpu is not None,
                lambda row: (row.state, row.function) == ("blocked", "Holder.hold"),
                lambda row: [wait.worker for wait in row.waits] == ["held"],
            )
        finally:
            os.kill(pids["stopped"], signal.SIGCONT)
            free.touch()
        await holding
        found = {row.name: row for row in rows}
        assert set(found) == {"main", *pids}
        assert any("in Holder.hold" in line for line in found["held"].stack)
        assert (found["held"].pid, found["stopped"].pid) == (pids["held"], pids["stopped"])
        assert found["main"].waits
        assert found["well"].memory > 0
        assert [name for name, row in found.items() if row.is_coordinator] == ["main"]


@pytest.mark.slow
async def test_processes_that_attach_are_there() -> None:
    """Also the world of `rpc.init_rpc`; without `attach` a process has no row."""
    with cast("ps", "t0", "t1") as players:
        for name in ("ps", "t0"):
            players[name].run(attached.enter)
        pid = players["ps"].run(os.getpid)
        rows = await look_at(pid)
        assert sorted(row.name for row in rows) == ["ps", "t0"]
        for name in ("ps", "t0"):
            players[name].run(attached.leave)
        rows = await look_at(pid)
        assert not rows


async def test_a_world_of_one_and_a_fork_of_it() -> None:
    """A child that `os.fork` has made is no worker, and the worker's row stays."""
    async with aiorpc.local_world(0):
        read, write = os.pipe()
        if (child := os.fork()) == 0:
            os.close(write)
            os.read(read, 1)
            os._exit(0)
        try:
            [row] = await rows_until(lambda row: row.state == "ok")
            assert (row.name, row.pid) == ("main", os.getpid())
        finally:
            os.close(write)
            os.close(read)
            os.waitpid(child, 0)  # noqa: ASYNC222


# ── the programs of the guide ───────────────────────────────────────────────────────────────────

GUIDE = guides.read(guides.DOCS / "guides" / "find-out-why-it-is-slow.md")


@contextlib.asynccontextmanager
async def running(program: Coroutine[None, None, None]) -> AsyncIterator[None]:
    """Run a program in the block, in this process."""
    task = asyncio.ensure_future(program)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait((task,))


def blocking(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Coroutine[None, None, None]:
    """Return the guide's program, which blocks an event loop."""
    program = GUIDE.files["blocking.py"].replace("range(100)", "range(10**6)")
    (folder / "blocking.py").write_text(program)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, "blocking", raising=False)
    main: Coroutine[None, None, None] = importlib.import_module("blocking").main()
    return main


@pytest.mark.promise("top.faults")
async def test_a_method_that_blocks_a_loop_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(blocking(tmp_path, monkeypatch)):
        found = await verdict_of("held", "policy")
    assert found.method == "Policy.act"


@pytest.mark.promise("top.faults")
@pytest.mark.parametrize(
    ("program", "kind", "worker", "method"),
    [(straggler, "slow", "env2", "Env.step"), (unbounded, "grows", "model", "Model.infer")],
)
async def test_a_slow_worker_and_a_queue_are_named(
    program: Callable[[], Coroutine[None, None, None]], kind: str, worker: str, method: str
) -> None:
    async with running(program()):
        found = await verdict_of(kind, worker)
    assert found.method == method


# ── the command ─────────────────────────────────────────────────────────────────────────────────


@pytest.mark.slow
async def test_json(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """And a picture, in which no font is fetched."""
    async with aiorpc.local_world(0):
        arguments = ["top", "--json", "--pid", str(os.getpid())]
        assert await asyncio.to_thread(command_line, arguments) == 0
        [[row]] = json.loads(capsys.readouterr().out)["worlds"].values()
        assert (row["name"], row["state"], row["rank"]) == ("main", "ok", 0)
        pytest.importorskip("rich")
        picture = tmp_path / "top.svg"
        arguments = ["top", "--svg", str(picture), "--pid", str(os.getpid())]
        assert await asyncio.to_thread(command_line, arguments) == 0
        assert ">main" in picture.read_text()
        assert "https" not in picture.read_text().partition("<style>")[2]


@pytest.mark.parametrize("way", [["--json"], ["--svg", "top.svg"]])
def test_a_process_that_is_no_worker_is_an_error(
    way: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Nothing is written: an empty answer would look like that of a world."""
    pytest.importorskip("rich")
    monkeypatch.chdir(tmp_path)
    look_once(monkeypatch)
    assert command_line(["top", *way, "--pid", "1"]) == 1
    printed = capsys.readouterr()
    assert (printed.out, "process 1 is no worker" in printed.err) == ("", True)
    assert not Path("top.svg").exists()


def test_a_machine_without_workers(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A script reads empty lists, and a person the reason on stderr."""
    monkeypatch.setattr("aiorpc_torch._top.terminal.look", lambda pid: ([], []))
    assert command_line(["top", "--json"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out) == {"worlds": {}, "verdicts": []}
    assert printed.err == "no worker of this user in this network namespace\n"


def test_a_picture_without_its_folder_is_an_error(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("rich")
    look_once(monkeypatch)
    path = str(tmp_path / "missing" / "top.svg")
    assert command_line(["top", "--svg", path]) == 1
    assert f"cannot write {path}: No such file" in capsys.readouterr().err


def test_a_picture_and_json_exclude_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command_line(["top", "--json", "--svg", "top.svg"])
    assert "not allowed with" in capsys.readouterr().err


def test_without_rich_it_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    assert command_line(["top"]) == 1
    assert "pip install 'aiorpc_torch[top]'" in capsys.readouterr().err


class Terminal:
    """A pseudo-terminal of 80 columns in which `top` runs."""

    def __init__(self, pid: int) -> None:
        self._master, slave = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "aiorpc_torch", "top", "--pid", str(pid)],
            stdin=slave,
            stdout=slave,
            env={**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm", "COLUMNS": "80"},
        )
        os.close(slave)
        self.text = ""

    def press(self, keys: bytes) -> None:
        self.text = ""
        os.write(self._master, keys)

    def until(self, text: str) -> None:
        """Wait until the terminal was sent this text since the last key."""
        end = time.monotonic() + SOON
        while text not in self.text:
            assert select.select([self._master], [], [], end - time.monotonic())[0], self.text
            self.text += os.read(self._master, 1 << 16).decode(errors="replace")

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._master)


@pytest.mark.slow
async def test_keys_in_a_terminal(tmp_path: Any) -> None:
    """The arrows select, Enter opens, Escape closes, letters sort, "q" ends it."""
    pytest.importorskip("rich")
    async with aiorpc.local_world(["env0"]) as me:
        holder = await create("env0", Holder)
        await remote(holder).pid()
        screen = Terminal(os.getpid())
        try:
            for keys, text in (
                *((b"", "nothing stands out"), (b"\x1b[B", "env0"), (b"\r", "rank 1")),
                *((b"\x1b", "enter open"), (b"p", "p99"), (b"\x1bOB", "env0")),
            ):
                if keys:
                    screen.press(keys)
                await asyncio.to_thread(screen.until, text)
            screen.press(b"q")
            assert await asyncio.to_thread(screen.process.wait, SOON) == 0
        finally:
            screen.close()
        assert me.peers == ("env0",)
