"""What the search knows of the library's inside: every private name that it uses is in this module.

It counts what is pending on both sides of the connections of a world of one, ends connections, and
stands in the way of what is sent.
"""

import asyncio
import contextlib
import functools
import os
import threading
import weakref
from asyncio import selector_events
from collections import Counter
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from aiorpc_torch import WorkerLost, _channel as channel
from aiorpc_torch._aio import threads
from aiorpc_torch._aio.segments import Segment
from aiorpc_torch._batching import queue as batch_queue
from aiorpc_torch._carrier import shared_memory, socket_threads, tensor_sockets
from aiorpc_torch._carrier.memory import ReceiveMemory, _received
from aiorpc_torch._carrier.socket_threads import SocketReceiver
from aiorpc_torch._carrier.tensor_sockets import TensorSockets
from aiorpc_torch._client import pool
from aiorpc_torch._client.connection import Connection
from aiorpc_torch._endpoint import entry_points
from aiorpc_torch._endpoint.runtime import OwnThread
from aiorpc_torch._node.node import Node
from aiorpc_torch._server.server import Server
from aiorpc_torch._server.session import Session
from aiorpc_torch._torch import transport
from aiorpc_torch._turns import turns as exclusive
from aiorpc_torch._wire.slots import Slots
from aiorpc_torch._world.directory_client import DirectoryClient
from aiorpc_torch.observe import stats
from aiorpc_torch.training import relays
from aiorpc_torch.types import LocalWorker

from .loop import SteppingLoop
from .socket_work import SocketWork

ME = "main"
CALLBACK = 0.5  # real seconds that the callback of a future may take


# ── both sides of a world of one ────────────────────────────────────────────────────────────────


def server() -> Server:
    found = entry_points.serving()
    assert isinstance(found, Server)
    return found


def connections() -> list[Connection]:
    found = pool.find_current()
    every = [] if found is None else [each for _, each in found.connections()]
    return [each for each in every if not each.ended.is_set()]


def sessions() -> list[Session]:
    return [] if entry_points.serving() is None else [*server().sessions.values()]


def end_at_caller() -> None:
    """Abort the transports of the callers' ends."""
    for each in connections():
        each.abort()


def end_at_callee() -> None:
    """Abort the transports of the callees' ends."""
    for each in sessions():
        each.abort()


def lose_peer() -> None:
    """Tell both sides that the other process is lost, as the membership does."""
    found = pool.find_current()
    if found is not None and entry_points.serving() is not None:
        found.on_peer_lost(ME, WorkerLost(ME, "killed by the search"))
        server().sessions.cancel_calls_of(ME)
    end_at_caller()
    end_at_callee()


def cancel_at_callee() -> None:
    """Cancel the tasks of the calls that run."""
    for each in sessions():
        for call in [*each.calls.values()]:
            if call.task is not None:
                call.task.cancel()


def be_another_host(patch: pytest.MonkeyPatch, idle: float) -> None:
    """Let the peer's processes share one transfer; after so many idle seconds sockets end, and a
    relay keeps no version."""
    patch.setattr(tensor_sockets, "sharing_group", lambda: "another host")
    patch.setattr(tensor_sockets, "IDLE_SECONDS", idle)
    patch.setattr(relays, "IDLE", idle)


def sends_at_once() -> bool:
    """Return whether the next lone call is sent in the iteration that makes it."""
    states = [each.state for each in connections()]
    return all(each.woken == 1 and not (each.is_paused or len(each)) for each in states)


# ── what is left ────────────────────────────────────────────────────────────────────────────────


def snapshot() -> Counter[str]:
    """Return what is pending now, by what it is; nothing has a count of 0."""
    found: Counter[str] = Counter()
    for connection in connections():
        found.update(_of_caller(connection))
    for session in sessions():
        found.update(_of_callee(session))
    found.update(_of_process())
    found.update(_of_registry())
    return +found


def _of_registry() -> dict[str, int]:
    if not isinstance(node := entry_points.here, Node):
        return {}
    found = node.registry
    return {
        "registry: watches": sum(map(len, found._listeners.values())),
        "registry: names": len(found._states),
        "registry: watchers": len(found._watchers),
        "registry: tasks": len(found._tasks),
    }


def _of_caller(connection: Connection) -> dict[str, int]:
    state = connection.state
    return {
        "connections": 1,
        "caller: pending calls": len(connection.pending),
        "caller: calls in the window": len(state.window),
        "caller: bytes in the window": state.window.size,
        "caller: unsent calls": len(state),
        "caller: unsent cancels and credits": len(state.cancels) + len(state.credits),
        "caller: calls behind copies": len(state._admitted),
        **_of_slots("caller: copies of calls", state._copies),
        "caller: calls of contexts": len(connection._recorded_calls),
        "caller: calls that interceptors know": len(connection.pending._observed),
        "caller: unresumed callers": len(connection.pending.wake),
        **_of_link("caller", connection.carriers.shared),
        **_of_sockets("caller", connection.carriers.sockets),
    }


def _of_callee(session: Session) -> dict[str, int]:
    return {
        "sessions": 1,
        "callee: running calls": len(session.calls),
        "callee: held results": len(session._results.held),
        **_of_slots("callee: slots", session.dispatcher.slots),
        **_of_slots("callee: copies of results", session._results._copies),
        "callee: unsent results": len(session._results.replies.results),
        "callee: events of a profiler": len(session.events),
        **_of_link("callee", session.carriers.shared),
        **_of_sockets("callee", session.carriers.sockets),
    }


def _of_slots(name: str, slots: Slots[Any]) -> dict[str, int]:
    return {name: len(slots.queues) + len(slots.unfilled) + len(slots._early)}


def _of_link(side: str, link: Any) -> dict[str, int]:
    return {
        f"{side}: segments that the peer holds": sum(map(len, link._held.values())),
        f"{side}: segments to be mapped": sum(link._unopened.values()),
        f"{side}: copies": link._copying,
        f"{side}: tensors in segments": len(link._buffers),
    }


def _of_sockets(side: str, link: TensorSockets) -> dict[str, int]:
    return {
        f"{side}: transfers": len(link._jobs),
        f"{side}: transfers that wait for memory": len(link._waiting),
        f"{side}: bytes at the peer": link._reserved,
        f"{side}: exported segments": len(link._exported),
        f"{side}: transfers that arrive": len(link._incoming),
        f"{side}: bytes that arrive": link._incoming._held,
        f"{side}: unsent news": len(link._untold),
        f"{side}: sockets": sum(len(each) for each in (link._sender, link._receiver) if each),
    }


def _of_process() -> Counter[str]:
    loop: Any = asyncio.get_running_loop()
    found: Counter[str] = Counter()
    if (memory := _received.get(loop)) is not None:
        found["pieces of memory with tensors"] += len(memory.used)
    if (copies := tensor_sockets._copies.get(loop)) is not None:
        found["transfers for several processes"] += len(copies)
    for store in [*shared_memory._stores.values()]:
        pieces = [*store.memory.pool._pieces.values()]
        found["segments in use"] += sum(bool(each.holders) for each in pieces)
        found["segments being written"] += (
            len(store._waiting) + len(store._copying) + store._running
        )
    for queue in batch_queue._queues.owners():
        found["calls in a batch queue"] += len(queue)
        found["running batches"] += len(queue._running)
    for by_name in [exclusive._turns.get(each) for each in exclusive._turns.owners()]:
        for turns in [*(by_name or {}).values()]:
            found["turns"] += len(turns.holders) + len(turns._queue.waiting())
    if entry_points.serving() is not None:
        found["calls of torch clients"] += len(server()._torch_calls)
        found["calls of ended sessions"] += sum(
            len(each.calls) for each in server().sessions._ended
        )
        found["tasks for threads"] += len(server().executor._threads._tasks)
    found["descriptors"] = _descriptors()
    for task in asyncio.all_tasks() - {asyncio.current_task()}:
        found[f"task {task.get_name()}"] += 1
    for timer in loop._scheduled:
        if not timer.cancelled():
            found[f"timer {_name(timer._callback)}"] += 1
    for name in _PERIODIC:
        del found[name]
    return found


_PERIODIC = ("timer Membership._check", "timer _trim")


def _name(callback: Any) -> str:
    while isinstance(callback, functools.partial):
        callback = callback.func
    return str(getattr(callback, "__qualname__", callback))


def _descriptors() -> int:
    """Return the number of open descriptors, without those of segments, which are used again."""
    count = 0
    for each in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # that of this listing
            count += not os.readlink(f"/proc/self/fd/{each}").startswith("/memfd:")
    return count


def path_counters() -> tuple[int, ...]:
    """Return counters that tell which paths calls took."""
    now = stats()
    return now.calls, now.messages, now.shared_messages, now.served, now.late


# ── in the way of what is sent, and of threads ──────────────────────────────────────────────────


class Outside:
    """The work that other threads do for the loop, and what stands in the way of the sending.

    Attributes:
        before_write: is called before bytes are given to the transport of a connection.
        before_torch: is called before a message is given to torch RPC.
        before_chunk: is called in a thread before a chunk of a tensor is sent or received.
        before_memory: is called in a thread before memory is reserved for tensors that arrive.
    """

    def __init__(self, loop: SteppingLoop) -> None:
        self.loop = loop
        self.before_write: Callable[[], object] = _nothing
        self.before_torch: Callable[[], object] = _nothing
        self.before_chunk: Callable[[], object] = _nothing
        self.before_memory: Callable[[], object] = _nothing
        self._sockets = SocketWork()
        self._changed = threading.Condition()
        self._running = 0  # tasks of threads
        self._at_directory = 0  # waits for rank 0's directory, which has a thread of its own
        self._sent: list[Any] = []  # futures of messages of torch RPC
        self._owed: list[Any] = []  # futures of their replies, at the callee
        self._answered = self._arrived = 0  # messages that have ended, and those that the loop got
        loop.is_busy, loop.give_up, loop.on_park = self.is_busy, self._give_up, self._notify

    def is_busy(self) -> bool:
        """Return whether a thread works, or torch carries a message, or the directory answers."""
        others = self._at_directory > 0 or self._sockets.is_under_way()
        return self._has_tasks() or self._carries() or others

    def _give_up(self) -> None:
        """Wait no more for what is under way: tasks that no thread runs, for one."""
        with self._changed:
            self._running = self.loop.waiting_threads
            self._at_directory = 0
            self._sockets.clear()
            self._sent.clear()

    def reset(self) -> None:
        """Forget the messages of an earlier world."""
        with self._changed:
            self._sent, self._owed = [], []
            self._answered = self._arrived = 0

    def unanswered(self) -> Counter[str]:
        """Return the messages of torch RPC without an answer."""
        self._carries()
        return +Counter({"messages of torch RPC": len(self._sent)})

    def _has_tasks(self) -> bool:
        return self._running > self.loop.waiting_threads

    def _carries(self) -> bool:
        with self._changed:
            sent = [each for each in self._sent if not each.done()]
            self._answered += len(self._sent) - len(sent)
            self._sent = sent
            self._owed = [each for each in self._owed if not each.done()]
            if len(sent) > len(self._owed):
                return True
            # torch marks a future as done before it runs its callbacks.
            self._changed.wait_for(lambda: self._arrived >= self._answered, CALLBACK)
            self._arrived = self._answered
            return False

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _tracked(self, function: Callable[..., Any]) -> Callable[..., Any]:
        with self._changed:
            self._running += 1

        def run(*args: Any) -> Any:
            try:
                return function(*args)
            finally:
                with self._changed:
                    self._running = max(0, self._running - 1)
                    self._changed.notify_all()

        return run

    def _settle(self) -> None:
        """On the loop: wait until each thread has ended its task, or waits for the loop."""
        if asyncio._get_running_loop() is self.loop:
            with self._changed:
                self._changed.wait_for(lambda: not self._has_tasks(), 0.2)

    @contextlib.contextmanager
    def installed(self) -> Iterator["Outside"]:
        """Stand in the way of what the library sends, and of what it starts in threads."""
        with contextlib.ExitStack() as stack:
            replace = functools.partial(_replaced, stack)
            replace(_Transport, "write", self._write)
            for name in ("invoke_rpc", "invoke_builtin"):
                replace(transport, name, self._invoke)
            replace(transport, "_queue_of", self._queue_of)
            replace(threads.DaemonThreadPool, "submit", self._submit)
            replace(OwnThread, "_start", self._start_own)
            replace(threads.ThreadCache, "__call__", self._run_cached)
            replace(threads, "threading", lambda _: self._threading())
            for name in ("register", "publish"):
                replace(DirectoryClient, name, self._ask_directory)
            for owner, name in _ANSWERS:
                replace(owner, name, self._answer)
            replace(socket_threads, "_send_all", self._preceded("before_chunk"))
            replace(SocketReceiver, "_receive_chunk", self._preceded("before_chunk"))
            replace(ReceiveMemory, "take", self._preceded("before_memory"))
            replace(Segment, "__init__", self._preceded("before_memory"))
            self._sockets.install(replace)
            yield self

    def _write(self, write: Callable[..., Any]) -> Callable[..., Any]:
        def written(transport: Any, data: bytes) -> None:
            if isinstance(transport.get_protocol(), channel._Protocol):
                self.before_write()
            write(transport, data)

        return written

    def _preceded(self, hook: str) -> Callable[..., Any]:
        def make(function: Callable[..., Any]) -> Callable[..., Any]:
            def called(*args: Any, **options: Any) -> Any:
                getattr(self, hook)()
                return function(*args, **options)

            return called

        return make

    def _invoke(self, invoke: Callable[..., Any]) -> Callable[..., Any]:
        def invoked(*args: Any) -> Any:
            self.before_torch()
            future = invoke(*args)
            with self._changed:
                self._sent.append(future)
            return future

        return invoked

    def _ask_directory(self, ask: Callable[..., Any]) -> Callable[..., Any]:
        async def asked(*args: Any) -> Any:
            self._at_directory += 1
            try:
                return await ask(*args)
            finally:
                self._at_directory = max(0, self._at_directory - 1)

        return asked

    def _answer(self, handle: Callable[..., Any]) -> Callable[..., Any]:
        def answered(owner: Any, *args: Any) -> Any:
            future = handle(owner, *args)
            with self._changed:
                self._owed.append(future)
            return future

        return answered

    def _queue_of(self, find: Callable[..., Any]) -> Callable[..., Any]:
        def put(queue: Any, item: Any) -> None:
            queue.put(item)
            with self._changed:
                self._arrived += 1
                self._changed.notify_all()

        def found(loop: Any) -> Any:
            return SimpleNamespace(put=functools.partial(put, find(loop)))

        return found

    def _submit(self, submit: Callable[..., Any]) -> Callable[..., Any]:
        def submitted(pool: Any, *tasks: Any) -> None:
            submit(pool, *[self._tracked(task) for task in tasks])
            self._settle()

        return submitted

    def _start_own(self, start: Callable[..., Any]) -> Callable[..., Any]:
        """Count a thread that has steps as one task: a step waits for those before it."""
        counts: weakref.WeakKeyDictionary[OwnThread, list[int]] = weakref.WeakKeyDictionary()

        def started(thread: OwnThread, step: Callable[[], object]) -> None:
            count = counts.setdefault(thread, [0])

            def run() -> None:
                try:
                    step()
                finally:
                    with self._changed:
                        count[0] -= 1
                        self._running = max(0, self._running - (not count[0]))
                        self._changed.notify_all()

            with self._changed:
                self._running += not count[0]
                count[0] += 1
            start(thread, run)
            self._settle()

        return started

    def _run_cached(self, run: Callable[..., Any]) -> Callable[..., Any]:
        return lambda cache, task: run(cache, self._tracked(task))

    def _threading(self) -> Any:
        outside = self

        class Thread(threading.Thread):
            def start(self) -> None:
                target = self._target  # type: ignore[attr-defined]
                if not isinstance(getattr(target, "__self__", None), _POOLS):
                    self._target = outside._tracked(target)
                super().start()

        return type("threading", (), {**vars(threading), "Thread": Thread})


def _replaced(
    stack: contextlib.ExitStack, owner: Any, name: str, make: Callable[[Any], Any]
) -> None:
    before = getattr(owner, name)
    setattr(owner, name, make(before))
    stack.callback(setattr, owner, name, before)


_Transport: Any = selector_events._SelectorSocketTransport  # type: ignore[attr-defined]
_ANSWERS = (
    *((Server, name) for name in ("payload", "collect")),
    *((Node, name) for name in ("introduce", "leave_message")),
)
_POOLS = (threads.DaemonThreadPool, threads.ThreadCache)


def _nothing() -> None:
    pass


# ── children ────────────────────────────────────────────────────────────────────────────────────


def child_pid(me: LocalWorker, name: str) -> int | None:
    """Return the pid of a child that runs."""
    child = me._supervisor.last.get(name)
    return None if child is None or child.ended.done() else child._process.pid
