"""The directory of a world: its members, its start, its changes and its end. A state machine.

One worker keeps it, at the start rank 0, and every worker has a connection to it from its
registration to its exit. The directory decides on names, ranks and worker ids, so there is one
order of all changes. It sends each change to all members. While nothing changes it only answers
those that ask whether it is there.

The start has three steps: all have registered, all have an address, all reach each other. torch's
agent needs the names, ids and device maps of all workers before it has an address.

A process that enters a running world is added at every living member before it is announced to
any: whoever learns of it may send its RRefs to any other worker, which knows it already.

A connection that ends is no verdict on a worker: the members are told, and each one pings it. So a
link that is cut between a worker and rank 0 alone does not exclude the worker. For a process that
enters later it is lost until it calls, or is connected to the directory again.

If its worker is lost, or leaves, another directory takes its place: a member's, or that of rank 0's
replacement process, to which the first member that connects tells what it knows. It lets none
enter until the members are connected to it, or do not come for some seconds.
"""

import functools
import hashlib
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
MAX_UNKNOWN = 64  # entries that no member knows of, when a directory has taken over
MAX_HELD = 16  # messages of a member that is not known yet
RESUME_TIMEOUT = 2.0  # seconds for the members to connect to a directory that has taken over

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

    def record(self, step: Callable[[], None]) -> None:
        """Write `numbers` at the place, then call `step`: not if another directory is there."""


@dataclass(eq=False, slots=True)
class _Process:
    """A process that has registered, and its place in the world."""

    connection: int
    registration: Registration
    digest: str
    """Of its key."""
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
    is_lost: bool = False
    """Whether it was lost for the member that told of it, when the directory moved."""
    entries: int = 0
    """Those that it knew of when it connected again."""
    judge: int | None = None
    """Connection of the member that is asked whether the holder of its name is alive."""
    name: str = field(init=False)

    def __post_init__(self) -> None:
        self.name = self.registration.name  # a name stays, unlike the rank

    @property
    def rank(self) -> int:
        return self.registration.rank


class Directory:
    """The directory of one world. A connection that sends what it must not raises ValueError.

    Args:
        keeper: name of the worker that keeps it.
        grace: seconds for which members of a world that runs may come before a new one starts.
        known: the running world that it takes over, None for a new one.
        numbers: those of the last directory at the place.
        world: id of a world that starts here.
    """

    def __init__(
        self,
        connections: Connections,
        keeper: str = "",
        grace: float = 0.0,
        known: wire.Known | None = None,
        numbers: tuple[int, int] = (0, 0),
        world: str = "",
    ) -> None:
        self._world = world
        self._connections = connections
        self._keeper = keeper
        self._step = _REGISTER
        self._open: dict[int, _Process] = {}  # by connection
        self._members: dict[str, _Process] = {}  # of each name the last process
        self._holders: dict[int, _Process] = {}  # of the ranks, until the world starts
        self._ahead = 0  # members that have taken this step of the start
        self._ended: dict[int, Registration] = {}  # before all had registered, by rank
        self._waiting: list[_Process] = []  # to enter the running world
        self._entering: dict[str, _Process] = {}  # by the name that is claimed, until announced
        self._entries = self._joins = self._first_ids = 0
        self._failure: wire.Failed | None = None
        self._known_ranks: set[int] = set()  # those that know of the failure
        self._is_ending = False
        self._unready: set[int] = set()  # ranks that are not ready to end, once some are
        self._awaiting: dict[int, tuple[_Process, set[int]]] = {}  # ranks, by connection
        self._awaiting_all: list[_Process] = []
        # Members of a running world, before it is known what they know, and what they send.
        self._survivors: dict[int, list[FromWorker]] = {}
        self._recalled: set[int] = set()  # those of them that are asked
        self._is_resuming = False
        self._absent: set[str] = set()  # members that may be alive, and have not connected yet
        self._has_grace = grace > 0.0
        if self._has_grace:
            connections.call_later(grace, self._end_grace)
        self._last_numbers = numbers
        if known is not None:
            self._take_over(known)

    @property
    def has_failed(self) -> bool:
        """Return whether the start has failed, and the workers were told."""
        return self._failure is not None

    @property
    def numbers(self) -> tuple[int, int]:
        """Return how many processes have entered, and how many of them under new ranks."""
        return self._last_numbers if self._step == _REGISTER else (self._entries, self._joins)

    @property
    def is_isolated(self) -> bool:
        """Return whether most members have no connection: they may be alive, beyond a cut."""
        if self._step != _RUNNING or self._is_resuming or self._is_ending:
            return False
        gone = (
            each.is_retiring or each.has_left or each.is_lost for each in self._members.values()
        )
        here = (each.is_open for each in self._members.values())
        return 2 * sum(here) < len(self._members) - sum(gone)

    @property
    def is_needed(self) -> bool:
        """Return whether the world goes on when the worker that keeps the directory leaves."""
        others = (each for each in self._members.values() if each.name != self._keeper)
        stay = (each.is_open and not (each.is_retiring or each.has_left) for each in others)
        return self._step == _RUNNING and not self._is_ending and any(stay)

    def receive(self, connection: int, message: FromWorker) -> None:
        """Handle a message of a worker."""
        if isinstance(message, wire.Register):
            self._register(connection, message.registration, message.key)
            return
        if isinstance(message, wire.Resume):
            self._resume(connection, message)
            return
        if isinstance(message, wire.Known) and connection in self._recalled:
            self._learn(connection, message)
            return
        process = self._open.get(connection)
        if process is None and 0 < len(held := self._survivors.get(connection, [])) < MAX_HELD:
            held.append(message)
            return
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
            case wire.Greet():
                self._send_to((process,), wire.Here())
            case wire.Know(worker_id):
                self._know(connection, worker_id)
            case wire.Verdict(name, worker_id, is_alive):
                self._judge(process, name, worker_id, is_alive=is_alive)
            case wire.Retire():
                self._retire(process)
            case wire.Leave(departs):
                self._leave(process, departs)
            case wire.Exit():
                self._exit(process, message)

    def gone(self, connection: int) -> None:
        """Note the end of a connection."""
        self._forget_survivor(connection)
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
            if each.judge == connection:
                self._ask(each)
        self._admit()

    # ── start ───────────────────────────────────────────────────────────────────────────────────

    def _register(self, connection: int, registration: Registration, key: str) -> None:
        size, rank = registration.world_size, registration.rank
        if connection in self._open or size > MAX_PROCESSES:
            raise ValueError("a connection registers once, for a world that is not too large")
        if not (registration.joined or 0 <= rank < size):
            raise ValueError(f"no rank of {size} workers: {rank}")
        own = replace(registration, entry=0, restarts=0, rank=-1 if registration.joined else rank)
        process = self._open[connection] = _Process(connection, own, _digest(key))
        if self._step == _ENDED or self._is_ending:
            self._turn_away(process)
        elif registration.joined or self._step == _RUNNING:
            self._waiting.append(process)
            self._admit()
        else:
            self._gather(process)

    def _gather(self, process: _Process) -> None:
        """Note one of the processes of a new world, unless it shall enter one that runs."""
        own = process.registration
        if self._step == _ENDED:
            self._turn_away(process)
        elif not (conflict := self._conflict(own)):
            self._members[own.name] = self._holders[own.rank] = process
            self._ended.pop(own.rank, None)
            self._ahead += 1
            self._advance()
        elif self._survivors:
            self._waiting.append(process)
        else:
            self._fail(wire.Failed(conflict))

    def _conflict(self, registration: Registration) -> str:
        # The members agree with each other: any of them speaks for all.
        any_, same_name = next(iter(self._members.values()), None), registration.name
        for each in (any_, self._members.get(same_name)):
            if each is not None and (text := each.registration.conflict_with(registration)):
                return text
        if (holder := self._holders.get(registration.rank)) is not None:
            held = holder.registration
            return f"two workers have rank {registration.rank}: {held} and {registration}"
        return ""

    def _size(self) -> int:
        """Return the number of workers of the start, 0 before any has registered."""
        return next((each.registration.world_size for each in self._members.values()), 0)

    def _missing(self) -> list[int]:
        """Return the ranks that are awaited in this step of the start."""
        here = {each.rank for each in self._members.values() if each.step > self._step}
        return [rank for rank in range(self._size()) if rank not in here]

    def _advance(self) -> None:
        """Begin the next step of the start if no rank is awaited in this one."""
        while self._step < _RUNNING and self._ahead and self._ahead == self._size():
            if self._step == _REGISTER and (self._has_grace or self._survivors):
                return
            self._step += 1
            self._ahead = sum(each.step > self._step for each in self._members.values())
            told = [*self._members.values()]
            if self._step == _RUNNING:  # the others are in their blocks since they had addresses
                told = [each for each in told if each.step == _RUNNING]
            self._send_to(told, self._result_of_step())
        self._admit()

    def _end_grace(self) -> None:
        self._has_grace = False
        if self._members:
            self._advance()

    def _result_of_step(self) -> ToWorker:
        if self._step == _REACH:
            return wire.Members(self._listed(), (), self._keeper)
        if self._step == _RUNNING:
            return wire.Complete()
        registrations = [each.registration for each in self._by_rank()]
        worker_ids = assign_worker_ids(registrations)
        for each, worker_id in zip(self._by_rank(), worker_ids, strict=True):
            each.worker_id = worker_id
        self._first_ids = max(worker_ids)
        return wire.Registered(registrations, self._world)

    def _publish(self, process: _Process, message: wire.Publish) -> None:
        is_entering = self._entering.get(process.name) is process
        if process.worker_id < 0 or process.member is not None or process.judge is not None:
            raise ValueError("not the time for an address")
        if not is_entering and self._members.get(process.name) is not process:
            return  # it was refused meanwhile
        own, where = process.registration, message.address
        host = urlsplit(where).hostname or ""
        process.loopback = host if is_loopback_host(host) and not own.endpoint else ""
        maps = message.device_maps
        process.member = wire.Member(own, process.worker_id, where, maps, process.digest)
        if is_entering:
            self._add(process)
        else:
            process.step = _ENDED if message.is_reaching else _REACH
            self._ahead += process.step > self._step
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
            self._ahead += 1
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

    # ── connecting again ────────────────────────────────────────────────────────────────────────

    def _resume(self, connection: int, message: wire.Resume) -> None:
        """Take a process's new connection in place of one that has ended, or will.

        A process that was replaced learns that its world is over.
        """
        if self._step == _REGISTER and not self._is_ending:
            if message.is_member:
                self._survivors[connection] = [message]
                self._recall_next()
            else:
                self._connections.close_connection(connection)  # it comes again, after a member
            return
        process, own = self._members.get(message.registration.name), message.registration
        claim = self._entering.get(own.name)
        is_known = process is not None and process.worker_id == message.worker_id
        is_of_another = message.world != self._world or not message.key
        if self._step != _RUNNING or self._is_ending or is_of_another:
            ended = wire.Failed("the world that this process was entering has ended", [])
            self._connections.send([connection], wire.Ended() if message.is_member else ended)
        elif process is None or not is_known:
            self._enter_again(connection, message)
        elif not hmac.compare_digest(process.digest, _digest(message.key)) or (
            claim is not None and claim.judge is None and claim is not process
        ):
            self._connections.send([connection], wire.Ended())
        elif not message.is_member:
            self._forget_entry(process)
            del self._members[own.name]
            self._absent.discard(own.name)
            if self._open.pop(process.connection, None) is not None:
                self._connections.close_connection(process.connection)
            self._enter_again(connection, message)
        else:
            if claim is not None:  # the judge has not answered yet: this process is alive
                self._refuse(claim, wire.Failed(_taken(own.name)))
            process.entries = message.entries
            self._reopen(process, connection)
            if message.entries > self._entries:  # others have entered that this one knows of
                self._recall(connection)
        self._count_resumed()

    def _reopen(self, process: _Process, connection: int) -> None:
        if self._open.pop(process.connection, None) is not None:
            self._connections.close_connection(process.connection)
        elif not self._is_resuming:
            # Those that have entered meanwhile took it for lost: they ping it.
            self._send_to(self._members.values(), wire.Gone(process.name, process.worker_id))
        for each in self._entering.values():  # it is asked again
            if process.connection in each.unaware:
                each.unaware ^= {process.connection, connection}
        process.connection, process.is_open = connection, True
        self._absent.discard(process.name)
        self._open[connection] = process
        if not self._is_resuming:  # else it is told at the end of that
            self._update(process)

    def _update(self, process: _Process) -> None:
        """Send a process all that it may not have heard."""
        added = [each for each in self._entering.values() if each.member is not None]
        self._send_members(process, but=added)
        for each in added:
            assert each.member is not None
            self._send_to((process,), wire.Add(each.member))

    def _enter_again(self, connection: int, message: wire.Resume) -> None:
        """Let a process enter whose entry another directory had begun: it keeps its numbers."""
        own = message.registration
        others = [*self._members.values(), *self._entering.values(), *self._waiting]
        has_id = any(each.worker_id == message.worker_id for each in others)
        holder = self._members.get(own.name)
        is_replaced = holder is not None and holder.worker_id > message.worker_id
        is_plausible = 0 < own.entry <= self._entries + MAX_UNKNOWN
        is_plausible &= message.worker_id == self._first_ids + own.entry
        if not is_plausible or has_id or is_replaced:
            failure = wire.Failed(_taken(own.name))  # another one was quicker
            answer = wire.Ended() if message.is_member else failure
            self._connections.send([connection], answer)
            return
        self._count(own)
        process = _Process(connection, own, _digest(message.key), message.worker_id)
        self._open[connection] = process
        self._waiting.append(process)
        self._admit()

    def _count(self, own: Registration) -> None:
        """Note the numbers of a process: no other one gets them."""
        self._entries = max(self._entries, own.entry)
        if own.joined and own.entry:
            self._joins = max(self._joins, own.rank - own.world_size + 1)

    # ── taking over ─────────────────────────────────────────────────────────────────────────────

    def _recall_next(self) -> None:
        """Ask one of the members of a running world what it knows, unless one is asked."""
        if self._step == _REGISTER and self._survivors and not self._recalled:
            self._recall(next(iter(self._survivors)))
        elif self._is_resuming:
            self._count_resumed()

    def _recall(self, connection: int) -> None:
        self._recalled.add(connection)
        self._connections.send([connection], wire.Recall())
        self._connections.call_later(RESUME_TIMEOUT, functools.partial(self._expire, connection))

    def _expire(self, connection: int) -> None:
        """Wait no longer for what a member knows: it is frozen, say."""
        if connection in self._recalled and self._step == _REGISTER:
            self._connections.close_connection(connection)
            self._forget_survivor(connection)

    def _forget_survivor(self, connection: int) -> None:
        self._survivors.pop(connection, None)
        if connection in self._recalled:
            self._recalled.discard(connection)
            self._recall_next()
        if self._step == _REGISTER and not self._survivors and self._members:
            waiting = [each for each in self._waiting if not each.registration.joined]
            for each in waiting:
                self._waiting.remove(each)
                self._gather(each)
            self._advance()

    def _learn(self, connection: int, known: wire.Known) -> None:
        self._recalled.discard(connection)
        if self._step == _REGISTER:
            resumed = self._survivors[connection][0]
            assert isinstance(resumed, wire.Resume)
            found = {each.name: each for each in known.members}.get(resumed.registration.name)
            if not resumed.key or found is None or found.digest != _digest(resumed.key):
                raise ValueError("it is no member of the world that it knows")
            self._take_over(known)
        else:
            self._add_known(known)
            self._count_resumed()

    def _take_over(self, known: wire.Known) -> None:
        """Go on with a running world; those who have registered enter it."""
        fresh, self._members, self._holders = [*self._members.values()], {}, {}
        self._step, self._is_resuming = _RUNNING, True
        self._waiting += [each for each in fresh if each not in self._waiting]
        self._ended.clear()
        self._entries, self._joins = self._last_numbers
        self._world = known.world
        self._add_known(known)
        self._connections.call_later(RESUME_TIMEOUT, self._end_resumption)
        survivors, self._survivors = self._survivors, {}
        for connection, messages in survivors.items():
            for message in messages:
                if connection in self._open or message is messages[0]:
                    self.receive(connection, message)
        self._count_resumed()

    def _add_known(self, known: wire.Known) -> None:
        """Add the members that another one knows; they are not connected yet."""
        ranks = [each.rank for each in known.members]
        ids = [each.worker_id for each in known.members]
        numbers = [known.entries, known.joins, known.first_ids, *ranks, *ids]
        if not all(0 <= each < 2 * MAX_PROCESSES for each in numbers):
            raise ValueError("no numbers of a world")
        self._entries = max(self._entries, known.entries)
        self._joins = max(self._joins, known.joins)
        self._first_ids = max(self._first_ids, known.first_ids)
        lost, leaving = {*known.lost}, {*known.leaving}
        for each in known.members:
            held = self._members.get(each.name)
            if held is not None and held.worker_id >= each.worker_id:
                continue
            process = _Process(-1, each.registration, each.digest, each.worker_id, _RUNNING, each)
            host = urlsplit(each.address).hostname or ""
            is_loopback = is_loopback_host(host) and not each.registration.endpoint
            process.loopback = host if is_loopback else ""
            process.is_open, process.is_lost = False, each.name in lost
            process.is_retiring = each.name in leaving
            self._members[each.name] = process
            if not (process.is_lost or process.is_retiring):
                self._absent.add(each.name)

    def _count_resumed(self) -> None:
        """End the wait for the members once all that may be alive are connected."""
        if self._is_resuming and not self._recalled and not self._absent:
            self._end_resumption()

    def _end_resumption(self) -> None:
        if not self._is_resuming:
            return
        self._recalled.clear()
        for each in [*self._members.values()]:
            if each.is_retiring and not each.is_open:
                del self._members[each.name]
        here = [each for each in self._members.values() if each.is_open]
        # Not the list of all members to all of them.
        knowing = [each for each in here if each.entries == self._entries and not self._entering]
        self._send_to(knowing, wire.Moved(self._keeper))
        self._send_ends(knowing)
        for each in here:
            if each.entries != self._entries or self._entering:
                self._update(each)
        self._is_resuming = False
        self._admit()

    # ── entering the running world ──────────────────────────────────────────────────────────────

    def _admit(self) -> None:
        """Let the waiting processes enter; those whose name is being claimed wait on."""
        if self._step != _RUNNING or self._is_resuming or not self._members:
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
                self._ask(process)

    def _ask(self, process: _Process) -> None:
        """Ask a member whether the holder of a name is alive that a process wants."""
        holder = self._members.get(process.name)
        here = [each for each in self._members.values() if each.is_open]
        judges = [each for each in here if each is not holder] or here
        if holder is None or not judges:
            self._judged(process, is_alive=False)
            return
        judge = min(judges, key=lambda each: (each.name != self._keeper, each.rank))
        process.judge = judge.connection
        self._send_to((judge,), wire.Ask(holder.name, holder.worker_id))

    def _refusal(self, registration: Registration) -> str:
        """Return why a process cannot enter, "" if it can as far as the names tell."""
        first = self._first().registration
        size = first.world_size if registration.joined else registration.world_size
        as_first = first.rank if registration.joined else registration.rank  # its name may be free
        if conflict := first.conflict_with(replace(registration, world_size=size, rank=as_first)):
            return conflict
        if text := self._out_of_reach(registration.namespace):
            return text
        holder = self._members.get(registration.name)
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

    def _judge(self, judge: _Process, name: str, worker_id: int, *, is_alive: bool) -> None:
        process, holder = self._entering.get(name), self._members.get(name)
        if self._step != _RUNNING or self._members.get(judge.name) is not judge:
            raise ValueError("not asked whether a process is alive")
        if process is None or process.judge != judge.connection:
            return  # a late answer
        if holder is None or holder.worker_id == worker_id:
            self._judged(process, is_alive=is_alive)

    def _judged(self, process: _Process, *, is_alive: bool) -> None:
        process.judge = None
        if is_alive:
            self._refuse(process, wire.Failed(_taken(process.name)))
        else:
            self._enter(process)

    def _refuse(self, process: _Process, failure: wire.Failed) -> None:
        self._forget_entry(process)
        self._send_to((process,), failure)
        self._admit()

    def _enter(self, process: _Process) -> None:
        """Give a process its rank and worker id, unless it has them from another directory."""
        if process.worker_id < 0 and not self._number(process):
            self._refuse(process, wire.Failed(_EXHAUSTED))
            return
        step = functools.partial(self._tell_numbers, process)
        self._connections.record(step)

    def _number(self, process: _Process) -> bool:
        own, size = process.registration, self._first().registration.world_size
        if self._first_ids + self._entries + 1 >= MAX_PROCESSES:
            return False
        self._entries += 1
        before = self._members.get(own.name)
        restarts = 0 if before is None else before.registration.restarts + 1
        own = replace(own, entry=self._entries, restarts=restarts)
        if own.joined:
            own = replace(own, rank=size + self._joins, world_size=size)
            self._joins += 1
        process.registration = own
        process.worker_id = self._first_ids + self._entries
        return True

    def _tell_numbers(self, process: _Process) -> None:
        """Tell a process its numbers, which are recorded, and the members that it starts beside."""
        if self._entering.get(process.name) is not process:
            return  # it has given up meanwhile
        own = process.registration
        others = [each.registration for each in self._by_rank() if each.name != own.name]
        every = sorted([*others, own], key=lambda each: each.rank)
        self._send_to((process,), wire.Entering(own, process.worker_id, every, self._world))
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
        self._send_to((process,), wire.Members(self._listed(but), names, self._keeper))
        self._send_ends([process])

    def _send_ends(self, processes: Sequence[_Process]) -> None:
        """Send which members leave or are in doubt."""
        for each in self._members.values():
            if each.is_retiring:
                self._send_to(processes, wire.Left(each.name, each.worker_id))
            if not (each.is_open or each.has_left):
                self._send_to(processes, wire.Gone(each.name, each.worker_id))

    def _know(self, connection: int, worker_id: int) -> None:
        for process in [*self._entering.values()]:
            if process.worker_id == worker_id and connection in process.unaware:
                process.unaware.remove(connection)
                if not process.unaware:
                    self._announce(process)

    def _announce(self, process: _Process) -> None:
        """Announce an entering process, unless it was: after a while also if some are unaware.

        Not if another directory has taken over meanwhile: the process enters there.
        """
        if self._entering.get(process.name) is process:
            step = functools.partial(self._tell_all, process)
            self._connections.record(step)

    def _tell_all(self, process: _Process) -> None:
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
            del self._members[process.name], self._holders[process.rank]
            self._ended[process.rank] = process.registration
            self._ahead -= 1
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
        if departs and self._members.get(process.name) is process:
            del self._members[process.name]

    def _exit(self, process: _Process, message: wire.Exit) -> None:
        if not self._is_ending:
            self._is_ending = True
            here = (each for each in self._members.values() if each.is_open)
            self._unready = {each.rank for each in here if not each.is_retiring}
        if message.is_full:
            self._awaiting_all.append(process)
        else:
            awaited = self._unready.intersection(message.ranks) | {process.rank}
            self._awaiting[process.connection] = process, awaited
        self._no_longer_await(process.rank)

    def _no_longer_await(self, rank: int) -> None:
        self._unready.discard(rank)
        for process, awaited in [*self._awaiting.values()]:
            awaited.discard(rank)
            if not awaited:
                del self._awaiting[process.connection]
                self._send_to((process,), wire.Exited())
        if not self._unready:
            ready, self._awaiting_all = self._awaiting_all, []
            self._send_to(ready, wire.Exited())

    # ── members ─────────────────────────────────────────────────────────────────────────────────

    def _by_rank(self) -> list[_Process]:
        return sorted(self._members.values(), key=lambda each: each.rank)

    def _listed(self, but: Sequence[_Process] = ()) -> list[wire.Member]:
        listed = [each for each in self._by_rank() if each not in but]
        return [each.member for each in listed if each.member is not None]

    def _first(self) -> _Process:
        return min(self._members.values(), key=lambda each: each.rank)

    def _send_to(self, processes: Iterable[_Process], message: ToWorker) -> None:
        self._connections.send([each.connection for each in processes if each.is_open], message)


_EXHAUSTED = (
    f"this world has had {MAX_PROCESSES:,} processes, its first ones and replacement processes "
    "included, and torch's worker ids have 16 bits: no further one can enter. Start a new world"
)


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()[:32] if key else ""


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
