"""Places that do not answer: a FIFO, a file system that hangs, an etcd that is frozen, a name."""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import aiorpc_torch as aiorpc
from tests.support import samples
from tests.support.etcd_servers import Member, needs_etcd, running
from tests.support.example_programs import free_port
from tests.support.hung_mounts import hung_mount
from tests.support.movers import Mover
from tests.support.scripts import program, started
from tests.support.slack import SLACK

START_TIMEOUT = 1.0  # seconds
SOON = START_TIMEOUT + 2.0 + SLACK
HEARTBEAT = 1.0  # seconds

pytestmark = pytest.mark.promise("worlds.place")

STARTS = f"""
import time
from pathlib import Path

async def main(rank, url):
    print("begins", flush=True)
    async with aiorpc.worker(
        rank=rank, world_size=2, init_method=url, start_timeout={START_TIMEOUT}
    ):
        print("in")

begun = time.monotonic()
try:
    asyncio.run(main(int(sys.argv[1]), sys.argv[2]))
except aiorpc.WorldTimeout as exc:
    print(time.monotonic() - begun, exc)
"""

ATTACHES = f"""
import socket, threading
from torch.distributed import rpc

def never(*args, **options):
    threading.Event().wait()

async def main():
    async with aiorpc.attach(start_timeout={START_TIMEOUT}):
        print("in")

options = rpc.TensorPipeRpcBackendOptions(init_method="file://" + sys.argv[1])
os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = socket.gethostname(), sys.argv[2]
rpc.init_rpc("w0", rank=0, world_size=1)
answers, socket.getaddrinfo = socket.getaddrinfo, never
try:
    asyncio.run(main())
except aiorpc.WorldTimeout as exc:
    print(exc)
socket.getaddrinfo = answers
rpc.shutdown()
"""


@pytest.mark.parametrize("rank", [0, 1])
async def test_a_fifo(tmp_path: Path, rank: int) -> None:
    """It is no place: nothing waits for its other end."""
    os.mkfifo(tmp_path / "world.rank0")
    where: dict[str, Any] = {"init_method": f"file://{tmp_path}/world", "start_timeout": 600.0}
    async with asyncio.timeout(SLACK):
        with pytest.raises(ValueError, match=rf"{tmp_path}/world\.rank0 is a FIFO, not a file: "):
            async with aiorpc.worker(rank=rank, world_size=2, **where):
                pass


# ── the start ───────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def hung(tmp_path: Path) -> Iterator[Path]:
    """A folder of a file system that does not answer."""
    found = tmp_path / "hung"
    found.mkdir()
    with hung_mount(found):
        yield found


@pytest.mark.parametrize("rank", samples.cells([0, 1], of=2))
def test_a_file_system_that_hangs(hung: Path, tmp_path: Path, rank: int) -> None:
    """The error names the file, and the process ends."""
    script = program(tmp_path, STARTS)
    with started(script, str(rank), f"file://{hung}/world") as process:
        output, errors = process.communicate(timeout=60 + SLACK)
    assert process.returncode == 0, errors
    assert f"within 1 s: the file {hung}/world.rank0 does not answer" in output, errors
    assert float(output.split()[1]) < SOON


@pytest.mark.slow
def test_a_signal_while_a_file_system_hangs(hung: Path, tmp_path: Path) -> None:
    """It ends the start, and the process."""
    script = program(tmp_path, STARTS.replace(str(START_TIMEOUT), "600.0"))
    with started(script, "0", f"file://{hung}/world") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "begins\n"
        time.sleep(0.5)
        begun = time.monotonic()
        process.send_signal(signal.SIGTERM)
        process.wait(60)
        assert time.monotonic() - begun < SOON


@needs_etcd
@pytest.mark.parametrize("rank", samples.cells([1, 0], of=2))
def test_an_etcd_that_is_frozen(tmp_path: Path, rank: int) -> None:
    script = program(tmp_path, STARTS)
    member = Member(tmp_path / "etcd")
    with running(member) as cluster:
        member.send(signal.SIGSTOP)
        with started(script, str(rank), cluster.url()) as process:
            output, errors = process.communicate(timeout=60 + SLACK)
    assert process.returncode == 0, errors
    assert f"etcd at {member.host} does not answer" in output, errors
    assert float(output.split()[1]) < START_TIMEOUT + 2.0 + SLACK / 4  # its calls have 5 s


@pytest.mark.slow
def test_a_name_that_attach_looks_up(tmp_path: Path) -> None:
    with started(program(tmp_path, ATTACHES), str(tmp_path / "s"), str(free_port())) as process:
        output, errors = process.communicate(timeout=60 + SLACK)
    assert process.returncode == 0, errors
    assert "no world within 1 s: the lookup of the name" in output, errors


# ── the running world ───────────────────────────────────────────────────────────────────────────


@contextlib.contextmanager
def file_place(folder: Path) -> Iterator[tuple[str, Callable[[], object]]]:
    """A URL, and a function with which its file system hangs."""
    (folder / "good").mkdir()
    (folder / "hung").mkdir()
    (folder / "shared").symlink_to("good")
    (folder / "next").symlink_to("hung")
    with hung_mount(folder / "hung"):
        yield f"file://{folder}/shared/world", lambda: (folder / "next").rename(folder / "shared")


@contextlib.contextmanager
def etcd_place(folder: Path) -> Iterator[tuple[str, Callable[[], object]]]:
    member = Member(folder / "etcd")
    with running(member) as cluster:
        yield cluster.url(), lambda: member.send(signal.SIGSTOP)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "is_late"),
    [
        pytest.param(file_place, True, id="file-reconnecting"),
        pytest.param(file_place, False, id="file-renewing", marks=pytest.mark.exhaustive),
        pytest.param(
            etcd_place, True, id="etcd-reconnecting", marks=[needs_etcd, pytest.mark.exhaustive]
        ),
        pytest.param(etcd_place, False, id="etcd-renewing", marks=needs_etcd),
    ],
)
def test_a_place_that_hangs(tmp_path: Path, kind: Any, is_late: bool) -> None:
    """Calls go on, also after the directory has closed, and all leave in bounded time."""
    with kind(tmp_path) as (url, hang), contextlib.ExitStack() as stack:
        options = {"world_size": 3, "init_method": url, "heartbeat": HEARTBEAT}
        movers = [stack.enter_context(Mover(f"w{rank}", rank=rank, **options)) for rank in range(3)]
        for rank, each in enumerate(movers):
            assert each.hear("in") == [rank, 0, "w0"]
        hang()
        count, longest = movers[1].ask("keep calling", "w0", 6.0 if is_late else 0.7)
        assert count > 50
        assert longest < SLACK
        begun = time.monotonic()
        for each in movers:
            each.tell("end")
        for each in movers:
            assert each.process.wait(60) == 0, each.errors()
        assert time.monotonic() - begun < 5.0 + SLACK
        warned = "it does not reach its place" in movers[0].errors()
        assert warned is is_late, movers[0].errors()
