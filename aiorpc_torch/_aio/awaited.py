"""Names of what a thread waits for, in a call that may block without end. See `blocking`."""

import contextlib
import contextvars
from collections.abc import Iterator

awaited: contextvars.ContextVar[list[str]] = contextvars.ContextVar("awaited")
"""The clauses of `blocking_on` around this code, if a `BlockingCall` runs it."""


@contextlib.contextmanager
def blocking_on(text: str) -> Iterator[None]:
    """Name what the block waits for, in the error of the `BlockingCall` that runs it.

    Args:
        text: a clause with what does not answer, and the remedy.
    """
    texts = awaited.get(None)
    if texts is None:
        yield
        return
    texts.append(text)
    try:
        yield
    finally:
        texts.pop()
