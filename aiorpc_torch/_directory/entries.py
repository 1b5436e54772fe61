"""The entry of processes into a running world.

A process is added at every living member before it is announced to any: whoever learns of it may
send its RRefs to any other worker, which knows it already. One whose name is held waits until a
member has judged whether the holder is alive.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from . import directory_messages as wire
from .members import Members, Process
from .registration import MAX_PROCESSES, Registration

START_TIMEOUT = 60.0  # seconds from the admission of a process to its address
ADD_TIMEOUT = 6.0  # seconds for the members to add a process that enters
JUDGE_TIMEOUT = 5.0  # seconds for a member to tell whether another one is alive: it pings it


class Entries:
    """All entries into one world, at most one of each name at once."""

    def __init__(self, members: Members, numbers: tuple[int, int]) -> None:
        self._members = members
        self.count, self.joins = numbers  # of all entries, and of those under a new rank
        self.known = 0  # the highest number of a process that has become a member
        self.first_ids = 0  # the highest worker id of the start
        self._is_open = False
        self._waiting: dict[Process, None] = {}  # in the order in which they have come
        self._entering: dict[str, Process] = {}  # by the name that is claimed, until announced
        self._adding: dict[int, Process] = {}  # those of them with an address, by worker id

    def open(self) -> None:
        """Let processes enter from now on."""
        self._is_open = True
        self._admit()

    def wait(self, process: Process) -> None:
        """Let a process enter as soon as it may."""
        self._waiting[process] = None
        self._admit()

    def withdraw(self) -> list[Process]:
        """Return those that wait though they have a rank; they wait no longer."""
        found = [each for each in self._waiting if not each.registration.joined]
        for each in found:
            del self._waiting[each]
        return found

    def forget(self, process: Process) -> None:
        """End the entry of a process, if it has one."""
        self._waiting.pop(process, None)
        if self.is_entering(process):
            del self._entering[process.name]
            self._adding.pop(process.worker_id, None)

    def is_entering(self, process: Process) -> bool:
        """Return whether the entry of a process has begun, and it is not announced yet."""
        return self._entering.get(process.name) is process

    # ── admission ───────────────────────────────────────────────────────────────────────────────

    def _admit(self) -> None:
        """Let the waiting processes enter; those whose name is being claimed wait on."""
        if not self._is_open:
            return
        if not self._members.named:  # the last one has left: others may start the next world
            for each in [*self._waiting, *self._entering.values()]:
                self.forget(each)
                ended = wire.Ended() if each.worker_id < 0 else wire.Failed(HAS_ENDED, [])
                self._members.send((each,), ended)
            return
        for process in [*self._waiting]:
            if process.name in self._entering:
                continue
            del self._waiting[process]
            if refusal := self._refusal(process.registration):
                self._members.send((process,), wire.Failed(refusal))
                continue
            self._entering[process.name] = process
            holder = self._members.named.get(process.name)
            if holder is None or self._members.holds(process):
                self._enter(process)
            else:  # also if its connection has ended: the process may be alive
                self._ask(process)

    def _refusal(self, registration: Registration) -> str:
        """Return why a process cannot enter, "" if it can as far as the names tell."""
        first = self._members.by_rank()[0].registration
        if conflict := first.conflict_with(registration):
            return conflict
        hidden = (each.hidden_from(registration.namespace) for each in self._members.here())
        if text := next(filter(None, hidden), ""):
            return text
        holder, every = self._members.named.get(registration.name), self._members.by_rank()
        if registration.joined:
            # The name of rank 0 is kept for its replacement process: without that, none might
            # enter.
            if holder is None:  # it has left
                is_kept = registration.name == self._members.keeper
            else:
                is_kept = holder.rank == 0 and not holder.registration.joined
            text = (
                f"{registration} cannot join: that name is of rank 0, which a process started with "
                "rank=0 takes over. Give it another name"
            )
            return text if is_kept else ""
        if holder is not None and holder.registration.joined:
            return f"{registration} cannot rejoin: {holder.registration} has joined"
        of_rank = next((each for each in every if each.rank == registration.rank), holder)
        if of_rank is not None and of_rank is not holder:
            return f"{registration} cannot rejoin: that rank is of {of_rank.registration}"
        return "" if holder is None else holder.registration.conflict_with(registration)

    def _ask(self, process: Process) -> None:
        """Ask a member whether the holder of a name is alive that a process wants."""
        process.is_doubtful = True
        holder, here = self._members.named.get(process.name), self._members.here()
        if holder is None:
            self._judged(process, is_alive=False)
            return
        keeper, expire = self._members.keeper, partial(self._expire_question, process)
        judges = [each for each in here if each.connection not in process.judges]
        if judges:
            judge = min(judges, key=lambda each: (each is holder, each.name != keeper, each.rank))
            process.judges.add(judge.connection)
            self._members.send((judge,), wire.Ask(holder.name, holder.worker_id))
            expire = partial(expire, judge.connection)
        if judges or not here:  # they may connect again
            self._members.connections.call_later(JUDGE_TIMEOUT, expire)

    def _expire_question(self, process: Process, asked: int | None = None) -> None:
        """Ask another member too; let the process enter if none has come that can be asked."""
        if not self.is_entering(process):
            return
        if asked in process.judges:  # it is frozen, say
            self._ask(process)
        elif asked is None and process.is_doubtful and not process.judges:
            self._judged(process, is_alive=False)

    def judge(self, connection: int, message: wire.Verdict) -> None:
        """Hear from a member whether the holder of a name is alive."""
        process = self._entering.get(message.name)
        holder = self._members.named.get(message.name)
        if process is None or connection not in process.judges:
            return  # a late answer
        if holder is not None and holder.worker_id == message.worker_id:
            self._judged(process, is_alive=message.is_alive)
            self._admit()
        else:  # the holder has left, or another member has told of a later process
            process.judges.clear()
            self._ask(process)

    def _judged(self, process: Process, *, is_alive: bool) -> None:
        process.is_doubtful = False
        process.judges.clear()
        if is_alive:
            holder = self._members.named[process.name]
            self._refuse(process, taken(holder.registration, process.registration))
        else:
            self._enter(process)

    def _refuse(self, process: Process, text: str, missing: Sequence[int] | None = None) -> None:
        """Refuse a process; `_admit` has to follow, as its name may be free now."""
        self.forget(process)
        self._members.send((process,), wire.Failed(text, missing))

    def refuse_claim(self, name: str) -> None:
        """Refuse the process that wants the name of a member, which is alive."""
        if (process := self._entering.get(name)) is not None:
            self._judged(process, is_alive=True)
            self._admit()

    def give_up(self, process: Process, when: str, *, is_starting: bool) -> None:
        """End the entry of a process that waits no longer, perhaps while the world starts."""
        text = f"{process.registration} was not let in {when}"
        if process in self._waiting and is_starting:
            text = f"{process.name!r} joins a running world, and none is complete {when}. "
            text += "Start its first workers without join="
        self._refuse(process, text, [])
        self._admit()

    # ── numbers ─────────────────────────────────────────────────────────────────────────────────

    def learn(self, count: int, joins: int, first_ids: int = 0) -> None:
        """Note numbers that another directory has given: no process gets them here."""
        self.count, self.joins = max(self.count, count), max(self.joins, joins)
        self.first_ids = max(self.first_ids, first_ids)

    def _enter(self, process: Process) -> None:
        """Give a process its rank and worker id, unless it has them from another directory."""
        if process.worker_id < 0:
            if self.first_ids + self.count + 1 >= MAX_PROCESSES:
                self._refuse(process, _EXHAUSTED)
                return
            self.count += 1
            before = self._members.named.get(process.name)
            restarts = 0 if before is None else before.registration.restarts + 1
            own = replace(process.registration, entry=self.count, restarts=restarts)
            if own.joined:
                size = self._members.by_rank()[0].registration.world_size
                own = replace(own, rank=size + self.joins, world_size=size)
                self.joins += 1
            process.registration, process.worker_id = own, self.first_ids + self.count
        # If another directory has taken over meanwhile, the process enters there.
        self._members.connections.record(partial(self._tell_numbers, process))

    def _tell_numbers(self, process: Process) -> None:
        """Tell a process its numbers, which are recorded, and the members that it starts beside."""
        if not self.is_entering(process):  # its entry has ended meanwhile
            return
        own, every = process.registration, self._members.by_rank()
        others = [each.registration for each in every if each.name != own.name]
        listed = sorted([*others, own], key=lambda each: each.rank)
        entering = wire.Entering(own, process.worker_id, listed, self._members.world)
        self._members.send((process,), entering)
        self._members.connections.call_later(START_TIMEOUT, partial(self._expire_start, process))

    def _expire_start(self, process: Process) -> None:
        """Free the name of an entering process that has no address in time: it is frozen, say."""
        if process.member is None and self.is_entering(process):
            text = f"{process.registration} had no address within {START_TIMEOUT:g} s"
            self._refuse(process, text, [])
            self._admit()

    # ── the addition at all members ─────────────────────────────────────────────────────────────

    def publish(self, process: Process, message: wire.Publish) -> None:
        """Let every living member add a process that has an address, unless one is out of reach."""
        if process.is_doubtful:
            raise ValueError("not the time for an address")
        member, others = process.publish(message.address, message.device_maps), self._members.here()
        hidden = (process.hidden_from(each.registration.namespace) for each in others)
        if text := next(filter(None, hidden), ""):
            self._refuse(process, text)
            self._admit()
            return
        self.known = max(self.known, process.registration.entry)
        replaced = self._members.named.get(process.name)
        self._members.add(process)
        if replaced is not None and self._members.disconnect(replaced):
            self._ask_in_place_of(replaced.connection)
        others = [each for each in others if each is not replaced]
        process.unaware = {each.connection for each in others}
        self._adding[process.worker_id] = process
        self._members.send(others, wire.Add(member))
        self._members.send_list([process])
        self._members.send_ends([process])
        self._members.connections.call_later(ADD_TIMEOUT, partial(self._announce, process))
        if not others:
            self._announce(process)

    def know(self, connection: int, worker_id: int) -> None:
        """Note that a member has added a process, or that its connection has ended."""
        process = self._adding.get(worker_id)
        if process is not None and connection in process.unaware:
            process.unaware.remove(connection)
            if not process.unaware:
                self._announce(process)

    def _announce(self, process: Process) -> None:
        """Announce an entering process, unless it was: after a while also if some are unaware."""
        if self.is_entering(process):
            self._members.connections.record(partial(self._tell_all, process))

    def _tell_all(self, process: Process) -> None:
        if not self.is_entering(process):  # its entry has ended meanwhile
            return
        every, unaware = self._members.by_rank(), process.unaware
        silent = [each.name for each in every if each.connection in unaware]
        self.forget(process)
        self._members.send_all(wire.Announce(process.name, process.worker_id, silent))
        self._admit()

    # ── connections of members ──────────────────────────────────────────────────────────────────

    def gone(self, connection: int) -> None:
        """Note the end of a connection: of a member that has to add a process, or judges, say."""
        for process in [*self._entering.values()]:
            self.know(connection, process.worker_id)
        self._ask_in_place_of(connection)
        self._admit()

    def update(self, processes: Sequence[Process]) -> None:
        """Send members the list of all, and ask them to add those that enter, but for itself."""
        members = [each for each in processes if not self.is_entering(each)]
        for asked in (members, *([each] for each in processes if self.is_entering(each))):
            others = [each for each in self._adding.values() if [each] != asked]
            self._members.send_list(asked, but=others)
            self._members.send_ends(asked)
            for other in others:
                assert other.member is not None
                other.unaware.update(each.connection for each in asked)
                self._members.send(asked, wire.Add(other.member))

    def reconnect(self, before: int, after: int) -> None:
        """Note the new connection of a member, which is asked again what it was asked."""
        for each in self._adding.values():
            if before in each.unaware:
                each.unaware ^= {before, after}
        self._ask_in_place_of(before)

    def _ask_in_place_of(self, connection: int) -> None:
        """Ask again what a judge was asked whose connection has ended, or what none was asked."""
        for process in [*self._entering.values()]:
            is_unasked = process.is_doubtful and not process.judges
            if connection in process.judges or is_unasked:
                process.judges.discard(connection)
                self._ask(process)

    def is_replacing(self, process: Process) -> bool:
        """Return whether another process enters under the name of one that was found dead."""
        other = self._entering.get(process.name, process)
        return other.worker_id != process.worker_id and not other.is_doubtful

    def with_id(self, worker_id: int) -> list[Process]:
        """Return the members with that worker id, and the processes that enter with it."""
        every = (*self._members.named.values(), *self._entering.values(), *self._waiting)
        return [each for each in every if each.worker_id == worker_id]


HAS_ENDED = "the world that this process was entering has ended"
_EXHAUSTED = (
    f"this world has had {MAX_PROCESSES:,} processes, its first ones and replacement processes "
    "included, and torch's worker ids have 16 bits: no further one can enter. Start a new world"
)


def taken(holder: Registration, other: Registration) -> str:
    """Return why a process is refused that has the name of a living worker."""
    text = f"two workers have the name {holder.name!r}: the first one is alive, {holder}"
    return f"{text}. Wait until it has ended, or end it, before {other} enters"
