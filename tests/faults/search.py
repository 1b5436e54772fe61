"""The search: one operation, one fault, injected at each step in turn."""

import asyncio
import contextlib
import gc
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator
from dataclasses import dataclass, field
from time import sleep
from typing import Any

import pytest
from torch.distributed import rpc

import aiorpc_torch as aiorpc
from aiorpc_torch import RRef, remote, testing
from tests.support.tensor_ways import set_way

from . import inside
from .faults import DEADLINE, Fault, Injected
from .loop import Clock, SteppingLoop, real_monotonic
from .operations import ENDLESS, WORLDS, Actor, Operation, Scene
from .watching import Watch

PATIENCE = 5.0  # real seconds in which other threads have ended what they do
BOUND = 30.0  # virtual seconds after which an operation hangs
REST = 1.5  # virtual seconds after which nothing of an operation is left
MAX_FINDINGS = 5  # of one search
WITHOUT = -1  # in place of the step: no fault was injected


@dataclass
class Report:
    """What a search found, and how many steps it has tried."""

    operation: Operation
    fault: Fault
    steps: int = 0
    findings: dict[int, list[str]] = field(default_factory=dict)

    def text(self) -> str:
        """Return the findings, each with its steps."""
        steps: dict[str, list[int]] = {}
        for step, found in self.findings.items():
            for each in found:
                steps.setdefault(each, []).append(step)
        name = f"{self.operation.name} × {self.fault.name}"
        return "\n".join(f"{name}, step {found}: {text}" for text, found in steps.items())


class Trap:
    """Injects a fault before step `at` of a run."""

    def __init__(self, fault: Fault, at: float) -> None:
        self.task: asyncio.Task[Any]
        self.sprung = asyncio.Event()
        self.steps = 0
        self._fault = fault
        self._at = at

    def step(self) -> None:
        if self.task.done():
            return
        self.steps += 1
        if self.steps == self._at + 1:
            self.sprung.set()
            self._fault.act(self.task)


class Search:
    """The runs of one operation with one fault, in worlds of one."""

    def __init__(self, operation: Operation, fault: Fault) -> None:
        self.report = Report(operation, fault)
        self._operation = operation
        self._fault = fault
        self._watch = Watch()

    def run(self, sample: int | None = None) -> Report:
        """Inject the fault at each step; at `sample` steps at most, evenly spread."""
        clock = Clock()
        with over(self._operation.way), clock.installed():
            self._loop = SteppingLoop(clock)
            self._loop.set_exception_handler(self._on_loop_error)
            with inside.Outside(self._loop).installed() as self._outside:
                with self._resource_warnings():
                    with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                        runner.run(self._search(sample))
        return self.report

    @contextlib.contextmanager
    def _resource_warnings(self) -> Iterator[None]:
        """Note what was not closed when it was collected as garbage."""
        with warnings.catch_warnings():
            warnings.simplefilter("always", ResourceWarning)
            warnings.showwarning = lambda text, *_, **__: self._on_unclosed(str(text))
            yield
            gc.collect()

    async def _search(self, sample: int | None) -> None:
        self._at = WITHOUT
        if self._fault.leaves:  # the first world of a process leaves descriptors of torch
            async with self._world():
                pass
        async with self._world():
            count = (await self._inject(ENDLESS)).steps if not self.report.findings else 0
        steps = range(count)
        if sample is not None and count > sample:
            steps = sorted({round(each * (count - 1) / (sample - 1)) for each in range(sample)})
        rest = iter(steps)
        while len(self.report.findings) < MAX_FINDINGS and await self._in_one_world(rest):
            pass

    def _find(self, text: str) -> None:
        self.report.findings.setdefault(self._at, []).append(text)

    def _on_unclosed(self, text: str) -> None:
        # CPython 3.11 drops a connection that it accepts while its server closes.
        if not ("_SelectorSocketTransport" in text or "laddr=b'\\x00aiorpc-" in text):
            self._find(text)

    def _on_loop_error(self, _: Any, context: dict[str, Any]) -> None:
        """Note what a callback of the loop has raised; a task's exception is its awaiter's."""
        exc = context.get("exception")
        if not isinstance(exc, Injected) and "future" not in context:
            self._find(f"the loop reports: {context['message']}: {exc!r}")

    async def _in_one_world(self, steps: Iterable[int]) -> bool:
        """Try steps until a world is spoilt; return whether steps are left."""
        async with self._world():
            for self._at in steps:
                self.report.steps += 1
                await self._inject(self._at)
                if self._fault.leaves or self._at in self.report.findings:
                    return True
        return False

    @contextlib.asynccontextmanager
    async def _world(self) -> AsyncIterator[None]:
        """A world in which the operation has run, and what it leaves was measured."""
        await asyncio.sleep(REST)  # the timers of an earlier world
        self._outer = self._snapshot()
        self._outside.reset()
        async with contextlib.AsyncExitStack() as self._stack:
            await self._enter()
            self._scene = Scene(self._loop)
            await self._calls()
            for _ in range(2):
                if (path := await self._clean_run()) is not None:
                    self._path = path
            self._before = await self._settled()
            yield

    async def _enter(self) -> None:
        if self._operation.around == "watched":
            self._stack.enter_context(self._watch.installed())
        if self._operation.around in WORLDS:
            world = testing.world(heartbeat=ENDLESS, freeze_gc=False)
            await self._stack.enter_async_context(world)
            self._echo = remote(RRef(Actor(self._loop)))
        elif self._operation.around == "agent":
            self._stack.enter_context(agent())

    # ── one run ─────────────────────────────────────────────────────────────────────────────────

    async def _inject(self, step: float) -> Trap:
        trap = Trap(self._fault, step)
        hooks = {"callback": self._loop, "watch": self._watch}
        task = trap.task = self._start(self._fault.has_deadline)
        hook = hooks.get(self._fault.steps, self._outside)
        attribute = f"before_{self._fault.steps}"
        setattr(hook, attribute, trap.step)
        if self._fault.leaves:
            sprung = asyncio.ensure_future(trap.sprung.wait())
            await asyncio.wait({task, sprung}, return_when=asyncio.FIRST_COMPLETED)
            sprung.cancel()
            await self._stack.aclose()
        is_over = await self._is_over(task, "it")
        setattr(hook, attribute, _nothing)
        if is_over:
            self._check_end(task)
        del task, trap.task  # an exception refers to what its frames hold
        if self._fault.leaves:
            await self._check_rest(self._outer)
        else:
            await self._check_next()
        return trap

    def _start(self, has_deadline: bool = False) -> "asyncio.Task[Any]":
        async def run() -> Any:
            with aiorpc.timeout(DEADLINE if has_deadline else None):
                return await self._operation.run(self._scene)

        return asyncio.create_task(run(), name="operation")

    async def _is_over(self, task: "asyncio.Task[Any]", name: str) -> bool:
        """Wait until a task has ended; note and cancel one that hangs."""
        await asyncio.wait({task}, timeout=BOUND)
        if task.done():
            return True
        self._find(f"{name} hangs: {stack_of(task)}")
        task.cancel()
        await asyncio.wait({task}, timeout=BOUND)
        return False

    def _check_end(self, task: "asyncio.Task[Any]") -> None:
        """Check the exceptions that the operation has ended with."""
        exc = asyncio.CancelledError() if task.cancelled() else task.exception()
        allowed = (*self._fault.allowed, *self._operation.raises)
        if self._fault.has_deadline and self._operation.waits:
            allowed += (TimeoutError,)
        for each in leaves_of(exc):
            if not isinstance(each, allowed):
                text = "".join(traceback.format_exception(each)[-4:])
                self._find(f"it raised {each!r}\n{text}")

    async def _check_next(self) -> None:
        """Check that the next calls work and take the same paths, and that nothing is left."""
        with contextlib.suppress(Exception):  # a call may meet the end of its connection
            await self._calls()
        calls = asyncio.create_task(self._calls())
        if not await self._is_over(calls, "the next call"):
            return
        if calls.exception() is not None:
            self._find(f"the next call raised {calls.exception()!r}")
            return
        if not inside.sends_at_once():
            self._find("the next lone call cannot be sent at once")
        if (path := await self._clean_run()) is not None:
            await self._check_rest(self._before)
            if path != self._path:
                self._find(f"the next run took another path: {path}, was {self._path}")

    async def _settled(self) -> "Counter[str]":
        """Return what there is once that changes no more, within some time."""
        after, end = self._snapshot(), real_monotonic() + PATIENCE
        while real_monotonic() < end:
            before, after = after, await self._snapshot_later()
            if after == before:
                break
        return after

    async def _snapshot_later(self) -> "Counter[str]":
        gc.collect()
        await asyncio.sleep(REST)
        sleep(0.01)  # noqa: ASYNC251 - other threads may be about to end
        return self._snapshot()

    async def _check_rest(self, before: "Counter[str]") -> None:
        gc.collect()
        after, end = self._snapshot(), real_monotonic() + PATIENCE
        while after != before and real_monotonic() < end:
            after = await self._snapshot_later()
        if left := after - before:
            self._find(f"left behind: {dict(left)}")
        if gone := before - after:
            self._find(f"gone: {dict(gone)}")

    def _snapshot(self) -> "Counter[str]":
        return inside.snapshot() + self._outside.unanswered() + self._watch.unended()

    async def _calls(self) -> None:
        """Make some lone calls, so that a connection is open and has found its ways."""
        if self._operation.around not in WORLDS:
            return
        for each in range(3):
            await self._echo.echo(each)
            await asyncio.sleep(0.01)
        await self._echo.echo(0)

    async def _clean_run(self) -> tuple[int, ...] | None:
        """Run the operation without a fault; return its path."""
        begin, task = inside.path_counters(), self._start()
        if not await self._is_over(task, "a run without a fault"):
            return None
        if task.exception() is not None and not isinstance(
            task.exception(), self._operation.raises
        ):
            self._find(f"a run without a fault raised {task.exception()!r}")
            return None
        path = tuple(now - then for now, then in zip(inside.path_counters(), begin, strict=True))
        await asyncio.sleep(REST)
        await self._calls()
        return path


@contextlib.contextmanager
def over(way: str) -> Iterator[None]:
    """Send large tensors that way; sockets to what is another host open for each run anew."""
    with pytest.MonkeyPatch.context() as patch:
        set_way(patch, way)
        inside.be_another_host(patch, REST / 3)
        yield


@contextlib.contextmanager
def agent() -> Iterator[None]:
    """Run torch's own RPC, for a world of this process alone."""
    with tempfile.TemporaryDirectory() as folder:
        options = rpc.TensorPipeRpcBackendOptions(
            init_method=f"file://{folder}/store", _transports=["uv"]
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's own use of process groups
            rpc.init_rpc(inside.ME, rank=0, world_size=1, rpc_backend_options=options)
        try:
            yield
        finally:
            rpc.shutdown(graceful=False)


def leaves_of(exc: BaseException | None) -> list[BaseException]:
    if isinstance(exc, BaseExceptionGroup):
        return [leaf for each in exc.exceptions for leaf in leaves_of(each)]
    return [] if exc is None else [exc]


def stack_of(task: "asyncio.Task[Any]") -> str:
    """Return where a task waits, the outermost function first."""
    found: list[str] = []
    each: Any = task.get_coro()
    while kinds := [kind for kind in _KINDS if hasattr(each, f"{kind}_frame")]:
        kind = kinds[0]
        code, frame = getattr(each, f"{kind}_code"), getattr(each, f"{kind}_frame")
        found.append(f"{code.co_qualname}:{frame and frame.f_lineno}")
        each = getattr(each, _KINDS[kind])
    return ", ".join([*found, type(each).__name__])


_KINDS = {"cr": "cr_await", "gi": "gi_yieldfrom", "ag": "ag_await"}


def _nothing() -> None:
    pass
