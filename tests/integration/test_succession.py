"""The directory moves: its worker is killed, freezes or leaves, in real processes."""

import contextlib
import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore

from tests.support import samples
from tests.support.certificates import Authority
from tests.support.etcd_servers import HAS_ETCD, Member, running
from tests.support.example_programs import free_port
from tests.support.movers import Mover, all_call_all, end_all
from tests.support.slack import SLACK

HEARTBEAT = 1.0  # seconds
SOON = HEARTBEAT + 3.0 + SLACK  # until a process has entered after the end of the coordinator

Start = Callable[..., Mover]


class Place:
    """Where the workers of a world meet."""

    def __init__(self, kind: str, folder: Path, stack: contextlib.ExitStack) -> None:
        self.kind, self.folder, self._stack = kind, folder, stack
        self.more: dict[str, Any] = {"init_method": "env://"}
        if kind == "file":
            self.more = {"init_method": f"file://{folder}/world"}
        elif kind == "tcp":
            self.more = {"init_method": f"tcp://127.0.0.1:{free_port()}"}
        elif kind == "etcd":
            cluster = stack.enter_context(running(Member(folder / "etcd")))
            self.more = {"init_method": cluster.url()}

    @property
    def is_movable(self) -> bool:
        return self.kind != "tcp"

    def start(self, name: str, rank: int = -1, size: int = 3, **more: Any) -> Mover:
        """Start a process. Without a rank it joins."""
        how = {"join": True} if rank < 0 else {"rank": rank, "world_size": size}
        options = {"heartbeat": HEARTBEAT, "start_timeout": 60.0} | how | self.more | more
        return self._stack.enter_context(Mover(name, **options))


PLACES = ["file", "tcp", "torchrun", "etcd"]


@pytest.fixture(params=PLACES)
def place(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Place]:
    if request.param == "etcd" and not HAS_ETCD:
        pytest.skip("needs etcd")
    store = None
    if request.param == "torchrun":
        # torch's own socket is an IPv6 one, of which it looks up the names of its clients.
        bare = socket.create_server(("127.0.0.1", 0))
        port, fd = bare.getsockname()[1], bare.detach()
        store = TCPStore("127.0.0.1", port, None, True, wait_for_workers=False, master_listen_fd=fd)
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(port))
        monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    with contextlib.ExitStack() as stack:
        yield Place(request.param, tmp_path, stack)
    del store


def world(place: Place, size: int = 3, **more: Any) -> list[Mover]:
    workers = [place.start(f"w{rank}", rank, size, **more) for rank in range(size)]
    for rank, each in enumerate(workers):
        assert each.hear("in") == [rank, 0, "w0"]
    return workers


@pytest.mark.promise("succession.takeover")
@pytest.mark.parametrize(
    ("place", "end"),
    samples.cells(PLACES, ["kill", "freeze", "leave"], of=3),
    indirect=["place"],
)
def test_the_coordinator_ends(place: Place, end: str) -> None:
    """Another worker keeps the directory, or rank 0's replacement process; the calls go on."""
    first, *others = world(place)
    others[0].tell("keep calling", "w2", 2.0)
    start = time.monotonic()
    first.end_by(end)
    if not place.is_movable:
        if end == "freeze":
            first.thaw()
        else:
            start = time.monotonic()
            first = place.start("w0", 0)
            # A process that has left is none that was lost, but another one has its rank.
            assert first.hear("in") == [0, 1 if end == "kill" else 0, "w0"]
        others.append(first)
    joined = place.start("a")
    assert joined.hear("in")[0] == 3
    assert time.monotonic() - start < SOON + STARTS
    coordinator = "w1" if place.is_movable else "w0"
    count, longest = others[0].hear("keep calling")
    assert count > 100
    assert longest < 1.0 + SLACK
    others.append(joined)
    for each in others:
        each.ask("coordinator", coordinator)
    all_call_all(others)
    if place.is_movable and end == "freeze":
        first.thaw()
        first.ask("coordinator", "w1")
        others.append(first)
        all_call_all(others)
    end_all(others)
    if place.kind == "file":
        assert os.listdir(place.folder) == [], "nothing is left at the place"


@pytest.mark.promise("succession.takeover", "succession.replacement")
@pytest.mark.parametrize(("kind", "end"), samples.cells(["file", "tcp"], ["kill", "leave"], of=2))
def test_a_coordinator_with_port_and_tls_ends(tmp_path: Path, kind: str, end: str) -> None:
    """Each worker listens at its port, also the one that takes over and the replacement process.

    tests/network/test_succession.py has the same between machines.
    """
    files = Authority(tmp_path).files()
    names = ("w0", "w1", "w2", "a")
    own = {name: {"port": free_port(), "tls": files, "interface": "lo"} for name in names}
    with contextlib.ExitStack() as stack:
        place = Place(kind, tmp_path, stack)
        first, *others = [
            place.start(name, rank, **own[name]) for rank, name in enumerate(names[:3])
        ]
        for rank, each in enumerate((first, *others)):
            assert each.hear("in") == [rank, 0, "w0"]
        others[0].tell("begin calling", "w2")
        first.end_by(end)
        if not place.is_movable:
            others.append(place.start("w0", 0, **own["w0"]))
            assert others[-1].hear("in") == [0, 1 if end == "kill" else 0, "w0"]
        others.append(place.start("a", **own["a"]))
        others[-1].hear("in")
        all_call_all(others)
        count, longest = others[0].ask("end calling")
        assert count > 100
        assert longest < 1.0 + SLACK
        end_all(others)


STARTS = 25.0  # seconds for the processes of such a test to start on a busy machine; torch: 60


@pytest.mark.slow
@pytest.mark.promise("succession.takeover", "succession.replacement")
def test_successions_in_a_row(place: Place) -> None:
    """Each coordinator is killed in turn, and a replacement process of each enters."""
    workers = {each.name: each for each in world(place)}
    for _ in range(4):
        keeper = workers["w1"].ask("who")
        workers[keeper].kill()
        workers[keeper] = place.start(keeper, int(keeper[1:]))
        rank, restarts, _ = workers[keeper].hear("in")
        assert rank == int(keeper[1:])
        assert restarts >= 1
        all_call_all([*workers.values()])
    end_all([*workers.values()])


@pytest.mark.slow
@pytest.mark.promise("succession.takeover")
def test_the_whole_world_is_killed(place: Place) -> None:
    """The next one at the same place is a new one, and starts at once."""
    for each in world(place):
        each.kill()
    start = time.monotonic()
    workers = world(place)
    assert time.monotonic() - start < STARTS + SLACK
    all_call_all(workers)
    end_all(workers)


@pytest.mark.slow
@pytest.mark.promise("succession.replacement")
def test_a_learner_that_starts_alone(place: Place) -> None:
    """Rank 0 of a world of one, in which others have joined: its replacement finds them."""
    if place.kind == "torchrun":
        pytest.skip("a world of one is met by its init_method= only")
    [first] = world(place, 1)
    actors = []
    for name in ("a", "b"):  # the first has the lower rank
        actors.append(place.start(name))
        actors[-1].hear("in")
    first.kill()
    if place.is_movable:
        for each in actors:
            each.ask("coordinator", "a")
    first = place.start("w0", 0, 1)
    assert first.hear("in")[:2] == [0, 1]
    all_call_all([first, *actors])
    end_all([*actors, first])
