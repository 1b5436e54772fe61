"""The directory of a world: its members, its start, its changes and its end. A state machine.

Rank 0 keeps it, and every worker has a connection to it from its registration to its exit. The
directory decides on names, ranks and worker ids, so there is one order of all changes. It
sends each change to all members, and nothing while nothing changes.

The start has three steps: all have registered, all have an address, all reach each other. torch's
agent needs the names, ids and device maps of all workers before it has an address.

A process that enters a running world is added at every living member before it is announced to
any: whoever learns of it may send its RRefs to any other worker, which knows it already.

A connection that ends is no verdict on a worker: the members are told, and each one pings it. So a
link that is cut between a worker and rank 0 alone does not exclude the worker. For a process that
enters later it is lost until it calls, or is connected to rank 0 again.
"""

import functools
import hmac
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol
from urllib.parse import urlsplit

from .._port.network import is_loopback_host
from . import directory_messages as wire
from .directory_messages import FromWorker, ToWorker
from .registration import MAX_PROCESSES, Registration, assign_worker_ids

START_TIMEOUT = 60.0  # seconds from the admission of a process to its address
ADD_TIMEOUT = 6.0  # seconds for the members to add a process that enters

_REGISTER, _START, _REACH, _RUNNING, _ENDED = range(5)
_ACTIONS = ("register", "start", "reach the others")  # what each step awaits of the workers


class Connections(Protocol):
    """The connections of the workers, by number."""

    def send(self, connections: Iterable[int], message: ToWorker) -> None:
        """Send a message to each of them that is open."""

    def close_connection(self, connection: int) -> None:
        """Close a connection; `gone` is not called for it."""

    def call_later(self, seconds: float, step: Callable[[], None]) -> None:
        """Call `step` after that time."""


@dataclass(eq=False, slots=True)
class _Process:
    """A process that has registered, and its place in the world."""

    connection: int
    registration: Registration
    key: str
    worker_id: int = -1
    step: int = _START
    """The step of the start that it is in."""
    member: wire.Member | None = None
    """As others reach it, once it has an address."""
    loopback: str = ""
    """Its host, if that is of the loopback interface."""
    unaware: set[int] = field(default_factory=set)
    """Connections of the members that have not added it yet."""
    is_open: bool = True
    is_retiring: bool = False
    """Whether its block has ended, and it takes no new calls."""
    has_left: bool = False
    awaited: set[int] | None = None
    """Ranks that it waits for in the barrier of the exit; None before it."""
    name: str = field(init=False)

    def __post_init__(self) -> None:
        self.name = self.registration.name  # a name stays, unlike the rank

    @property
    def rank(self) -> int:
        return self.registration.rank


class Directory:
    """The directory of one world. A connection that sends what it must not raises ValueError."""

    def __init__(self, connections: Connections) -> None:
        self._connections = connections
        self._step = _REGISTER
        self._open: dict[int, _Process] = {}  # by connection
        self._members: dict[str, _Process] = {}  # of each name the last process
        self._ended: dict[int, Registration] = {}  # before all had registered, by rank
        self._waiting: list[_Process] = []  # to enter the running world
        self._entering: dict[str, _Process] = {}  # by the name that is claimed, until announced
        self._entries = self._joins = self._highest_id = 0
        self._failure: wire.Failed | None = None
        self._known_ranks: set[int] = set()  # those that know of the failure
        self._is_ending = False

    @property
    def has_failed(self) -> bool:
        """Return whether the start has failed, and the workers were told."""
        return self._failure is not None

    def receive(self, connection: int, message: FromWorker) -> None:
        """Handle a message of a worker."""
        if isinstance(message, wire.Register):
            self._register(connection, message.registration, message.key)
            return
        if isinstance(message, wire.Resume):
            self._resume(connection, message)
            return
        process = self._open.get(connection)
        if process is None:
            raise ValueError("a connection must register first")
        match message:
            case wire.Publish():
                self._publish(process, message)
            case wire.Confirm(unreachable, text):
                self._confirm(process, unreachable, text)
            case wire.GiveUp(when):
                self._give_up(process, when)
            case wire.AskMissing():
                self._send_missing(process)
            case wire.Know(worker_id):
                self._know(connection, worker_id)
            case wire.Verdict(name, worker_id, is_alive):
                self._judge(process, name, worker_id, is_alive)
            case wire.Retire():
                self._retire(process)
            case wire.Leave(departs):
                self._leave(process, departs)
            case wire.Exit(ranks):
                self._exit(process, ranks)

    def gone(self, connection: int) -> None:
        """Note the end of a connection."""
        process = self._open.pop(connection, None)
        if process is None:
            return
        process.is_open = False
        self._forget_entry(process)
        if self._members.get(process.name) is process:
            self._on_end_of_member(process)
            self._no_longer_await(process.rank)
        for each in [*self._entering.values()]:
            self._know(connection, each.worker_id)
        self._admit()

    # ── start ───────────────────────────────────────────────────────────────────────────────────

    def _register(self, connection: int, registration: Registration, key: str) -> None:
        size, rank = registration.world_size, registration.rank
        if connection in self._open or size > MAX_PROCESSES:
            raise ValueError("a connection registers once, for a world that is not too large")
        if not (registration.joined or 0 <= rank < size):
            raise ValueError(f"no rank of {size} workers: {rank}")
        own = replace(registration, entry=0, restarts=0, rank=-1 if registration.joined else rank)
        process = self._open[connection] = _Process(connection, own, key)
        if self._step == _ENDED or self._is_ending:
            self._turn_away(process)
        elif registration.joined or self._step == _RUNNING:
            self._waiting.append(process)
            self._admit()
        elif conflict := self._conflict(own):
            self._fail(wire.Failed(conflict))
        else:
            self._members[own.name] = process
            self._ended.pop(rank, None)
            self._advance()

    def _conflict(self, registration: Registration) -> str:
        for each in self._members.values():
            if text := each.registration.conflict_with(registration):
                return text
            if each.rank == registration.rank:
                held = each.registration
                return f"two workers have rank {registration.rank}: {held} and {registration}"
        return ""

    def _missing(self) -> list[int]:
        """Return the ranks that are awaited in this step of the start."""
        here = {each.rank for each in self._members.values() if each.step > self._step}
        first = next(iter(self._members.values()), None)
        size = 0 if first is None else first.registration.world_size
        return [rank for rank in range(size) if rank not in here]

    def _advance(self) -> None:
        """Begin the next step of the start if no rank is awaited in this one."""
        while self._step < _RUNNING and not self._missing():
            self._step += 1
            told = [*self._members.values()]
            if self._step == _RUNNING:  # the others are in their blocks since they had addresses
                told = [each for each in told if each.step == _RUNNING]
            self._send_to(told, self._result_of_step())
        self._admit()

    def _result_of_step(self) -> ToWorker:
        if self._step == _REACH:
            return wire.Members(self._listed())
        if self._step == _RUNNING:
            return wire.Complete()
        registrations = [each.registration for each in self._by_rank()]
        worker_ids = assign_worker_ids(registrations)
        for each, worker_id in zip(self._by_rank(), worker_ids, strict=True):
            each.worker_id = worker_id
        self._highest_id = max(worker_ids)
        return wire.Registered(registrations)

    def _publish(self, process: _Process, message: wire.Publish) -> None:
        is_entering = self._entering.get(process.name) is process
        if process.worker_id < 0 or process.member is not None:
            raise ValueError("not the time for an address")
        if not is_entering and self._members.get(process.name) is not process:
            return  # it was refused meanwhile
        own, where = process.registration, message.address
        host = urlsplit(where).hostname or ""
        process.loopback = host if is_loopback_host(host) and not own.endpoint else ""
        maps, space = message.device_maps, own.namespace
        process.member = wire.Member(
            process.name, process.rank, process.worker_id, where, maps, space, own.endpoint
        )
        if is_entering:
            self._add(process)
        else:
            process.step = _ENDED if message.is_reaching else _REACH
            self._advance()

    def _confirm(self, process: _Process, unreachable: Sequence[int], text: str) -> None:
        if process.step != _REACH or self._step < _REACH:
            raise ValueError("not the time to confirm")
        if self._step != _REACH:
            return  # the start has failed meanwhile
        if unreachable:
            self._fail(wire.Failed(f"{process.registration}: {text}", unreachable), process)
            self._send_to((process,), wire.Failed(text, unreachable))
        else:
            process.step = _RUNNING
            self._advance()

    def _send_missing(self, process: _Process) -> None:
        if self._step < _RUNNING:
            missing, action = self._missing(), _ACTIONS[self._step]
            self._send_to((process,), wire.Missing(missing, action, self._ended_text()))

    def _ended_text(self) -> str:
        listed = ", ".join(str(self._ended[rank]) for rank in sorted(self._ended))
        return listed and f"{listed} had registered, and ended"

    def _give_up(self, process: _Process, when: str) -> None:
        own = process.registration
        if process in self._waiting and self._step < _RUNNING:
            text = f"{own.name!r} joins a running world, and none is complete {when}. "
            self._refuse(process, wire.Failed(f"{text}Start its first workers without join=", []))
        elif self._members.get(process.name) is not process:
            self._refuse(process, wire.Failed(f"{own} was not let in {when}", []))
        elif self._step < _RUNNING:
            missing, action = self._missing(), _ACTIONS[self._step]
            listed = ", ".join(map(str, missing))
            count = f"{len(missing)} of {own.world_size} workers"
            ended = f" ({text})" if (text := self._ended_text()) else ""
            text = f"{count} did not {action} {when}: rank {listed}{ended}"
            self._fail(wire.Failed(f"{own} has given up: {text}", missing), process)
            self._send_to((process,), wire.Failed(text, missing))

    def _fail(self, failure: wire.Failed, but: _Process | None = None) -> None:
        """End the start: all workers fail; `but` is told by the caller."""
        self._step, self._failure = _ENDED, failure
        self._known_ranks = {each.rank for each in self._open.values()}
        # Rank 0 ends the directory when it learns of it.
        others = [each for each in self._open.values() if each is not but]
        self._send_to(sorted(others, key=lambda each: -each.rank), failure)

    def _turn_away(self, process: _Process) -> None:
        """Send a process to the next world; one that is late to a conflict learns of it, once."""
        failure = self._failure
        if failure is None or failure.missing is not None or process.rank in self._known_ranks:
            self._send_to((process,), wire.Ended())
        else:
            self._known_ranks.add(process.rank)
            self._send_to((process,), failure)

    def _resume(self, connection: int, message: wire.Resume) -> None:
        """Take a member's new connection in place of one that has ended, or will.

        A process that was replaced learns that its world is over.
        """
        process, claim = self._members.get(message.name), self._entering.get(message.name)
        if (
            self._step != _RUNNING
            or process is None
            or process.worker_id != message.worker_id
            or (claim is not None and claim.worker_id >= 0)
            or not message.key
            or not hmac.compare_digest(process.key, message.key)
        ):
            self._connections.send([connection], wire.Ended())
            return
        if claim is not None:  # rank 0's worker has not judged yet: this process is alive
            self._refuse(claim, wire.Failed(_taken(message.name)))
        if self._open.pop(process.connection, None) is not None:
            self._connections.close_connection(process.connection)
        else:  # those that have entered meanwhile took it for lost: they ping it
            self._send_to(self._members.values(), wire.Gone(process.name, process.worker_id))
        process.connection, process.is_open = connection, True
        self._open[connection] = process
        added = [each for each in self._entering.values() if each.member is not None]
        self._send_members(process, but=added)
        for each in added:
            assert each.member is not None
            self._send_to((process,), wire.Add(each.member))

    # ── entering the running world ──────────────────────────────────────────────────────────────

    def _admit(self) -> None:
        """Let the waiting processes enter; those whose name is being claimed wait on."""
        if self._step != _RUNNING:
            return
        for process in [*self._waiting]:
            if process.name in self._entering:
                continue
            if refusal := self._refusal(process.registration):
                self._refuse(process, wire.Failed(refusal))
                continue
            self._waiting.remove(process)
            self._entering[process.name] = process
            holder = self._members.get(process.name)
            if holder is None:
                self._enter(process)
            else:  # also if its connection has ended: the process may be alive
                self._send_to((self._first(),), wire.Ask(holder.name, holder.worker_id))

    def _refusal(self, registration: Registration) -> str:
        """Return why a process cannot enter, "" if it can as far as the names tell."""
        first = self._first().registration
        size = first.world_size if registration.joined else registration.world_size
        if conflict := first.conflict_with(replace(registration, world_size=size)):
            return conflict
        if text := self._out_of_reach(registration.namespace):
            return text
        holder = self._members.get(registration.name)
        if holder is not None and holder.rank == 0:
            return _taken(registration.name)
        if registration.joined:
            return ""
        if holder is not None and holder.registration.joined:
            return f"{registration} cannot rejoin: {holder.registration} has joined"
        of_rank = next((each for each in self._by_rank() if each.rank == registration.rank), holder)
        if of_rank is not None and of_rank is not holder:
            return f"{registration} cannot rejoin: that rank is of {of_rank.registration}"
        return "" if holder is None else holder.registration.conflict_with(registration)

    def _out_of_reach(self, namespace: str) -> str:
        """Return why a process in that network namespace does not reach all, "" if it may."""
        living = (each for each in self._members.values() if each.is_open)
        return next(filter(None, (_hidden_from(namespace, each) for each in living)), "")

    def _judge(self, judge: _Process, name: str, worker_id: int, is_alive: bool) -> None:
        process, holder = self._entering.get(name), self._members.get(name)
        if judge.rank != 0 or self._members.get(judge.name) is not judge:
            raise ValueError("not asked whether a process is alive")
        if process is None or process.worker_id >= 0 or (holder and holder.worker_id != worker_id):
            return  # a late answer
        if is_alive:
            self._refuse(process, wire.Failed(_taken(name)))
        else:
            self._enter(process)

    def _refuse(self, process: _Process, failure: wire.Failed) -> None:
        self._forget_entry(process)
        self._send_to((process,), failure)
        self._admit()

    def _enter(self, process: _Process) -> None:
        """Give a process its rank and worker id, and the members beside whom its agent starts."""
        own, size = process.registration, self._first().registration.world_size
        if self._highest_id + self._entries + 1 >= MAX_PROCESSES:
            self._refuse(process, wire.Failed(_EXHAUSTED))
            return
        self._entries += 1
        before = self._members.get(own.name)
        restarts = 0 if before is None else before.registration.restarts + 1
        own = replace(own, entry=self._entries, restarts=restarts)
        if own.joined:
            own = replace(own, rank=size + self._joins, world_size=size)
            self._joins += 1
        process.registration = own
        process.worker_id = self._highest_id + self._entries
        others = [each.registration for each in self._by_rank() if each.name != own.name]
        every = sorted([*others, own], key=lambda each: each.rank)
        self._send_to((process,), wire.Entering(own, process.worker_id, every))
        self._connections.call_later(START_TIMEOUT, functools.partial(self._expire_start, process))

    def _expire_start(self, process: _Process) -> None:
        """Free the name of an entering process that has no address in time: it is frozen, say."""
        if process.member is None and self._entering.get(process.name) is process:
            text = f"{process.registration} had no address within {START_TIMEOUT:g} s"
            self._refuse(process, wire.Failed(text, []))

    def _add(self, process: _Process) -> None:
        """Let every living member add a process that has an address, unless one is out of reach."""
        assert process.member is not None
        for each in self._members.values():
            if each.is_open and (text := _hidden_from(each.registration.namespace, process)):
                self._refuse(process, wire.Failed(text))
                return
        replaced = self._members.get(process.name)
        self._members[process.name] = process
        if replaced is not None and self._open.pop(replaced.connection, None) is not None:
            self._connections.close_connection(replaced.connection)
        others = [each for each in self._members.values() if each.is_open and each is not process]
        process.unaware = {each.connection for each in others}
        self._send_to(others, wire.Add(process.member))
        self._send_members(process)
        self._connections.call_later(ADD_TIMEOUT, functools.partial(self._announce, process))
        if not others:
            self._announce(process)

    def _send_members(self, process: _Process, but: Sequence[_Process] = ()) -> None:
        """Send the members to a process, and which of them leave or are in doubt."""
        names = [each.name for each in but]
        self._send_to((process,), wire.Members(self._listed(but), names))
        for each in self._members.values():
            if each.is_retiring:
                self._send_to((process,), wire.Left(each.name, each.worker_id))
            if not (each.is_open or each.has_left):
                self._send_to((process,), wire.Gone(each.name, each.worker_id))

    def _know(self, connection: int, worker_id: int) -> None:
        for process in [*self._entering.values()]:
            if process.worker_id == worker_id and connection in process.unaware:
                process.unaware.remove(connection)
                if not process.unaware:
                    self._announce(process)

    def _announce(self, process: _Process) -> None:
        """Announce an entering process, unless it was: after a while also if some are unaware."""
        if self._entering.get(process.name) is not process:
            return
        del self._entering[process.name]
        silent = [each.name for each in self._by_rank() if each.connection in process.unaware]
        announce = wire.Announce(process.name, process.worker_id, silent)
        self._send_to(self._members.values(), announce)
        self._admit()

    def _forget_entry(self, process: _Process) -> None:
        if process in self._waiting:
            self._waiting.remove(process)
        if self._entering.get(process.name) is process:
            del self._entering[process.name]

    # ── ends ────────────────────────────────────────────────────────────────────────────────────

    def _on_end_of_member(self, process: _Process) -> None:
        if self._step == _REGISTER:  # another process may take its rank
            del self._members[process.name]
            self._ended[process.rank] = process.registration
        elif self._step < _RUNNING:
            text = f"{process.registration} has ended while the world started"
            self._fail(wire.Failed(text, [process.rank]))
        elif self._step == _RUNNING and not process.has_left:
            self._send_to(self._members.values(), wire.Gone(process.name, process.worker_id))

    def _retire(self, process: _Process) -> None:
        if self._members.get(process.name) is process and not process.is_retiring:
            process.is_retiring = True
            others = [each for each in self._members.values() if each is not process]
            self._send_to(others, wire.Left(process.name, process.worker_id))

    def _leave(self, process: _Process, departs: bool) -> None:
        process.has_left = True
        if departs and process.rank != 0 and self._members.get(process.name) is process:
            del self._members[process.name]

    def _exit(self, process: _Process, ranks: Sequence[int]) -> None:
        self._is_ending = True
        ready = {each.rank for each in self._members.values() if each.awaited is not None}
        ending = (each for each in self._members.values() if each.is_open and not each.is_retiring)
        here = {each.rank for each in ending}
        process.awaited = (here.intersection(ranks) - ready) | {process.rank}
        self._no_longer_await(process.rank)

    def _no_longer_await(self, rank: int) -> None:
        for each in [*self._open.values()]:
            if each.awaited and rank in each.awaited:
                each.awaited.remove(rank)
                if not each.awaited:
                    self._send_to((each,), wire.Exited())

    # ── members ─────────────────────────────────────────────────────────────────────────────────

    def _by_rank(self) -> list[_Process]:
        return sorted(self._members.values(), key=lambda each: each.rank)

    def _listed(self, but: Sequence[_Process] = ()) -> list[wire.Member]:
        listed = [each for each in self._by_rank() if each not in but]
        return [each.member for each in listed if each.member is not None]

    def _first(self) -> _Process:
        return next(each for each in self._members.values() if each.rank == 0)

    def _send_to(self, processes: Iterable[_Process], message: ToWorker) -> None:
        self._connections.send([each.connection for each in processes if each.is_open], message)


_EXHAUSTED = (
    f"this world has had {MAX_PROCESSES:,} processes, its first ones and replacement processes "
    "included, and torch's worker ids have 16 bits: no further one can enter. Start a new world"
)


def _hidden_from(namespace: str, process: _Process) -> str:
    """Return why one in that network namespace does not reach a process, "" if it may."""
    own = process.registration.namespace
    if not (process.loopback and namespace and own) or namespace == own:
        return ""
    return (
        f"worker {process.name!r} listens at {process.loopback} only, and a process that enters is "
        "on another host or in another container. Give the first workers and that process the "
        "interface= (or AIORPC_INTERFACE) at which the others reach them"
    )


def _taken(name: str) -> str:
    return f"two workers are called {name!r}: the first one is alive"
