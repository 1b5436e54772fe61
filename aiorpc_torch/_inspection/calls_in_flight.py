"""The calls in flight in this process."""

import time
from dataclasses import dataclass

from .._client import pool
from .._endpoint import entry_points
from .._endpoint.runtime import mark_runs_on_loop
from .._wire.targets import target_name


@dataclass(frozen=True, slots=True)
class PendingCall:
    """A call or stream that has not ended.

    Attributes:
        method: Name of the method or function.
        worker: The callee of an outgoing call, the caller of an incoming one.
        age: Seconds since it was made, or since it arrived.
        incoming: Whether another worker, or this one, has called this process.
    """

    method: str
    worker: str
    age: float
    incoming: bool


@mark_runs_on_loop  # a worker whose threads all hang must still tell
def pending() -> list[PendingCall]:
    """Return the calls in flight, the oldest first: those made here and those that run here.

    An outgoing call is in flight until its result is here, an incoming one until it is answered.
    Incoming calls may wait for a batch, for a turn on an exclusive object or for a payload. A call
    of this worker to itself is in the list twice. Calls of plain torch clients are in the list if
    they are of `async_execution` or `@batched` functions. Their worker is "a torch client".
    Callable from any thread; outside a world the list is empty. `await call("w", observe.pending)`
    returns the list of worker `w`, from its event loop: it needs no free thread there. Incoming
    calls of this function are not in the list.
    """
    now, connections, server = time.monotonic(), pool.find_current(), entry_points.serving()
    outgoing = [
        (target_name(each.receiver.source), each.connection.peer.name, each.receiver.started)
        for each in ([] if connections is None else connections.outgoing(None))
    ]
    incoming = [] if server is None else server.running_calls(but=pending)
    calls = [
        PendingCall(method, worker, max(0.0, now - started), is_incoming)
        for is_incoming, found in ((False, outgoing), (True, incoming))
        for method, worker, started in found
    ]
    return sorted(calls, key=lambda call: call.age, reverse=True)
