"""Members of a running world that connect again: at this directory, or after another one's end.

Each member keeps a `View` of its world, so any of them can tell a new directory what it must know.
"""

import hmac
from collections.abc import Callable, Iterable
from functools import partial

from . import directory_messages as wire
from .directory_messages import FromWorker, ToWorker
from .entries import HAS_ENDED, Entries, taken
from .members import Connections, Members, Process, digest
from .registration import MAX_PROCESSES, Registration

RESUME_TIMEOUT = 2.0  # seconds for the members to connect to a directory that has taken over
ANSWER_TIMEOUT = 2.0  # seconds for a survivor to tell what it knows
MAX_HELD = 16  # messages of a survivor
MAX_UNKNOWN = 64  # entries that no member knows of, when a directory has taken over
MAX_LEAVING = 256  # members that have left last, which the directory may still know


def check_numbers(known: wire.Known) -> None:
    """Raise ValueError if a world cannot have these numbers."""
    ranks = (each.rank for each in known.members)
    ids = (each.worker_id for each in known.members)
    numbers = known.entries, known.joins, known.first_ids, *ranks, *ids
    if not all(0 <= each < 2 * MAX_PROCESSES for each in numbers):
        raise ValueError("no numbers of a world")


class View:
    """The world as one member has heard of it: enough to take the place of the directory."""

    def __init__(self) -> None:
        self.entries = self.joins = 0
        """Entries, and those of them under a new rank, up to the last that this member knows."""
        self.world = ""
        self._first_ids = 0  # the highest worker id of the start
        self._members: dict[str, wire.Member] = {}
        self._leaving: dict[str, None] = {}  # oldest first

    def hear(self, message: ToWorker) -> None:
        """Note what a message of the directory tells."""
        match message:
            case wire.Registered(_, world):
                self.world = world
            case wire.Entering(own, _, _, world):
                self.world = world
                self.count(own)
            case wire.Members(members):
                self._members.clear()
                self._leaving.clear()
                for each in members:
                    self._add(each)
            case wire.Add(member):
                self._add(member)
            case wire.Left(name, worker_id):
                known = self._members.get(name)
                if known is not None and known.worker_id == worker_id:
                    self._leaving[name] = None
                if len(self._leaving) > MAX_LEAVING:  # a world of a week has thousands
                    oldest = next(iter(self._leaving))
                    del self._leaving[oldest], self._members[oldest]

    def _add(self, member: wire.Member) -> None:
        own = member.registration
        self._members[own.name] = member
        self._leaving.pop(own.name, None)
        self._first_ids = max(self._first_ids, member.worker_id - own.entry)
        self.count(own)

    def count(self, entered: Registration) -> None:
        """Note the numbers of a process, so that no other one gets them."""
        self.entries = max(self.entries, entered.entry)
        if entered.joined:
            self.joins = max(self.joins, entered.rank - entered.world_size + 1)

    def known(self, lost: Iterable[str], left: Iterable[str] = ()) -> wire.Known:
        """Return what a directory has to know: and who is lost, or has told of its leave."""
        members, leaving = [*self._members.values()], [*{**self._leaving, **dict.fromkeys(left)}]
        numbers = self.entries, self.joins, self._first_ids
        return wire.Known(*numbers, members, leaving, [*lost], self.world)


class Survivors:
    """Members of a running world that connect to the directory of a start.

    They may come within `grace` seconds. One after another is asked what it knows, until one has
    answered; what they send meanwhile is held. `on_none` is called when there is none any more.
    """

    def __init__(self, connections: Connections, grace: float, on_none: Callable[[], None]) -> None:
        self._connections, self._on_none = connections, on_none
        self.held: dict[int, list[FromWorker]] = {}  # by connection
        self.asked: int | None = None  # connection of the one that is asked what it knows
        self.has_grace = grace > 0.0
        if self.has_grace:
            connections.call_later(grace, self._end_grace)

    def _end_grace(self) -> None:
        self.has_grace = False
        if not self.held:
            self._on_none()

    def add(self, connection: int, message: wire.Resume) -> None:
        """Add one that has connected."""
        self.held[connection] = [message]
        self._ask_next()

    def hold(self, connection: int, message: FromWorker) -> bool:
        """Keep a message; return whether it is of a survivor, and not one too many."""
        if not 0 < len(held := self.held.get(connection, [])) < MAX_HELD:
            return False
        held.append(message)
        return True

    def _ask_next(self) -> None:
        if self.asked is None and self.held:
            self.asked = next(iter(self.held))
            self._connections.send([self.asked], wire.Recall())
            self._connections.call_later(ANSWER_TIMEOUT, partial(self._expire, self.asked))

    def _expire(self, connection: int) -> None:
        """Wait no longer for what a survivor knows: it is frozen, say."""
        if connection == self.asked:
            self._connections.close_connection(connection)
            self.forget(connection)

    def check(self, connection: int, known: wire.Known) -> None:
        """Check what the one knows that is asked: it must be a member of that world."""
        check_numbers(known)
        resumed = self.held[connection][0]
        assert isinstance(resumed, wire.Resume)
        found = {each.name: each for each in known.members}.get(resumed.registration.name)
        if not resumed.key or found is None or found.digest != digest(resumed.key):
            raise ValueError("it is no member of the world that it knows")
        self.asked = None

    def forget(self, connection: int) -> None:
        """Note the end of a connection."""
        if self.held.pop(connection, None) is not None:
            if connection == self.asked:
                self.asked = None
                self._ask_next()
            if not self.held:
                self._on_none()


class Succession:
    """The return of members to a directory that knows their world.

    One that has taken it over knows what one member has told. It lets no process enter until the
    members are connected, or do not come for some seconds.
    """

    def __init__(self, members: Members, entries: Entries) -> None:
        self._members, self._entries = members, entries
        self.is_resuming = False  # whether it has taken over, and waits for members
        self._absent: set[str] = set()  # members that may be alive, and have not connected yet
        self.recalled: set[int] = set()  # connections of those that are asked what they know
        self._resumed: dict[Process, int] = {}  # the entries that each knows of, until that is over

    def begin(self, known: wire.Known) -> None:
        """Take over a world as one member knows it. `end_if_complete` has to follow."""
        self.is_resuming = True
        self._members.world = known.world
        self._learn(known)
        self._members.connections.call_later(RESUME_TIMEOUT, self._end)

    def _learn(self, known: wire.Known) -> None:
        """Add the members that another one knows; they are not connected yet."""
        check_numbers(known)
        self._entries.learn(known.entries, known.joins, known.first_ids)
        self._entries.known = max(self._entries.known, known.entries)
        lost, leaving = {*known.lost}, {*known.leaving}
        replaced: list[int] = []
        for each in known.members:
            held = self._members.named.get(each.name)
            if held is not None and held.worker_id >= each.worker_id:
                continue
            if held is not None and self._members.disconnect(held):
                replaced.append(held.connection)
            process = Process(each.registration, each.digest, each.worker_id)
            process.publish(each.address, each.device_maps)
            process.is_lost, process.is_retiring = each.name in lost, each.name in leaving
            self._members.add(process)
            if not process.is_lost:
                self._absent.add(each.name)
        for connection in replaced:  # its process may judge
            self._entries.gone(connection)

    def answer(self, connection: int, known: wire.Known) -> None:
        """Add what a member knows that was asked."""
        self.recalled.discard(connection)
        self._learn(known)
        if self.is_resuming:
            self.end_if_complete()
        else:
            self._entries.update(self._members.here())

    def forget(self, connection: int) -> None:
        """Note the end of a connection."""
        if connection in self.recalled:
            self.recalled.discard(connection)
            self.end_if_complete()

    def end_if_complete(self) -> None:
        """End the wait for the members once all that may be alive are connected."""
        if not (self.recalled or self._absent):
            self._end()

    def _end(self) -> None:
        if not self.is_resuming:
            return
        for each in [*self._members.named.values()]:
            if each.is_retiring and (each.has_left or not each.is_open):
                self._members.remove(each)
                self._members.send_all(wire.Left(each.name, each.worker_id))
        # Not the list of all members to all of them.
        here, count = self._members.here(), self._entries.count
        current = [each for each in here if self._resumed.get(each) == count]
        self._members.send(current, wire.Moved(self._members.keeper))
        self._members.send_ends(current)
        if behind := [each for each in here if self._resumed.get(each) != count]:
            self._entries.update(behind)
        self.recalled.clear()
        self._resumed.clear()
        self.is_resuming = False
        self._entries.open()

    def resume(self, connection: int, message: wire.Resume, *, has_ended: bool) -> None:
        """Take a process's new connection in place of one that has ended, or will.

        A process that was replaced learns that its world is over, also if that `has_ended`.
        """
        own, key = message.registration, digest(message.key)
        process = self._members.named.get(own.name)
        if has_ended or message.world != self._members.world or not message.key:
            self._turn_away(connection, message, wire.Failed(HAS_ENDED, []))
        elif process is None or process.worker_id != message.worker_id:
            self._enter_again(connection, message)
        elif not hmac.compare_digest(process.digest, key) or self._entries.is_replacing(process):
            self._members.connections.send([connection], wire.Ended())
        elif message.is_member:
            self._entries.refuse_claim(own.name)  # no judge has answered: this process is alive
            if self.is_resuming:
                self._resumed[process] = message.entries
            self._reopen(process, connection)
            if message.entries > self._entries.known:  # it knows of others that have entered
                self.recalled.add(connection)
                self._members.connections.send([connection], wire.Recall())
            elif not self.is_resuming:  # else it is told at the end of that
                self._entries.update([process])
        else:
            self._enter_again(connection, message)
        self.end_if_complete()

    def _reopen(self, process: Process, connection: int) -> None:
        if not self._members.disconnect(process) and not self.is_resuming:
            # Those that have entered meanwhile took it for lost: they ping it.
            self._members.send_all(wire.Gone(process.name, process.worker_id))
        before = process.connection
        self._members.connect(process, connection)
        self._entries.reconnect(before, connection)
        self._absent.discard(process.name)
        process.is_lost = False

    def _enter_again(self, connection: int, message: wire.Resume) -> None:
        """Let a process enter whose entry another directory had begun: it keeps its numbers."""
        own, worker_id, entries = message.registration, message.worker_id, self._entries
        key, holder = digest(message.key), self._members.named.get(own.name)
        if holder is not None and holder.worker_id > worker_id:
            failure = wire.Failed(taken(holder.registration, own))
            self._turn_away(connection, message, failure)
            return
        same = entries.with_id(worker_id)
        is_own = all(
            each.name == own.name and hmac.compare_digest(each.digest, key) for each in same
        )
        if not (is_own and self._is_possible(own, worker_id)):
            text = f"{own} was to enter, and another process has got its number meanwhile"
            self._turn_away(connection, message, wire.Failed(text, []))
            return
        for each in same:  # it stays a member if it is one: others may have added it
            entries.forget(each)
            if self._members.disconnect(each):
                entries.gone(each.connection)
            self._absent.discard(own.name)
        entries.learn(own.entry, own.rank - own.world_size + 1 if own.joined else 0)
        process = Process(own, key, worker_id)
        self._members.connect(process, connection)
        entries.wait(process)

    def _is_possible(self, own: Registration, worker_id: int) -> bool:
        """Return whether another directory of this world may have given these numbers."""
        entries, members = self._entries, self._members.by_rank()
        size = members[0].registration.world_size if members else 0
        most = size + entries.joins + MAX_UNKNOWN if own.joined else size
        is_entry = 0 < own.entry <= entries.count + MAX_UNKNOWN
        has_id = worker_id == entries.first_ids + own.entry
        return is_entry and has_id and own.world_size == size and 0 <= own.rank < most

    def _turn_away(self, connection: int, message: wire.Resume, failure: wire.Failed) -> None:
        answer = wire.Ended() if message.is_member else failure
        self._members.connections.send([connection], answer)
