"""States of the world when a fault happens, each made on all three workers.

`main` makes the state: waits for `a` from here and from `b`, and a wait of `a` for `b`. Faults are
defined elsewhere, except methods that never return: these must run before others wait for them.
"""

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from aiorpc_torch import (
    CallTimeout,
    Round,
    RoundTimeout,
    RRef,
    WorkerLeft,
    batched,
    call,
    create,
    remote,
    supervised,
)
from aiorpc_torch.autograd import context
from aiorpc_torch.testing import Gate
from aiorpc_torch.types import Supervised

SHORT = 0.5  # seconds, of a call with a timeout
End = tuple[str, float]
"""The result or the error of a wait, and its time."""


async def end_of(awaitable: Awaitable[Any]) -> End:
    try:
        value = repr(await awaitable)
    except Exception as exc:
        value = f"{type(exc).__name__}: {exc}"
    return value, time.monotonic()  # the same clock in every process


async def end_on(rref: RRef[Any], method: str, *args: Any) -> End:
    """Call from the worker that runs this; return how and when the call ended."""
    return await end_of(getattr(remote(rref), method)(*args))


async def items_of(rref: RRef[Any], method: str, timeout: float | None = None) -> list[Any]:
    return [item async for item in getattr(remote(rref, timeout=timeout), method)()]


async def end_of_items(rref: RRef[Any], method: str) -> End:
    return await end_of(items_of(rref, method))


async def hello(name: str) -> str:
    """Call the worker `name` from here and return its answer."""
    return await call(name, str.upper, "hello")


# ── methods and objects ─────────────────────────────────────────────────────────────────────────


def block_for_ever() -> None:
    """Block a thread, which cannot be cancelled."""
    threading.Event().wait()


async def ignore_cancellation() -> None:
    """Wait on the event loop and ignore cancellations."""
    while True:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()


class Hangs:
    """Methods that never return."""

    def blocks(self, _: Any) -> None:
        block_for_ever()

    async def ignores(self, _: Any) -> None:
        await ignore_cancellation()


class Source:
    """Streams that yield one item and then wait."""

    def __init__(self) -> None:
        self._followed, self._closed = asyncio.Event(), asyncio.Event()

    async def follow(self) -> AsyncIterator[int]:
        try:
            yield 0
            self._followed.set()
            await asyncio.Event().wait()
        finally:
            self._closed.set()

    async def followed(self) -> None:
        await self._followed.wait()

    async def closed(self) -> None:
        await self._closed.wait()

    def blocks(self) -> Iterator[int]:
        yield 0
        block_for_ever()

    async def ignores(self) -> AsyncIterator[int]:
        yield 0
        await ignore_cancellation()


class Desk:
    """Batches that wait for more items, or behind a running batch."""

    def __init__(self) -> None:
        self.gate = Gate()

    async def here(self) -> None:
        """Return after earlier calls have started."""

    @batched(max_size=4, max_wait=600.0)
    async def waiting(self, items: list[int]) -> list[int]:
        return [sum(items)] * len(items)

    @batched(max_size=1)
    async def busy(self, items: list[int]) -> list[int]:
        await self.gate.passed()
        return items

    @batched(max_size=1)
    def blocks(self, items: list[int]) -> list[int]:
        block_for_ever()
        return items

    @batched(max_size=1)
    async def ignores(self, items: list[int]) -> list[int]:
        await ignore_cancellation()
        return items


class Table:
    """Rounds that wait for members."""

    async def here(self) -> None:
        """Return after earlier calls have started."""

    @batched(Round(size=3))
    async def total(self, items: list[int]) -> int:
        return sum(items)

    @batched(Round(size=2, timeout=SHORT))
    async def pair(self, items: list[int]) -> int:
        return sum(items)

    @batched(Round(size=1))
    def blocks(self, items: list[int]) -> list[int]:
        block_for_ever()
        return items

    @batched(Round(size=1))
    async def ignores(self, items: list[int]) -> list[int]:
        await ignore_cancellation()
        return items


class _Blocks(torch.autograd.Function):
    """The identity function, whose backward waits."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        backward_runs.set()
        backward_may_end.wait()
        backward_runs.clear()
        return grads[0]


backward_runs, backward_may_end = threading.Event(), threading.Event()


def forward(x: Tensor) -> Tensor:
    result: Tensor = _Blocks.apply(x)
    return result


def wait_for_backward() -> None:
    backward_runs.wait()


async def end_backward() -> None:
    """Wait until a backward that runs here has ended.

    A process that ends earlier would wait for it in torch's exit functions, perhaps for ever. It
    could also abort, when the thread takes the GIL of an interpreter that has ended (2.15).
    """
    backward_may_end.set()
    while backward_runs.is_set():  # noqa: ASYNC110 - it is cleared by a thread of torch's
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.1)  # for torch's own part of it


# ── states ──────────────────────────────────────────────────────────────────────────────────────


class Scene:
    """The waits for `a`, and the waits of `a` for `b`."""

    def __init__(self) -> None:
        self.waits: dict[str, asyncio.Future[End]] = {}
        self.relics: dict[str, Callable[[], Awaitable[Any]]] = {}
        self.proofs: list[Callable[[str], Awaitable[None]]] = []
        """Each is told how `a` has gone: "lost" or "left"."""
        self.kept: list[Any] = []  # tasks and objects that must live as long

    def here(self, name: str, awaitable: Awaitable[Any]) -> None:
        """Add a wait of `main` itself."""
        self.waits[name] = asyncio.ensure_future(end_of(awaitable))

    def from_b(self, name: str, function: Callable[..., Any], *args: Any) -> None:
        """Add a wait of `b`: `function` runs there and returns how the wait ended."""
        self.waits[f"{name}, from b"] = asyncio.ensure_future(call("b", function, *args))

    def by_a(self, function: Callable[..., Any], *args: Any) -> None:
        """Add a wait of `a` for `b`, and one of `main` for that call of `a`."""
        self.here(f"what makes a wait for {args[1]}", call("a", function, *args))


async def idle(scene: Scene) -> None:
    assert await call("a", hello, "b") == await call("b", hello, "a") == "HELLO"


async def pending_call(scene: Scene) -> None:
    gate, far = await create("a", Gate), await create("b", Gate)
    scene.here("call of an async def", remote(gate).passed())
    scene.here("call of a def", remote(gate).passed_in_thread())
    scene.from_b("call", end_on, gate, "passed")
    scene.by_a(end_on, far, "passed")
    await remote(gate).entered(3)
    await remote(far).entered()
    scene.relics["on b: what it ran for a is cancelled"] = remote(far).cancelled


async def open_stream(scene: Scene) -> None:
    near, other, far = [await create(each, Source) for each in ("a", "a", "b")]
    scene.here("stream", items_of(near, "follow"))
    scene.from_b("stream", end_of_items, other, "follow")
    scene.by_a(end_of_items, far, "follow")
    for source in (near, other, far):
        await remote(source).followed()
    scene.relics["on b: its stream to a is closed"] = remote(far).closed


async def waiting_batch(scene: Scene) -> None:
    near, far = await create("a", Desk), await create("b", Desk)
    gate = await create("b", Gate)
    scene.here("item that waits for more", remote(near).waiting(1))
    scene.here("item being answered", remote(near).busy(1))
    scene.here("item behind a busy batch", remote(near).busy(2))
    scene.from_b("item that waits for more", end_on, near, "waiting", 2)
    scene.by_a(end_on, far, "waiting", 1000)
    scene.by_a(end_on, gate, "passed")  # sent after the item, so it is cancelled after it
    await remote(gate).entered()
    scene.relics["on b: no item of a waits"] = remote(gate).cancelled
    mine = asyncio.create_task(remote(far).waiting(1))
    await _has_begun(near, far)
    scene.proofs.append(lambda _: _complete(far, mine))


async def _has_begun(*rrefs: RRef[Any]) -> None:
    """Wait until earlier calls of this worker and `b` are in their queues."""
    await asyncio.sleep(0)
    for rref in rrefs:
        await remote(rref).here()
        await call("b", end_on, rref, "here")


async def _complete(far: RRef[Desk], mine: "asyncio.Task[int]") -> None:
    """Check that the batch runs without the lost worker's item once it is full."""
    others = await asyncio.gather(*(remote(far).waiting(n) for n in (2, 3, 4)), mine)
    assert others == [10] * 4, others


async def forming_round(scene: Scene) -> None:
    near, far = await create("a", Table), await create("b", Table)
    gate = await create("b", Gate)
    # A round of main and a, whose members b records.
    both = await asyncio.gather(remote(far).pair(1), call("a", end_on, far, "pair", 2))
    assert both[0] == 3, both
    scene.here("contribution", remote(near).total(1))
    scene.from_b("contribution", end_on, near, "total", 2)
    scene.by_a(end_on, far, "total", 1000)
    scene.by_a(end_on, gate, "passed")
    await remote(gate).entered()
    scene.relics["on b: no contribution of a is there"] = remote(gate).cancelled
    mine = asyncio.create_task(remote(far).total(1))
    await _has_begun(near, far)
    scene.proofs.append(lambda _: _go_round(far, mine))


async def _go_round(far: RRef[Table], mine: "asyncio.Task[int]") -> None:
    """Check that the round goes on without the lost worker, and that a timeout names it."""
    sums = await asyncio.gather(remote(far).total(2), remote(far).total(3), mine)
    assert [*sums] == [6, 6, 6], sums
    (end,) = await asyncio.gather(remote(far).pair(1), return_exceptions=True)
    assert isinstance(end, RoundTimeout), end
    assert (end.present, end.missing) == (("main",), ("a",)), end


async def supervised_object(scene: Scene) -> None:
    """Start calls of a supervised object; later ones wait until it is there again."""
    gate = await supervised("a", Gate)
    scene.here("call", remote(gate).passed())
    scene.from_b("call", end_on, gate.rref, "passed")
    await remote(gate).entered(2)
    scene.proofs.append(lambda how: _is_not_sent(gate, how))


async def _is_not_sent(gate: Supervised[Gate], how: str) -> None:
    """Check that a call is not sent: it waits within its timeout, unless the worker has left."""
    end = await asyncio.gather(remote(gate, timeout=SHORT).entered(0), return_exceptions=True)
    assert isinstance(end[0], WorkerLeft if how == "left" else CallTimeout), end
    assert end[0].may_have_run is False, end


async def backward_in_flight(scene: Scene) -> None:
    """Start backward passes of recorded calls; they block on `a`."""
    scene.here("backward", learn())
    scene.here("backward with a timeout", learn(SHORT))
    await call("a", wait_for_backward)
    gate = await create("a", Gate)
    scene.here("call", remote(gate).passed())
    await remote(gate).entered()


async def learn(timeout: float | None = None) -> None:
    async with context() as ctx:
        found = await call("a", forward, torch.ones(2, requires_grad=True))
        await ctx.backward([found.sum()], timeout=timeout)


MAKE = {
    "idle": idle,
    "pending call": pending_call,
    "open stream": open_stream,
    "waiting batch": waiting_batch,
    "forming round": forming_round,
    "supervised object": supervised_object,
    "backward in flight": backward_in_flight,
}


async def hang(scene: Scene, state: str, how: str) -> None:
    """Make the state with a method of `a` that never returns; wait with and without a timeout."""
    if state == "backward in flight":
        return await backward_in_flight(scene)
    if state == "open stream":
        source = await create("a", Source)
        scene.here("without a timeout", items_of(source, how))
        scene.here("with a timeout", items_of(source, how, SHORT))
        scene.from_b("without a timeout", end_of_items, source, how)
        return None
    what: Any = {"waiting batch": Desk, "forming round": Table}.get(state, Hangs)
    make: Any = supervised if state == "supervised object" else create
    rref = await make("a", what)
    scene.here("without a timeout", getattr(remote(rref), how)([1]))
    scene.here("with a timeout", getattr(remote(rref, timeout=SHORT), how)([2]))
    scene.from_b("without a timeout", end_on, getattr(rref, "rref", rref), how, [3])
    return None
