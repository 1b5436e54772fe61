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
from collections.abc import Iterable
from typing import Any

from .._aio.loop_lag import LoopLag
from .._aio.places import stack_of_thread
from .._aio.slow_steps import slow_steps
from .._node.node import Node
from .._server.calls import ServerCall
from .._server.timings import timings
from .._version import __version__
from ..errors import RpcError, WorkerLost
from .counters import stats
from .dump import stack_of
from .gpus import gpu_use
from .where import where_of

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
        "lost": {name: _reason(error) for name, error in members.lost().items()},
        "left": [name for name, failure in members.told().items() if not failure],
        "stats": dataclasses.asdict(stats()),
        "timings": timings.snapshot(),
        "slow_steps": slow_steps.counts(),
        "waits": _waits(node),
        "serving": _serving(node.server.open_calls(OLDEST), OLDEST),
        "loop": _loop(lag, thread),
    }
    if detail:
        found["calls"] = _with_stacks(node.server.open_calls(OLDEST_IN_DETAIL))
        found["threads"] = _threads()
        found["where"] = [] if lag.blocked_for() >= BLOCKED else _where(node)
    return found


def _reason(error: RpcError) -> str:
    text = error.reason if isinstance(error, WorkerLost) else str(error)
    return text[:MOST_TEXT]


def _waits(node: Node) -> list[dict[str, Any]]:
    """Return for each peer the calls that this worker waits for, and the oldest of them."""
    now, found = time.monotonic(), []
    for peer, (count, oldest) in node.pool.waits(OLDEST).items():
        method, started = min(oldest, key=lambda call: call[1], default=("", now))
        found.append({"worker": peer, "calls": count, "method": method, "age": now - started})
    return found


def _serving(calls: Iterable[ServerCall], most: int) -> list[dict[str, Any]]:
    oldest = sorted(calls, key=lambda call: call.started)[:most]
    return [_describe(call) for call in oldest]


def _describe(call: ServerCall) -> dict[str, Any]:
    age = max(0.0, time.monotonic() - call.started)
    stream = not getattr(call, "sends_value", True)
    return {"method": call.name, "worker": call.caller, "age": age, "stream": stream}


def _with_stacks(calls: Iterable[ServerCall]) -> list[dict[str, Any]]:
    found = []
    for call in sorted(calls, key=lambda call: call.started)[:OLDEST_IN_DETAIL]:
        task = call.task
        stack = [] if task is None else [line.strip() for line in stack_of(task.get_coro())]
        found.append({**_describe(call), "stack": stack})
    return found


def _loop(lag: LoopLag, thread: int) -> dict[str, Any]:
    found: dict[str, Any] = {"lag": lag.longest(LAG_WINDOW), "blocked": 0.0}
    if lag.blocked_for() >= BLOCKED and (stack := stack_of_thread(thread)) is not None:
        found |= {"function": stack.function, "stack": [*stack.frames]}
        found["blocked"] = lag.blocked_for()  # 0.0 if the loop went on meanwhile
    return found


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
