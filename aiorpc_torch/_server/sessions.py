"""The sessions of one worker: its connected callers, and the running calls of each."""

import asyncio
from itertools import islice

from .._wire.messages import SessionKey
from .calls import RpcCall
from .session import Session


class SessionTable(dict[SessionKey, Session]):
    """The open sessions of worker `name`, and the ended ones that have calls which still run.

    The worker's loop changes the table; any thread may read it.
    """

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name
        self._ended: list[Session] = []
        self._served = 0  # calls of ended sessions

    def add(self, session: Session) -> None:
        """Add an open session; one with the same key was given up by its caller."""
        if (former := self.get(session.key)) is not None:
            former.abort()
        self[session.key] = session

    def end(self, session: Session) -> None:
        """Cancel the calls of a session that has ended."""
        if self.get(session.key) is session:
            del self[session.key]
        self._served += session.dispatcher.served
        _cancel_calls(session)
        self._ended = [each for each in (*self._ended, session) if each.calls]

    def of(self, caller: str) -> list[Session]:
        """Return the open sessions of a worker."""
        return [each for each in [*self.values()] if each.caller == caller]

    def of_peers(self) -> list[Session]:
        """Return the open sessions of other workers."""
        return [each for each in [*self.values()] if each.caller != self._name]

    def callers(self) -> set[str]:
        """Return the workers that have calls running here."""
        return {each.caller for each in [*self.values()] if each.calls}

    def connected(self) -> set[str]:
        """Return the workers that have a connection to this one."""
        return {each.caller for each in [*self.values()]}

    def linked(self) -> set[str]:
        """Return the workers that have an open connection to this one."""
        return {each.caller for each in [*self.values()] if each.is_open}

    def open_calls(self, most: int | None = None) -> list[RpcCall]:
        """Return the unanswered calls; at most the `most` oldest of each session."""
        every = (*self.values(), *self._ended)
        return [call for each in every for call in [*islice(each.calls.values(), most)]]

    def tally(self) -> tuple[int, int, int]:
        """Return the calls served, those that run, and the bytes of held results."""
        sessions = [*self.values()]
        served = self._served + sum(each.dispatcher.served for each in sessions)
        running = sum(len(each.calls) for each in (*sessions, *self._ended))
        return served, running, sum(each.held_bytes for each in sessions)

    def has_work(self) -> bool:
        """Return whether a call runs or is on its way, or a result waits to be collected."""
        return bool(self.open_calls()) or any(each.has_work() for each in self.values())

    def ping(self, caller: str) -> None:
        """Ask the event loops of a worker for a sign of life, on each connection."""
        for session in self.of(caller):
            session.ping()

    def check_paths(self, timeout: float) -> None:
        """End the connections whose path has carried nothing for `timeout` seconds."""
        for session in [*self.values()]:
            session.check_path(timeout)

    def cancel_calls_of(self, caller: str, why_lost: str | None = None) -> None:
        """Cancel the calls of a worker, because it was lost or has left."""
        for session in self.of(caller):
            _cancel_calls(session, why_lost)


def _cancel_calls(session: Session, why_lost: str | None = None) -> None:
    for call in [*session.calls.values()]:
        if not call.is_cancelled:
            call.why_lost = why_lost
        call.cancel()
        if call.task is None:  # in a thread, or waits for a payload
            call.abandon(asyncio.CancelledError())
