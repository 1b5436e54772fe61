"""Worlds at etcd, whose members are killed or freeze while the directory moves."""

import contextlib
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import samples
from tests.support.etcd_servers import Cluster, Member, eventually, needs_etcd, running
from tests.support.movers import PATIENCE, Mover, all_call_all, check_directories, end_all
from tests.support.slack import SLACK

pytestmark = [pytest.mark.slow, needs_etcd]

LONG, SHORT = 20.0, 1.0  # heartbeats in seconds
# A lease lasts half a heartbeat, and 2 s at least.
PAUSE = LONG / 2 / 4  # seconds: less than the lease of the one, more than that of the other


class World:
    """Three workers at an etcd of three members, and those that join. w1 calls w2 all the time."""

    def __init__(self, folder: Path, stack: contextlib.ExitStack) -> None:
        self._stack = stack
        members = [Member(folder / f"m{number}") for number in range(3)]
        self.etcd = stack.enter_context(running(*members))
        for each in members:
            eventually(Cluster([each]).value(name="other").read)
        self._url = self.etcd.url()
        self.workers: dict[str, Mover] = {}

    def start(self, heartbeat: float, first: Member | None = None) -> None:
        """Start the first workers. The URL begins with that member."""
        self._url = Cluster(sorted(self.etcd.members, key=lambda each: each is not first)).url()
        self._more = {"heartbeat": heartbeat, "start_timeout": PATIENCE}
        for rank in range(3):
            self._add(f"w{rank}", rank=rank, world_size=3)
        for rank, each in enumerate(self.workers.values()):
            assert each.hear("in") == [rank, 0, "w0"]
        self.workers["w1"].tell("begin calling", "w2")

    def _add(self, name: str, **more: Any) -> Mover:
        given = {"init_method": self._url, **self._more, **more}
        self.workers[name] = self._stack.enter_context(Mover(name, **given))
        return self.workers[name]

    def join(self, name: str) -> Mover:
        """Start a process that enters."""
        return self._add(name, join=True)

    def kill(self, name: str) -> None:
        self.workers.pop(name).kill()

    def coordinator(self) -> str:
        """Return the worker that keeps the directory, once all name the same one."""
        while True:
            first, *others = [each.ask("who") for each in self.workers.values()]
            if {first} == {*others}:
                return str(first)

    @contextlib.contextmanager
    def frozen_etcd(self) -> Iterator[None]:
        """Freeze all members of etcd during the block."""
        for each in self.etcd.members:
            each.send(signal.SIGSTOP)
        yield
        for each in self.etcd.members:
            each.send(signal.SIGCONT)

    def check(self) -> None:
        """Check that all call all, that no call has failed, and that there was one directory."""
        workers = [*self.workers.values()]
        all_call_all(workers)
        count, longest = self.workers["w1"].ask("end calling")
        assert count > 100
        assert longest < 1.0 + SLACK
        check_directories(workers)
        end_all(workers)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with contextlib.ExitStack() as stack:
        yield World(tmp_path, stack)


@pytest.mark.promise("succession.takeover")
@pytest.mark.parametrize(
    ("is_leader", "is_at_once"),
    samples.cells([True, False], [False, True], of=2),
    ids=["leader-one-by-one", "leader-at-once", "another-one-by-one", "another-at-once"],
)
def test_a_member_of_etcd_is_killed(world: World, is_leader: bool, is_at_once: bool) -> None:
    """The world goes on; so it does when rank 0 is killed then, or at the same time."""
    victim = next(each for each in world.etcd.members if each.is_leader() == is_leader)
    world.start(LONG, victim)
    victim.end()
    if not is_at_once:
        assert world.join("a").hear("in") == [3, 0, "w0"]
    world.kill("w0")
    joined = world.join("b")
    assert joined.hear("in")[2] == "w1"
    assert world.coordinator() == "w1"
    world.check()


@pytest.mark.promise("succession.never_two")
def test_etcd_freezes_for_less_than_the_lease(world: World) -> None:
    """The directory stays where it is; a process that came meanwhile enters after the thaw."""
    world.start(LONG)
    with world.frozen_etcd():
        joined = world.join("a")
        world.workers["w0"].ask("keep calling", "w2", PAUSE)
    assert joined.hear("in") == [3, 0, "w0"]
    assert world.coordinator() == "w0"
    assert "the directory ends" not in world.workers["w0"].errors()
    world.check()


@pytest.mark.promise("succession.never_two", "succession.takeover")
def test_etcd_freezes_for_longer_than_the_lease(world: World) -> None:
    """The directory closes, and after the thaw one is there again."""
    world.start(SHORT)
    with world.frozen_etcd():
        joined = world.join("a")
        world.workers["w0"].logs("the directory ends, and moves to another worker")
        world.workers["w1"].ask("call", "w2")
        assert not joined.has_said("in")
    assert joined.hear("in")[0] == 3
    world.coordinator()
    world.check()


@pytest.mark.promise("succession.never_two", "succession.takeover")
def test_etcd_thaws_before_the_directory_has_closed(world: World) -> None:
    """The answer to a renewal that is later than the lease lets no process enter."""
    world.start(SHORT)
    with world.frozen_etcd():
        joined = world.join("a")
        world.workers["w0"].ask("keep calling", "w2", PAUSE)
    assert joined.hear("in")[0] == 3
    world.coordinator()
    world.check()


@pytest.mark.promise("succession.never_two", "succession.takeover")
def test_rank_0_is_killed_while_etcd_is_frozen(world: World) -> None:
    """Another worker takes the directory over after the thaw."""
    world.start(SHORT)
    with world.frozen_etcd():
        world.kill("w0")
        joined = world.join("a")
        world.workers["w2"].ask("keep calling", "w1", PAUSE)
    assert joined.hear("in")[0] == 3
    assert world.coordinator() in ("w1", "w2")
    world.check()
