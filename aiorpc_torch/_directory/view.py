"""The world as a member knows it from the directory: enough to take the place of that."""

from collections.abc import Iterable

from . import directory_messages as wire
from .directory_messages import Known, Member, ToWorker
from .registration import Registration

MAX_LEAVING = 256  # members that have left last, which the directory may still know


class View:
    """The world as one member has heard of it."""

    def __init__(self) -> None:
        self.entries = self.joins = 0
        """Entries, and those of them under a new rank, up to the last that this member knows."""
        self.world = ""
        self._first_ids = 0  # the highest worker id of the start
        self._members: dict[str, Member] = {}
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

    def _add(self, member: Member) -> None:
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

    def known(self, lost: Iterable[str], left: Iterable[str] = ()) -> Known:
        """Return what a directory has to know: and who is lost, or has told of its leave."""
        members, leaving = [*self._members.values()], [*{**self._leaving, **dict.fromkeys(left)}]
        numbers = self.entries, self.joins, self._first_ids
        return Known(*numbers, members, leaving, [*lost], self.world)
