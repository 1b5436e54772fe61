"""The admission of rollouts by how stale they may get: `StalenessLimit`."""

import contextlib
import secrets
import weakref
from collections.abc import AsyncIterator, Iterator

from .._gauges import measure
from .admission import Admission, Ticket
from .waiting import Changes, Line, ends_at_leave

_limits: "weakref.WeakValueDictionary[str, StalenessLimit]" = weakref.WeakValueDictionary()


class StalenessLimit:
    """A limit of the rollouts that run at once, and of how old their weights may get.

        limit = StalenessLimit(max_staleness=2, max_in_flight=16)  # at the learner
        await limit.advance(await weights.publish(model.state_dict()))

        async with aiorpc.remote(limit).ticket() as ticket:  # at an actor, `limit` an RRef
            await policy.wait(ticket.version)
            ...

    A rollout begins with the newest version. While it runs, at most `max_staleness` newer versions
    are announced: `advance` waits for the rollouts that are too old, and rollouts that would be too
    old wait for `advance`. Use it on the event loop of its worker, or through an RRef.

    Args:
        max_staleness: maximum number of versions by which a rollout that runs is behind. With 0,
            no rollout runs while a version is announced; None is no maximum.
        max_in_flight: maximum number of rollouts that run.
        version: the version at the start.

    Raises:
        ValueError: if an argument is invalid.
    """

    def __init__(self, max_staleness: int | None, max_in_flight: int, *, version: int = 0) -> None:
        self._admission = Admission(max_staleness, max_in_flight, version)
        self._name = secrets.token_hex(8)
        _limits[self._name] = self
        self._rollouts = Line()
        self._announcements = Changes()
        measure(self)

    def __repr__(self) -> str:
        return (
            f"<StalenessLimit at version {self.version}, {self.in_flight} in flight, "
            f"{len(self._rollouts)} waiting>"
        )

    @property
    def version(self) -> int:
        """Return the newest version that was announced."""
        return self._admission.version

    @property
    def in_flight(self) -> int:
        """Return the number of rollouts that run."""
        return self._admission.in_flight

    @property
    def staleness(self) -> int:
        """Return how many versions the oldest rollout that runs is behind."""
        return self._admission.staleness

    @ends_at_leave
    @contextlib.asynccontextmanager
    async def ticket(self) -> AsyncIterator[Ticket]:
        """Wait until a rollout may start, in the order of arrival; `async with` its ticket.

        The ticket is given back at the end of the block, whatever ends it: also a cancellation, a
        deadline, or the loss of the process that holds it.

        Raises:
            CallTimeout: if the deadline passes before the rollout may start.
        """
        await self._rollouts.turn(self._admission.may_start, "the wait for a ticket", self.__repr__)
        ticket = self._admission.start()._replace(limit=self._name)
        try:
            yield ticket
        finally:
            self._admission.end(ticket)
            self._notify()

    async def advance(self, version: int) -> int:
        """Announce a version, once no rollout that runs would be too old; return the newest.

        While it waits, rollouts of the present version wait too if they would be too old for the
        one to come. If it is cancelled, the version is not announced.

        Raises:
            CallTimeout: if the deadline passes.
            ValueError: if `version` is no number of a version.
        """
        self._admission.propose(version)
        try:
            await self._announcements.until(
                lambda: self._admission.may_announce(version),
                f"the wait for rollouts that are too old for version {version}",
                self.__repr__,
            )
            self._admission.announce(version)
        finally:
            self._admission.withdraw(version)
            self._notify()
        return self.version

    def _numbers(self) -> dict[str, float]:
        return {
            "aiorpc_staleness_versions": self.staleness,
            "aiorpc_staleness_rollouts": self.in_flight,
            "aiorpc_staleness_waiting_rollouts": len(self._rollouts),
        }

    def _notify(self) -> None:
        self._rollouts.notify()
        self._announcements.notify()


@contextlib.contextmanager
def parked(ticket: Ticket | None) -> Iterator[None]:
    """Let no version wait for the rollout of a ticket inside the block: it waits itself.

    It does nothing if the ticket's limit is in another process.
    """
    limit = None if ticket is None else _limits.get(ticket.limit)
    if limit is None or ticket is None:
        yield
        return
    limit._admission.park(ticket)
    limit._announcements.notify()
    try:
        yield
    finally:
        limit._admission.unpark(ticket)
