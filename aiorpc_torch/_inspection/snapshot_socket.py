"""The socket of a worker at which `python -m aiorpc_torch top` takes snapshots of it.

A daemon thread waits in `accept`. It answers while the event loop is blocked. Without a viewer it
only looks every 2.5 s whether the loop stands, and whether a call waits for long. Abstract sockets
are those of one network namespace: a viewer in a container sees that container's workers.

Snapshots hold counters, waits and stacks. They are taken in that thread, without locks. What grows
with the calls in flight is cut, so a snapshot takes about a millisecond.
"""

import asyncio
import contextlib
import dataclasses
import functools
import json
import logging
import os
import secrets
import socket
import struct
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

from .._aio.fork import close_on_fork
from .._aio.loop_lag import LOOK_INTERVAL, LoopLag, StallWatch
from .._aio.places import stack_of_thread
from .._aio.slow_steps import slow_steps
from .._aio.sockets import is_same_user, listen_unix
from .._node.node import Node
from .._server.calls import ServerCall
from .._server.timings import timings
from .._version import __version__
from ..errors import WorkerLost
from .calls_in_flight import where_of
from .counters import gpu_use, stats
from .dump import stack_of
from .long_waits import LongWaits

log = logging.getLogger("aiorpc_torch")

PREFIX = "aiorpc-top-"
NAME_LENGTH = 60  # characters of a worker's name in that of its socket: for one that is stopped
PROBE_INTERVAL = 0.1  # seconds between two looks at the event loop, while a viewer watches
QUIET = 10.0  # seconds after a request until nothing is measured any more
REQUEST_TIMEOUT = 0.5  # seconds for a viewer to send its request, and to take the snapshot
END_TIMEOUT = 1.0  # seconds for the thread to end
RETRY = 1.0  # seconds, where a viewer cannot be accepted for lack of descriptors

OLDEST = 8  # calls of each connection in a snapshot
OLDEST_IN_DETAIL = 50
LAG_WINDOW = 1.5  # seconds, over which the longest lag is told
BLOCKED = 0.1  # seconds of lag from which the stack of the loop's thread is told
MOST_TEXT = 300  # characters of a reason
WHERE_SECONDS = 0.15  # for the workers to tell where calls stand

# No dash: at the interpreter's end it is not waited for, since it enters no operator of torch's.
THREAD = "aiorpc:top"


@contextlib.contextmanager
def offered(node: Node, url: str) -> Iterator[None]:
    """Let viewers take snapshots of this worker in the block. On the loop that serves.

    `url` is the address at which the workers of its world meet.
    """
    try:
        watched = Watched(node, world_name(url))
    except (OSError, RuntimeError) as exc:  # no descriptor, or no thread: the worker does without
        log.debug("top will not see %s: %r", node.members.name, exc)
        yield
        return
    try:
        yield
    finally:
        watched.close()


def world_name(url: str) -> str:
    """Return the text that the workers of one world have in common."""
    if url.startswith("env://"):
        host, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
        return f"tcp://{host}:{port}"
    return url


class Watched:
    """The socket and the thread of one worker, until `close`."""

    def __init__(self, node: Node, world: str) -> None:
        self._lag = LoopLag(asyncio.get_running_loop())
        thread = threading.get_ident()
        self._take = functools.partial(take, node, world, self._lag, thread)
        self._stalls = StallWatch(self._lag, thread, node.members.name)
        self._long_waits = LongWaits(node)
        self._watched_until = 0.0
        self._is_closed = False
        name = f"{PREFIX}{secrets.token_hex(8)}-{node.members.name[:NAME_LENGTH]}"
        self._socket = listen_unix(name)
        self._socket.setblocking(True)
        self._wait_for(LOOK_INTERVAL)
        close_on_fork(self._socket)
        self._thread = threading.Thread(target=self._serve, name=THREAD, daemon=True)
        try:
            self._thread.start()
        except BaseException:
            self._socket.close()
            raise

    def close(self) -> None:
        """End the thread, which closes the socket: at once, unless it answers a viewer."""
        self._is_closed = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread from `accept`
        self._thread.join(END_TIMEOUT)
        timings.is_on = False

    # ── in the thread ───────────────────────────────────────────────────────────────────────────

    def _serve(self) -> None:
        with self._socket:
            while not self._is_closed:
                try:
                    viewer, _ = self._socket.accept()
                except BlockingIOError:  # none for so long
                    self._measure()
                except OSError:  # it is closed, or there are no descriptors
                    if not self._is_closed:
                        time.sleep(RETRY)
                else:
                    with viewer, contextlib.suppress(OSError):
                        self._answer(viewer)

    def _answer(self, viewer: socket.socket) -> None:
        if not is_same_user(viewer):
            return
        close_on_fork(viewer)
        viewer.settimeout(REQUEST_TIMEOUT)
        request = viewer.recv(1024)
        if not request:  # a viewer that has gone meanwhile
            return
        self._watched_until = time.monotonic() + QUIET
        self._measure()
        try:
            text = json.dumps(self._take(detail=b"detail" in request), default=str)
        except Exception as exc:  # that must not hide the worker
            log.debug("a snapshot failed: %r", exc)
            text = json.dumps({"error": repr(exc)})
        viewer.sendall(f"{text}\n".encode())

    def _measure(self) -> None:
        """Look at the event loop, rarely if no viewer has asked for a while."""
        now = time.monotonic()
        if self._stalls.look(now):
            try:
                self._long_waits.look(now)
            except Exception as exc:  # other threads change what it looks at
                log.debug("the look at long waits has failed: %r", exc)
        is_watched = now < self._watched_until and not self._is_closed
        timings.is_on = is_watched
        self._wait_for(PROBE_INTERVAL if is_watched else LOOK_INTERVAL)
        if is_watched:
            self._lag.probe()

    def _wait_for(self, seconds: float) -> None:
        """Let `accept` wait so long. With a timeout of Python's, `close` would not wake it."""
        limit = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)


def take(node: Node, world: str, lag: LoopLag, thread: int, *, detail: bool) -> dict[str, Any]:
    """Return what `top` shows of a worker of `world`, whose event loop runs in `thread`, as JSON.

    With `detail` the oldest calls are added, with their stacks.
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
