"""Lines at which the calls of one worker stand, and what they wait for on this worker.

Seen from outside: calls, queues and locks know nothing of it. A `Subject` is a call, a batch or a
task that runs here; its holders are those whose lock, turn or batch it waits for.
"""

import asyncio
import functools
import inspect
import itertools
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from .._aio.own_frames import outwards
from .._aio.places import (
    WORK_OF_EXECUTOR,
    Chain,
    Line,
    awaited_by,
    awaited_lock,
    chains_of,
    holds_lock,
    is_at_lock,
    lines_of,
    work_of_executor,
)
from .._aio.threads import run_in_thread
from .._text import printable
from .._turns.queues import PauseQueue
from .._turns.turns import Turn, Turns
from .._wire.ancestry import BATCH, CallKey
from .._wire.where import BATCH as BEHIND_BATCH, IDLE, LOCK, TURN, Key, key_of
from .calls import RpcCall, ServerCall
from .executor import Executor
from .pauses import object_of
from .session import Session
from .stream_writer import StreamCall, entered

MOST_HOLDERS = 4
MOST_SEARCHED = 1000  # tasks among which the holder of a lock is sought

_TURN_WAIT = Turns.wait.__code__
_PUMP = StreamCall.pump.__code__
_PAUSE = "pause_object"  # the call of `paused`


@dataclass
class Subject:
    """A call, batch or task that has not ended."""

    key: Key  # identifier over all workers
    name: str  # this, caller and age: as in `Standing`
    caller: str
    age: float
    state: str = "waits"  # this, lines and inside: where it stands
    lines: Sequence[Line] = ()
    inside: str = ""
    call_key: CallKey | None = None  # that the contexts of the calls have which it has made
    futures: Sequence[Any] = ()  # those that it waits for
    # Which of the calls that it has made it waits for: those of `futures` (None), all (True), or
    # perhaps all, if none is of `futures` (False).
    awaits: bool | None = None
    is_entered: bool = False  # a context manager that its caller's `async with` has entered
    # What it waits for here: the reason, whether that is certain, and what has it.
    holders: "list[tuple[str, bool, Subject]]" = field(default_factory=list)


class View:
    """The unanswered calls of a worker as they stand now, for one answer. On its event loop."""

    def __init__(self, worker: str, calls: Sequence[ServerCall], executor: Executor) -> None:
        self._worker = worker
        self._calls = [*dict.fromkeys((*calls, *executor.in_threads))]
        self._executor = executor
        self._known: dict[Any, Subject] = {}
        self._lock_holders: dict[int, list[ServerCall | asyncio.Task[Any]]] = {}
        self._chains: dict[asyncio.Task[Any], Sequence[Chain]] = {}
        self._now = time.monotonic()
        self._own_task = asyncio.current_task()

    def of_number(self, session: Session, number: int) -> Subject:
        """Return the subject of a call of a session, also of one that does not run."""
        if (call := session.calls.get(number)) is not None:
            return self.of_call(call)
        state = "has ended, and its result is on the way, or it has not arrived yet"
        if number in session.dispatcher.slots.unfilled:
            state = "waits for its tensors, which torch RPC brings"
        key = key_of(session.key, number)
        return Subject(key, "", session.caller, 0.0, state)

    def of_block(self, key: CallKey | None, task: Any) -> tuple[Subject, bool] | None:
        """Return the call with that key in its context, and whether it certainly has the block.

        `task` has entered the block: another one of the call may end by itself.
        """
        for call in self._calls if key is not None else ():
            if call.session is not None and (call.session.key, call.number) == key:
                found = self.of_call(call)
                return found, len(found.futures) <= 1 and call.task in (None, task)
        return None

    def of_call(self, call: ServerCall) -> Subject:
        """Return the subject of a call."""
        if (known := self._known.get(call)) is not None:
            return known
        key, age = (call.caller, -1, 2, id(call)), max(0.0, self._now - call.started)
        found = self._known[call] = Subject(key, call.name, call.caller, age)
        if call.session is not None:  # else it is of a torch client
            found.key = key_of(call.session.key, call.number)
            found.call_key = call.session.key, call.number
        self._describe_call(found, call)
        if found.state == "waits" and hasattr(call.function, "__aiorpc_idles__"):
            found.state = IDLE
        return found

    def _describe_call(self, found: Subject, call: ServerCall) -> None:
        leave: Any = getattr(call.leave_queue, "__self__", None)
        turn = getattr(call, "turn", None)
        if isinstance(call.leave_queue, functools.partial):
            if isinstance(getattr(call.leave_queue.func, "__self__", None), PauseQueue):
                callers = {each.caller for each in self._calls if each.function.__name__ == _PAUSE}
                names = ", ".join(repr(each) for each in sorted(callers))
                by = f", by worker {names}" if names else ""
                found.state = f"waits: its object is paused{by}"
        elif turn is not None and leave is turn:
            self._wait_for_turn(found, turn)
        elif hasattr(leave, "batch"):
            self._describe_queued(found, leave)
        elif isinstance(call, StreamCall) and call.credit <= 0:
            self._describe_idle_stream(found, call)
        elif call.task is not None:
            self._describe_task(found, call.task, call)
        elif (frame := self._threads.get(call)) is not None:
            self._describe_thread(found, frame, call)
        elif isinstance(call, RpcCall) and call in call.session.dispatcher.slots.held():
            found.state = "waits for the tensors of an earlier call of its object"
        elif call in self._executor.in_threads or call.on_loop:
            found.state = "starts, or ends"
        else:
            count = len(self._executor.in_threads)
            found.state = f"waits for a thread: {count} plain `def`s run (`threads=` of the worker)"

    def _wait_for_turn(self, found: Subject, turn: Turn) -> None:
        """Name those that hold the turns of an object. With several, any of them may end first."""
        holders = [*turn._turns.holders]
        found.state = "waits for its turn on the object"
        for each in self._calls:
            if getattr(each, "turn", None) in holders:
                found.holders.append((TURN, len(holders) == 1, self.of_call(each)))

    def _describe_queued(self, found: Subject, queued: Any) -> None:
        """Describe a call in a batch, or in the queue of one."""
        if (batch := queued.batch()) is None:
            found.state = printable(queued.queue.why_waiting())
            found.holders += self._running_batches(queued.queue, found.name)
            return
        whole = self.of_batch(batch, found.name)
        found.state = f"is in a batch, which {whole.state}"
        found.lines, found.inside, found.holders = whole.lines, whole.inside, whole.holders
        found.call_key, found.futures, found.awaits = whole.call_key, whole.futures, whole.awaits

    def _running_batches(self, queue: Any, name: str) -> list[tuple[str, bool, Subject]]:
        return [(BEHIND_BATCH, False, self.of_batch(each, name)) for each in queue.running()]

    def of_batch(self, batch: Any, name: str) -> Subject:
        """Return the subject of a batch that runs."""
        if (known := self._known.get(batch)) is not None:
            return known
        key = self._worker, -1, 0, batch.id[1]
        found = self._known[batch] = Subject(key, name, "a batch", 0.0)
        found.call_key = BATCH, batch.id[1]
        self._describe_task(found, batch.task, batch)
        return found

    def of_task(self, task: "asyncio.Task[Any]") -> Subject:
        """Return the subject of a task that is of no call."""
        if (known := self._known.get(task)) is not None:
            return known
        code = getattr(task.get_coro(), "cr_code", None)
        name = task.get_name() if code is None else code.co_qualname
        key = self._worker, -1, 1, id(task)
        found = self._known[task] = Subject(key, printable(name), "a task there", 0.0)
        self._describe_task(found, task, task)
        return found

    def _describe_task(self, found: Subject, task: "asyncio.Task[Any]", whose: Any) -> None:
        chains = self._chains_of(task)
        if not chains:
            found.state = "starts, or ends"
            return
        found.lines, found.inside = lines_of(chains[0].frames)
        own = found.lines
        found.futures = [each.future for each in chains]
        for chain in chains:
            if (lock := awaited_lock(chain)) is not None:
                found.state = "waits for a lock"
                self._wait_for_lock(found, lock, whose)
            elif chain.frames and chain.frames[-1].f_code is _TURN_WAIT:
                self._wait_for_turn(found, chain.frames[-1].f_locals["turn"])
            elif _is_entered(chain):
                found.state = f"is held by an `async with` of worker {found.caller!r}"
                found.is_entered = True
            elif hasattr(getattr(chain.future, "call", None), "batch"):
                queued: Any = chain.future.call
                name = queued.queue.name
                if (batch := queued.batch()) is None:
                    found.holders += self._running_batches(queued.queue, name)
                else:
                    found.holders.append((BEHIND_BATCH, True, self.of_batch(batch, name)))
            elif (frame := self._thread_of(chain)) is not None:
                self._describe_thread(found, frame, whose)
                found.lines = [*own, *found.lines]
            elif len(chains) == 1:
                # It waits in code of this library, or for a future of unknown origin.
                last = chain.frames[-1] if chain.frames else None
                if last is None or last.f_code.co_qualname not in _SETTLED:
                    found.awaits = False

    def _chains_of(self, task: "asyncio.Task[Any]") -> Sequence[Chain]:
        if task is self._own_task:  # its frames have this view, so they would keep each other
            return ()
        if (known := self._chains.get(task)) is None:
            known = self._chains[task] = [_with_manager(each) for each in chains_of(task)]
        return known

    def _wait_for_lock(self, found: Subject, lock: Any, whose: Any) -> None:
        """Name what is inside of `async with lock`; else what runs of the same object."""
        # Many calls may wait for one lock: it is looked for once.
        if (known := self._lock_holders.get(id(lock))) is None:
            known = [*itertools.islice(self._holders_of(lock), MOST_HOLDERS)]
            self._lock_holders[id(lock)] = known
        is_one = isinstance(lock, asyncio.Lock)
        for each in known:
            holder = self.of_task(each) if isinstance(each, asyncio.Task) else self.of_call(each)
            found.holders.append((LOCK, is_one, holder))
        if not known and isinstance(whose, ServerCall):
            found.holders += self._guessed_holders(whose)

    def _holders_of(self, lock: Any) -> "Iterator[ServerCall | asyncio.Task[Any]]":
        seen: set[asyncio.Future[Any]] = set()
        for call in self._calls[:MOST_SEARCHED]:
            chains = [] if call.task is None else self._chains_of(call.task)
            seen.update(each.task for each in chains)
            if any(holds_lock(each, lock) for each in chains):
                yield call
        for task in [*asyncio.all_tasks()][:MOST_SEARCHED]:
            outer = self._chains_of(task)[:1]
            if task not in seen and any(holds_lock(each, lock) for each in outer):
                yield task

    def _guessed_holders(self, call: ServerCall) -> list[tuple[str, bool, Subject]]:
        """Return what may have the lock that a call waits for.

        That is any other call of its object that runs, and waits for no lock.
        """
        found: list[tuple[str, bool, Subject]] = []
        instance = object_of(call)
        for each in () if instance is None else self._calls[:MOST_SEARCHED]:
            if each is call or object_of(each) is not instance:
                continue
            if each.task is not None:
                waits = any(awaited_lock(chain) is not None for chain in self._chains_of(each.task))
            else:
                frame = self._threads.get(each)
                waits = frame is None or is_at_lock(frame)
            if not waits:
                found.append((LOCK, False, self.of_call(each)))
                if len(found) == MOST_HOLDERS:
                    break
        return found

    def _describe_idle_stream(self, found: Subject, call: StreamCall) -> None:
        found.state = "waits until its caller takes items"
        pairs = [] if call.task is None else [*awaited_by(call.task.get_coro())]
        pump = next((frame for _, frame in pairs if frame.f_code is _PUMP), None)
        if pump is not None:
            found.lines, _ = lines_of([frame for _, frame in awaited_by(pump.f_locals["source"])])

    # ── threads ─────────────────────────────────────────────────────────────────────────────────

    @functools.cached_property
    def _frames(self) -> list[list[FrameType]]:
        """The frames of all threads, the innermost first."""
        found = sys._current_frames()
        del found[threading.get_ident()]  # this very frame, which has the dict: they would keep all
        return [[*outwards(each)] for each in found.values()]

    @functools.cached_property
    def _threads(self) -> dict[ServerCall, FrameType]:
        """Return the innermost frame of each call that runs in a thread."""
        found = {}
        for frames in self._frames:
            for each in frames:
                if each.f_code.co_qualname in _RUN_CALL:
                    found[each.f_locals["call"]] = frames[0]
        return found

    def _thread_of(self, chain: Chain) -> FrameType | None:
        """Return the innermost frame of the thread that a task waits for, None if for none."""
        last = chain.frames[-1] if chain.frames else None
        if last is not None and last.f_code is run_in_thread.__code__:
            work, name, value = _WORK, "outcomes", last.f_locals["outcomes"]
        elif (value := work_of_executor(chain.future)) is not None:  # `asyncio.to_thread`, say
            work, name = WORK_OF_EXECUTOR, "self"
        else:
            return None
        for frames in self._frames:
            for each in frames:
                if each.f_code.co_qualname == work:
                    found = each.f_locals.get(name)
                    if found is value or getattr(found, "future", None) is value:
                        return frames[0]
        return None

    def _describe_thread(self, found: Subject, frame: FrameType, whose: Any) -> None:
        frames = [*outwards(frame)][::-1]
        start = next((at for at, each in enumerate(frames) if each.f_code.co_name == _RUN), 0)
        found.lines, found.inside = lines_of(frames[start + 1 :])
        found.state = "runs in a thread"
        # An event loop that it runs, by `asyncio.run`, waits for calls.
        found.awaits = any(each.f_code.co_name == _RUN_LOOP for each in frames[start:])
        if is_at_lock(frame) and isinstance(whose, ServerCall):
            found.state, found.awaits = "waits for a lock, in a thread,", None
            found.holders += self._guessed_holders(whose)


_RUN = "run_in_method"
_WORK = "run_in_thread.<locals>.work"
_RUN_LOOP = "run_until_complete"
_RUN_CALL = "Executor._run_in_thread", "Executor._submit_rest.<locals>.run"


def _with_manager(chain: Chain) -> Chain:
    """Add the generator of a context manager that a caller has entered: it has its locks."""
    last = chain.frames[-1] if chain.frames else None
    if last is None or last.f_code is not entered.__code__:
        return chain
    source = getattr(last.f_locals["manager"], "gen", None)
    if not inspect.isasyncgen(source) or source.ag_frame is None:
        return chain
    frames = [*chain.frames, source.ag_frame]
    return chain._replace(awaited=[*chain.awaited, source], frames=frames)


def _is_entered(chain: Chain) -> bool:
    """Return whether a context manager waits for the end of its caller's block."""
    at = next((n for n, each in enumerate(chain.frames) if each.f_code is entered.__code__), None)
    if at is None:
        return False
    inner = chain.awaited[at + 1 :]  # the generator, as of `_with_manager`, or what it waits for
    return not inner or inspect.isasyncgen(inner[0])


_SETTLED = frozenset(("sleep", "Event.wait", "Queue.get", "Queue.put", "Condition.wait"))
"""Functions of asyncio that wait for no call."""
