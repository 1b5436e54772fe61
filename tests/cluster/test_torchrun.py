"""Workers of two agents of torchrun, and what they do when one of them fails."""

import contextlib
import importlib.util
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from tests.cluster.hosts import ADDRESSES, Host
from tests.cluster.programs import Running, environment
from tests.cluster.steady import pids, reaching
from tests.support import guides
from tests.support.example_programs import free_port, killed

GUIDE = guides.DOCS / "guides" / "torchrun.md"
SIZE = 4
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=2"]
LOCAL = "127.0.0.1"

# Rank 3 fails once all have called each other, and only in the first world.
FAILS_ONCE = """\
import asyncio, os, pathlib, signal, sys
import aiorpc_torch as aiorpc

ways = {"exit": lambda: sys.exit(1), "kill": lambda: os.kill(os.getpid(), signal.SIGKILL)}
called = 0
all_called = asyncio.Event()

def pid():
    return os.getpid()

async def has_called():
    global called
    called += 1
    if called == int(os.environ["WORLD_SIZE"]) - 1:
        all_called.set()

async def main(options):
    failed = pathlib.Path("failed")
    is_first = not failed.exists()
    async with aiorpc.worker(**options) as me:
        found = await asyncio.gather(*(aiorpc.call(peer, pid) for peer in me.peers))
        pids = " ".join(map(str, sorted([*found, pid()])))
        os.write(1, f"{me.rank} {pid()} {me.restarts} calls {pids}\\n".encode())
        await asyncio.gather(*(aiorpc.call(peer, has_called) for peer in me.peers))
        await all_called.wait()
        if is_first:
            if me.rank == 3:
                failed.touch()
                ways[sys.argv[1]]()
            await asyncio.sleep(600)

if __name__ == "__main__":
    asyncio.run(main({"on_failure": "stop"} if "stop" in sys.argv else {}))
"""


@contextlib.contextmanager
def agents(
    folder: Path, options: Sequence[str], *program: str, nodes: Sequence[Sequence[str]] = ((), ())
) -> Iterator[list[Running]]:
    """Start two agents, with options of both and of each."""
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(
                Running([*TORCHRUN, *options, *own, *program], cwd=folder, env=environment())
            )
            for own in nodes
        ]


def end_well(found: Sequence[Running]) -> list[str]:
    """Wait for the end of both agents, and return their lines."""
    for each in found:
        assert each.end() == 0, "\n".join(line for agent in found for line in agent.lines)
    return [line for each in found for line in each.lines]


def worlds(lines: Sequence[str]) -> dict[str, dict[int, int]]:
    """Return the processes by rank, for each set of processes that called each other."""
    found: dict[str, dict[int, int]] = {}
    for line in lines:
        if match := re.fullmatch(r"(\d) (\d+) \d calls ([\d ]+)", line):
            found.setdefault(match[3], {})[int(match[1])] = int(match[2])
    return found


# ── a rendezvous that both agents join again ────────────────────────────────────────────────────


@contextlib.contextmanager
def c10d(_: Path) -> Iterator[list[str]]:
    """Meet at the first agent."""
    yield ["--rdzv-backend=c10d", f"--rdzv-endpoint={LOCAL}:{free_port()}"]


@contextlib.contextmanager
def etcd(folder: Path) -> Iterator[list[str]]:
    """Meet at an etcd, which outlives the agents."""
    if (server := shutil.which("etcd")) is None or importlib.util.find_spec("etcd") is None:
        pytest.skip("no etcd: apt-get install etcd-server, and pip install python-etcd")
    client, peer = (f"http://{LOCAL}:{free_port()}" for _ in range(2))
    command = [server, "--enable-v2", f"--data-dir={folder / 'etcd-data'}"]
    command += [f"--listen-client-urls={client}", f"--advertise-client-urls={client}"]
    command += [f"--listen-peer-urls={peer}", f"--initial-advertise-peer-urls={peer}"]
    command += [f"--initial-cluster=default={peer}"]
    with Running(command, cwd=folder, env=environment()) as running:
        running.wait_for(".*ready to serve client requests.*")
        address = client.removeprefix("http://")
        yield ["--rdzv-backend=etcd-v2", f"--rdzv-endpoint={address}", "--rdzv-conf=protocol=http"]


Meeting = Callable[[Path], contextlib.AbstractContextManager[list[str]]]


def named(value: "str | Meeting") -> str:
    """Return the name of a parameter."""
    return value if isinstance(value, str) else value.__name__


@pytest.mark.promise("worlds.torchrun")
@pytest.mark.parametrize(
    ("meeting", "way"), [(c10d, "exit"), (c10d, "kill"), (etcd, "exit")], ids=named
)
def test_all_start_again(meeting: Meeting, way: str, tmp_path: Path) -> None:
    """One of four fails: a second world has four other processes, and both agents end well."""
    (tmp_path / "program.py").write_text(FAILS_ONCE)
    with meeting(tmp_path) as where:
        options = [*where, "--rdzv-id=test", "--max-restarts=2", f"--local-addr={LOCAL}"]
        with agents(tmp_path, options, "program.py", way) as found:
            first, second = worlds(end_well(found)).values()
    assert set(first) == set(second) == {*range(SIZE)}
    assert not {*first.values()} & {*second.values()}


# ── a rendezvous without a second attempt ───────────────────────────────────────────────────────


def static() -> tuple[list[str], list[list[str]]]:
    """Return the options of both agents and of each, as the guide has them."""
    both = [f"--master-addr={LOCAL}", f"--master-port={free_port()}", "--max-restarts=2"]
    return both, [["--node-rank=0"], ["--node-rank=1"]]


@pytest.mark.promise("rejoin.machines")
def test_only_one_agent_starts_its_processes_again(tmp_path: Path) -> None:
    """They replace the old ones in the living world; those of the other agent go on."""
    options, nodes = static()
    steady = str(Path(__file__).with_name("steady.py"))
    with agents(tmp_path, options, steady, nodes=nodes) as (one, other):
        stay = pids(one.wait_for(r"(\d) (\d+) entered 0", 2))
        killed(pids(other.wait_for(r"(\d) (\d+) entered 0", 2))[3])
        running = stay | pids(other.wait_for(r"(\d) (\d+) entered 1", 2))
        for rank in stay:
            one.wait_for(reaching(rank, running))
        (tmp_path / "stop").touch()
        end_well([one, other])


@pytest.mark.promise("worlds.on_failure")
def test_all_end_with_one(tmp_path: Path) -> None:
    """With `on_failure="stop"` each agent sees a failure, and all processes start again."""
    options, nodes = static()
    (tmp_path / "program.py").write_text(FAILS_ONCE)
    with agents(tmp_path, options, "program.py", "kill", "stop", nodes=nodes) as found:
        first, second = worlds(end_well(found)).values()
    assert set(first) == set(second) == {*range(SIZE)}
    assert not {*first.values()} & {*second.values()}


def test_the_report_of_one_machine(tmp_path: Path) -> None:
    """The first failure is the root cause; the others have exit code 143."""
    (tmp_path / "program.py").write_text(FAILS_ONCE)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=4"]
    command += ["--rdzv-backend=c10d", f"--rdzv-endpoint={LOCAL}:0", "program.py", "exit"]
    with Running(command, cwd=tmp_path, env=environment()) as running:
        assert running.end() == 1
    report = running.lines
    assert len([line for line in report if re.fullmatch(r" *exitcode +: 143 .*", line)]) == 3
    cause = report[next(at for at, line in enumerate(report) if "Root Cause" in line) :]
    assert any(re.fullmatch(r" *rank +: 3 .*", line) for line in cause), report
    assert any(re.fullmatch(r" *exitcode +: 1 .*", line) for line in cause), report


# ── the guide ───────────────────────────────────────────────────────────────────────────────────


def commands_of_the_guide() -> tuple[str, str]:
    """Return the command for two machines, and the one that checks a machine first."""
    text = GUIDE.read_text()
    (start,) = [found for _, _, found in guides.BLOCK.findall(text) if "--node-rank" in found]
    (check,) = re.findall(r"`(python -m aiorpc_torch doctor [^`]+)`", text)
    return start, check


def test_two_machines_of_the_guide(hosts: tuple[Host, Host], tmp_path: Path) -> None:
    """The command for each of two machines, as it is there."""
    (tmp_path / "hello.py").write_text(guides.read(GUIDE).files["hello.py"])
    start, check = commands_of_the_guide()
    with contextlib.ExitStack() as stack:
        found = [
            stack.enter_context(
                Running(
                    host.inside(
                        *("bash", "-c", start.replace("-rank=0", f"-rank={rank}")), cwd=tmp_path
                    ),
                    cwd=tmp_path,
                    env=environment(),
                )
            )
            for rank, host in enumerate(hosts)
        ]
        lines = end_well(found)
    hello = [line for line in lines if line.startswith("hello")]
    assert hello == [f"hello worker0, this is process {rank}" for rank in range(1, 8)]
    for rank, host in enumerate(hosts):
        with Running(host.inside(*check.split()), cwd=tmp_path, env=environment()) as doctor:
            doctor.end()
        assert doctor.matching(rf".*{re.escape(ADDRESSES[rank])}.*"), doctor.lines
