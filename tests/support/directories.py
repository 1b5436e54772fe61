"""Worlds without sockets or clocks: processes, and the directories that some of them keep."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

from aiorpc_torch._directory.directory import Directory
from aiorpc_torch._directory.directory_messages import (
    Add,
    Announce,
    Ask,
    Complete,
    Confirm,
    Ended,
    Entering,
    FromWorker,
    Gone,
    Know,
    Known,
    Leave,
    Left,
    Members,
    Moved,
    Publish,
    Recall,
    Register,
    Registered,
    Resume,
    Retire,
    ToWorker,
    Verdict,
)
from aiorpc_torch._directory.registration import Registration
from aiorpc_torch._directory.succession import View


def registration(rank: int, size: int = 3, **changes: Any) -> Registration:
    """Return a valid registration, with those changes."""
    return replace(Registration(f"w{rank}", rank, size, "1.0", pid=70 + rank), **changes)


class Process:
    """A worker as directories see it: it answers each message when the test delivers it."""

    def __init__(self, network: "Network", own: Registration) -> None:
        self.network, self.own = network, own
        self.host: Host | None = None
        self.connection, self.key, self.address = -1, "", f"at {own.name}"
        self.inbox: list[ToWorker] = []
        self.number = -1
        self.is_alive, self.is_frozen = True, False
        self.has_entered = self.is_retiring = self.has_left = self.is_over = False
        self.view: dict[str, int] = {}
        self.knowledge = View()
        self.coordinator = ""
        self.told: set[int] = set()
        self.gone: set[int] = set()
        self.left: set[int] = set()
        self.announced: set[int] = set()
        self.heard: list[ToWorker] = []

    def __repr__(self) -> str:
        return f"<{self.own.name} {self.number}>"

    @property
    def is_cut(self) -> bool:
        """Whether it is connected to no directory."""
        return self.host is None

    def say(self, message: FromWorker) -> None:
        if self.host is not None:
            self.host.receive(self.connection, message)

    def deliver(self) -> None:
        """Handle the first message in the inbox."""
        message = self.inbox.pop(0)
        self.heard.append(message)
        self.knowledge.hear(message)
        match message:
            case Registered(registrations):
                self.number = [each.name for each in registrations].index(self.own.name)
                self.say(Publish(self.address, {}, False))
            case Entering(own, number):
                self.own, self.number = own, number
                self.say(Publish(self.address, {}, False))
            case Members(members, entering, coordinator):
                listed = {each.name for each in members}.union(entering)
                missing = {n for name, n in self.view.items() if name not in listed}
                self.left |= missing & self.announced
                self.view |= {each.name: each.worker_id for each in members}
                self.announced |= {each.worker_id for each in members}
                self.coordinator = coordinator
                if not (self.own.entry or self.has_entered):
                    self.say(Confirm([], ""))
            case Moved(coordinator):
                self.coordinator = coordinator
            case Recall():
                self.say(self.known())
            case Complete():
                self.has_entered = True
            case Add(member):
                self.view[member.name] = member.worker_id
                self.say(Know(member.worker_id))
            case Announce(_, number):
                self.announced.add(number)
                self.has_entered |= number == self.number
            case Gone(_, number):
                self.told.add(number)
                if not self.network.is_alive(number):  # as its ping finds
                    self.gone.add(number)
            case Left(_, number):
                self.left.add(number)
            case Ask(name, number):
                self.say(Verdict(name, number, self.network.is_alive(number)))
            case Ended():
                self.is_over = self.has_entered

    def known(self) -> Known:
        """Return what this process knows of its world."""
        lost = [name for name, n in self.view.items() if not self.network.is_alive(n)]
        return self.knowledge.known(lost)

    def end(self) -> None:
        """Let the process die, and its directory."""
        self.is_alive = False
        self.cut()
        self.network.close_hosts_of(self)

    def cut(self) -> None:
        """End the connection, with what is on its way."""
        if self.host is not None:
            host, self.host = self.host, None
            self.inbox.clear()
            host.gone(self.connection)

    def resume(self, host: "Host | None" = None) -> None:
        """Connect again."""
        self.host = host or self.network.host
        self.connection = self.host.next_connection(self)
        entries, is_member = self.knowledge.entries, self.has_entered or not self.own.entry
        world = self.knowledge.world
        self.say(Resume(self.own, self.number, self.key, entries, is_member, world))

    def retire(self) -> None:
        """Take no new calls: this worker will leave while the others go on."""
        self.is_retiring = True
        self.say(Retire())

    def depart(self) -> None:
        """Leave while the others go on."""
        self.has_left = True
        self.say(Retire())
        self.say(Leave(True))
        self.end()

    @property
    def last(self) -> ToWorker:
        return [*self.heard, *self.inbox][-1]

    @property
    def last_sent(self) -> ToWorker | None:
        """Return the last message to it that it has not handled."""
        return self.inbox[-1] if self.inbox else None


class Host:
    """One directory and its connections. What it sends waits in inboxes until it is delivered.

    What it writes at the place waits too, until the test lets it: then it may be another's.
    """

    def __init__(
        self,
        network: "Network",
        keeper: Process | None = None,
        known: Known | None = None,
        *,
        grace: float = 0.0,
        numbers: tuple[int, int] = (0, 0),
    ) -> None:
        self.network, self.keeper = network, keeper
        self.owners: dict[int, Process] = {}  # of the connections
        self.expiring: list[Callable[[], None]] = []
        self.writing: list[Callable[[], None]] = []
        self.held: list[Callable[[], None]] = []  # while its keeper is frozen
        self.is_closed, self.is_slow = False, False
        name = "w0" if keeper is None else keeper.own.name
        world = f"world {len(network.hosts)}"
        self.directory = Directory(self, name, grace, known, numbers, world)

    @property
    def is_frozen(self) -> bool:
        return self.keeper is not None and self.keeper.is_frozen

    def receive(self, connection: int, message: FromWorker) -> None:
        self.do(partial(self.directory.receive, connection, message))

    def gone(self, connection: int) -> None:
        self.do(partial(self.directory.gone, connection))

    def do(self, step: Callable[[], None]) -> None:
        if self.is_frozen:
            self.held.append(step)
        elif not self.is_closed:
            step()

    def thaw(self) -> None:
        """Do what was held; its keeper is frozen no more."""
        while self.held:
            self.do(self.held.pop(0))

    def send(self, connections: Iterable[int], message: ToWorker) -> None:
        for each in connections:
            owner = self.owners[each]
            if owner.host is self and owner.connection == each:
                owner.inbox.append(message)

    def close_connection(self, connection: int) -> None:
        """Close the connection of a process that was replaced, say: it learns so elsewhere."""
        owner = self.owners[connection]
        if owner.host is self and owner.connection == connection:
            owner.host = None
            owner.inbox.clear()

    def next_connection(self, process: Process) -> int:
        number = len(self.owners)
        self.owners[number] = process
        return number

    def call_later(self, seconds: float, step: Callable[[], None]) -> None:
        self.expiring.append(step)

    def record(self, step: Callable[[], None]) -> None:
        self.writing.append(step)
        if not self.is_slow:
            self.write()

    def write(self) -> None:
        """Write at the place, unless it is another's: then this directory ends."""
        if self.network.host is self:
            self.network.numbers = self.directory.numbers
            self.writing.pop(0)()
        else:
            self.close()

    def close(self) -> None:
        if not self.is_closed:
            self.is_closed = True
            for each in {*self.owners.values()}:
                if each.host is self:
                    each.host = None
                    each.inbox.clear()


class Network:
    """Processes, the directories that they keep, and the one whose place it is."""

    host_type = Host
    process_type = Process

    def __init__(self) -> None:
        self.processes: list[Process] = []
        self.numbers = 0, 0  # those at the place
        self.hosts: list[Host] = []
        self.host = self.host_type(self)
        self.hosts.append(self.host)

    @property
    def directory(self) -> Directory:
        return self.host.directory

    @property
    def expiring(self) -> list[Callable[[], None]]:
        return self.host.expiring

    def claim(self, keeper: Process, known: Known | None = None, **more: Any) -> Host:
        """Let the directory of that process have the place from now on."""
        self.host = self.host_type(self, keeper, known, numbers=self.numbers, **more)
        self.hosts.append(self.host)
        return self.host

    def close_hosts_of(self, keeper: Process) -> None:
        for each in self.hosts:
            if each.keeper is keeper:
                each.close()

    def new_process(self, own: Registration) -> Process:
        process = self.process_type(self, own)
        self.processes.append(process)
        process.key = f"key {len(self.processes) - 1}"
        return process

    def register(self, own: Registration) -> Process:
        process = self.new_process(own)
        self.connect(process)
        return process

    def connect(self, process: Process) -> None:
        """Let a process register at the place."""
        process.host = self.host
        process.connection = self.host.next_connection(process)
        process.say(Register(process.own, process.key))

    def is_alive(self, number: int) -> bool:
        found = (each for each in self.processes if each.number == number)
        return any(each.is_alive and not each.is_frozen for each in found)

    def settle(self) -> None:
        """Deliver all messages and those that follow from them."""
        while busy := self.busy():
            for each in busy:
                if each.inbox:
                    each.deliver()

    def busy(self) -> list[Process]:
        """Return the processes that have a message to handle."""
        running = [each for each in self.processes if each.is_alive and not each.is_frozen]
        return [each for each in running if each.inbox]

    def join(self, name: str, **changes: Any) -> Process:
        return self.register(registration(-1, -1, name=name, joined=True, **changes))


def start(size: int = 3) -> tuple[Network, list[Process]]:
    """Return a world that runs."""
    network = Network()
    processes = [network.register(registration(rank, size)) for rank in range(size)]
    network.settle()
    assert all(each.has_entered for each in processes)
    return network, processes
