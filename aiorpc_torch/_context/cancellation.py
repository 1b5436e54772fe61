"""`is_cancelled`: whether a caller still waits for what a plain `def` computes."""

from collections.abc import Callable
from contextvars import ContextVar

_is_given_up: ContextVar[Callable[[], bool]] = ContextVar("aiorpc_given_up", default=lambda: False)

ask_whether_given_up = _is_given_up.set
"""Let `is_cancelled` ask this function in the current context. A function of C."""


def is_cancelled() -> bool:
    """Return whether the callers of the plain `def` that runs have left.

        def train(self, steps: int) -> float:
            for step in range(steps):
                if aiorpc.is_cancelled():
                    break
                ...

    The caller has cancelled the call or is lost, or the deadline of the call has passed. In a
    `@batched` plain `def`: all callers have left. A plain `def` cannot be interrupted, so a long
    one asks now and then. An `async def` needs not: it gets CancelledError at an `await`. False
    outside a call.
    """
    return _is_given_up.get()()
