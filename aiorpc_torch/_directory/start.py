"""The start of a world: all register, then all have an address, then all reach each other.

torch's agent needs the names, ids and device maps of all workers before it has an address. So each
of the three steps begins once all workers have taken the one before. If one cannot, all fail.
"""

from collections.abc import Sequence

from . import directory_messages as wire
from .entries import Entries
from .members import Members, Process
from .registration import Registration, assign_worker_ids

MAX_NAMED = 20  # ranks of those that are awaited, to each worker that asks for them

_REGISTER, _START, _REACH, _RUNNING, _FAILED = range(5)
_ACTIONS = ("register", "start", "reach the others")  # what each step awaits of the workers


class Start:
    """The start of one world, which opens it for entries at its end."""

    def __init__(self, members: Members, entries: Entries) -> None:
        self._members, self._entries = members, entries
        self._step = _REGISTER
        self._awaited: set[int] = set()  # ranks that have not taken this step
        self._report: wire.Missing | None = None  # of these, until they change
        self._ended: dict[int, Registration] = {}  # before all had registered, by rank
        self._unconfirmed: set[Process] = set()  # have an address; they tell whom they reach
        self._confirmed: list[Process] = []
        self.failure: wire.Failed | None = None  # of all
        self._told: set[int] = set()  # ranks that know of the failure

    @property
    def is_gathering(self) -> bool:
        """Return whether it awaits registrations."""
        return self._step == _REGISTER

    @property
    def is_running(self) -> bool:
        """Return whether the world runs."""
        return self._step == _RUNNING

    def skip(self) -> Sequence[Process]:
        """Return those that have registered: the world runs already, and has no start."""
        gathered = [*self._members.named.values()]
        for each in gathered:
            self._members.remove(each)
        self._step = _RUNNING
        return gathered

    def gather(self, process: Process) -> str:
        """Add a worker; return why it cannot be one, "" if it can. `advance` may follow."""
        own, every = process.registration, self._members.named
        # The members agree with each other: any of them speaks for all.
        for each in (next(iter(every.values()), None), every.get(own.name)):
            if each is not None and (text := each.registration.conflict_with(own)):
                return text
        if not every:
            self._awaited = {*range(own.world_size)}
        if self._step != _REGISTER or own.rank not in self._awaited:
            [held] = [each.registration for each in every.values() if each.rank == own.rank]
            return f"two workers have rank {own.rank}: {held} and {own}"
        self._members.add(process)
        self._ended.pop(own.rank, None)
        self._note(own.rank)
        return ""

    def _note(self, rank: int) -> None:
        """Note that a worker has taken this step."""
        self._awaited.discard(rank)
        self._report = None

    def advance(self) -> None:
        """Begin the next step if no rank is awaited in this one."""
        while self._step < _RUNNING and self._members.named and not self._awaited:
            self._step += 1
            self._report, every = None, self._members.by_rank()
            if self._step == _START:
                registrations = [each.registration for each in every]
                worker_ids = assign_worker_ids(registrations)
                for each, worker_id in zip(every, worker_ids, strict=True):
                    each.worker_id = worker_id
                self._awaited = {each.rank for each in every}
                self._entries.count, self._entries.joins = 0, 0  # numbers of a new world
                self._entries.first_ids = max(worker_ids)
                self._members.send(every, wire.Registered(registrations, self._members.world))
            elif self._step == _REACH:
                self._awaited = {each.rank for each in self._unconfirmed}
                self._members.send_list(every)
            else:  # the others are in their blocks since they had addresses
                self._members.send(self._confirmed, wire.Complete())
                self._confirmed.clear()
                self._entries.open()

    def publish(self, process: Process, message: wire.Publish) -> None:
        """Note the address of a worker."""
        process.publish(message.address, message.device_maps)
        if not message.is_reaching:
            self._unconfirmed.add(process)
        self._note(process.rank)
        self.advance()

    def confirm(self, process: Process, unreachable: Sequence[int], text: str) -> None:
        """Note which workers one does not reach."""
        if process not in self._unconfirmed or self._step < _REACH:
            raise ValueError("not the time to confirm")
        if self._step != _REACH:
            return  # the start has failed meanwhile
        if unreachable:
            self.fail(wire.Failed(f"{process.registration}: {text}", unreachable), process)
            self._members.send((process,), wire.Failed(text, unreachable))
        else:
            self._unconfirmed.remove(process)
            self._confirmed.append(process)
            self._note(process.rank)
            self.advance()

    def send_missing(self, process: Process) -> None:
        """Tell a worker which ranks are awaited: a bounded number, as all workers ask."""
        if self._step >= _RUNNING:
            return
        if self._report is None:
            ranks, action = sorted(self._awaited), _ACTIONS[self._step]
            more = max(0, len(ranks) - MAX_NAMED)
            ended = self._ended_text(MAX_NAMED)
            self._report = wire.Missing(ranks[:MAX_NAMED], action, ended, more)
        self._members.send((process,), self._report)

    def _ended_text(self, most: int) -> str:
        listed = ", ".join(str(self._ended[rank]) for rank in sorted(self._ended)[:most])
        more = f" and {len(self._ended) - most} more" if len(self._ended) > most else ""
        return listed and f"{listed}{more} had registered, and ended"

    def give_up(self, process: Process, when: str) -> None:
        """End the start, for which a worker waits no longer; name all that are awaited."""
        if self._step < _RUNNING:
            own, missing, action = process.registration, sorted(self._awaited), _ACTIONS[self._step]
            listed = ", ".join(map(str, missing))
            count = f"{len(missing)} of {own.world_size} workers"
            ended = f" ({text})" if (text := self._ended_text(len(self._ended))) else ""
            text = f"{count} did not {action} {when}: rank {listed}{ended}"
            self.fail(wire.Failed(f"{own} has given up: {text}", missing), process)
            self._members.send((process,), wire.Failed(text, missing))

    def lose(self, process: Process) -> None:
        """Note the end of a worker. Before all have registered, another one may take its rank."""
        if self._step == _REGISTER:
            self._members.remove(process)
            self._ended[process.rank] = process.registration
            self._awaited.add(process.rank)
            self._report = None
        elif self._step < _RUNNING:
            text = f"{process.registration} has ended while the world started"
            self.fail(wire.Failed(text, [process.rank]))

    def fail(self, failure: wire.Failed, but: Process | None = None) -> None:
        """End the start: all that are connected fail; `but` is told by the caller."""
        self._step, self.failure = _FAILED, failure
        self._told = {each.rank for each in self._members.open.values()}
        # Rank 0 ends the directory when it learns of it.
        others = [each for each in self._members.open.values() if each is not but]
        self._members.send(sorted(others, key=lambda each: -each.rank), failure)

    def turn_away(self, process: Process) -> None:
        """Send a process to the next world; one that is late to a conflict learns of it, once."""
        failure = self.failure
        if failure is None or failure.missing is not None or process.rank in self._told:
            self._members.send((process,), wire.Ended())
        else:
            self._told.add(process.rank)
            self._members.send((process,), failure)
