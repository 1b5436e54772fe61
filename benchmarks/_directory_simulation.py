"""What does the directory of a large world cost by itself: messages, bytes and CPU time?

The directory is the real state machine, without sockets. Simulated workers answer each message at
once. A message to several workers is encoded once, as the server does it.
"""

import json
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from aiorpc_torch._aio.host import network_namespace
from aiorpc_torch._directory import directory_messages as wire
from aiorpc_torch._directory.directory import Directory
from aiorpc_torch._directory.directory_messages import FromWorker, ToWorker, read_from_worker
from aiorpc_torch._directory.directory_stream import encode
from aiorpc_torch._directory.registration import Registration
from aiorpc_torch._directory.succession import View

from ._compare import lay_out, machine, number
from ._process import own_memory

SIZES, QUICK = [1_000, 3_000, 10_000], [300]
JOINS = 100
SUCCESSOR, DEAD = 2, (0, 1)  # ranks
PREFIX = 4  # bytes of a message's length


class Cost(NamedTuple):
    """Costs of one phase for all workers together."""

    received: int
    """Messages to the directory."""
    received_bytes: int
    encoded: int
    """Messages that the directory has encoded: one to several workers is encoded once."""
    encoded_bytes: int
    sent: int
    """Messages that it has sent."""
    sent_bytes: int
    seconds: float
    """CPU time of the directory, with the decoding and encoding of its messages."""
    memory: int
    """Bytes by which the process has grown."""


class Simulation:
    """A directory, and its workers, which answer at once and in order."""

    def __init__(self) -> None:
        self.directory = Directory(self)
        self._answers: deque[tuple[Sequence[int], ToWorker]] = deque()
        self._of: list[Registration] = []  # by the number of the connection
        self._counts = [0] * (len(Cost._fields) - 2)
        self.view = View()  # of the worker that takes the directory over
        self._seconds = 0.0
        self._told: Counter[type[ToWorker]] = Counter()

    # ── for the directory ───────────────────────────────────────────────────────────────────────

    def send(self, connections: Iterable[int], message: ToWorker) -> None:
        """Encode a message as the server does, and keep it for the workers."""
        numbers = [*connections]
        size = len(encode(message))
        for field, count in enumerate((1, size, len(numbers), size * len(numbers)), 2):
            self._counts[field] += count
        self._answers.append((numbers, message))
        if SUCCESSOR in numbers:
            self.view.hear(message)
        self._told[type(message)] += len(numbers)

    def close_connection(self, connection: int) -> None:
        """Do nothing: no process is replaced here."""

    def call_later(self, seconds: float, step: Callable[[], None]) -> None:
        """Do nothing: all is done in time."""

    def record(self, step: Callable[[], None]) -> None:
        """Go on: the place is this directory's."""
        step()

    # ── the workers ─────────────────────────────────────────────────────────────────────────────

    def register(self, own: Registration) -> int:
        """Let a worker register; return the number of its connection."""
        self._of.append(own)
        connection = len(self._of) - 1
        self.say(connection, wire.Register(own, f"{connection:032x}"))
        return connection

    def say(self, connection: int, message: FromWorker) -> None:
        """Let the directory handle a message of a worker."""
        data = encode(message)
        self._counts[0] += 1
        self._counts[1] += len(data)
        self.run(lambda: self.directory.receive(connection, read_from_worker(data[PREFIX:])))

    def run(self, step: Callable[[], None]) -> None:
        """Let the directory do something, and measure that."""
        begin = time.thread_time()
        step()
        self._seconds += time.thread_time() - begin

    def take_over(self, known: wire.Known) -> None:
        """Let another directory take the place of this one."""
        self.directory = Directory(self, f"w{SUCCESSOR}", known=known)

    def settle(self) -> None:
        """Let the workers answer all messages, and those that follow."""
        while self._answers:
            numbers, message = self._answers.popleft()
            for connection in numbers:
                if (answer := self._answer(connection, message)) is not None:
                    self.say(connection, answer)

    def _answer(self, connection: int, message: ToWorker) -> FromWorker | None:
        match message:
            case wire.Registered() | wire.Entering():
                host, port = divmod(connection, 8)
                address = f"uv://10.0.{host // 250}.{host % 250}:{40_000 + port}"
                return wire.Publish(address, {}, False)
            case wire.Members() if not self._of[connection].joined:
                return wire.Confirm([], "")
            case wire.Add(member):
                return wire.Know(member.worker_id)
            case wire.Failed(text):
                raise RuntimeError(text)
            case wire.Ended():
                raise RuntimeError("a member was turned away")
        return None

    def check(self, kind: type[ToWorker], count: int) -> None:
        """Raise RuntimeError unless so many messages of a kind were sent."""
        if self._told[kind] != count:
            raise RuntimeError(f"{self._told[kind]} of {count} workers got {kind.__name__}")

    # ── phases ──────────────────────────────────────────────────────────────────────────────────

    def cost(self, phase: Callable[[], None]) -> Cost:
        """Return what a phase costs, with all answers."""
        memory, self._seconds = own_memory(), 0.0
        self._counts = [0] * len(self._counts)
        phase()
        self.settle()
        return Cost._make([*self._counts, self._seconds, own_memory() - memory])


def phases(size: int) -> Iterator[tuple[str, Cost]]:
    """Let a world start, take members, lose one, move its directory and end."""
    world, namespace = Simulation(), network_namespace()
    first = Registration("w0", 0, size, "0.1.0", namespace=namespace, host="gpu-node-0000")

    def start() -> None:
        for rank in range(size):
            world.register(replace(first, name=f"w{rank}", rank=rank, pid=10_000 + rank))

    def join(name: str, *, at_once: bool) -> None:
        for count in range(JOINS):
            world.register(replace(first, name=f"{name}{count}", rank=-1, joined=True))
            if not at_once:
                world.settle()

    def die() -> None:
        world.run(lambda: world.directory.gone(1))

    def succeed() -> None:
        """Let rank 0 and those that have joined end, and a member take the directory over."""
        late = [f"{name}{count}" for name in ("late", "later") for count in range(JOINS)]
        known = world.view.known(["w0", "w1", *late])
        world.run(lambda: world.take_over(known))
        for rank in range(size):
            if rank not in DEAD:
                own, key = replace(first, name=f"w{rank}", rank=rank), f"{rank:032x}"
                world.say(rank, wire.Resume(own, rank, key, known.entries, True, known.world))

    def leave() -> None:
        every = [rank for rank in range(size) if rank not in DEAD]
        for rank in every:
            world.say(rank, wire.Leave(departs=False))
            world.say(rank, wire.Exit([], is_full=True))

    yield "start", world.cost(start)
    world.check(wire.Complete, size)
    yield f"{JOINS} joins, one by one", world.cost(lambda: join("late", at_once=False))
    yield f"{JOINS} joins at once", world.cost(lambda: join("later", at_once=True))
    yield "a death", world.cost(die)
    yield "succession", world.cost(succeed)
    world.check(wire.Moved, size - len(DEAD))
    yield "exit", world.cost(leave)
    world.check(wire.Exited, size - len(DEAD))


# ── the table ───────────────────────────────────────────────────────────────────────────────────

Costs = dict[str, Cost]  # by size and phase

HEAD = (
    *("workers", "phase", "received", "bytes", "encoded", "bytes", "sent", "bytes"),
    *("CPU, s", "a worker, µs", "memory, MB"),
)


def show(found: Costs, before: Costs) -> None:
    """Print a row for each phase, and below it the ratio to the measurement before."""
    table: list[Sequence[str]] = [HEAD]
    for key, cost in found.items():
        size, phase = key.split(" ", 1)
        *counts, seconds, memory = cost
        figures = *(f"{count:,}" for count in counts), number(seconds)
        each = number(1e6 * seconds / int(size))
        table.append((size, phase, *figures, each, number(memory / 1e6)))
        if (old := before.get(key)) is not None:
            pairs = zip(cost[:-1], old[:-1], strict=True)
            ratios = (f"{now / then:.3g}" if then else "" for now, then in pairs)
            table.append(("", "  ratio", *ratios, "", ""))
    lay_out(table)
    print("\nwithout sockets; CPU: with decoding and encoding; ratio: now / before")
    print(machine())


def simulate(sizes: Sequence[int], save: Path | None, before: Path | None) -> None:
    """Simulate worlds of these sizes, and print their costs."""
    found = {f"{size} {phase}": cost for size in sizes for phase, cost in phases(size)}
    show(found, {} if before is None else _load(before))
    if save is not None:
        save.write_text(json.dumps(found))


def _load(path: Path) -> Costs:
    read: dict[str, list[Any]] = json.loads(path.read_text())
    return {key: Cost._make(cost) for key, cost in read.items()}
