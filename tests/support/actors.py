"""Objects and functions that tests call in other processes: importable from everywhere."""

import asyncio
import contextvars
import ctypes
import itertools
import os
import threading
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed import rpc

import aiorpc_torch as aiorpc
from aiorpc_torch import Round, async_execution, batched, call, remote


class Notes:
    """What came, in its order."""

    def __init__(self) -> None:
        self.order: list[Any] = []

    async def note(self, item: Any, *_: Any) -> None:
        self.order.append(item)

    async def noted(self) -> list[Any]:
        return self.order


class Counter:
    """State, arithmetic, and where things ran."""

    attribute = 3

    def __init__(self, start: int = 0) -> None:
        self.value = start

    def add(self, amount: int = 1) -> int:
        self.value += amount
        return self.value

    async def aadd(self, amount: int = 1) -> int:
        self.value += amount
        return self.value

    def thread(self) -> str:
        return threading.current_thread().name

    async def on_loop(self) -> bool:
        return asyncio.get_running_loop() is not None

    def _secret(self) -> int:
        return self.value

    def scale(self, tensor: Tensor) -> Tensor:
        return tensor * self.value

    def threads(self) -> int:
        return torch.get_num_threads()

    def fails_to_pickle(self) -> Any:
        return threading.Lock()

    def later(self) -> Any:
        """As plain torch does it: a Future that somebody completes."""
        future: Any = torch.futures.Future()
        future.set_result("later")
        return future

    def plain_def_coroutine(self) -> Any:
        """A plain def that hands out a coroutine, as decorators make of an `async def`."""
        return self.aadd(10)


class Loud(Counter):
    """Overrides a method."""

    def add(self, amount: int = 1) -> int:
        return super().add(amount) * 100


class Failing:
    """Cannot be made."""

    def __init__(self) -> None:
        raise KeyError("no such model")


class Batching:
    """Every kind of batched body."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    @batched(max_size=8)
    async def double(self, xs: list[int]) -> list[int]:
        self.sizes.append(len(xs))
        return [2 * x for x in xs]

    @batched(max_size=8)
    def double_in_thread(self, xs: list[int], offsets: list[int] = 0) -> list[int]:  # type: ignore[assignment]
        return [2 * x + offset for x, offset in zip(xs, offsets, strict=True)]

    @batched(Round(size=3))
    async def total(self, xs: list[int]) -> int:
        return sum(xs)

    @batched(max_size=8)
    async def rows(self, xs: list[Tensor]) -> Tensor:
        return torch.stack(xs) * 2

    @batched(max_size=8)
    async def broken(self, xs: list[int]) -> list[int]:
        raise LookupError("the body", len(xs))

    @staticmethod
    @batched(max_size=8)
    async def static_double(xs: list[int]) -> list[int]:
        return [2 * x for x in xs]

    async def batch_sizes(self) -> list[int]:
        return self.sizes


class Knot:
    """Batched bodies and methods that call on, along a route of (method, object)."""

    def __init__(self) -> None:
        self.left: list[asyncio.Task[Any]] = []
        self.gate = asyncio.Event()
        self.gate.set()

    @batched(max_size=8)
    async def ask(self, routes: list[Any]) -> list[Any]:
        answers = [await follow(route) for route in routes]
        await self.gate.wait()
        return answers

    @batched(max_size=8, max_concurrent_batches=2)
    def ask_in_thread(self, routes: list[Any]) -> list[Any]:
        return [asyncio.run(follow(route)) for route in routes]

    async def relay(self, route: Any) -> Any:
        return await follow(route)

    def relay_in_thread(self, route: Any) -> Any:
        return asyncio.run(follow(route))

    async def stream(self, route: Any) -> AsyncIterator[Any]:
        yield await follow(route)

    def stream_in_thread(self, route: Any) -> Iterator[Any]:
        yield asyncio.run(follow(route))

    async def leave(self, route: Any) -> str:
        """Answered at once; the route is followed by a task that is left behind."""
        self.left.append(asyncio.create_task(follow(route)))
        return "left"

    async def what_was_left(self) -> list[Any]:
        left, self.left = self.left, []
        return await asyncio.gather(*left)

    async def open(self, is_open: bool) -> None:
        (self.gate.set if is_open else self.gate.clear)()

    async def here(self) -> None:
        pass


async def follow(route: Any) -> Any:
    """Make the first call of the route, which makes the next; at its end all is well."""
    if not route:
        return "end"
    (name, rref), *rest = route
    if name == "local":
        return await rref.local_value().ask(rest)
    if name == "typed":
        return await call(rref, Knot.ask, rest)
    if name == "create":
        return await aiorpc.fetch(await aiorpc.create(rref.owner_name(), follow, rest))
    if name.startswith("stream"):
        (answer,) = [each async for each in getattr(remote(rref), name)(rest)]
        return answer
    return await getattr(remote(rref), name)(rest)


def knots(here: Any, there: Any, name: str) -> list[Any]:
    """Routes through another worker by some method, and back into a queue that they came from."""
    around = [("ask", here), (name, there), ("relay_in_thread", there), ("typed", here)]
    # The queue is there, and another of this worker's is in between.
    through = [("ask_in_thread", there), ("ask", here), (name, here), ("ask_in_thread", there)]
    return [around, [("relay", there), *around], through]


async def walk_between(worker: str, names: list[str]) -> tuple[list[str], list[str], Any]:
    """What becomes of knots with that worker, of routes without one, and of one left behind."""
    here, there = aiorpc.RRef(Knot()), await aiorpc.create(worker, Knot)
    told, free = [], []
    for name in names:
        told += [repr(each) for each in await _walk(*knots(here, there, name))]
        free += await _walk([("ask", here), (name, there)], [("ask_in_thread", there)])
    left = await _walk([("ask", here), ("leave", there), ("ask", here)])
    return told, free, [*left, *await remote(there).what_was_left()]


async def _walk(*routes: Any) -> list[Any]:
    async with asyncio.timeout(30.0):
        return await asyncio.gather(*map(follow, routes), return_exceptions=True)


class PingPong:
    """Calls itself back and forth between two workers."""

    def __init__(self) -> None:
        self.peer: Any = None

    async def meet(self, peer: Any) -> None:
        self.peer = peer

    async def bounce(self, depth: int) -> int:
        if depth == 0:
            return 0
        return 1 + int(await remote(self.peer).bounce(depth - 1))


class Holder:
    """Holds an RRef, and uses it."""

    def __init__(self) -> None:
        self.rref: Any = None

    async def take(self, rref: Any) -> None:
        self.rref = rref

    async def take_from(self, other: Any) -> None:
        self.rref = await remote(other).given()

    async def given(self) -> Any:
        return self.rref

    async def add(self, amount: int) -> int:
        return await remote(self.rref).add(amount)

    def add_by_torch(self, amount: int) -> int:
        """Call the object as a plain torch client."""
        return self.rref.rpc_sync(timeout=30.0).add(amount)

    async def is_its_own(self) -> bool:
        return self.rref.local_value() is self


class Slotted:
    """An object without weak references, so only torch finds it."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0

    async def add(self, amount: int) -> int:
        self.value += amount
        return self.value

    async def me(self, rref: Any) -> bool:
        return rref.is_owner() and rref.local_value() is self


class Sleeper:
    """Waits on its loop."""

    async def sleep(self, seconds: float) -> float:
        await asyncio.sleep(seconds)
        return seconds

    def block(self, release: str) -> None:
        """Hold a thread until a file appears."""
        while not os.path.exists(release):
            threading.Event().wait(0.01)


@async_execution
async def add_slowly(a: int, b: int) -> int:
    """An async def that plain torch clients may call."""
    await asyncio.sleep(0)
    return a + b


@async_execution
async def fail_slowly(text: str) -> None:
    """The same, failing."""
    await asyncio.sleep(0)
    raise ValueError(text)


async def ask_back(worker: str) -> str:
    """On the callee: call the caller."""
    return await call(worker, name_of_worker)


async def call_abs(worker: str, value: int) -> int:
    """Call that worker from here."""
    return await aiorpc.call(worker, abs, value)


def name_of_worker() -> str:
    """Where this runs, according to torch."""
    name: str = rpc.get_worker_info().name
    return name


async def remaining() -> float | None:
    """Seconds left of the caller's time, as the callee sees it."""
    return aiorpc.seconds_left()


def address() -> str:
    """Where others reach this worker, as torch has it."""
    found: str = rpc.api._get_current_rpc_agent().store.get(f"addrs/{name_of_worker()}").decode()
    return found


def pid() -> int:
    """This process."""
    return os.getpid()


# ── streams ─────────────────────────────────────────────────────────────────────────────────────


class Streams:
    """Every kind of stream. It remembers how many items it made, and tells when it was closed."""

    def __init__(self) -> None:
        self.made = 0
        self.cancelled = 0
        self._closed = threading.Event()
        self._followed = asyncio.Event()
        self._items: asyncio.Queue[Any] = asyncio.Queue()

    async def count(self, number: int, size: int = 0) -> AsyncIterator[Any]:
        try:
            for n in range(number):
                self.made += 1
                yield torch.full((size,), float(n)) if size else n
        finally:
            await asyncio.sleep(0)  # it has time to clean up
            self._closed.set()

    def count_in_thread(self, number: int, size: int = 0) -> Iterator[Any]:
        try:
            for n in range(number):
                self.made += 1
                yield torch.full((size,), float(n)) if size else n
        finally:
            self._closed.set()

    async def refill(self, number: int, size: int) -> AsyncIterator[Any]:
        buffer = torch.empty(size)
        for n in range(number):
            yield {"buffer": buffer.fill_(n), "view": buffer[:1]} if n % 2 else buffer.fill_(n)

    def iterator(self, number: int) -> Any:
        return map(str, range(number))

    async def follow(self) -> AsyncIterator[Any]:
        """What others put."""
        self._followed.set()
        try:
            while (item := await self._items.get()) is not None:
                yield item
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self._closed.set()

    async def followed(self) -> None:
        await self._followed.wait()

    async def put(self, item: Any) -> None:
        self._items.put_nowait(item)

    async def fail_at(self, number: int, exc: Any, *args: Any) -> AsyncIterator[int]:
        for n in range(number):
            yield n
        raise exc(*args)

    def fail_in_thread_at(self, number: int, exc: Any, *args: Any) -> Iterator[int]:
        yield from range(number)
        raise exc(*args)

    async def unpicklable_at(self, number: int) -> AsyncIterator[Any]:
        try:
            for n in range(number):
                yield n
            yield threading.Lock()
        finally:
            self._closed.set()

    def unpicklable_in_thread_at(self, number: int) -> Iterator[Any]:
        try:
            yield from range(number)
            yield threading.Lock()
        finally:
            self._closed.set()

    async def a_list(self) -> list[int]:
        return [1]

    def a_list_in_thread(self) -> list[int]:
        return [1]

    async def how_many(self) -> int:
        return self.made

    def closed(self) -> int:
        """Wait until a generator has ended; how often one was cancelled."""
        assert self._closed.wait(30.0), "nobody closed it"
        return self.cancelled


async def count(number: int) -> AsyncIterator[int]:
    for n in range(number):
        yield n


def count_in_thread(number: int) -> Iterator[int]:
    yield from range(number)


async def wait_for_ever() -> AsyncIterator[int]:
    yield 0
    await asyncio.Event().wait()


# ── who calls on ────────────────────────────────────────────────────────────────────────────────


async def call_on(rref: Any, name: str, *args: Any) -> Any:
    """On the callee: call a method elsewhere."""
    return await getattr(remote(rref), name)(*args)


async def iterate_on(rref: Any, name: str, *args: Any) -> list[Any]:
    """On the callee: take the whole of a stream from elsewhere."""
    return [item async for item in getattr(remote(rref), name)(*args)]


async def try_on(rref: Any, name: str, *args: Any) -> str:
    """What comes of a call elsewhere."""
    try:
        return repr(await call_on(rref, name, *args))
    except Exception as exc:
        return repr(exc)


_tried: set[asyncio.Task[str]] = set()


async def try_in_a_task(rref: Any, name: str, *args: Any) -> None:
    """Start `try_on`, also for the time when whoever calls this is lost."""
    _tried.add(asyncio.create_task(try_on(rref, name, *args)))


async def tried() -> list[str]:
    """What came of all that was started."""
    return [await each for each in _tried]


def keep_gil(seconds: float) -> float:
    """What C code does that computes for long: no other Python code of the process runs."""
    ctypes.PyDLL(None).usleep(int(1e6 * seconds))
    return seconds


async def hold_loop(seconds: float) -> float:
    """What no coroutine should do."""
    time.sleep(seconds)  # noqa: ASYNC251
    return seconds


async def remaining_along(*route: str) -> list[float | None]:
    """Seconds left here, and at each next worker of the route."""
    left = await remaining()
    return [left, *(await call(route[0], remaining_along, *route[1:]) if route else ())]


# ── a model ─────────────────────────────────────────────────────────────────────────────────────


class Net(torch.nn.Linear):
    """A layer with gradients in contexts of torch's distributed autograd."""

    async def aforward(self, x: Tensor) -> Tensor:
        await asyncio.sleep(0)
        return self.forward(x)

    def gradients(self, context: int) -> list[Tensor]:
        found = torch.distributed.autograd.get_gradients(context)
        return [found[self.weight], found[self.bias]]


def make_net(seed: int) -> Net:
    """The same one, wherever it is made."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Net(3, 2)


# ── exceptions ──────────────────────────────────────────────────────────────────────────────────


class TwoArguments(Exception):
    def __init__(self, code: int, reason: str) -> None:
        super().__init__(f"{code}: {reason}")
        self.code, self.reason = code, reason


class KeywordOnly(Exception):
    def __init__(self, *, path: str) -> None:
        super().__init__(path)
        self.path = path


class HoldsLock(Exception):
    def __init__(self, text: str) -> None:
        super().__init__(text, threading.Lock())


class UnpicklesBadly(Exception):
    def __reduce__(self) -> Any:
        return int, ("not a number",)


class Stop(BaseException):
    pass


def raise_local() -> None:
    class Local(Exception):
        pass

    raise Local("nobody else knows this class")


def raise_it(exc: Any, *args: Any, **kwargs: Any) -> None:
    raise exc(*args, **kwargs)


async def araise_it(exc: Any, *args: Any, **kwargs: Any) -> None:
    raise exc(*args, **kwargs)


async def raise_from_third(worker: str) -> None:
    """B re-raises what C raised."""
    await call(worker, raise_it, TwoArguments, 7, "third")


__all__ = [name for name in dir() if not name.startswith("_")]
assert aiorpc


_context: contextvars.ContextVar[int] = contextvars.ContextVar("context", default=0)


_count = itertools.count(1)


def bump_global() -> int:
    """How often this was called in one process."""
    return next(_count)


async def bump_context() -> int:
    """How often this was called in one context."""
    _context.set(_context.get() + 1)
    return _context.get()


class Parameters:
    """What trainers update together, round by round; who was in each."""

    def __init__(self) -> None:
        self._rounds: list[list[str]] = []

    async def here(self) -> None:
        """Answered once all that its caller called before has begun."""

    async def rounds(self) -> list[list[str]]:
        return self._rounds

    def _step(self, grads: list[Tensor], names: list[str]) -> tuple[Tensor, int]:
        self._rounds.append(sorted(names))
        return torch.stack(grads).sum(0), len(self._rounds)

    @batched(Round(5, quorum=4, timeout=1.0, member=lambda grad, name: name))
    def lenient(self, grads: list[Tensor], names: list[str]) -> tuple[Tensor, int]:
        return self._step(grads, names)

    @batched(Round(5, timeout=1.0, member=lambda grad, name: name))
    def strict(self, grads: list[Tensor], names: list[str]) -> tuple[Tensor, int]:
        return self._step(grads, names)


class Proxied:
    """Every attribute is a callable with every attribute."""

    def __init__(self, answer: Any) -> None:
        self._answer = answer

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return Anything(self._answer)


class Anything:
    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def __call__(self, *args: Any) -> Any:
        return self.answer

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything(self.answer)


async def _call_back(worker: str) -> int:
    return await call(worker, pid)


def call_back_on_a_new_loop(worker: str) -> int:
    """Call back from a thread of torch's."""
    return asyncio.run(_call_back(worker))
