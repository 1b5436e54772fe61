"""Snapshots of this worker for `python -m aiorpc_torch top`: counters, waits and stacks.

They are taken in a thread of their own, without locks: the event loop may be blocked. What grows
with the calls in flight is cut, so a snapshot takes about a millisecond.
"""

import asyncio
import dataclasses
import os
import sys
import threading
import time
from typing import Any

from .._aio.loop_lag import LoopLag, stack_of_thread
from .._aio.slow_steps import slow_steps
from .._node.node import Node
from .._server.calls import ServerCall
from .._server.timings import timings
from .._version import __version__
from ..errors import WorkerLost
from .calls_in_flight import where_of
from .counters import gpu_use, stats
from .dump import stack_of

OLDEST = 8  # calls of each connection in a snapshot
OLDEST_IN_DETAIL = 50
LAG_WINDOW = 1.5  # seconds, over which the longest lag is told
BLOCKED = 0.1  # seconds of lag from which the stack of the loop's thread is told
MOST_TEXT = 300  # characters of a reason
WHERE_SECONDS = 0.15  # for the workers to tell where calls stand


def take(node: Node, world: str, lag: LoopLag, thread: int, *, detail: bool) -> dict[str, Any]:
    """Return what `top` shows of this worker, as JSON has it.

    Args:
        node: this worker.
        world: text that names its world.
        lag: the lag of its event loop.
        thread: identifier of the loop's thread.
        detail: whether to add the oldest calls with their stacks.
    """
    members = node.members
    found: dict[str, Any] = {
        "version": __version__,
        "time": time.monotonic(),
        "pid": os.getpid(),
        "name": members.name,
        "world": world,
        "members": {each.name: each.rank for each in [*members.workers.values()]},
        "processes": {each.name: each.worker_id for each in [*members.workers.values()]},
        "coordinator": members.coordinator,
        "restarts": members.restarts,
        "gpus": gpu_use(),
        "lost": {
            name: (error.reason if isinstance(error, WorkerLost) else str(error))[:MOST_TEXT]
            for name, error in members.lost().items()
        },
        "left": [name for name, failure in members.told().items() if not failure],
        "stats": dataclasses.asdict(stats()),
        "timings": timings.snapshot(),
        "slow_steps": slow_steps.counts(),
        "waits": _waits(node),
        "serving": [_describe(call) for call in _oldest(node, OLDEST)],
        "loop": {"lag": lag.longest(LAG_WINDOW), "blocked": 0.0},
    }
    if lag.blocked_for() >= BLOCKED and (stack := stack_of_thread(thread)) is not None:
        found["loop"] |= {"function": stack.function, "stack": [*stack.frames]}
        found["loop"]["blocked"] = lag.blocked_for()  # 0.0 if the loop went on meanwhile
    if detail:
        found["calls"] = []
        for call in _oldest(node, OLDEST_IN_DETAIL):
            frames = () if call.task is None else stack_of(call.task.get_coro())
            stack_of_call = [line.strip() for line in frames]
            found["calls"].append({**_describe(call), "stack": stack_of_call})
        found["threads"] = _threads()
        found["where"] = [] if lag.blocked_for() >= BLOCKED else _where(node)
    return found


def _waits(node: Node) -> list[dict[str, Any]]:
    """Return for each peer the calls that this worker waits for, and the oldest of them."""
    now, found = time.monotonic(), []
    for peer, (count, oldest) in node.pool.waits(OLDEST).items():
        method, started = min(oldest, key=lambda call: call[1], default=("", now))
        found.append({"worker": peer, "calls": count, "method": method, "age": now - started})
    return found


def _oldest(node: Node, most: int) -> list[ServerCall]:
    """Return the oldest calls that run here."""
    return sorted(node.server.open_calls(most), key=lambda call: call.started)[:most]


def _describe(call: ServerCall) -> dict[str, Any]:
    age = max(0.0, time.monotonic() - call.started)
    stream = not getattr(call, "sends_value", True)
    return {"method": call.name, "worker": call.caller, "age": age, "stream": stream}


def _where(node: Node) -> list[str]:
    """Return where the oldest calls stand that this worker has made, as text."""
    if not (calls := sorted(node.pool.outgoing(), key=lambda each: each.receiver.started)):
        return []
    asking = where_of(calls[:OLDEST], WHERE_SECONDS)
    try:
        answer = asyncio.run_coroutine_threadsafe(asking, node.loop)
    except RuntimeError:  # the loop is closed
        asking.close()
        return []
    try:
        return str(answer.result(2 * WHERE_SECONDS)).splitlines()
    except TimeoutError:
        answer.cancel()
        return []


def _threads() -> dict[str, list[str]]:
    """Return the stacks of the threads that run plain `def` methods."""
    names = {each.ident: each.name for each in threading.enumerate()}
    found = {}
    for ident in sys._current_frames():
        name = names.get(ident, "")
        if not name.startswith("aiorpc-def") or (stack := stack_of_thread(ident)) is None:
            continue
        if not stack.function.startswith("DaemonThreadPool."):  # else it is idle
            found[name] = [*stack.frames]
    return found
