"""The supervisor of a world's child processes: it starts, restarts and ends them."""

import asyncio
import contextlib
import logging
import signal
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from .._aio.loops import Interrupt, interruptible
from .._aio.tasks import run_to_end
from .._aio.threads import run_in_thread
from .._node.config import OnFailure, WorkerConfig
from .._node.membership import Membership
from .._text import printable
from .._world.worker import Worker, check_is_free
from ..errors import NotInWorld, WorkerLost, WorldTimeout
from .child import ChildProcess, Main, ParentCommand
from .child_logs import LogReader
from .forkserver import ProcessFactory, ProcessOptions, ServerDied

log = logging.getLogger("aiorpc_torch")

# Seconds for children to end: those that leave their world in order, and those that are cancelled.
EXIT_TIMEOUT = 5.0
CANCEL_TIMEOUT = 0.7
LOST_TIMEOUT = 0.5  # for those that are lost: frozen, say
STOP_GRACE = 2.0  # beyond its `stop_timeout` for a child to leave when it is told to
SIGTERM_DELAY = 0.5  # after the SIGTERM of a child, for that of this process to be handled
JOIN_GRACE = 1.0  # seconds beyond `start_timeout` for a child to tell itself why it does not join

# Seconds for the exception of a child that has told its peers of its failure, and has not ended by
# then: `run_local` raises it, and would return as if nothing had happened.
FAILURE_TIMEOUT = 20.0

# What peers are told.
REPLACED = "its process was ended by restart()"
STOPPED = "it was stopped before it was restarted"

FIRST_PAUSE = 0.1  # seconds before the second restart in a row; it doubles from one to the next
LONGEST_PAUSE = 30.0
STABLE = 10.0  # seconds in its world after which the end of a process is no further one in a row


class Restarts:
    """The restarts of a world: a process that fails again and again waits longer each time."""

    def __init__(self, left: int) -> None:
        self.left = left
        self._in_a_row: dict[str, int] = {}

    def take(self, name: str, lived: float) -> float | None:
        """Return the seconds before the next restart of a worker; None if no restart is left.

        Its last process was in the world for `lived` seconds.
        """
        if not self.left:
            return None
        self.left -= 1
        before = 0 if lived >= STABLE else self._in_a_row.get(name, 0)
        self._in_a_row[name] = before + 1
        # The exponent is bounded: a float overflows at 1,024.
        return min(FIRST_PAUSE * 2.0 ** min(before - 1, 20), LONGEST_PAUSE) if before else 0.0


@dataclass(eq=False)
class Supervisor:
    """A supervisor of one child for each of `configs`, which runs `main(me, *args)` or only serves.

    `max_restarts` times altogether, a child that fails or dies is started again. A failure beyond
    that interrupts the block of `raising_failures`. With its `on_failure` "continue" only that of a
    child which the world lacks at its start does.
    """

    configs: Sequence[WorkerConfig]
    main: Main | None
    args: tuple[Any, ...]
    max_restarts: int
    processes: ProcessOptions
    failures: list[BaseException] = field(default_factory=list)
    last: dict[str, ChildProcess] = field(default_factory=dict)
    """The last child of each name. Any thread may read it."""
    _children: list[ChildProcess] = field(default_factory=list)
    config_of: dict[str, WorkerConfig] = field(default_factory=dict)
    """The configuration of each name that has had a child."""
    _starting: set[str] = field(default_factory=set)
    _restarting: dict[str, "asyncio.Task[None]"] = field(default_factory=dict)
    _replacing: dict[str, "asyncio.Task[None]"] = field(default_factory=dict)
    _make_process: ProcessFactory | None = None
    _making: asyncio.Lock = field(default_factory=asyncio.Lock)
    _logs: LogReader | None = None
    _command: ParentCommand | None = None  # the last one that was sent
    # Ends of children that were in the world before this process knew that it is complete.
    _early: list[ChildProcess] = field(default_factory=list)
    # Set once the world is complete: before, no child can rejoin.
    _membership: Membership | None = None
    _interrupt: Interrupt | None = None
    _on_failure: OnFailure = "stop"
    _is_stopping = False  # by a signal
    _is_closed = False

    def __post_init__(self) -> None:
        self._restarts = Restarts(self.max_restarts)
        # A handler of the program decides, for its children too.
        self._has_default = signal.getsignal(signal.SIGTERM) is signal.SIG_DFL

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Start the children, and wait for their end at the end of the block."""
        check_is_free()
        try:
            for config in self.configs:
                await self._start(config)
            yield
        except BaseException:
            self._send("cancel")
            await self._close(CANCEL_TIMEOUT)
            raise
        await self._close(EXIT_TIMEOUT)

    def begin_to_stop(self) -> None:
        """Restart no child from now on: a signal stops this process, and perhaps all."""
        self._is_stopping = True
        for name, task in self._restarting.items():
            task.cancel()
            self._abandon(name, "it is not restarted: the program stops")

    def _on_sigterm(self, child: ChildProcess) -> None:
        """End a child, unless this process got a SIGTERM too: then the program stops in order."""

        def end() -> None:
            if self._has_default and not (self._is_stopping or self._command):
                child.kill("its process was killed by SIGTERM")

        asyncio.get_running_loop().call_later(SIGTERM_DELAY, end)

    def watch_children(self, me: Worker) -> None:
        """Restart children from now on, and report their deaths to `me`: its world is complete."""
        self._membership = me._node.membership
        early, self._early = self._early, []
        for child in early:
            self._on_end(child)

    @contextlib.contextmanager
    def notifying_on_exit(self) -> Iterator[None]:
        """Tell the children at the end of the block that this process leaves, or fails."""
        try:
            yield
        except BaseException:
            self._send("cancel")
            raise
        self._send("leave")

    @contextlib.asynccontextmanager
    async def raising_failures(self, on_failure: OnFailure) -> AsyncIterator[None]:
        """Interrupt the block when a child fails, and raise the child's exception."""
        async with interruptible() as interrupt:
            self._interrupt, self._on_failure = interrupt, on_failure
            for failure in self.failures:
                interrupt(failure)
            yield

    async def add(self, config: WorkerConfig, has_joined: Coroutine[Any, Any, None]) -> None:
        """Start one more child, and supervise it once it has joined; else raise why it has not."""
        joining = asyncio.ensure_future(has_joined)
        child: ChildProcess | None = None
        try:
            await self._stop_restarting(config.name)
            last = self.last.get(config.name)
            if config.name in self._starting or (last is not None and last.is_entering()):
                first = "the first one is joining"
                raise ValueError(f"two workers have the name {config.name!r}: {first}")
            child = await self._begin(config)
            either, limit = (joining, child.ended), config.start_timeout + JOIN_GRACE
            await asyncio.wait(either, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
            if child.ended.done():
                raise child.ended.result() or WorkerLost(config.name, "its process has ended")
            if not joining.done():
                text = f"{config.name!r} has not joined within {config.start_timeout:g} s"
                raise WorldTimeout(f"{text}, and its process was killed: it may be frozen")
        except BaseException as exc:
            if child is not None:
                self._drop(child)
            # A restart that this start has stopped does not follow.
            is_lost = self._membership is not None and self._membership.is_lost(config.name)
            if is_lost and not self._is_coming(config.name):
                text = printable(f"its start has failed: {type(exc).__name__}")
                self._abandon(config.name, f"{text}; {self._not_restarted(config.name)}")
            raise
        finally:
            joining.cancel()
        child.ended.add_done_callback(lambda _: self._on_end(child))

    def _drop(self, child: ChildProcess) -> None:
        """Kill a child that is not supervised."""
        child.kill()
        if self.last.get(child.name) is child:  # none that `replace` may wait for
            del self.last[child.name]
        child.is_leaving = True
        self._release(child)
        child.ended.add_done_callback(lambda _: self._release(child))

    async def _stop_restarting(self, name: str) -> bool:
        """Let no process follow one that has ended; return whether one would have."""
        task = self._restarting.get(name)
        if task is None:
            return False
        task.cancel()
        try:
            await asyncio.wait((task,))
        except asyncio.CancelledError:  # who has stopped it does not go on

            def on_end(ended: "asyncio.Task[None]") -> None:
                if ended.cancelled():
                    self._abandon(name, STOPPED)

            task.add_done_callback(on_end)
            raise
        return task.cancelled()

    def _is_coming(self, name: str) -> bool:
        """Return whether a process of that name lives, starts or is to be started."""
        last = self.last.get(name)
        is_there = last is not None and not last.ended.done()
        return is_there or name in self._starting or name in self._restarting

    async def remove(self, name: str, timeout: float) -> None:
        """Let a child leave while the others go on, and wait for its end.

        It has `timeout` seconds for the calls that run there. One that then does not end is killed:
        it is frozen, or its event loop is blocked. A cancellation changes nothing of that.
        """
        if await self._stop_restarting(name):
            self._abandon(name, STOPPED)
            return
        child = self._alive(name)
        child.is_leaving, child.is_replaced = True, False
        child.send("stop")
        seconds = timeout + STOP_GRACE

        def kill_late() -> None:
            if child in self._children:  # else the world has ended
                text = f"it did not leave within {seconds:g} s, and was killed"
                log.warning("worker %r: %s", name, text)
                child.kill()
                self._abandon(name, text)

        def on_end(_: object) -> None:
            timer.cancel()
            self._release(child)

        timer = asyncio.get_running_loop().call_later(seconds, kill_late)
        child.ended.add_done_callback(on_end)
        await asyncio.wait((child.ended,))

    def _alive(self, name: str) -> ChildProcess:
        child = self.last.get(name)
        if child is None or child.ended.done():
            alive = ", ".join(each.name for each in self._children if not each.ended.done())
            raise ValueError(f"{name!r} is not a child of this world; there are: {alive or 'none'}")
        return child

    async def replace_once(
        self, name: str, replace: Callable[[], Coroutine[Any, Any, None]]
    ) -> None:
        """Wait for `replace()`, or for the one of that name that is under way."""
        if (task := self._replacing.get(name)) is None:
            task = self._replacing[name] = asyncio.create_task(replace())

            def on_end(ended: "asyncio.Task[None]") -> None:
                del self._replacing[name]
                if not ended.cancelled():
                    ended.exception()  # whoever waits has it

            task.add_done_callback(on_end)
        await asyncio.shield(task)

    async def replace(self, name: str) -> bool:
        """Kill a child whatever its state, and start another one, which does not count.

        Return False for one that has ended, and is not restarted.
        """
        if await self._stop_restarting(name):
            self._restart(self.config_of[name], WorkerLost(name, REPLACED), 0.0)
            return True
        if name not in self.last:
            return False
        child = self._alive(name)
        child.is_leaving, child.is_replaced = False, True
        child.kill(REPLACED)
        await asyncio.wait((child.ended,))
        return True

    def _abandon(self, name: str, text: str, cause: BaseException | None = None) -> None:
        if self._membership is not None:
            error = WorkerLost(name, text)
            error.__cause__ = cause
            self._membership.abandon(name, error)

    def _release(self, child: ChildProcess) -> None:
        """Free what belongs to a child if it has ended; otherwise the end of the world does."""
        if child.release() and child in self._children:
            self._children.remove(child)
            if self.last.get(child.name) is child:
                del self.last[child.name]

    async def _start(self, config: WorkerConfig) -> ChildProcess:
        child = await self._begin(config)
        child.ended.add_done_callback(lambda _: self._on_end(child))
        return child

    async def _begin(self, config: WorkerConfig) -> ChildProcess:
        self.config_of[config.name] = config
        self._starting.add(config.name)
        try:
            try:
                return await self._begin_once(config)
            except ServerDied:  # it was frozen, say
                self._make_process = None
                return await self._begin_once(config)
        finally:
            self._starting.discard(config.name)

    async def _begin_once(self, config: WorkerConfig) -> ChildProcess:
        async with self._making:  # one server for all
            if self._make_process is None:
                self._make_process = await self.processes.factory(config.start_timeout)
        if self.processes.logs is not None and self._logs is None:
            self._logs = LogReader()
        output = None if self._logs is None else self._logs.open(config.name)
        try:
            child = ChildProcess(
                self._make_process, config, self.main, self.args, output, self._on_sigterm
            )
        except OSError:  # too many open files
            if output is not None:
                output.started()
            raise
        try:
            await child.start()
        except BaseException:
            if child.has_started():  # this was cancelled meanwhile
                self._children.append(child)
                self._drop(child)
            raise
        if self._is_closed:
            await run_in_thread(child.close, "aiorpc-reaper")
            raise NotInWorld("this worker has left its world")
        self._children.append(child)
        self.last[child.name] = child
        if self._command is not None:
            child.send(self._command)
        return child

    def _on_end(self, child: ChildProcess) -> None:
        name, failure = child.name, child.ended.result()
        if failure is None or self._command == "cancel":
            return
        if self._membership is None and child.entered_at is not None:
            self._early.append(child)
            return
        if self.last.get(name, child) is not child:  # one that was frozen, say
            text = printable(str(failure))
            log.warning("a former process of worker %r has ended: %s", name, text)
            self._release(child)
            return
        pause: float | None = None
        if child.is_replaced:
            pause = 0.0
        elif self._membership is not None and not (
            child.is_leaving or self._command or self._is_stopping
        ):
            pause = self._restarts.take(name, child.lived())
        reason = _reason(name, failure)
        if child.is_leaving:
            reason += "; it was to leave"
        elif pause is None:
            reason += f"; {self._not_restarted(name)}"
        is_death = isinstance(failure, WorkerLost) and failure.worker == name
        death = WorkerLost(name, reason)
        death.__notes__ = getattr(failure, "__notes__", [])  # its last lines
        if self._membership is not None and is_death:
            self._membership.lose(name, death)
        if child.is_leaving:
            self._abandon(name, reason)
            return
        self._release(child)
        if pause is not None:
            self._restart(child.config, failure, pause)
        else:
            if is_death:
                log.warning("%s", printable(str(death)))
            self._report(name, failure)

    def _not_restarted(self, name: str) -> str:
        if self.main or self._membership is None or self._command or self._is_stopping:
            return "it is not restarted"
        return f"it is not restarted: `await me.restart({name!r})` starts it again"

    def _restart(self, config: WorkerConfig, failure: BaseException, pause: float) -> None:
        reason = _reason(config.name, failure)
        raised = failure if failure.__cause__ else None  # the traceback of the child
        when = f" in {pause:g} s" if pause else ""
        log.warning("worker %r is restarted%s: %s", config.name, when, reason, exc_info=raised)

        def on_end(ended: "asyncio.Task[None]") -> None:
            if self._restarting.get(config.name) is ended:
                del self._restarting[config.name]

        task = asyncio.create_task(self._start_again(config, failure, pause))
        self._restarting[config.name] = task
        task.add_done_callback(on_end)

    async def _start_again(
        self, config: WorkerConfig, failure: BaseException, pause: float | None
    ) -> None:
        while pause is not None:
            await asyncio.sleep(pause)
            try:
                child = await self._start(config)
            except Exception as exc:  # too many processes or open files
                log.error("worker %r cannot be restarted: %r", config.name, exc)
                exc.__cause__ = failure
                # Frames of a traceback may hold descriptors.
                failure, pause = exc.with_traceback(None), self._restarts.take(config.name, 0.0)
            else:
                limit = config.start_timeout + JOIN_GRACE
                asyncio.get_running_loop().call_later(limit, self._kill_unless_entered, child)
                return
        self._report(config.name, failure)

    def _kill_unless_entered(self, child: ChildProcess) -> None:
        if child.entered_at is None and child in self._children:
            child.kill("it has not entered its world in time: it may be frozen")

    def _report(self, name: str, failure: BaseException) -> None:
        """Report a failure after which a child is not restarted."""
        self.failures.append(failure)
        self._abandon(name, f"{_reason(name, failure)}; {self._not_restarted(name)}", failure)
        if self._interrupt is None or self._is_stopping:
            return
        if self._on_failure == "stop" or self._membership is None:  # the world stays incomplete
            self._interrupt(failure)

    def _send(self, command: ParentCommand) -> None:
        self._command = command
        for child in self._children:
            child.send(command)

    async def _close(self, timeout: float) -> None:
        """Wait for the children's end, for `timeout` seconds; a cancellation ends them at once."""

        def kill_all() -> None:
            for child in self._children:
                child.kill()

        def end_soon() -> None:
            self._send("cancel")
            asyncio.get_running_loop().call_later(CANCEL_TIMEOUT, kill_all)

        await run_to_end(asyncio.create_task(self._end_children(timeout)), end_soon)

    async def _end_children(self, timeout: float) -> None:
        if restarting := self._restarting.values():
            for task in restarting:
                task.cancel()
            await asyncio.wait(restarting)
        if ends := [child.ended for child in self._children]:
            await asyncio.wait(ends, timeout=min(timeout, LOST_TIMEOUT))
        if (world := self._membership) is not None:
            ends = [child.ended for child in self._children if not world.is_lost(child.name)]
        if ends:
            await asyncio.wait(ends, timeout=max(0.0, timeout - LOST_TIMEOUT))
        late = [child for child in self._children if not child.ended.done()]
        if world and (ends := [each.ended for each in late if world.failure_of(each.name)]):
            await asyncio.wait(ends, timeout=FAILURE_TIMEOUT)
        for child in self._children:
            child.stop_watching()
        self._is_closed = True

        def reap() -> None:
            for child in self._children:
                child.close()
            if self._logs is not None:
                self._logs.close()

        await run_in_thread(reap, "aiorpc-reaper")
        # The last reference to a server ends it, and the membership refers to this object.
        self._children.clear()
        self.last.clear()
        self._make_process = None


def _reason(name: str, failure: BaseException) -> str:
    """Return the text of the failure of a child, without the name of that child."""
    if isinstance(failure, WorkerLost) and failure.worker == name:
        return printable(failure.reason)
    return printable(str(failure))
