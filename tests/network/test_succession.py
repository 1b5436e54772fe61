"""The directory moves between machines on which each worker has one port, with TLS and without."""

import contextlib
from pathlib import Path
from typing import Any

import pytest

from tests.support import samples
from tests.support.certificates import Authority
from tests.support.movers import PATIENCE, Mover, all_call_all, end_all
from tests.support.network_namespaces import ADDRESSES, LINK, Machine, machines as machines
from tests.support.packets import Packets, is_tls, packets_at
from tests.support.slack import SLACK

MASTER = 29500
PORTS = {"w0": 29600, "w1": 29601, "w2": 29602, "a": 29603, "b": 29604}
HOSTS = {"w0": 0, "w1": 1, "w2": 0, "a": 0, "b": 1}
HEARTBEAT = 1.0  # seconds


class World:
    """A world over two machines.

    Args:
        place: where its workers meet.
        has_port, is_secure: whether they have port= and tls=.
    """

    def __init__(
        self,
        hosts: tuple[Machine, Machine],
        folder: Path,
        stack: contextlib.ExitStack,
        place: str,
        *,
        has_port: bool,
        is_secure: bool,
    ) -> None:
        self.is_movable = place == "file"
        self._hosts, self._stack = hosts, stack
        self._has_port, self._is_secure = has_port, is_secure
        self._authority = Authority(folder) if is_secure else None
        self._more = {
            "init_method": f"file://{folder}/world" if self.is_movable else f"tcp://{FIXED}",
            "interface": LINK,
            "heartbeat": HEARTBEAT,
            "start_timeout": PATIENCE,
        }

    def start(self, name: str) -> Mover:
        """Start a process. It joins if its name is not that of one of the first workers."""
        is_first = name.startswith("w")
        own: dict[str, Any] = (
            {"rank": int(name[1:]), "world_size": 3} if is_first else {"join": True}
        )
        if self._has_port:
            own["port"] = PORTS[name]
        if self._authority is not None:
            own["tls"] = self._authority.files(name)
        prefix = self._hosts[HOSTS[name]].inside()
        return self._stack.enter_context(Mover(name, prefix, **self._more, **own))

    def check_packets(self, packets: Packets) -> None:
        """Check that no other port was dialled, and that all bytes were records of TLS."""
        if self._has_port:
            dialled = {port for _, (_, port) in packets.connected}
            assert dialled <= {MASTER, *PORTS.values()}
        streams = packets.streams()
        assert streams
        assert all(is_tls(stream) for _, stream in streams) is self._is_secure

    def check_ports(self, workers: list[Mover]) -> None:
        """Check that each worker listens at one port alone, and w0 at that of the world."""
        for each in workers:
            found, address = each.ask("ports"), ADDRESSES[HOSTS[each.name]]
            if each.name == "w0" and not self.is_movable:
                found.remove([address, MASTER])
            [[host, port]] = found
            assert host == address
            assert port == PORTS[each.name] or not self._has_port


FIXED = f"{ADDRESSES[0]}:{MASTER}"


@pytest.mark.promise("succession.takeover", "succession.replacement", "security.encryption")
@pytest.mark.parametrize(
    ("how", "place", "end"),
    samples.cells(["port", "tls", "port-tls"], ["file", "tcp"], ["kill", "freeze", "leave"], of=3),
)
def test_the_coordinator_ends(
    machines: tuple[Machine, Machine], tmp_path: Path, how: str, place: str, end: str
) -> None:
    """A process of each machine enters afterwards, and all call all."""
    with packets_at(machines[0]) as packets, contextlib.ExitStack() as stack:
        given = {"has_port": "port" in how, "is_secure": "tls" in how}
        world = World(machines, tmp_path, stack, place, **given)
        first, *others = [world.start(name) for name in ("w0", "w1", "w2")]
        for rank, each in enumerate((first, *others)):
            assert each.hear("in") == [rank, 0, "w0"]
        others[0].tell("begin calling", "w2")
        first.end_by(end)
        if not world.is_movable:
            if end == "freeze":
                first.thaw()
            else:
                first = world.start("w0")
                assert first.hear("in") == [0, 1 if end == "kill" else 0, "w0"]
            others.append(first)
        joined = [world.start(name) for name in ("a", "b")]
        assert sorted(each.hear("in")[0] for each in joined) == [3, 4]
        others += joined
        if world.is_movable and end == "freeze":
            first.thaw()
            others.append(first)
        coordinator = others[0].ask("who")
        assert (coordinator == "w0") is not world.is_movable
        for each in others:
            each.ask("coordinator", coordinator)
        all_call_all(others)
        count, longest = others[0].ask("end calling")
        assert count > 100
        assert longest < 1.0 + SLACK
        world.check_ports(others)
        end_all(others)
    world.check_packets(packets)
