"""The directory of a world: its members, its start, its changes and its end. A state machine.

One worker keeps it, at the start rank 0, and every worker has a connection to it from its
registration to its exit. The directory decides on names, ranks and worker ids, so there is one
order of all changes. It sends each change to all members. While nothing changes it only answers
those that ask whether it is there.

A connection that ends is no verdict on a worker: the members are told, and each one pings it. So a
link that is cut between a worker and rank 0 alone does not exclude the worker. For a process that
enters later it is lost until it calls, or is connected to the directory again.

If its worker is lost, or leaves, another directory takes its place: a member's, or that of rank 0's
replacement process, to which the first member that connects tells what it knows.

This module passes each message to the part that it is for: `start`, `entries`, `succession` or the
exit barrier. Each part is a state machine, and all share the table of `members`.
"""

from collections.abc import Sequence
from dataclasses import replace

from . import directory_messages as wire
from .directory_messages import FromWorker
from .entries import Entries
from .members import Connections, Members, Process, digest
from .registration import MAX_PROCESSES, Registration
from .start import Start
from .succession import Succession, Survivors


class Directory:
    """The directory of one world. A connection that sends what it must not raises ValueError."""

    def __init__(
        self,
        connections: Connections,
        keeper: str = "",  # name of the worker that keeps it
        grace: float = 0.0,  # seconds in which members of a running world may come
        known: wire.Known | None = None,  # the running world that it takes over
        numbers: tuple[int, int] = (0, 0),  # of the last directory at the place
        world: str = "",  # id of a world that starts here
    ) -> None:
        self._members = Members(connections, keeper, world)
        self._entries = Entries(self._members, numbers)
        self._start = Start(self._members, self._entries)
        self._survivors = Survivors(connections, grace, self._gather_again)
        self._succession = Succession(self._members, self._entries)
        self._barrier = ExitBarrier(self._members)
        if known is not None:
            self._take_over(known)

    @property
    def has_failed(self) -> bool:
        """Return whether the start has failed, and the workers were told."""
        return self._start.failure is not None

    @property
    def numbers(self) -> tuple[int, int]:
        """Return how many processes have entered, and how many of them under new ranks."""
        return self._entries.count, self._entries.joins

    @property
    def is_isolated(self) -> bool:
        """Return whether most members have no connection: they may be alive, beyond a cut."""
        if not self._start.is_running or self._succession.is_resuming or self._is_over:
            return False
        every = self._members.named.values()
        stay = [e for e in every if not (e.is_retiring or e.has_left or e.is_lost)]
        return 2 * sum(each.is_open for each in stay) < len(stay)

    @property
    def is_needed(self) -> bool:
        """Return whether the world goes on when the worker that keeps the directory leaves."""
        others = (each for each in self._members.here() if each.name != self._members.keeper)
        stay = (not (each.is_retiring or each.has_left) for each in others)
        return self._start.is_running and not self._is_over and any(stay)

    @property
    def _is_over(self) -> bool:
        """Return whether the world ends, or its last member has left."""
        has_none = self._start.is_running and not self._members.named
        return has_none or self._barrier.is_over

    def is_member(self, connection: int) -> bool:
        """Return whether a connection is of a member, or of one that a start has gathered."""
        process = self._members.open.get(connection)
        return process is not None and self._members.has(process)

    def receive(self, connection: int, message: FromWorker) -> None:
        match message:
            case wire.Register(registration, key):
                self._register(connection, registration, key)
                return
            case wire.Resume():
                self._resume(connection, message)
                return
            case wire.Known() if self._start.is_gathering and connection == self._survivors.asked:
                self._survivors.check(connection, message)
                self._take_over(message)
                return
            case wire.Known() if connection in self._succession.recalled:
                self._succession.answer(connection, message)
                return
        if (process := self._members.open.get(connection)) is None:
            if not self._survivors.hold(connection, message):
                raise ValueError("a connection must register first")
            return
        match message:
            case wire.Publish():
                if process.worker_id < 0 or process.member is not None:
                    raise ValueError("not the time for an address")
                if self._entries.is_entering(process):
                    self._entries.publish(process, message)
                elif self._members.has(process):  # else it was refused meanwhile
                    self._start.publish(process, message)
            case wire.Confirm(unreachable, text):
                self._start.confirm(process, unreachable, text)
            case wire.GiveUp(when):
                if self._members.has(process):
                    self._start.give_up(process, when)
                else:
                    is_starting = not (self._start.is_running or self.has_failed)
                    self._entries.give_up(process, when, is_starting=is_starting)
            case wire.AskMissing():
                self._start.send_missing(process)
            case wire.Greet():
                self._members.send((process,), wire.Here())
            case wire.Know(worker_id):
                self._entries.know(process.connection, worker_id)
            case wire.Verdict():
                if not (self._start.is_running and self._members.has(process)):
                    raise ValueError("not asked whether a process is alive")
                self._entries.judge(process.connection, message)
            case wire.Retire() if self._members.has(process) and not process.is_retiring:
                process.is_retiring = True
                others = (each for each in self._members.named.values() if each is not process)
                self._members.send(others, wire.Left(process.name, process.worker_id))
            case wire.Leave(departs):
                process.has_left = True
                # While members connect, it stays until all are here to be told.
                may_go = self._start.is_running and not self._succession.is_resuming
                if departs and may_go and self._members.has(process):
                    self._members.remove(process)
            case wire.Exit():
                if not (self._start.is_running and self._members.has(process)):
                    raise ValueError("no member leaves")
                self._barrier.enter(process, message)

    def gone(self, connection: int) -> None:
        """Note the end of a connection."""
        self._survivors.forget(connection)
        self._succession.forget(connection)
        process = self._members.open.pop(connection, None)
        if process is None:
            return
        process.is_open = False
        self._entries.forget(process)
        if self._members.has(process):
            if not self._start.is_running:
                self._start.lose(process)
            elif not process.has_left:
                self._members.send_all(wire.Gone(process.name, process.worker_id))
            self._barrier.leave(process)
        elif self._members.holds(process):  # it has not entered again
            self._members.send_all(wire.Gone(process.name, process.worker_id))
        self._entries.gone(connection)

    # ── who comes ───────────────────────────────────────────────────────────────────────────────

    def _register(self, connection: int, registration: Registration, key: str) -> None:
        size, rank = registration.world_size, registration.rank
        if connection in self._members.open or size > MAX_PROCESSES:
            raise ValueError("a connection registers once, for a world that is not too large")
        if not (registration.joined or 0 <= rank < size):
            raise ValueError(f"no rank of {size} workers: {rank}")
        own = replace(registration, entry=0, restarts=0, rank=-1 if registration.joined else rank)
        process = Process(own, digest(key))
        self._members.connect(process, connection)
        if self.has_failed or self._is_over:
            self._start.turn_away(process)
        elif registration.joined or self._start.is_running:
            self._entries.wait(process)
        else:
            self._gather([process])

    def _gather(self, processes: Sequence[Process]) -> None:
        """Gather workers of a new world, unless they shall enter one that runs."""
        for each in processes:
            if self.has_failed:
                self._start.turn_away(each)
            elif conflict := self._start.gather(each):
                if self._survivors.held:
                    self._entries.wait(each)
                else:
                    self._start.fail(wire.Failed(conflict))
        if not (self._survivors.held or self._survivors.has_grace):
            self._start.advance()

    def _gather_again(self) -> None:
        """Start a new world: no member of a running one is there, or awaited."""
        if self._start.is_gathering:
            self._gather(self._entries.withdraw())

    def _resume(self, connection: int, message: wire.Resume) -> None:
        """Let a process connect again, perhaps one of a world that is not known here yet."""
        if not self._start.is_gathering or self._is_over:
            has_ended = not self._start.is_running or self._is_over
            self._succession.resume(connection, message, has_ended=has_ended)
        elif message.is_member:
            self._survivors.add(connection, message)
        else:
            self._members.connections.close_connection(connection)  # it comes again, after a member

    def _take_over(self, known: wire.Known) -> None:
        """Go on with a running world; those who have registered enter it."""
        for each in self._start.skip():
            self._entries.wait(each)
        self._succession.begin(known)
        held, self._survivors.held = self._survivors.held, {}
        for connection, messages in held.items():
            try:
                for message in messages:
                    if connection in self._members.open or message is messages[0]:
                        self.receive(connection, message)
            except ValueError:  # it is not in order
                self._members.connections.close_connection(connection)
                self.gone(connection)
        self._succession.end_if_complete()


class ExitBarrier:
    """The barrier of one world. Workers may come to it while others go on."""

    def __init__(self, members: Members) -> None:
        self._members = members
        self._ready: set[Process] = set()
        self._unready: set[int] = set()  # ranks of the others, while some are awaited
        self._awaiting: dict[Process, set[int]] = {}  # ranks
        self._awaiting_all: list[Process] = []

    @property
    def is_over(self) -> bool:
        """Return whether the world ends: no member stays in it."""
        return bool(self._ready) and all(
            each in self._ready or each.is_retiring or each.has_left
            for each in self._members.here()
        )

    def enter(self, process: Process, message: wire.Exit) -> None:
        """Note that a worker is ready, and which ones it awaits."""
        if not (self._awaiting or self._awaiting_all):
            here = self._members.here()
            unready = (each for each in here if not (each.is_retiring or each in self._ready))
            self._unready = {each.rank for each in unready}
        self._ready.add(process)
        if message.is_full:
            self._awaiting_all.append(process)
        else:
            self._awaiting[process] = self._unready.intersection(message.ranks) | {process.rank}
        self._pass(process.rank)

    def leave(self, process: Process) -> None:
        """Note that a worker is gone."""
        self._ready.discard(process)
        self._pass(process.rank)

    def _pass(self, rank: int) -> None:
        """Wait for that rank no longer."""
        self._unready.discard(rank)
        for process in [*self._awaiting]:  # not a tuple of each: the garbage collector counts them
            (awaited := self._awaiting[process]).discard(rank)
            if not awaited:
                del self._awaiting[process]
                self._members.send((process,), wire.Exited())
        if not self._unready and self._awaiting_all:
            ready, self._awaiting_all = self._awaiting_all, []
            self._members.send(ready, wire.Exited())
