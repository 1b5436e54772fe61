"""The end of a world: each worker waits until others are ready to end too."""

from . import directory_messages as wire
from .members import Members, Process


class ExitBarrier:
    """The barrier of one world, which ends once a worker has come to it."""

    def __init__(self, members: Members) -> None:
        self._members = members
        self.has_begun = False
        self._unready: set[int] = set()  # ranks that are not ready, once some are
        self._awaiting: dict[Process, set[int]] = {}  # ranks
        self._awaiting_all: list[Process] = []

    def enter(self, process: Process, message: wire.Exit) -> None:
        """Note that a worker is ready, and which ones it awaits."""
        if not self.has_begun:
            self.has_begun = True
            self._unready = {each.rank for each in self._members.here() if not each.is_retiring}
        if message.is_full:
            self._awaiting_all.append(process)
        else:
            self._awaiting[process] = self._unready.intersection(message.ranks) | {process.rank}
        self.pass_rank(process.rank)

    def pass_rank(self, rank: int) -> None:
        """Wait for that rank no longer: it is ready, or gone."""
        self._unready.discard(rank)
        for process, awaited in [*self._awaiting.items()]:
            awaited.discard(rank)
            if not awaited:
                del self._awaiting[process]
                self._members.send((process,), wire.Exited())
        if not self._unready and self._awaiting_all:
            ready, self._awaiting_all = self._awaiting_all, []
            self._members.send(ready, wire.Exited())
