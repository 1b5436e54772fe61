"""The supervisor of a world's child processes: it starts, restarts and ends them."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from .._aio.fork import check_not_forked
from .._aio.interruption import Interrupt, interruptible
from .._aio.threads import run_in_thread
from .._node.config import OnFailure, WorkerConfig
from .._node.membership import Membership
from .._world.worker import Worker
from ..errors import WorkerLost, WorldTimeout
from .child import ChildProcess, Main, ParentCommand
from .child_logs import LogReader
from .processes import ProcessFactory, ProcessOptions

log = logging.getLogger("aiorpc_torch")

# Seconds for children to end: those that leave their world in order, and those that are cancelled.
EXIT_TIMEOUT = 5.0
CANCEL_TIMEOUT = 0.7
LOST_TIMEOUT = 0.5  # for those that are lost: frozen, say
STOP_GRACE = 2.0  # beyond its `stop_timeout` for a child to leave when it is told to
JOIN_GRACE = 1.0  # seconds beyond `start_timeout` for a child to tell itself why it does not join

# Seconds for the exception of a child that has told its peers of its failure, and has not ended by
# then: `run_local` raises it, and would return as if nothing had happened.
FAILURE_TIMEOUT = 20.0


@dataclass(eq=False)
class Supervisor:
    """A supervisor of one child for each of `configs`, which runs `main(me, *args)` or only serves.

    `restarts` times altogether, a child that fails or dies is started again. A failure beyond that
    interrupts the block of `raising_failures`. With its `on_failure` "continue" only that of a
    child which the world lacks at its start does.
    """

    configs: Sequence[WorkerConfig]
    main: Main | None
    args: tuple[Any, ...]
    restarts: int
    processes: ProcessOptions
    failures: list[BaseException] = field(default_factory=list)
    last: dict[str, ChildProcess] = field(default_factory=dict)
    """The last child of each name. Any thread may read it."""
    _children: list[ChildProcess] = field(default_factory=list)
    _stopping: set[ChildProcess] = field(default_factory=set)
    _make_process: ProcessFactory | None = None
    _logs: LogReader | None = None
    _command: ParentCommand | None = None  # the last one that was sent
    # Ends of children that were in the world before this process knew that it is complete.
    _early: list[tuple[ChildProcess, WorkerConfig, BaseException]] = field(default_factory=list)
    # Set once the world is complete: before, no child can rejoin.
    _membership: Membership | None = None
    _interrupt: Interrupt | None = None
    _on_failure: OnFailure = "stop"

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Start the children, and wait for their end at the end of the block."""
        check_not_forked()
        try:
            if self.configs:
                self._make_process = await self.processes.factory(self.configs[0].start_timeout)
            for config in self.configs:
                self._start(config)
                await asyncio.sleep(0)  # each fork takes milliseconds
            yield
        except BaseException:
            self._send("cancel")
            await self._close(CANCEL_TIMEOUT)
            raise
        await self._close(EXIT_TIMEOUT)

    def watch_children(self, me: Worker) -> None:
        """Restart children from now on, and report their deaths to `me`: its world is complete."""
        self._membership = me._node.membership
        early, self._early = self._early, []
        for each in early:
            self._on_end(*each)

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
        """Start one more child, and supervise it once it has joined.

        Raises:
            Exception: as it has raised it, if it does not join.
            WorldTimeout: if it is frozen, say.
            ValueError: if a child of that name is joining.
        """
        joining = asyncio.ensure_future(has_joined)
        child: ChildProcess | None = None
        try:
            if self._make_process is None:
                self._make_process = await self.processes.factory(config.start_timeout)
            if self._is_joining(config.name):
                first = "the first one is joining"
                raise ValueError(f"two workers are called {config.name!r}: {first}")
            child = self._begin(config)
            either, limit = (joining, child.ended), config.start_timeout + JOIN_GRACE
            await asyncio.wait(either, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
            if child.ended.done():
                raise child.ended.result() or WorkerLost(config.name, "its process has ended")
            if not joining.done():
                text = f"{config.name!r} has not joined within {config.start_timeout:g} s"
                raise WorldTimeout(f"{text}, and its process was killed: it may be frozen")
        except BaseException:
            if child is not None:
                child.kill()
                self._stopping.add(child)
                self._release(child)
                child.ended.add_done_callback(partial(self._on_killed, child))
            raise
        finally:
            joining.cancel()
        self._supervise(child, config)

    def _on_killed(self, child: ChildProcess, _: object) -> None:
        self._release(child)

    def _is_joining(self, name: str) -> bool:
        """Return whether the last child of this name is on its way into the world."""
        child = self.last.get(name)
        if child is None or child in self._stopping:
            return False
        return not (child.has_entered or child.ended.done())

    async def remove(self, name: str, timeout: float) -> None:
        """Let a child leave while the others go on, and wait for its end.

        It has `timeout` seconds for the calls that run there. One that then does not end is killed:
        it is frozen, or its event loop is blocked. A cancellation changes nothing of that.

        Raises:
            ValueError: if no such child is alive.
        """
        child = self.last.get(name)
        if child is None or child.ended.done():
            alive = ", ".join(each.name for each in self._children if not each.ended.done())
            raise ValueError(f"{name!r} is not a child of this world; there are: {alive or 'none'}")
        self._stopping.add(child)
        child.send("stop")
        loop = asyncio.get_running_loop()
        timer = loop.call_later(timeout + STOP_GRACE, self._kill_late, child, timeout + STOP_GRACE)
        child.ended.add_done_callback(partial(self._on_stopped, child, timer))
        await asyncio.wait((child.ended,))

    def _kill_late(self, child: ChildProcess, seconds: float) -> None:
        if child not in self._children:  # the world has ended
            return
        text = f"it did not leave within {seconds:g} s, and was killed"
        log.warning("worker %r: %s", child.name, text)
        child.kill()
        if self._membership is not None:
            self._membership.abandon(child.name, WorkerLost(child.name, text))

    def _on_stopped(self, child: ChildProcess, timer: asyncio.TimerHandle, _: object) -> None:
        timer.cancel()
        self._release(child)

    def _release(self, child: ChildProcess) -> None:
        """Free what belongs to a child if it has ended; otherwise the end of the world does."""
        if child.release() and child in self._children:
            self._children.remove(child)
            self._stopping.discard(child)
            if self.last.get(child.name) is child:
                del self.last[child.name]

    def _start(self, config: WorkerConfig) -> None:
        self._supervise(self._begin(config), config)

    def _begin(self, config: WorkerConfig) -> ChildProcess:
        assert self._make_process is not None
        if self.processes.logs is not None and self._logs is None:
            self._logs = LogReader()
        output = None if self._logs is None else self._logs.open(config.name)
        child = ChildProcess(self._make_process, config, self.main, self.args, output)
        self._children.append(child)
        self.last[child.name] = child
        return child

    def _supervise(self, child: ChildProcess, config: WorkerConfig) -> None:
        child.ended.add_done_callback(lambda ended: self._on_end(child, config, ended.result()))

    def _on_end(
        self, child: ChildProcess, config: WorkerConfig, failure: BaseException | None
    ) -> None:
        if failure is None or self._command == "cancel":
            return
        if self._membership is None and child.has_entered:
            self._early.append((child, config, failure))
            return
        if self.last.get(config.name, child) is not child:  # one that was frozen, say
            log.warning("a former process of worker %r has ended: %s", config.name, failure)
            self._release(child)
            return
        death = None
        if isinstance(failure, WorkerLost) and failure.worker == config.name:
            death = failure
        if self._membership is not None and death is not None:
            self._membership.lose(config.name, death)
        if child in self._stopping:
            return
        if self._membership is not None and self.restarts and self._command is None:
            error = self._restart(child, config, failure)
            if error is None:
                return
            failure = error
        elif death is not None:
            log.warning("%s", death)
        self._report(child, failure)
        self._release(child)

    def _restart(
        self, child: ChildProcess, config: WorkerConfig, failure: BaseException
    ) -> BaseException | None:
        """Start a child again; return the error if no process can be started."""
        self.restarts -= 1
        reason = _reason(config.name, failure)
        raised = failure if failure.__cause__ else None  # the traceback of the child
        log.warning("worker %r is restarted: %s", config.name, reason, exc_info=raised)
        self._release(child)
        try:
            self._start(config)
        except Exception as exc:  # too many processes or open files
            log.error("worker %r cannot be restarted: %r", config.name, exc)
            exc.__cause__ = failure
            return exc
        return None

    def _report(self, child: ChildProcess, failure: BaseException) -> None:
        """Report a failure after which a child is not restarted."""
        name = child.name
        self.failures.append(failure)
        if self._membership is not None:
            error = WorkerLost(name, f"{_reason(name, failure)}; it is not restarted")
            error.__cause__ = failure
            self._membership.abandon(name, error)
        is_incomplete = self._membership is None  # and stays so
        if self._interrupt is not None and (self._on_failure == "stop" or is_incomplete):
            self._interrupt(failure)

    def _send(self, command: ParentCommand) -> None:
        self._command = command
        for child in self._children:
            child.send(command)

    async def _close(self, timeout: float) -> None:
        if ends := [child.ended for child in self._children]:
            await asyncio.wait(ends, timeout=min(timeout, LOST_TIMEOUT))
        if ends := [child.ended for child in self._children if not self._is_lost(child)]:
            await asyncio.wait(ends, timeout=max(0.0, timeout - LOST_TIMEOUT))
        if late := [each.ended for each in self._children if self._has_failed(each)]:
            await asyncio.wait(late, timeout=FAILURE_TIMEOUT)
        for child in self._children:
            child.stop_watching()
        await run_in_thread(self._reap, "aiorpc-reaper")
        # The last reference to a server ends it, and the membership refers to this object.
        self._children.clear()
        self.last.clear()
        self._make_process = None

    def _is_lost(self, child: ChildProcess) -> bool:
        return self._membership is not None and self._membership.is_lost(child.name)

    def _has_failed(self, child: ChildProcess) -> bool:
        if child.ended.done() or self._membership is None:
            return False
        return self._membership.failure_of(child.name) is not None

    def _reap(self) -> None:
        for child in self._children:
            child.close()
        if self._logs is not None:
            self._logs.close()


def _reason(name: str, failure: BaseException) -> str:
    """Return the text of the failure of a child, without the name of that child."""
    if isinstance(failure, WorkerLost) and failure.worker == name:
        return failure.reason
    return str(failure)
