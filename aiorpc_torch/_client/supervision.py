"""The state machine of a supervised object: which calls may start, which wait, when it is made.

It has no event loop, no clock and no torch. `Supervised` acts for it: it waits for the process,
makes the object, and resolves the tokens of the waiting calls.
(tests/unit/client/test_supervision.py)
"""

from collections.abc import Hashable
from typing import Generic, Literal, TypeVar

Token = TypeVar("Token", bound=Hashable)

State = Literal["alive", "lost", "making", "ended"]


class Supervision(Generic[Token]):
    """The state of one supervised object, and the calls that wait for it.

    Calls start in the order in which they came. So a call also waits while calls that came before
    it have been released and have not started.

    Attributes:
        state: "alive"; "lost" until its process is replaced or alive again; "making"; "ended" while
            its process is not started again.
        incarnation: number of times that it was made again.
    """

    def __init__(self) -> None:
        self.state: State = "alive"
        self.incarnation = 0
        self._recovers = False
        self._waiting: dict[Token, None] = {}
        self._released: dict[Token, None] = {}  # have not started yet

    @property
    def is_open(self) -> bool:
        """Return whether a call may start at once."""
        return self.state == "alive" and not self._released

    # ── calls ───────────────────────────────────────────────────────────────────────────────────

    def wait(self, token: Token) -> None:
        """Add a call that waits, behind those that do."""
        self._waiting[token] = None

    def leave(self, token: Token) -> None:
        """Remove a call: it has started, or does not wait any more."""
        self._waiting.pop(token, None)
        self._released.pop(token, None)

    def release(self) -> list[Token]:
        """Return the waiting calls that start now, in order: all if the object is alive."""
        return self._take(self._released) if self.state == "alive" else []

    def _take(self, into: dict[Token, None] | None = None) -> list[Token]:
        taken, self._waiting = self._waiting, {}
        if into is not None:
            into.update(taken)
        return [*taken]

    # ── losses ──────────────────────────────────────────────────────────────────────────────────

    def lose(self, incarnation: int) -> None:
        """Note that a call has found an incarnation lost."""
        if self.state == "alive" and incarnation == self.incarnation:
            self.state = "lost"

    def begin_recovery(self) -> bool:
        """Return whether a recovery is to begin: the object is lost, and none is under way."""
        begins = self.state == "lost" and not self._recovers
        self._recovers = self._recovers or begins
        return begins

    # ── the recovery that is under way ──────────────────────────────────────────────────────────

    def resume(self) -> None:
        """Note that its process is alive and was not replaced: it was silent only."""
        self._end_recovery("alive")

    def make(self) -> None:
        """Note that its process was replaced: the object is being made again."""
        self.state = "making"

    def made(self) -> None:
        """Note that the object was made again."""
        self.incarnation += 1
        self._end_recovery("alive")

    def lose_again(self) -> None:
        """Note that the process was lost in which the object was being made."""
        self.state = "lost"

    def fail(self) -> list[Token]:
        """End the recovery with an exception; return the calls that get it.

        The next call begins another recovery.
        """
        self._end_recovery("lost")
        return self._take()

    def end(self) -> list[Token]:
        """End the object: its process is not started again. Return the calls that waited."""
        self._end_recovery("ended")
        return self._take()

    def reopen(self) -> None:
        """Note that a process was started all the same: the object may be made again."""
        if self.state == "ended":
            self.state = "lost"

    def _end_recovery(self, state: State) -> None:
        self.state = state
        self._recovers = False
