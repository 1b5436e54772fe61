"""The end of a world: each worker waits until others are ready to end too."""

from . import directory_messages as wire
from .members import Members, Process


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
