"""What this process has done and is doing: a snapshot, gathered from where it is counted."""

from dataclasses import dataclass, field

from ._batching.stats import BatchStats, batch_stats
from ._client import pool
from ._protocol import endpoints

__all__ = ("Stats", "stats")


@dataclass(frozen=True, slots=True)
class Stats:
    """Of this process, since it entered its world."""

    calls: int = 0
    """Calls and streams made from here."""
    in_flight: int = 0
    """Of those, how many are awaited now."""
    unsent: int = 0
    """Of those, how many wait for room in their peer's window."""
    messages: int = 0
    """Frames of calls sent, and messages of torch's: calls that travel together share one."""
    bytes_sent: int = 0
    """Bytes of those messages, large tensors included."""
    late: int = 0
    """Answers to calls that nobody waited for any more."""
    served: int = 0
    """Calls and streams that came in from other workers, or from this one."""
    running: int = 0
    """Of those, how many are not answered yet."""
    held_bytes: int = 0
    """Bytes of large results that are kept until their callers have collected them."""
    batches: dict[str, BatchStats] = field(default_factory=dict)
    """Of each `@batched` function that was called here, by its qualified name, since it was made.
    """


def stats() -> Stats:
    """A snapshot of this process's calls, messages and batches."""
    served = running = held = 0
    if (server := endpoints.serving()) is not None:
        served, running, held = server.tally()
    outbox = pool.find_current()
    sent = outbox.tally() if outbox else {}
    return Stats(served=served, running=running, held_bytes=held, batches=batch_stats(), **sent)
