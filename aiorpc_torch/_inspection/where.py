"""Lines at which the calls of this process stand, at any worker."""

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from .._client import pool
from .._client.pool import Outgoing
from .._node.standing import ask
from .._wire.standing import MOST_CALLS, CallNode, Limits, Standings, standings_of

SECONDS = 1.0
"""Seconds for which an answer is waited for."""


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


async def where_of(calls: Sequence[Outgoing], seconds: float = SECONDS) -> Standings:
    """Return where pending calls of this process stand."""
    by_connection = defaultdict[Any, list[Outgoing]](list)
    for each in calls:
        if len(found := by_connection[each.connection]) < MOST_CALLS:
            found.append(each)
    limits = Limits(MOST_CALLS, seconds)
    answers = await asyncio.gather(*(ask(each, (), limits) for each in by_connection.values()))
    nodes: list[CallNode] = [node for answer in answers for node in answer]
    return Standings(sorted(standings_of(nodes), key=lambda each: each.age, reverse=True))
