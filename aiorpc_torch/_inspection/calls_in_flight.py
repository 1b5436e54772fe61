"""The calls in flight in this process, and the lines at which they stand, at any worker."""

import asyncio
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .._client import pool
from .._client.pool import Outgoing
from .._endpoint import entry_points
from .._endpoint.runtime import mark_runs_on_loop
from .._node.where import ask
from .._wire.targets import target_name
from .._wire.where import MOST_CALLS, Limits, Standings, standings_of


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
    calls: list[PendingCall] = []
    for each in () if connections is None else connections.outgoing(None):
        method, worker = target_name(each.receiver.target), each.connection.peer.name
        age = max(0.0, now - each.receiver.started)
        calls.append(PendingCall(method, worker, age, incoming=False))
    for call in () if server is None else server.open_calls():
        if call.function is not pending:
            age = max(0.0, now - call.started)
            calls.append(PendingCall(call.name, call.caller, age, incoming=True))
    return sorted(calls, key=lambda call: call.age, reverse=True)


async def where() -> Standings:
    """Return where the calls and streams stand that this process has made, and why they wait.

        print(await aiorpc.observe.where())

    For each of them: the line of the method at its worker, and what that waits for in turn, over
    all workers: further calls, the lock, the turn or the batch that another call has. Calls that
    wait for each other are named as a deadlock.

    The workers look at their frames when they are asked, and at nothing before. They are asked over
    the connections of the calls, also those that restrict their exports. No values are read. An
    answer is waited for at most a second: the event loop of a worker may be blocked, its process
    frozen, or its host out of reach.

    Of many calls the 64 oldest of each connection are in the result, the oldest first. Outside of a
    world it is empty. `await call("w", observe.where)` returns the calls of worker `w`. From
    synchronous code: `me.run(observe.where)`.
    """
    connections = pool.find_current()
    return await where_of([] if connections is None else connections.outgoing())


async def where_of(calls: Sequence[Outgoing], seconds: float = 1.0) -> Standings:
    """Return where pending calls of this process stand; wait `seconds` for an answer."""
    by_connection = defaultdict[Any, list[Outgoing]](list)
    for each in calls:
        if len(found := by_connection[each.connection]) < MOST_CALLS:
            found.append(each)
    limits = Limits(MOST_CALLS, seconds)
    answers = await asyncio.gather(*(ask(each, (), limits) for each in by_connection.values()))
    nodes = [node for answer in answers for node in answer]
    return Standings(sorted(standings_of(nodes), key=lambda each: each.age, reverse=True))
