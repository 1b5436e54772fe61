"""A child is started, stopped, restarted or left, and a fault comes before one callback of that."""

import asyncio
import contextlib
import errno
import gc
import multiprocessing
import os
import signal
from collections.abc import Awaitable, Callable
from typing import Any, NoReturn

import psutil
import pytest

from aiorpc_torch import RpcError, WorldTimeout, call, testing
from aiorpc_torch.types import LocalWorker
from tests.support.fork_servers import server

from . import inside
from .loop import Clock, SteppingLoop
from .search import real_monotonic, stack_of

BOUND = 30.0  # real seconds for each part: a frozen server takes seven of them
ALLOWED = (RpcError, WorldTimeout, ValueError, OSError, asyncio.CancelledError)

STEPS: dict[str, tuple[str, Callable[[LocalWorker], Awaitable[None]]]] = {
    "start": ("c", lambda me: me.start("c")),
    "stop": ("a", lambda me: me.stop("a")),
    "restart": ("a", lambda me: me.restart("a")),
    "leave": ("a", lambda me: asyncio.sleep(0)),
}
FAULTS = ("cancel", "kill", "freeze", "the GIL is kept", "no descriptors", "the server is frozen")


def keep_the_gil() -> int:
    return sum(range(10**11))


class Run:
    """One step of a child's life, and a fault before one callback; `findings` is what is wrong."""

    def __init__(self, step: str, fault: str, at: int) -> None:
        self.findings: list[str] = []
        self.is_hit = False
        self._is_leaving = step == "leave"
        self._name, self._begin = STEPS[step]
        self._fault = fault
        self._left = at  # callbacks until the fault
        self._task: asyncio.Task[Any] | None = None
        self._patch = pytest.MonkeyPatch()

    def run(self) -> None:
        """Run it in a world with two children."""
        self._loop = SteppingLoop(Clock(), is_virtual=False)
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._run())

    async def _run(self) -> None:
        async with testing.world(["a"]):
            pass  # the fork server has started
        before = _descriptors()
        await self._bounded("the world", self._live())
        self._end_step()
        for each in await _outliving():
            self.findings.append(f"left behind: {each}")
            each.kill()
        if self._fault != "the server is frozen" and (after := _descriptors()) > before:
            self.findings.append(f"descriptors: {after}, were {before}")

    async def _live(self) -> None:
        options: Any = {"heartbeat": 0.5, "stop_timeout": 0.3, "max_restarts": 3, "logs": None}
        options["start_timeout"] = BOUND / 4
        async with testing.world(["a", "b"], **options) as me:
            self._me = me
            await call("a", abs, -1)
            if self._is_leaving:
                self._task = asyncio.current_task()
                self._loop.before_callback = self._count
                return
            self._task = asyncio.ensure_future(self._begin(me))
            self._loop.before_callback = self._count
            await self._bounded("it", self._task)
            self._end_step()
            await self._bounded("what comes next", self._go_on())

    # ── the fault ───────────────────────────────────────────────────────────────────────────────

    def _count(self) -> None:
        self._left -= 1
        if self._left < 0 and not self.is_hit and self._task is not None:
            self.is_hit = not self._task.done()
            self._loop.before_callback = _nothing
            self._act(self._task)

    def _act(self, task: "asyncio.Task[Any]") -> None:
        match self._fault:
            case "cancel":
                task.cancel()
            case "kill":
                self._signal(signal.SIGKILL)
            case "freeze":
                self._signal(signal.SIGSTOP)
            case "the server is frozen":
                server().suspend()
            case "no descriptors":  # torch aborts the process at a true limit
                self._patch.setattr(multiprocessing, "Pipe", _no_descriptors)
            case "the GIL is kept":
                calling = asyncio.ensure_future(call(self._name, keep_the_gil))
                calling.add_done_callback(lambda done: done.cancelled() or done.exception())

    def _signal(self, number: int) -> None:
        if pid := inside.child_pid(self._me, self._name):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def _end_step(self) -> None:
        self._loop.before_callback = _nothing
        self._task = None  # a traceback refers to what its frames hold
        self._patch.undo()

    # ── what has to hold ────────────────────────────────────────────────────────────────────────

    async def _bounded(self, name: str, step: Awaitable[Any]) -> None:
        """Wait for the end of a step; note one that hangs, or raises what it must not."""
        task = asyncio.ensure_future(step)
        await asyncio.wait((task,), timeout=BOUND)
        if not task.done():
            self.findings.append(f"{name} hangs: {stack_of(task)}")
            task.cancel()
            await asyncio.wait((task,), timeout=BOUND)
        elif not task.cancelled() and not isinstance(task.exception(), (*ALLOWED, type(None))):
            self.findings.append(f"{name} raised {task.exception()!r}")

    async def _go_on(self) -> None:
        """The other child serves, and the name of this one serves again."""
        if await call("b", abs, -1) != 1:
            self.findings.append("the other child does not serve")
        end = real_monotonic() + BOUND / 2
        while (problem := await self._serve_again()) and real_monotonic() < end:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        if problem:
            self.findings.append(f"the name does not serve again: {problem}")

    async def _serve_again(self) -> str:
        try:
            async with asyncio.timeout(BOUND / 4):
                is_here = self._name in self._me.peers
                await (self._me.restart if is_here else self._me.start)(self._name)
                await call(self._name, abs, -1)
        except (RpcError, ValueError, TimeoutError) as exc:
            return repr(exc)
        return ""


def _descriptors() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


async def _outliving() -> list[psutil.Process]:
    """Return the children that have outlived their world, those with stopped servers too."""
    end = real_monotonic() + 3.0
    while (left := _children()) and real_monotonic() < end:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    return left


def _children() -> list[psutil.Process]:
    try:
        found = server().children(recursive=True)
        return [each for each in found if each.status() != psutil.STATUS_ZOMBIE]
    except psutil.NoSuchProcess:
        return []


def _no_descriptors() -> NoReturn:
    raise OSError(errno.EMFILE, "injected: too many open files")


def _nothing() -> None:
    pass
