"""Processes that something starts again: what dies is back in the world of the others."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cluster import supervisor
from tests.cluster.programs import Running
from tests.cluster.steady import BACK, Pids, pids, reaching
from tests.support.example_programs import free_port, killed

STEADY = str(Path(__file__).with_name("steady.py"))
ALL = range(supervisor.SIZE)


def file(folder: Path) -> Running:
    """Meet at a file."""
    return supervisor.loops(STEADY, f"file://{folder}/world", cwd=folder)


def tcp(folder: Path) -> Running:
    """Meet at an address."""
    return supervisor.loops(STEADY, f"tcp://127.0.0.1:{free_port()}", cwd=folder)


def pods(folder: Path) -> Running:
    """Find the address in the variables of a pod."""
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    return supervisor.loops(STEADY, cwd=folder, **address)


def torchrun(folder: Path) -> Running:
    """Meet at the store of torchrun, which is in an agent."""
    return supervisor.agents(STEADY, cwd=folder, port=free_port())


@pytest.fixture
def started(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Running, Pids]]:
    """Start three processes that are started again, and wait until each has reached the others."""
    start: Callable[[Path], Running] = request.param
    with start(tmp_path) as running:
        first = pids(running.wait_for(r"(\d) (\d+) entered 0", supervisor.SIZE))
        for rank in ALL:
            running.wait_for(reaching(rank, first))
        yield running, first


def end(running: Running, folder: Path) -> None:
    """Let all end in order, and check that they do."""
    (folder / "stop").touch()
    assert running.end() == 0, running.lines


def ways(*starts: Callable[[Path], Running]) -> pytest.MarkDecorator:
    """Run a test in each of these ways."""
    return pytest.mark.parametrize(
        "started", [pytest.param(each, id=each.__name__) for each in starts], indirect=True
    )


# Under torchrun all processes of an agent are started again: test_torchrun.py.
@ways(file, tcp, pods)
@pytest.mark.promise("rejoin.machines", "rejoin.changes", "rejoin.undisturbed")
def test_a_process_that_is_killed(started: tuple[Running, Pids], tmp_path: Path) -> None:
    """It is back; meanwhile the others go on to call each other."""
    running, first = started
    killed(first[2])
    stay = {rank: first[rank] for rank in (0, 1)}
    for rank, pid in stay.items():
        running.wait_for(f"{rank} {pid} saw lost worker2")
        running.wait_for(reaching(rank, stay))
    second = stay | pids(running.wait_for(r"(2) (\d+) entered 1"))
    for rank in ALL:
        running.wait_for(reaching(rank, second))
    for rank, pid in stay.items():
        running.wait_for(f"{rank} {pid} saw returned worker2")
    end(running, tmp_path)
    assert len(running.matching(r"rank \d is started again")) == 1, running.lines


@ways(file, tcp, torchrun)
def test_rank_0_is_killed(started: tuple[Running, Pids], tmp_path: Path) -> None:
    """It enters the world that runs, twice. The others stay in it, and reach it."""
    running, now = started
    stay = {rank: now[rank] for rank in (1, 2)}
    for entries in (2, 3):
        killed(now[0])
        now |= pids(running.wait_for(r"(0) (\d+) entered \d", entries, BACK))
        for rank in ALL:
            running.wait_for(reaching(rank, now), timeout=BACK)
    end(running, tmp_path)
    assert pids(running.matching(r"([12]) (\d+) .*")) == stay
    assert len(running.matching(r"[12] \d+ entered \d")) == 2, running.lines


@ways(file, tcp)
def test_another_rank_after_rank_0(started: tuple[Running, Pids], tmp_path: Path) -> None:
    """The world that rank 0 came back to takes in other ranks too."""
    running, now = started
    for rank in (0, 2):
        killed(now[rank])
        now |= pids(running.wait_for(rf"({rank}) (\d+) entered \d", 2, BACK))
        for each in ALL:
            running.wait_for(reaching(each, now), timeout=BACK)
    end(running, tmp_path)
