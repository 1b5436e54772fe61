"""Small worlds to search: processes and directories in which one step is taken at a time."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import msgspec

from aiorpc_torch._directory import directory_messages as wire
from aiorpc_torch._directory.directory_messages import (
    FromWorker,
    Known,
    Leave,
    Member,
    Retire,
    ToWorker,
)
from aiorpc_torch._directory.members import Members
from aiorpc_torch._directory.registration import Registration
from tests.support.directories import Host, Network, Process, registration
from tests.support.state_search import Action, Flat, share_values

GRACE_OF_JOINED = 2.0  # as a replacement process of rank 0 waits for members
FIRST_CONNECTION = 1 << 24  # greater than all other numbers


def _is_message(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, msgspec.Struct)


share_values([*filter(_is_message, vars(wire).values()), Member, Registration])


class SmallProcess(Process):
    """A worker that follows its client: it connects again, and ends once it is refused."""

    network: "SmallWorld"

    def __init__(self, network: "SmallWorld", own: Registration) -> None:
        super().__init__(network, own)
        self.index = len(network.processes)
        self.follows = False
        """Whether it has the members: it may keep the directory."""
        self.has_begun = False
        """Whether it has registered at any directory."""
        self.is_refused = self.was_frozen = False
        self.died_apart = False
        """Whether it had no connection when it died: none is told of it."""
        self.is_replaceable = False
        """Whether it did not answer when a process wanted its name."""
        self.is_told_lost = False
        """Whether a member has told a new directory that it is lost."""
        self.was_alive: set[str] = set()
        """Names of those that have ended since this one has begun."""

    def cut(self) -> None:
        """End the connection. The directory notices that later."""
        if self.host is not None:
            self.host.note_end(self.connection)
            self.host = None
            self.inbox.clear()

    @property
    def is_running(self) -> bool:
        return self.is_alive and not (self.is_frozen or self.is_over or self.is_refused)

    @property
    def may_have_left(self) -> bool:
        """Return whether it retires, and has not come to a new directory in time."""
        is_closed = self.host is not self.network.host or self.host.is_closed
        return self.is_retiring and (is_closed or wire.Ended() in self.inbox)

    @property
    def is_member(self) -> bool:
        """Return whether it takes part in the world, as far as it knows."""
        return self.is_alive and self.has_entered and not self.is_over

    @property
    def is_candidate(self) -> bool:
        """Return whether it makes a directory where there is none: that of rank 0."""
        return self.own.rank == 0 and self.number < 0

    def known(self) -> Known:
        left = [name for name, n in self.view.items() if n in self.left]
        ended = {name: n for name, n in self.view.items() if not self.network.is_alive(n)}
        lost = [each for each in ended if each not in left]
        for each in self.network.processes:
            each.is_told_lost |= each.number in ended.values()
        return self.knowledge.known(lost, left)

    def deliver(self) -> None:
        message = self.inbox[0]
        if isinstance(message, wire.Ask) and not self.network.is_alive(message.worker_id):
            self.network.note_replaceable(message.worker_id)
        if self.has_begun:  # else the world starts
            self._check_order(message)
        super().deliver()
        self.heard.clear()
        match message:
            case wire.Members():
                self.follows = True
            case wire.Failed(text):
                self._fail(text)
            case wire.Ended():
                self._on_ended()

    def _check_order(self, message: ToWorker) -> None:
        """Check that the client expects such a message."""
        if self.follows:
            assert not isinstance(message, wire.Registered | wire.Missing), message
            return
        expected: Any = wire.Entering | wire.Failed | wire.Ended
        expected |= wire.Registered if self.number < 0 else wire.Members
        assert isinstance(message, expected), f"{self} has no address yet: {message}"

    def _fail(self, text: str) -> None:
        assert self._is_true(text), f"{self} is told what is not true: {text}"
        self.is_over, self.is_refused = self.has_entered, not self.has_entered
        self.network.note_end(self)
        if self.is_refused:
            self.end_directory()
        self.cut()

    def _is_true(self, text: str) -> bool:
        if "the first one is alive" in text:
            others = (each for each in self.network.processes if each is not self)
            living = {each.own.name for each in others if each.is_alive and not each.is_over}
            return self.own.name in living | self.was_alive
        if "had no address" in text:
            return self.was_frozen or self.network.has_hurried
        if "another process has got its number" in text:
            return self.network.is_fixed
        staying = (each.is_member and not each.is_retiring for each in self.network.processes)
        return "has ended" in text and not any(staying)

    def _on_ended(self) -> None:
        self.is_over = self.follows
        if self.is_over:
            self.network.note_end(self)
        elif self.number < 0:
            self.end_directory()
        self.cut()

    def connect(self) -> None:
        """Connect to the directory at the place, as far as this process has come."""
        self.has_begun = True
        if self.number < 0:
            self.network.connect(self)
            return
        self.resume()
        if self.is_retiring:  # the last directory may not have told the others
            self.say(Retire())

    def claim(self) -> None:
        """Make the next directory at the place."""
        self.has_begun = True
        holder = self.network.host.keeper
        if self.follows:
            known = self.known()
            known.lost = [*known.lost, holder.own.name]
            self.network.claim(self, known)
        else:
            grace = GRACE_OF_JOINED if self.network.numbers[1] else 0.0
            self.network.claim(self, grace=grace)
        self.connect()

    def retire(self) -> None:
        super().retire()
        if self.host is None or not self.host.is_running:
            self.network.tell_left(self)

    def leave(self) -> None:
        """Leave, once it has retired."""
        self.has_left = True
        self.say(Leave(True))
        self.end_directory()
        self.end()

    def end_directory(self) -> None:
        """End the directory that this process keeps; if the world ends, its place is empty."""
        for each in self.network.hosts:
            if each.keeper is self and not each.is_closed:
                each.is_in_order = True
                if each is self.network.host and not each.directory.is_needed:
                    self.network.numbers = 0, 0
                each.close()

    def end(self) -> None:
        self.died_apart = self.host is not self.network.host or not self.host.is_running
        super().end()
        self.network.note_end(self)


class SmallHost(Host):
    """A directory whose timers expire in the order of their times."""

    network: "SmallWorld"
    expiring: list[tuple[float, Callable[[], None]]]  # type: ignore[assignment]

    def __init__(self, network: "SmallWorld", *args: Any, **kwargs: Any) -> None:
        self.index = len(network.hosts)
        self.ended: list[int] = []
        """Connections whose end it has not noticed yet."""
        self.is_in_order = False
        """Whether its keeper has left: all that it has sent arrives."""
        super().__init__(network, *args, **kwargs)

    @property
    def is_running(self) -> bool:
        return not (self.is_closed or self.is_frozen)

    @property
    def has_ended(self) -> bool:
        """Return whether it closes when it renews its claim."""
        return self is not self.network.host or self.directory.is_isolated

    def note_end(self, connection: int) -> None:
        if not self.is_closed:
            self.ended.append(connection)
            self.ended.sort()  # in which order they ended makes no difference

    def notice_end(self, connection: int) -> None:
        """Notice the end of a connection."""
        self.ended.remove(connection)
        self.gone(connection)

    def close_connection(self, connection: int) -> None:
        if connection in self.ended:
            self.ended.remove(connection)
        super().close_connection(connection)

    def thaw(self) -> None:
        """Do all that has come meanwhile, in one step."""
        super().thaw()
        for each in [*self.ended]:
            if each in self.ended:
                self.notice_end(each)
        while self.is_overdue:
            self.expire()

    @property
    def is_overdue(self) -> bool:
        """Return whether a timer was to expire before."""
        return bool(self.expiring) and self.expiring[0][0] <= self.network.clock

    def receive(self, connection: int, message: FromWorker) -> None:
        self.do(partial(self._receive, connection, message))

    def _receive(self, connection: int, message: FromWorker) -> None:
        try:
            self.directory.receive(connection, message)
        except ValueError as exc:
            if str(exc) != "a connection must register first":
                raise AssertionError(exc) from exc
            self.directory.gone(connection)  # it was turned away, and has sent more meanwhile

    def send(self, connections: Iterable[int], message: ToWorker) -> None:
        connections = [*connections]
        if isinstance(message, wire.Entering | wire.Announce) and connections:
            assert self is self.network.host, f"{message} of a directory that has lost its place"
        if isinstance(message, wire.Announce):
            self._check_announced(message)
        if isinstance(message, wire.Entering):
            self.network.note_numbers(message.own, message.worker_id)
        super().send(connections, message)

    def _check_announced(self, message: wire.Announce) -> None:
        """Check that all that are connected know a process, but for those that are named.

        One that was replaced connects again only to learn that its world is over.
        """
        for each in self.network.processes:
            is_connected = each.host is self and self.directory.is_member(each.connection)
            if is_connected and each.is_running and each.is_member:
                is_known = each.view.get(message.name) == message.worker_id
                is_named = each.own.name in (message.name, *message.silent)
                assert is_known or is_named, f"{each} does not know what is announced: {message}"

    def next_connection(self, process: Process) -> int:
        count = sum(each is process for each in self.owners.values())
        number = FIRST_CONNECTION + (self.index << 16 | process.index << 8 | count)
        self.owners[number] = process
        return number

    def call_later(self, seconds: float, step: Callable[[], None]) -> None:
        if not self.is_closed:
            self.expiring.append((self.network.clock + seconds, step))
            self.expiring.sort(key=lambda each: each[0])

    def expire(self) -> None:
        time, step = self.expiring.pop(0)
        self.network.clock = max(self.network.clock, time)
        step()

    def record(self, step: Callable[[], None]) -> None:
        if not self.is_closed:
            super().record(step)

    def write(self) -> None:
        if self.network.is_fixed:
            self.writing.pop(0)()
        else:
            super().write()

    def close(self) -> None:
        """End. What is on its way may arrive."""
        self.is_closed = True
        self.expiring, self.writing, self.held, self.ended = [], [], [], []


class SmallWorld(Network):
    """A world that runs, in which all that happens is one action after the other.

    Args:
        size: number of workers of the start.
        entrants: those that want to enter.
        events: kinds of events that may happen.
        budget: number of events.
        is_fixed: whether the place is an address: rank 0 alone keeps the directory.
    """

    host_type = SmallHost
    process_type = SmallProcess
    processes: list[SmallProcess]  # type: ignore[assignment]
    hosts: list[SmallHost]  # type: ignore[assignment]
    host: SmallHost

    def __init__(
        self,
        size: int,
        entrants: Sequence[Registration],
        events: Iterable[str],
        budget: int,
        *,
        is_fixed: bool = False,
    ) -> None:
        self.size = size
        self.clock, self.has_hurried = 0.0, False
        self.kinds, self.budget, self.is_fixed = frozenset(events), budget, is_fixed
        self.ids: dict[int, tuple[str, int]] = {}  # the processes that got them
        self.ranks: dict[int, tuple[str, int]] = {}  # the same of those that have joined
        super().__init__()
        for rank in range(size):
            self.register(registration(rank, size))
        self.host.keeper = self.processes[0]
        self.settle()
        for each in self.processes:
            each.has_begun = each.follows = True
        for each in self.processes:
            self.note_numbers(each.own, each.number)
        for own in entrants:
            self.new_process(own)

    # ── what the processes know of each other ───────────────────────────────────────────────────

    def is_alive(self, number: int) -> bool:
        found = [each for each in self.processes if each.number == number]
        return any(each.is_alive and not (each.is_frozen or each.is_refused) for each in found)

    def tell_left(self, process: SmallProcess) -> None:
        """Let a process tell the others that it leaves, since no directory does."""
        for each in self.processes:
            if each is not process and process.number in each.view.values():
                each.left.add(process.number)

    def note_end(self, process: SmallProcess) -> None:
        """Note that a process has been in the world until now."""
        for each in self.processes:
            if each.has_begun:
                each.was_alive.add(process.own.name)

    def note_replaceable(self, number: int) -> None:
        """Note that a process has not answered: another one may get its name."""
        for each in self.processes:
            each.is_replaceable |= each.number == number

    def note_numbers(self, own: Registration, number: int) -> None:
        """Check that no other process has had these numbers."""
        for each in self.processes:  # there may be none to ask
            is_other = each.own.name == own.name and each.number not in (number, -1)
            each.is_replaceable |= is_other and (each.is_frozen or each.is_told_lost)
        holder = (own.name, own.pid)
        if self.is_fixed:
            return  # at an address there is no record of them
        found = self.ids.setdefault(number, holder)
        assert found == holder, f"{own} gets the worker id of {found}"
        if own.joined:
            found = self.ranks.setdefault(own.rank, holder)
            assert found == holder, f"{own} gets the rank of {found}"

    # ── actions ─────────────────────────────────────────────────────────────────────────────────

    @property
    def has_directory(self) -> bool:
        """Return whether a directory at the place answers."""
        return self.host.is_running

    def _may_claim(self, process: SmallProcess) -> bool:
        if self.is_fixed:
            return process.is_candidate and self.host.is_closed
        return process.is_candidate or (process.follows and not process.is_retiring)

    def steps(self) -> list[Action]:
        found = [each for process in self.processes for each in self._steps_of(process)]
        for index, host in enumerate(self.hosts):
            if not host.is_running:
                continue
            possible = {
                "write": host.writing,
                "renew": host.has_ended,
                "expire": host.is_overdue,
            }
            found += [(kind, index) for kind, is_possible in possible.items() if is_possible]
            found += [("notice", index, each) for each in host.ended]
        return found

    def _steps_of(self, process: SmallProcess) -> list[Action]:
        if not process.is_running:
            return []
        host = process.host
        possible = {
            "deliver": process.inbox,
            "connect": process.is_cut and self.has_directory,
            "claim": process.is_cut and not self.has_directory and self._may_claim(process),
            "give up on": host is not None
            and (host.is_frozen or (host.is_closed and not host.is_in_order)),
            "leave": process.is_retiring,
        }
        return [(kind, process.index) for kind, is_possible in possible.items() if is_possible]

    def pauses(self) -> list[Action]:
        hosts = [each for each in self.hosts if each.is_running and each.expiring]
        first = min(hosts, key=lambda each: each.expiring[0][0], default=None)
        return [] if first is None else [("expire", first.index)]

    def releases(self) -> list[Action]:
        frozen = [each.index for each in self.processes if each.is_frozen]
        lost = [
            each.keeper.index for each in self.hosts if each.is_frozen and each is not self.host
        ]
        return [("thaw", each) for each in frozen] + [("end and thaw", each) for each in lost]

    def events(self) -> list[Action]:
        if not self.budget:
            return []
        found = [each for process in self.processes for each in self._events_of(process)]
        if not self.host.is_slow and not self.host.is_closed:
            found.append(("slow", self.host.index))
        timed = (each for each in self.hosts if each.is_running and each.expiring)
        found += [("hurry", each.index) for each in timed if each.expiring[0][0] > self.clock]
        return [each for each in found if each[0] in self.kinds]

    def _events_of(self, process: SmallProcess) -> list[Action]:
        is_frozen, host = process.is_frozen, process.host
        is_member = process.is_member and not is_frozen
        is_running = process.is_running and process.has_begun
        possible = {
            "kill": process.is_alive and process.has_begun,
            "freeze": is_running,
            "cut": is_running and host is not None and host.keeper is not process,
            "retire": is_member and not process.is_retiring,
            "usurp": is_member
            and process.is_cut
            and self.has_directory
            and not self.is_fixed
            and not process.is_retiring,
        }
        return [(kind, process.index) for kind, is_possible in possible.items() if is_possible]

    def take(self, action: Action) -> None:
        kind, index, *rest = action
        if kind in _EVENTS:
            self.budget -= 1
        if kind in _OF_HOSTS:
            _OF_HOSTS[kind](self.hosts[index], *rest)
        else:
            _OF_PROCESSES[kind](self.processes[index])
        for each in self.processes:
            while each.is_running and each.inbox and self._is_quiet(each, each.inbox[0]):
                each.deliver()
            if each.host is not None and each.host.is_closed and not each.inbox:
                each.cut()

    def _is_quiet(self, process: SmallProcess, message: ToWorker) -> bool:
        """Return whether no directory can tell when a message is delivered."""
        if isinstance(message, wire.Gone | wire.Moved):
            return True
        # Others change what the process would tell another directory, so they may get lost.
        may_be_lost = self.budget or process.host is not self.host or not self.host.is_running
        return not may_be_lost and isinstance(message, wire.Announce | wire.Left | wire.Members)

    def describe(self, action: Action) -> str:
        kind, index, *rest = action
        if kind in _OF_HOSTS:
            host = self.hosts[index]
            todo = {"write": host.writing, "expire": host.expiring, "hurry": host.expiring}
            what = f": {_words(todo[kind][0])}" if todo.get(kind) else ""
            what += "".join(f": that of {host.owners[each]}" for each in rest)
            return f"{kind} the directory of {host.keeper}{what}"
        process = self.processes[index]
        what = f": {_brief(process.inbox[0])}" if kind == "deliver" else ""
        return f"{kind} {process}{what}"

    # ── states ──────────────────────────────────────────────────────────────────────────────────

    def fingerprint(self) -> int:
        flat = Flat(_IGNORED, FIRST_CONNECTION, self._owner)
        flat.add([self.budget, self.has_hurried, self.numbers, self.processes, self.host])
        for host in self.hosts:
            if not host.is_closed:
                flat.add(host)
                flat.add(host.directory)
                flat.add([(max(time - self.clock, 0.0), step) for time, step in host.expiring])
        flat.add([self.ids, self.ranks])
        return hash(tuple(flat.items))

    def _owner(self, connection: int) -> tuple[Any, ...]:
        host = self.hosts[(connection - FIRST_CONNECTION) >> 16]
        owner = host.owners[connection]
        return owner.index, owner.host is host and owner.connection == connection

    def check(self) -> None:
        members = [each for each in self.processes if each.is_member and not each.is_replaceable]
        members = [each for each in members if not each.may_have_left]
        for what in ("name", "rank"):
            values = [getattr(each.own, what) for each in members]
            assert len({*values}) == len(values), f"two members have one {what}: {members}"
        for each in members:
            numbers = [*each.view.values()]
            assert len({*numbers}) == len(numbers), f"{each} sees one worker id twice: {each.view}"
        numbers = {each.number for each in members}
        assert len(numbers) == len(members), f"two members have one worker id: {members}"

    def check_rest(self) -> None:
        members = [each for each in self.processes if each.is_member and not each.is_frozen]
        unsafe = self._unsafe_names()
        for each in self.processes:
            is_excluded = each.is_over and not each.is_retiring and each.own.name not in unsafe
            assert not is_excluded, f"{each} was replaced, and is alive"
        if not members:
            if not self.releases():
                self._check_next_world()
            return
        if self.is_fixed and not self.host.is_running:
            return
        assert self.host.is_running, "none keeps the directory"
        numbers = {each.number for each in members}
        for each in members:
            self._check_view(each, numbers)
        for each in self.processes:
            is_answered = each.has_entered or not each.is_running
            assert is_answered, f"{each} waits without end"

    def _unsafe_names(self) -> set[str]:
        """Return the names of processes that were found dead, and may have answered afterwards."""
        return {each.own.name for each in self.processes if each.is_replaceable}

    def _check_next_world(self) -> None:
        """Check that a new world can start, if a directory is there."""
        if not self.host.is_running:
            return
        for each in self.processes:
            is_waiting = each.is_running and each.number >= 0
            assert not is_waiting, f"{each} waits for a world that has ended"
        here = {each.own.rank for each in self.processes if each.is_running}
        for rank in range(self.size):
            if rank not in here:
                self.register(registration(rank, self.size)).has_begun = True
        while actions := self.steps() or self.pauses():
            self.take(actions[0])
        first = [each for each in self.processes if each.is_running and not each.own.entry]
        assert [each.own.rank for each in first if each.is_member] == [*range(self.size)]

    def _check_view(self, member: SmallProcess, numbers: set[int]) -> None:
        assert self.host.keeper is not None
        assert member.coordinator == self.host.keeper.own.name, f"{member}: {member.coordinator}"
        staying = [each for each in self.processes if each.is_member and not each.is_retiring]
        assert member.left.isdisjoint(each.number for each in staying), f"{member} {member.left}"
        view = {*member.view.values()}
        assert numbers <= view, f"{member} does not know {numbers - view}"
        unsafe = self._unsafe_names()
        apart = {each.number for each in self.processes if each.died_apart}
        apart |= {each.number for each in self.processes if each.is_frozen}
        apart |= {n for name, n in member.view.items() if name in unsafe}
        known = view & member.announced  # others are not called
        present = known - member.left - member.gone - numbers - apart
        assert not present, f"{member} takes {present} for members"


def _brief(message: Any) -> str:
    values = (getattr(message, name, None) for name in ("name", "worker_id", "text", "entries"))
    told = ", ".join(str(each) for each in values if each is not None)
    return f"{type(message).__name__}({told})"


def _words(step: Any) -> str:
    if isinstance(step, tuple):
        return f"at {step[0]:g} s, {_words(step[1])}"
    name = getattr(step, "func", step).__name__
    values = (getattr(each, "name", None) or _brief(each) for each in getattr(step, "args", ()))
    return f"{name} {', '.join(values)}"


def _freeze(process: SmallProcess) -> None:
    process.is_frozen = process.was_frozen = True


def _thaw(process: SmallProcess) -> None:
    process.is_frozen = False
    for each in process.network.hosts:
        if each.keeper is process:
            each.thaw()


def _end_and_thaw(process: SmallProcess) -> None:
    """Let a process find first that its directory has lost its place."""
    process.network.close_hosts_of(process)
    process.is_frozen = False


def _hurry(host: SmallHost) -> None:
    host.network.has_hurried = True
    host.expire()


def _slow(host: SmallHost) -> None:
    host.is_slow = True


_OF_PROCESSES: dict[str, Callable[[SmallProcess], None]] = {
    "deliver": SmallProcess.deliver,
    "connect": SmallProcess.connect,
    "claim": SmallProcess.claim,
    "give up on": SmallProcess.cut,
    "leave": SmallProcess.leave,
    "thaw": _thaw,
    "end and thaw": _end_and_thaw,
    "kill": SmallProcess.end,
    "freeze": _freeze,
    "cut": SmallProcess.cut,
    "retire": SmallProcess.retire,
    "usurp": SmallProcess.claim,
}
_OF_HOSTS: dict[str, Callable[..., None]] = {
    "notice": SmallHost.notice_end,
    "write": SmallHost.write,
    "renew": SmallHost.close,
    "expire": SmallHost.expire,
    "hurry": _hurry,
    "slow": _slow,
}
_EVENTS = frozenset({"kill", "freeze", "cut", "retire", "usurp", "hurry", "slow"})
_IGNORED = {
    SmallProcess: frozenset(
        {"network", "heard", "connection", "index", "key", "address", "told", "host_number"}
    ),
    SmallHost: frozenset({"network", "owners", "expiring", "index", "directory"}),
    Members: frozenset({"_by_rank"}),  # follows from the others
}
