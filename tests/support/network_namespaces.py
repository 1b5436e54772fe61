"""Two machines on this one: network namespaces, with a cable between them or a poor line.

A namespace lives as long as a process of its own, which ends with the tests: nothing stays behind.
Only root may make them.
"""

import asyncio
import concurrent.futures
import contextlib
import ctypes
import fcntl
import functools
import json
import os
import random
import socket
import struct
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

HERE = Path(__file__).parent
ADDRESSES = ("10.93.7.1", "10.93.7.2")
LINK = "v0"  # the name of either end
PATIENCE = 30.0  # seconds for anything that a test waits for


@functools.cache
def why_not() -> str | None:
    """Why this machine cannot play two."""
    if not sys.platform.startswith("linux"):
        return "network namespaces are Linux's"
    words = ["unshare", "--net", "ip", "link", "add", LINK, "type", "veth", "peer", "name", "v1"]
    try:
        tried = subprocess.run(words, capture_output=True, text=True, check=False)
    except OSError as exc:
        return str(exc)
    return tried.stderr.strip() or None


class Machine:
    """A network namespace."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.prefix: tuple[str, ...] = ()
        """Words before each command that `running` runs."""
        self._keeper = subprocess.Popen(
            ["unshare", "--net", "sh", "-c", "echo in; exec cat"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._keeper.stdout is not None
        assert self._keeper.stdout.readline() == b"in\n"
        self.ip("link", "set", "lo", "up")

    @property
    def pid(self) -> int:
        """Of a process inside."""
        return self._keeper.pid

    def inside(self, *command: str) -> list[str]:
        """The command, to be run in there."""
        return ["nsenter", f"--net=/proc/{self.pid}/ns/net", *command]

    def ip(self, *words: str) -> None:
        subprocess.run(self.inside("ip", *words), check=True, timeout=PATIENCE)

    def sent(self) -> int:
        """The bytes that its interface has sent."""
        words = self.inside("cat", "/proc/net/dev")
        done = subprocess.run(words, check=True, capture_output=True, text=True, timeout=PATIENCE)
        (line,) = [each for each in done.stdout.splitlines() if each.strip().startswith(f"{LINK}:")]
        return int(line.split(":")[1].split()[8])

    def gets(self, address: str, interface: str = LINK) -> None:
        """An interface of it goes up with that address."""
        at_once = ["nodad"] if ":" in address else []  # IPv6 looks for a second for duplicates
        self.ip("address", "add", address, "dev", interface, *at_once)
        self.ip("link", "set", interface, "up")

    def loses(self, address: str) -> None:
        self.ip("address", "del", address, "dev", LINK)

    def unplug(self) -> None:
        self.ip("link", "set", LINK, "down")

    def plug(self) -> None:
        self.ip("link", "set", LINK, "up")

    def drop(self, port: int) -> None:
        """Its firewall drops what it sends from that port."""
        rule = ["-A", "OUTPUT", "-p", "tcp", "--sport", str(port), "-j", "DROP"]
        subprocess.run(self.inside("iptables", *rule), check=True, timeout=PATIENCE)

    def close(self) -> None:
        with self._keeper:
            self._keeper.kill()


@pytest.fixture
def machines() -> Iterator[tuple[Machine, Machine]]:
    """Two, with a cable between them."""
    with pair() as (one, other):
        end = ("netns", str(other.pid))
        one.ip("link", "add", LINK, "type", "veth", "peer", "name", LINK, *end)
        for machine, address in zip((one, other), ADDRESSES, strict=True):
            machine.gets(f"{address}/24")
        yield one, other


@contextlib.contextmanager
def pair() -> Iterator[tuple[Machine, Machine]]:
    """Two that are not connected."""
    if reason := why_not():
        pytest.skip(f"no network namespaces here: {reason}")
    with contextlib.ExitStack() as stack:
        made = [stack.enter_context(contextlib.closing(Machine(name))) for name in ("one", "other")]
        yield made[0], made[1]


# ── a line that loses and delays ────────────────────────────────────────────────────────────────

_NEWNET = 0x40000000  # CLONE_NEWNET
_TUNSETIFF = 0x400454CA
_TUN_WITHOUT_HEADER = 0x1001  # IFF_TUN | IFF_NO_PI


class Packet(NamedTuple):
    """A packet of TCP over IPv4, or another one without ports."""

    size: int
    source: int
    target: int

    @classmethod
    def of(cls, data: bytes) -> "Packet":
        """Return what is known of an IP packet."""
        if data[0] >> 4 != 4 or data[9] != socket.IPPROTO_TCP:
            return cls(len(data), 0, 0)
        header = 4 * (data[0] & 15)
        return cls(len(data), *struct.unpack_from("!HH", data, header))


class Line:
    """Carries IP packets between two machines, on the test's own event loop."""

    def __init__(self, *ends: int) -> None:
        self.delay = 0.0  # seconds, one way
        self.loss = 0.0  # a probability, one way
        self.carried = self.lost = 0
        self.drops: Callable[[Packet], bool] = lambda _: False
        self._wanted, self._busy = sys.maxsize, asyncio.Event()
        self._chance = random.Random(7)
        self._ends = ends
        self._loop = asyncio.get_running_loop()
        for end, far in zip(ends, reversed(ends), strict=True):
            self._loop.add_reader(end, self._carry, end, far)

    def _carry(self, near: int, far: int) -> None:
        packet = os.read(near, 65536)
        if self.drops(Packet.of(packet)) or self._chance.random() < self.loss:
            self.lost += 1
        else:
            self.carried += 1
            if self.carried >= self._wanted:
                self._busy.set()
            self._loop.call_later(self.delay, self._arrive, far, packet)

    def _arrive(self, end: int, packet: bytes) -> None:
        if self._ends:
            with contextlib.suppress(OSError):  # its queue is full, or it is down: lost on the way
                os.write(end, packet)

    async def carries(self, packets: int) -> None:
        """Wait until it has carried that many more."""
        self._wanted = self.carried + packets
        self._busy.clear()
        async with asyncio.timeout(PATIENCE):
            await self._busy.wait()

    async def rests(self) -> None:
        """Wait until it has carried packets, and then none for a while."""
        await self.carries(1)
        seen = 0
        while seen != self.carried:
            seen = self.carried
            await asyncio.sleep(0.3)

    def close(self) -> None:
        ends, self._ends = self._ends, ()
        for end in ends:
            self._loop.remove_reader(end)
            os.close(end)


@contextlib.contextmanager
def line() -> Iterator[tuple[tuple[Machine, Machine], Line]]:
    """Two machines with a line between them."""
    if not os.path.exists("/dev/net/tun"):
        pytest.skip("no /dev/net/tun here")
    with pair() as both_machines:
        ends = [_tun(machine) for machine in both_machines]
        for machine, address in zip(both_machines, ADDRESSES, strict=True):
            machine.gets(f"{address}/24")
        with contextlib.closing(Line(*ends)) as made:
            yield both_machines, made


def _tun(machine: Machine) -> int:
    """The other end of a new interface of that machine."""

    def make() -> int:
        with open(f"/proc/{machine.pid}/ns/net") as namespace:
            assert ctypes.CDLL(None).setns(namespace.fileno(), _NEWNET) == 0
        end = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        request = struct.pack("16sH22x", LINK.encode(), _TUN_WITHOUT_HEADER)
        fcntl.ioctl(end, _TUNSETIFF, request)
        return end

    # A namespace is entered by a thread: this one, which ends.
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        return thread.submit(make).result()


# ── what runs there ─────────────────────────────────────────────────────────────────────────────


class Node:
    """A process on a machine that tells what happens, in lines of JSON, and goes on when told."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._errors = asyncio.create_task(self._read_errors())

    async def _read_errors(self) -> str:
        assert self._process.stderr is not None
        return (await self._process.stderr.read()).decode()

    async def hears(self, what: str) -> Any:
        """The next that it tells, which is to be `what`."""
        assert self._process.stdout is not None
        async with asyncio.timeout(PATIENCE):
            line = await self._process.stdout.readline()
        if not line:
            pytest.fail(f"it ended in place of {what!r}:\n{await self._errors}")
        print(self._process.pid, line.decode().strip())
        event, value = json.loads(line)
        assert event == what, (event, value)
        return value

    def tell(self) -> None:
        """It may go on."""
        assert self._process.stdin is not None
        self._process.stdin.write(b"\n")

    async def end(self) -> tuple[int, str]:
        """Its exit code, and what it wrote as errors and log."""
        async with asyncio.timeout(PATIENCE):
            return await self._process.wait(), await self._errors

    async def close(self) -> None:
        if self._process.returncode is None:
            self._process.kill()
        await self._process.wait()
        await self._errors


@contextlib.asynccontextmanager
async def running(machine: Machine, *command: str, **environment: str) -> AsyncIterator[Node]:
    """A command of Python on that machine."""
    process = await asyncio.create_subprocess_exec(
        *machine.inside(*machine.prefix, sys.executable, *command),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={
            **os.environ,
            "PYTHONPATH": str(HERE.parents[1]),
            "OMP_NUM_THREADS": "1",
            **environment,
        },
    )
    node = Node(process)
    try:
        yield node
    finally:
        await node.close()


@contextlib.asynccontextmanager
async def both(
    machines: tuple[Machine, Machine], scenario: str, **arguments: Any
) -> AsyncIterator[tuple[Node, Node]]:
    """Rank 0 and rank 1 of a scenario of network_scenarios.py."""
    async with contextlib.AsyncExitStack() as stack:
        words = [str(HERE / "network_scenarios.py"), scenario]
        nodes = [
            await stack.enter_async_context(
                running(machine, *words, str(rank), json.dumps(arguments))
            )
            for rank, machine in enumerate(machines)
        ]
        yield nodes[0], nodes[1]
