"""A real caller and a real callee over a simulated network: what is promised of calls and streams.

The link and the server, with its loop and its threads, are those that workers have; between them is
a network that delivers messages and answers late, in any order, or not at all. Time is virtual.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future as Job
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from contextvars import ContextVar, copy_context
from threading import Event, Thread, current_thread
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from torch import Tensor
from torch.futures import Future

from aiorpc_torch import (
    _backlog,
    _calling,
    _deadline,
    _incoming,
    _jobs,
    _link,
    _recording,
    _runner,
    _streams,
)
from aiorpc_torch._calling import Calling
from aiorpc_torch._link import Link
from aiorpc_torch._message import load
from aiorpc_torch._server import Server
from aiorpc_torch._window import Window
from aiorpc_torch._wire import Method
from aiorpc_torch.errors import CallTimeout, RemoteError, WorkerLost

PATIENCE = 10.0  # real seconds after which something will never happen
CREDIT = 4
EOF = "eof (this error originated at tensorpipe/transport/shm/connection_impl.cc:259)"
UNSENDABLE = "this tensor cannot be sent"
ELSEWHERE = """TensorPipe RPC backend only supports CPU tensors by default
Exception raised from getDevicesForRemote at torch/csrc/distributed/rpc/tensorpipe_agent.cpp:1423"""

in_context: ContextVar[bool] = ContextVar("in_context", default=False)  # of distributed autograd
scope: ContextVar[float | None] = ContextVar("scope", default=None)


# ── the callee's object ─────────────────────────────────────────────────────────────────────────


class Gate:
    """What a call waits for, on a loop or in a thread."""

    def __init__(self) -> None:
        self._on_loop = asyncio.Event()
        self._in_thread = Event()

    def open(self) -> None:
        self._on_loop.set()
        self._in_thread.set()

    async def passed(self) -> None:
        await self._on_loop.wait()

    def pass_in_thread(self) -> None:
        assert self._in_thread.wait(PATIENCE)


class Actor:
    """Notes what is started, and what of it is cancelled or closed."""

    def __init__(self) -> None:
        self.gates: dict[int, Gate] = {}
        self.started: list[int] = []  # on the loop
        self.threaded: list[int] = []
        self.cancelled: set[int] = set()
        self.yielded: dict[int, int] = {}
        self.closed: list[int] = []
        self.blocked = Event()  # a thread of the network's runs a method, or runs none

    async def quick(self, number: int) -> int:
        self.started.append(number)
        return number

    async def gated(self, number: int) -> int:
        self.started.append(number)
        try:
            await self.gates[number].passed()
        except asyncio.CancelledError:
            self.cancelled.add(number)
            raise
        return number

    async def wrong(self, number: int) -> None:
        self.started.append(number)
        raise ValueError(number)

    async def doubled(self, number: int, value: Tensor) -> Tensor:
        self.started.append(number)
        return value * 2

    async def elsewhere(self, number: int) -> list[Tensor]:
        self.started.append(number)
        return [torch.empty(1, device="meta")]

    def plain_elsewhere(self, number: int) -> list[Tensor]:
        self.threaded.append(number)
        return [torch.empty(1, device="meta")]

    def plain(self, number: int) -> int:
        self.threaded.append(number)
        return number

    def plain_gated(self, number: int) -> int:
        self.threaded.append(number)
        if current_thread().name.startswith("network"):
            self.blocked.set()
        self.gates[number].pass_in_thread()
        return number

    def plain_wrong(self, number: int) -> None:
        self.threaded.append(number)
        raise ValueError(number)

    def plain_wrapped(self, number: int) -> Any:
        self.threaded.append(number)
        return self.later(number)

    async def later(self, number: int) -> int:
        await self.gates[number].passed()
        return number

    def wrapped(self, number: int) -> Any:
        self.threaded.append(number)
        self.gates[number].pass_in_thread()
        return self.endless(number)

    async def endless(self, number: int) -> None:
        try:
            await asyncio.get_running_loop().create_future()
        except asyncio.CancelledError:
            self.cancelled.add(number)
            raise

    async def items(self, number: int, count: int, fails: bool) -> AsyncIterator[int]:
        self.started.append(number)
        try:
            for item in range(count):
                if item == 2:
                    await self.gates[number].passed()
                self.yielded[number] = item + 1
                yield item
            if fails:
                raise ValueError(number)
        finally:
            self.closed.append(number)

    def plain_items(self, number: int, count: int, fails: bool) -> Iterator[int]:
        self.threaded.append(number)
        try:
            for item in range(count):
                self.yielded[number] = item + 1
                yield item
            if fails:
                raise ValueError(number)
        finally:
            self.closed.append(number)


class Ref:
    """Stands for an RRef: it travels, and knows the object where it arrives."""

    actors: ClassVar[dict[int, Actor]] = {}

    def __init__(self, key: int) -> None:
        self.key = key

    def __reduce__(self) -> Any:
        return Ref, (self.key,)

    def local_value(self) -> Actor:
        return self.actors[self.key]


# ── the network ─────────────────────────────────────────────────────────────────────────────────


class Network:
    """Messages that were sent and answers that are ready, until somebody delivers them."""

    def __init__(self, accept: Callable[..., Any], blocked: Event) -> None:
        self.messages: list[tuple[Future[Any], bytes, list[Tensor]]] = []
        self.answers: list[tuple[Future[Any], Future[Any]]] = []
        self.down = False
        self.refuses = False
        self.unsendable: str | None = None  # a message in which this is named is refused
        self._accept = accept
        self._blocked = blocked
        self._waiting: list[Future[Any]] = []
        self._latest = -1  # of the messages that were delivered
        self._threads = ThreadPoolExecutor(8, "network")
        self._accepted: list[Job[None]] = []

    def send(self, _: Any, __: Any, data: bytes, tensors: Any = ()) -> "Future[Any]":
        """In place of `_bridge.send`."""
        named = self.unsendable is not None and self.unsendable.encode() in data
        if named or (self.refuses and load(data).numbers):
            self.refuses = False
            raise RuntimeError(UNSENDABLE)
        future: Future[Any] = Future()
        if self.down:
            future.set_exception(RuntimeError(EOF))
        else:
            self._waiting.append(future)
            self.messages.append((future, data, [*tensors]))
        return future

    def deliver(self, which: int) -> None:
        """Hand over one of the messages. It may run a method, which may have to wait."""
        if not self.messages:
            return
        future, data, tensors = self.messages.pop(which % len(self.messages))
        with suppress(Exception):  # one that cannot be read
            self._latest = max(self._latest, load(data).seq)

        def accept() -> None:
            reply = self._accept(data, tensors)
            reply.add_done_callback(lambda done: self.answers.append((future, done)))

        self._blocked.clear()
        self._accepted.append(self._threads.submit(accept))
        self._accepted[-1].add_done_callback(lambda _: self._blocked.set())
        assert self._blocked.wait(PATIENCE)

    def answer(self, which: int) -> None:
        """Hand back one of the answers."""
        if not self.answers:
            return
        future, done = self.answers.pop(which % len(self.answers))
        if future in self._waiting:
            self._waiting.remove(future)
            value = done.wait()
            if isinstance(value, tuple) and any(tensor.is_meta for tensor in value[1]):
                future.set_exception(RuntimeError(ELSEWHERE))
            else:
                future.set_result(value)

    def lose(self) -> None:
        """The connection breaks: all that is outstanding fails, and so does all that follows."""
        # It is read in order, though its messages are handed over in any: these have been read.
        for message in [*self.messages]:
            if load(message[1]).seq < self._latest:
                self.deliver(self.messages.index(message))
        self.down = True
        self.messages.clear()
        while self._waiting:
            self._waiting.pop().set_exception(RuntimeError(EOF))

    def close(self) -> None:
        self._threads.shutdown()
        for accepted in self._accepted:
            accepted.result()


class World:
    """A link and a server that the network joins, on a loop with a clock that is set by hand."""

    def __init__(self, threads: int, *, is_open: bool = True) -> None:
        self.patch = pytest.MonkeyPatch()
        self.errors: list[dict[str, Any]] = []
        self.clock = 1000.0
        self._set_constants()
        self.loop = asyncio.new_event_loop()
        self.loop.time = lambda: self.clock  # type: ignore[method-assign]
        self.loop.set_exception_handler(lambda _, context: self.errors.append(context))
        self.actor = Actor()
        self.key = max(Ref.actors, default=0) + 1
        Ref.actors[self.key] = self.actor
        self.ref = Ref(self.key)
        self.server: Server
        self.link: Link
        self.run(self._start(threads))
        if is_open:
            self.run(self.open())

    def _set_constants(self) -> None:
        clock = SimpleNamespace(monotonic=lambda: self.clock)
        for room in (_calling, _deadline, _jobs, _link):
            self.patch.setattr(room, "time", clock)
        self.patch.setattr(_calling, "scope_deadline", scope.get)
        self.patch.setattr(_recording, "autograd_context", lambda: 0 if in_context.get() else -1)
        self.patch.setattr(_backlog, "SLICE", 3)
        self.patch.setattr(_backlog, "SOON", 2)
        self.patch.setattr(_calling, "link_to", lambda _: self.link)
        self.patch.setattr(_link, "LARGE", 20_000)
        self.patch.setattr(_backlog, "LARGE", 20_000)
        self.patch.setattr(_streams, "CREDIT", CREDIT)
        self.patch.setattr(_incoming, "CREDIT", CREDIT)

    async def _start(self, threads: int) -> None:
        self.server = Server("callee", threads)
        self.network = Network(self.server.accept, self.actor.blocked)
        self.patch.setattr(_link, "send", self.network.send)
        self.link = Link(
            "caller", 0, SimpleNamespace(name="callee"), lambda _: None, lambda *_: None
        )

    async def open(self) -> None:
        """The callee begins to serve."""
        self.server.open()

    def run(self, coro: Any) -> Any:
        return self.loop.run_until_complete(coro)

    def turn(self, times: int = 4) -> None:
        """Some turns of the loop, in next to no time."""

        async def turns() -> None:
            for _ in range(times):
                self.clock += _runner.PAUSE / times
                await asyncio.sleep(0)

        self.run(turns())

    def call(self, name: str, *args: Any) -> Calling:
        return Calling("callee", Method(self.ref, name), args, {})  # type: ignore[arg-type]

    def task(self, coro: Any) -> "asyncio.Task[Any]":
        return self.loop.create_task(coro)

    def deliver_all(self, until: Callable[[], bool]) -> None:
        """Deliver whatever there is until that is so."""
        idle_since = time.monotonic()
        while not until():
            busy = self.network.messages or self.network.answers
            self.network.deliver(0)
            self.network.answer(0)
            self.turn()
            if busy:
                idle_since = time.monotonic()
            else:  # a thread is at work, or the link waits for its trickle
                self.clock += 0.05
                time.sleep(0.0005)
                stuck = time.monotonic() - idle_since > PATIENCE
                assert not stuck, f"stuck: {self.link}, {self.server}"

    def is_quiet(self) -> bool:
        """Neither side waits for anything."""
        link = self.link.tally()
        return not (link["in_flight"] or link["unsent"] or self.server.tally()[1])

    def part(self) -> None:
        """Say goodbye, and look for what is left."""
        if not self.network.down:
            parting = self.task(self.link.goodbye("it failed"))
            self.deliver_all(parting.done)
            assert self.server.peers.goodbyes == {"caller": "it failed"}
            self.deliver_all(lambda: self.link._outstanding == 0)
        self.link.close()
        self.turn()
        assert not self.link.waiting
        assert not self.errors

    def close(self) -> None:
        """Whatever has happened: leave nothing behind."""
        for gate in self.actor.gates.values():
            gate.open()
        self.link.close()
        self.run(self.server.close(1.0))
        self.network.close()
        self.turn()
        self.loop.close()
        self.patch.undo()
        del Ref.actors[self.key]


# ── the machine ─────────────────────────────────────────────────────────────────────────────────


class Call:
    """A call and what may become of it."""

    def __init__(self, number: int, kind: str, value: Any, gate: Gate) -> None:
        self.number = number
        self.kind = kind
        self.value = value
        self.gate = gate
        self.own = False
        self.is_cancelled = False
        self.may_raise: list[type[Exception]] = []
        self.task: asyncio.Task[Any]

    def is_plain(self) -> bool:
        return self.kind.startswith("plain")

    def outcome(self) -> Any:
        return self.task.result()

    def check_error(self, exc: ValueError) -> None:
        """It is its own."""
        assert exc.args == (self.number,)
        assert isinstance(self.value, ValueError)

    def check(self) -> None:
        """It has ended as it should."""
        if self.is_cancelled:
            assert self.task.cancelled()
            return
        try:
            value = self.outcome()
        except ValueError as exc:
            self.check_error(exc)
        except tuple(self.may_raise):
            pass
        else:
            assert self.kind != "late"
            same = torch.equal if isinstance(value, Tensor) else int.__eq__
            assert same(value, self.value)


class Iteration(Call):
    """A stream and who iterates it: as far as is allowed, and not beyond `leaves_at`."""

    def __init__(self, number: int, kind: str, count: int, fails: bool, gate: Gate) -> None:
        super().__init__(number, kind, ValueError() if fails else None, gate)
        self.count = count
        self.leaves_at = -1
        self.allowed = 0
        self.more = asyncio.Event()
        self.got: list[int] = []

    async def run(self, call: Callable[..., Calling]) -> None:
        async for item in call(self.kind, self.number, self.count, self.value is not None):
            self.got.append(item)
            if len(self.got) == self.leaves_at:
                break
            while len(self.got) >= self.allowed:
                self.more.clear()
                await self.more.wait()

    def allow(self, more: int) -> None:
        self.allowed += more
        self.more.set()

    def outcome(self) -> None:
        self.task.result()
        assert len(self.got) in (self.count, self.leaves_at)
        assert self.leaves_at >= 0 or not isinstance(self.value, ValueError)

    def check(self) -> None:
        assert self.got == [*range(len(self.got))], "in order, none missing, none twice"
        if self.value is None:
            return self._check_end()
        try:
            self._check_end()
        except ValueError as exc:
            self.check_error(exc)
            assert len(self.got) == self.count, "the error comes last"

    def _check_end(self) -> None:
        if self.is_cancelled:
            assert self.task.cancelled()
        elif self.task.exception() is None:
            self.outcome()
        elif not isinstance(self.task.exception(), tuple(self.may_raise)):
            self.task.result()


SINGLE = ["quick", "quick", "gated", "wrong", "doubled", "late", "plain", "plain_gated"]
SINGLE += ["plain_wrong", "plain_wrapped"]

some = st.integers(0, 1000)


class Protocol(RuleBasedStateMachine):
    """Whatever happens on the way, every call ends once, as it should, and nothing is left."""

    @initialize(
        threads=st.sampled_from([1, 2, 4]), is_open=st.booleans(), window=st.integers(1, 12)
    )
    def start(self, threads: int, is_open: bool, window: int) -> None:
        self.world = World(threads, is_open=is_open)
        self.actor, self.network = self.world.actor, self.world.network
        self.threads = threads
        self.is_open = is_open
        self.window = window
        self.world.link._window = self.world.link._queue._window = Window(window, 50_000)
        self.calls: list[Call] = []

    # ── what the caller does ────────────────────────────────────────────────────────────────────

    def add(self, call: Call, coro: Any) -> None:
        call.task = self.world.task(coro)
        if self.network.down:
            call.may_raise.append(WorkerLost)
        self.calls.append(call)

    def new_gate(self) -> tuple[int, Gate]:
        number = len(self.calls)
        gate = self.actor.gates[number] = Gate()
        return number, gate

    def call(self, kind: str) -> None:
        number, gate = self.new_gate()
        value: Any = ValueError() if kind.endswith("wrong") else number
        args: tuple[Any, ...] = (number,)
        if kind == "doubled":
            size = (4, 2000, 8000)[number % 3]  # rides in the bytes, in torch's table, goes alone
            value = torch.full((size,), 2.0 * number)
            args = number, torch.full((size,), float(number))
        call = Call(number, kind, value, gate)
        call.own = in_context.get()
        if kind == "late":
            scope.set(self.world.clock - 1)
            call.may_raise.append(CallTimeout)
        self.add(call, self.world.call("quick" if kind == "late" else kind, *args))

    @rule(kinds=st.lists(st.sampled_from(SINGLE), min_size=1, max_size=6), turn=st.booleans())
    def call_together(self, kinds: list[str], turn: bool) -> None:
        """Calls of one turn of the loop, or of the same as those that follow."""
        for kind in kinds:
            copy_context().run(self.call, kind)
        if turn:
            self.world.turn()

    @rule(kind=st.sampled_from(SINGLE[:5]))
    def call_in_context(self, kind: str) -> None:
        """In a distributed autograd context: it goes by itself, and its answer too."""

        def call() -> None:
            in_context.set(True)
            self.call(kind)

        copy_context().run(call)

    @rule(kind=st.sampled_from(["quick", "gated", "plain_gated"]), seconds=st.floats(0.1, 3))
    def call_with_timeout(self, kind: str, seconds: float) -> None:
        number, gate = self.new_gate()
        call = Call(number, kind, number, gate)
        call.may_raise.append(CallTimeout)
        calling = self.world.call(kind, number)
        calling._timeout = seconds
        self.add(call, calling)

    @rule(
        kind=st.sampled_from(["items", "plain_items"]),
        count=st.integers(0, 4 * CREDIT),
        fails=st.booleans(),
        allowed=st.integers(0, 8),
        leaves_at=st.sampled_from([-1, -1, -1, 1, 3, 6]),
    )
    def iterate(self, kind: str, count: int, fails: bool, allowed: int, leaves_at: int) -> None:
        number, gate = self.new_gate()
        stream = Iteration(number, kind, count, fails, gate)
        stream.leaves_at = leaves_at
        stream.allow(allowed)
        self.add(stream, stream.run(self.world.call))

    @rule(which=some, more=st.integers(1, 10))
    def consume(self, which: int, more: int) -> None:
        streams = [call for call in self.calls if isinstance(call, Iteration)]
        if streams:
            streams[which % len(streams)].allow(more)

    @rule(which=some)
    def cancel(self, which: int) -> None:
        open_calls = [call for call in self.calls if not call.task.done()]
        if open_calls:
            call = open_calls[which % len(open_calls)]
            call.is_cancelled = call.task.cancel()

    # ── what happens meanwhile ──────────────────────────────────────────────────────────────────

    @rule(which=some)
    def open_gate(self, which: int) -> None:
        if self.calls:
            self.calls[which % len(self.calls)].gate.open()

    @rule()
    def open_server(self) -> None:
        """The callee is there at last; messages may have come before."""
        if not self.is_open:
            self.is_open = True
            self.world.run(self.world.open())

    @rule()
    def turn(self) -> None:
        self.world.turn()

    @rule(seconds=st.sampled_from([0.2, 1.0, 2.0]))
    def time_passes(self, seconds: float) -> None:
        self.world.clock += seconds
        self.world.turn()

    @rule(which=st.lists(some, min_size=1, max_size=4))
    def deliver(self, which: list[int]) -> None:
        for each in which:
            self.network.deliver(each)
        self.world.turn()

    @rule(which=st.lists(some, min_size=1, max_size=4))
    def answer(self, which: list[int]) -> None:
        for each in which:
            self.network.answer(each)
        self.world.turn()

    def may_all_raise(self, error: type[Exception]) -> None:
        for call in self.calls:
            if not call.task.done():
                call.may_raise.append(error)

    @rule()
    def refuse(self) -> None:
        """The next message with calls cannot be sent."""
        self.network.refuses = True
        self.call("quick")
        self.may_all_raise(RemoteError)
        self.world.turn()
        self.network.refuses = False

    @rule()
    def fall_silent(self) -> None:
        """The peer is given up, though its connection stands."""
        self.world.turn()
        self.may_all_raise(WorkerLost)
        self.world.loop.call_soon(self.world.link.lost, WorkerLost("callee"))
        self.world.turn()
        assert not self.world.link.waiting

    @rule(calls=st.integers(0, 30))
    def lose(self, calls: int) -> None:
        """The connection breaks, and each side learns it."""
        if self.network.down or len(self.calls) < calls:
            return
        self.may_all_raise(WorkerLost)
        self.network.lose()
        self.world.loop.call_soon(self.world.server.lost, "caller")
        self.world.turn()

    # ── what holds at any time ──────────────────────────────────────────────────────────────────

    @invariant()
    def each_starts_once_and_in_order(self) -> None:
        if not hasattr(self, "calls"):
            return
        for started in (self.actor.started, [*self.actor.threaded]):
            assert len(set(started)) == len(started)
        in_order = [n for n in self.actor.started if not self.calls[n].own]
        assert in_order == sorted(in_order)
        if self.threads == 1:
            in_order = [n for n in self.actor.threaded if not self.calls[n].own]
            assert in_order == sorted(in_order)

    @invariant()
    def no_producer_runs_away(self) -> None:
        for call in getattr(self, "calls", ()):
            if isinstance(call, Iteration):
                assert self.actor.yielded.get(call.number, 0) <= len(call.got) + CREDIT

    # ── and at the end ──────────────────────────────────────────────────────────────────────────

    def teardown(self) -> None:
        """When all is delivered, all is answered."""
        if hasattr(self, "calls"):
            try:
                self.finish()
            finally:
                self.world.close()

    def finish(self) -> None:
        self.open_server()
        self.world.turn()
        if not self.network.down:  # so that cancellations that wait for a message leave
            self.call("quick")
        for call in self.calls:
            if call.is_plain() or not call.task.done():
                call.gate.open()
            if isinstance(call, Iteration):
                call.allow(1000)
        self.world.deliver_all(lambda: all(call.task.done() for call in self.calls))
        self.world.deliver_all(self.world.is_quiet)
        self.each_starts_once_and_in_order()
        for call in self.calls:
            call.check()
        streams = {call.number for call in self.calls if isinstance(call, Iteration)}
        begun = streams & {*self.actor.started, *self.actor.threaded}
        self.world.deliver_all(lambda: begun <= {*self.actor.closed})
        assert sorted(self.actor.closed) == sorted(begun), "each once"
        if not self.network.down:
            self.world.deliver_all(lambda: len(self.world.link._window) == 0)
        self.world.part()


TestProtocol = Protocol.TestCase
TestProtocol.settings = settings(stateful_step_count=25)


# ── by example ──────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def world() -> Iterator[World]:
    """With two threads, of which torch's lend none."""
    world = World(2)
    yield world
    try:
        world.deliver_all(world.is_quiet)
        world.part()
    finally:
        world.close()


def gate(world: World, number: int) -> Gate:
    world.actor.gates[number] = Gate()
    return world.actor.gates[number]


def context(**values: Any) -> Any:
    """A copy of this context in which these are set."""
    context = copy_context()
    for name, value in values.items():
        context.run({"in_context": in_context, "scope": scope}[name].set, value)
    return context


def exchange(world: World, times: int = 10) -> None:
    """Deliver what there is, and what follows from it, in order."""
    for _ in range(times):
        while world.network.messages:
            world.network.deliver(0)
        world.turn()
        while world.network.answers:
            world.network.answer(0)
        world.turn()


def wait_for(condition: Callable[[], bool]) -> None:
    """Until a thread has brought it about; the loop stands still."""
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.0005)


def test_a_lone_call_is_one_message(world: World) -> None:
    """Nothing more is sent to get its answer, or because it came."""
    for number in range(3):
        task = world.task(world.call("quick", number))
        exchange(world)
        assert task.result() == number
    assert world.link.tally()["messages"] == 3


def test_calls_of_a_turn_share_messages(world: World) -> None:
    """As many as fit, the first as well, though it finds the link idle: others come after it."""
    tasks = [world.task(world.call("quick", number)) for number in range(7)]
    exchange(world)
    assert [task.result() for task in tasks] == [*range(7)]
    assert world.link.tally()["messages"] == 3  # the first two as soon as there are so many


def test_a_call_leaves_before_its_turn_ends(world: World) -> None:
    """If nobody else is to have a turn, who might call as well."""
    senders = []

    def send(*args: Any) -> Any:
        senders.append(asyncio.current_task())
        world.loop.stop()
        return world.network.send(*args)

    world.patch.setattr(_link, "send", send)
    task = world.task(world.call("quick", 0))
    world.loop.run_forever()
    assert senders == [task]
    world.patch.setattr(_link, "send", world.network.send)
    exchange(world)


@pytest.mark.parametrize(("callers", "messages"), [(2, 1), (7, 1), (8, 2), (9, 2), (40, 2)])
def test_who_call_again_together_share_messages(world: World, callers: int, messages: int) -> None:
    """One, or two if they are many: both sides work at once, and do not send more than it takes."""
    world.patch.setattr(_backlog, "SLICE", 256)
    world.patch.setattr(_backlog, "SOON", 8)
    turns = 20
    seen = []

    async def caller() -> None:
        for turn in range(turns):
            assert await world.call("quick", turn) == turn
            seen.append(world.link.tally()["messages"])

    tasks = [world.task(caller()) for _ in range(callers)]
    exchange(world, 3 * turns)
    assert all(task.done() for task in tasks)
    assert seen[-1] - seen[len(seen) // 2] <= messages * turns // 2


def test_a_slow_call_delays_nobody(world: World) -> None:
    """The rest of its message is answered, and its own answer comes by a poll."""
    gate(world, 1)
    tasks = [world.task(world.call(kind, n)) for n, kind in enumerate(["quick", "gated", "quick"])]
    exchange(world)
    assert [task.done() for task in tasks] == [True, False, True]
    world.actor.gates[1].open()
    exchange(world)
    assert tasks[1].result() == 1


def test_a_call_in_a_context_keeps_its_turn(world: World) -> None:
    """It goes by itself, but not before those that were awaited before it."""
    world.task(world.call("quick", 0))
    world.task(world.call("quick", 1))
    world.loop.create_task(world.call("quick", 2), context=context(in_context=True))
    world.task(world.call("quick", 3))
    exchange(world)
    assert world.actor.started == [0, 1, 2, 3]


def test_a_slow_call_in_a_context_delays_nobody(world: World) -> None:
    """Its message waits for its own answer; others' need not wait for it."""
    for number in range(4):
        gate(world, number)
    tasks = [world.task(world.call("gated", number)) for number in range(3)]
    world.turn()
    tasks.append(world.loop.create_task(world.call("gated", 3), context=context(in_context=True)))
    exchange(world)
    for number in range(3):
        world.actor.gates[number].open()
        exchange(world)
        assert tasks[number].result() == number
    assert not tasks[3].done()
    world.actor.gates[3].open()
    exchange(world)
    assert tasks[3].result() == 3


def test_a_call_that_cannot_be_sent_fails_alone(world: World) -> None:
    """What was to leave with it leaves without it: other calls, cancellations, and credit."""
    gate(world, 0)
    waits = world.task(world.call("gated", 0))
    stream = Iteration(1, "plain_items", 3 * CREDIT, False, gate(world, 1))
    stream.allow(CREDIT - 1)
    iterating = world.task(stream.run(world.call))
    world.deliver_all(lambda: len(stream.got) == CREDIT - 1)
    waits.cancel()
    stream.allow(1)
    world.network.unsendable = "wrong"
    tasks = [
        world.task(world.call(kind, n)) for n, kind in enumerate(["quick", "wrong", "quick"], 2)
    ]
    exchange(world)
    assert [task.result() for task in tasks[::2]] == [2, 4]
    with pytest.raises(RemoteError, match=UNSENDABLE):
        tasks[1].result()
    assert world.actor.cancelled == {0}
    stream.allow(3 * CREDIT)
    world.deliver_all(iterating.done)
    assert stream.got == [*range(3 * CREDIT)]


@pytest.mark.parametrize("kind", ["elsewhere", "plain_elsewhere"])
def test_a_result_that_cannot_be_sent_fails_alone(world: World, kind: str) -> None:
    """Those that would have been carried back with it are not lost, and nor is the peer."""
    gate(world, 1)
    tasks = [world.task(world.call(each, n)) for n, each in enumerate(["quick", "gated", kind])]
    exchange(world)
    world.actor.gates[1].open()
    tasks += [world.task(world.call(each, n)) for n, each in enumerate([kind, "quick", kind], 3)]
    world.deliver_all(lambda: all(task.done() for task in tasks))
    assert [tasks[number].result() for number in (0, 1, 4)] == [0, 1, 4]
    for number in (2, 3, 5):
        with pytest.raises(ValueError, match="a tensor on meta cannot be sent to worker 'caller'"):
            tasks[number].result()


def test_an_answer_that_fails_is_no_lost_peer(world: World) -> None:
    """Only what came in its message fails, though the error names a file of the agent's."""
    gate(world, 0)
    waits = world.task(world.call("gated", 0))
    world.turn()
    fails = world.task(world.call("quick", 1))  # in a message of its own
    world.turn()
    for _ in range(2):
        world.network.deliver(0)
    world.turn()
    ((future, _),) = world.network.answers
    world.network.answers.clear()
    future.set_exception(RuntimeError(ELSEWHERE))
    world.turn()
    with pytest.raises(RemoteError, match="only supports CPU tensors") as caught:
        fails.result()
    assert not isinstance(caught.value, WorkerLost)
    world.actor.gates[0].open()
    exchange(world)
    assert waits.result() == 0


def test_a_full_window_holds_calls_back(world: World) -> None:
    """They wait at the caller, in order, and leave as answers come."""
    world.link._window = world.link._queue._window = Window(2, 1000)
    for number in range(5):
        gate(world, number)
    tasks = [world.task(world.call("gated", number)) for number in range(5)]
    exchange(world)
    assert world.actor.started == [0, 1]
    world.actor.gates[1].open()
    exchange(world)
    assert world.actor.started == [0, 1, 2]
    tasks[3].cancel()
    world.actor.gates[2].open()
    exchange(world)
    assert world.actor.started == [0, 1, 2, 4]
    for number in (0, 4):
        world.actor.gates[number].open()


def test_a_full_window_is_no_deadlock(world: World) -> None:
    """Without any answer one more call passes now and then: it may be what the others wait for."""
    world.link._window = world.link._queue._window = Window(1, 1000)
    for number in range(4):
        gate(world, number)
    tasks = [world.task(world.call("gated", number)) for number in range(4)]
    exchange(world)
    tasks[1].cancel()
    for started in ([0], [0, 2], [0, 2, 3]):
        assert world.actor.started == started, "one that was cancelled before it left never does"
        world.clock += 1.1
        exchange(world)
    for number in range(4):
        world.actor.gates[number].open()


@pytest.mark.parametrize("kind", ["quick", "plain"])
def test_messages_that_come_as_it_opens_keep_their_order(kind: str) -> None:
    """A thread of torch's may bring one while those that came before are started."""
    world = World(1, is_open=False)
    tasks = [world.task(world.call(kind, number)) for number in range(6)]
    world.turn()
    assert len(world.network.messages) >= 3
    last = world.network.messages.pop()
    while world.network.messages:
        world.network.deliver(0)
    world.network.messages.append(last)
    brought = Thread(target=world.network.deliver, args=(0,), name="aiorpc-test")
    hand_over = world.server._hand_over

    def meanwhile(*args: Any) -> None:
        if not brought.ident:
            brought.start()
            brought.join(0.05)  # as far as it gets
        hand_over(*args)

    world.patch.setattr(world.server, "_hand_over", meanwhile)
    world.run(world.open())
    brought.join(PATIENCE)
    world.deliver_all(lambda: all(task.done() for task in tasks))
    started = world.actor.started if kind == "quick" else world.actor.threaded
    assert started == [*range(6)]
    world.part()
    world.close()


@pytest.mark.parametrize("returns", ["before", "after"])
def test_an_async_def_behind_a_plain_one_is_cancelled(world: World, returns: str) -> None:
    """Also when its caller leaves just as it returns the coroutine, or before it does."""
    gate(world, 0)
    task = world.task(world.call("wrapped", 0))
    world.turn()
    world.network.deliver(0)
    world.deliver_all(lambda: world.actor.threaded == [0])
    task.cancel()
    world.turn()
    if returns == "before":
        world.actor.gates[0].open()
        wait_for(lambda: "Inbox 1 waiting" in repr(world.server))
    world.network.deliver(0)
    world.turn()
    world.actor.gates[0].open()
    world.deliver_all(lambda: world.is_quiet() and world.actor.cancelled == {0})


@pytest.mark.parametrize("kind", ["gated", "quick", "items"])
def test_a_call_that_is_cancelled_before_it_starts(world: World, kind: str) -> None:
    """Though its task is there already: its function is not called."""
    world.link._window = world.link._queue._window = Window(1, 1000)
    gate(world, 0)
    call = world.call(kind, 0) if kind != "items" else Iteration(0, kind, 3, False, Gate())
    task = world.task(call if isinstance(call, Calling) else call.run(world.call))
    world.turn()
    task.cancel()
    world.turn()
    assert len(world.network.messages) == 2, "the call and its cancellation"
    world.network.deliver(0)
    world.network.deliver(0)
    world.deliver_all(world.is_quiet)
    assert world.actor.started == []


def test_what_runs_for_a_silent_peer_that_comes_back(world: World) -> None:
    """Who was given up learns with the next message that nobody waits for his calls."""
    for number in range(2):
        gate(world, number)
    given_up = [world.task(world.call("gated", number)) for number in range(2)]
    exchange(world)
    world.loop.call_soon(world.link.lost, WorkerLost("callee", "it is silent"))
    world.turn()
    for task in given_up:
        with pytest.raises(WorkerLost, match="it is silent"):
            task.result()
    again = world.task(world.call("quick", 2))
    exchange(world)
    assert again.result() == 2
    assert world.actor.cancelled == {0, 1}


def test_a_lost_peer_is_lost_for_all(world: World) -> None:
    """For who waits, who has not sent yet, who iterates, and who comes later."""
    gate(world, 0)
    world.link._window = world.link._queue._window = Window(1, 1000)
    stream = Iteration(1, "items", 3, False, gate(world, 1))
    tasks = [world.task(world.call("gated", 0)), world.task(stream.run(world.call))]
    tasks.append(world.task(world.call("quick", 2)))
    exchange(world)
    world.network.lose()
    world.loop.call_soon(world.server.lost, "caller")
    world.turn()
    tasks.append(world.task(world.call("quick", 3)))
    world.turn()
    for task in tasks:
        with pytest.raises(WorkerLost, match="eof"):
            task.result()
    assert world.actor.cancelled == {0}
