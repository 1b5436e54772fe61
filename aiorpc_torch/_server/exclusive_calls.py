"""Calls of peers on exclusive objects: they wait on the event loop, without a task or a thread.

Plain `def`s that wait in threads could use all of them. The call that they wait for could then not
call back.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from .._turns.turns import Turn, Turns
from .._wire.ancestry import NO_BATCHES, enter_scopes
from .calls import CreateCall, RpcCall, ServerCall
from .stream_writer import StreamCall


class Entrance(NamedTuple):
    """The turns on the object of a call, and whether the function of the call runs on the loop."""

    turns: Turns
    on_loop: bool


class CallInTurn(ServerCall):
    """A call on an exclusive object. Its turn ends when its function has ended."""

    turn: Turn | None = None

    def __init__(self, entrance: Entrance, *how: Any) -> None:
        super().__init__(*how)
        self._entrance: Entrance | None = entrance  # while the call waits for its turn

    def enter(self, begin: Callable[[], None]) -> bool:
        """Enter the queue; return whether the turn has begun, otherwise `begin` is called later.

        Raises RuntimeError if the call would wait for itself.
        """
        batches = NO_BATCHES if self.scope is None else self.scope.batches
        assert self._entrance is not None
        turns = self._entrance.turns
        self.turn = turn = Turn(turns, begin)
        self.leave_queue = turn.leave
        return turns.enter(turn, self.name, batches)

    def begin(self) -> bool:
        """Begin the turn; return whether the function runs on the loop."""
        assert self._entrance is not None
        runs_on_loop = self._entrance.on_loop
        self._entrance = self.leave_queue = None
        return runs_on_loop

    def invoke(self) -> Any:
        self.enter_context()
        return super().invoke()

    def enter_context(self) -> None:
        super().enter_context()
        assert self.turn is not None
        scopes = frozenset((self.turn.scope(),))
        enter_scopes(scopes if self.scope is None else scopes | {self.scope})

    def succeed(self, value: Any) -> None:
        try:
            super().succeed(value)
        finally:  # later calls wait for the turn
            self._leave()

    def fail(self, exc: BaseException) -> None:
        try:
            super().fail(exc)
        finally:
            self._leave()

    def abandon(self, exc: BaseException) -> None:
        super().fail(exc)
        if self._entrance is not None:  # it waits; otherwise its function still runs
            self._leave()

    def _leave(self) -> None:
        if self.turn is not None:
            self.turn.leave()


class ExclusiveCall(CallInTurn, RpcCall):
    """A call of a function."""


class ExclusiveCreate(CallInTurn, CreateCall):
    """A call of a function whose result stays on this worker."""


class ExclusiveStream(CallInTurn, StreamCall):
    """A call of a generator. Its turn ends when the generator has ended."""
