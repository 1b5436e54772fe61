"""Messages and answers that are malformed or hostile, against a real link and a real server.

Whatever comes: nothing is killed, nobody is left waiting, no other call is disturbed, and nothing
stays behind. Real messages are recorded and then changed, as plain values and as bytes; what is
inside a pickle of a user's is made by hand, so that nothing harmful can be named by chance.
"""

import asyncio
import contextlib
import itertools
import logging
import math
import pickle
import pickletools
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from random import Random
from types import SimpleNamespace
from typing import Any

import actors
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_protocol import Gate, World
from torch import Tensor

import aiorpc_torch as aiorpc
from aiorpc_torch import RpcError, _doors, _exceptions, _wire, call, create, remote
from aiorpc_torch._exceptions import Failure
from aiorpc_torch._link import Link
from aiorpc_torch._message import Group, dump, load_results
from aiorpc_torch._pending import Pending
from aiorpc_torch._tensors import from_bytes
from aiorpc_torch._wire import Create, Function, Method, pack
from aiorpc_torch.errors import RemoteError, WorkerLost

PEER: Any = SimpleNamespace(name="callee")
DEEP = 100_000

# One seed each: what an answer holds depends on threads, and may not decide what is drawn.
rolls = st.randoms(use_true_random=True)
slow = settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])


@pytest.fixture(autouse=True)
def _only_what_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes changed by chance cannot name what would do harm."""
    known = ("aiorpc_torch.", "test_", "torch", "copyreg", "math", "builtins", "actors")

    def find_class(self: Any, module: str, name: str) -> Any:
        if not module.startswith(known) or name in ("exec", "eval", "input", "exit", "breakpoint"):
            raise pickle.UnpicklingError(f"{module}.{name} is not for a test")
        return find(self, module, name)

    find = _wire._Unpacker.find_class
    monkeypatch.setattr(_wire._Unpacker, "find_class", find_class)
    monkeypatch.setattr(_exceptions, "pickle", Careful)


class Careful:
    """`pickle`, for exceptions that come in."""

    Pickler = pickle.Pickler

    @staticmethod
    def loads(data: Any) -> Any:
        names = {arg for _, arg, _ in pickletools.genops(data) if isinstance(arg, str)}
        if names & {"system", "exec", "eval", "exit"}:
            raise pickle.UnpicklingError("not for a test")
        return pickle.loads(data)


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR, "aiorpc_torch")  # thousands of warnings otherwise


# ── what is made of a message ───────────────────────────────────────────────────────────────────


class Foreign:
    """A class, where only plain values are expected."""


class Bad:
    """What raises when it is unpickled."""

    def __init__(self, error: type[BaseException]) -> None:
        self.error = error

    def __reduce__(self) -> Any:
        return throw, (self.error,)


class Noted:
    """What is noticed when it is unpickled."""

    def __reduce__(self) -> Any:
        return ran.append, ("unpickled",)


ran: list[str] = []


def throw(error: type[BaseException]) -> None:
    raise error("while it was unpickled")


class Odd(Exception):
    """Takes no notes, and has no text."""

    def __init__(self, *args: Any) -> None:
        self.__notes__: Any = 5

    def __str__(self) -> str:
        raise SystemExit

    def __reduce__(self) -> Any:
        raise KeyboardInterrupt


RAISED = [KeyboardInterrupt, SystemExit, GeneratorExit, asyncio.CancelledError, StopIteration]
RAISED += [MemoryError, RecursionError, ImportError, Odd, BaseException]

JUNK: list[Any] = [
    None, True, False, 0, 1, 2, -1, 7, 1 << 20, 1 << 31, (1 << 63) - 1, 1 << 63, -(1 << 63), 10**30,
    0.0, -0.5, 1e308, math.inf, math.nan, 1j, "", "quick", "_private", "a.b", "plain", "tensor",
    "packed", "failed", "ended", "float32", "\udcff", b"", b"\x80", b"\x80\x05N.", (), [],
    {}, set(), (1, 2), (0, 0, 0), [[]], [(1, 2)], {"a": 1}, ["ab", 1], [b"", 0], ("float32", (2,)),
    ("float32", (0,)), ("float32", (-1, -2)), ("float32", (1 << 40, 1 << 40)),
    ("uint8", (0, 1 << 62)), ("qint32", (1,)),
    ("no", ()), bytearray(b"x"), "x" * 5000, pack([1]).data, pack(Bad(SystemExit)).data,
    pack(Method(0, "quick")).data, pack(Function(math.hypot)).data, Foreign(),
    Bad(KeyboardInterrupt),
]  # fmt: skip


def changed(dice: Random, value: Any) -> Any:
    """`value` with one thing in it that is not as it was."""
    if isinstance(value, list | tuple) and value:
        items = [*value]
        index = dice.randrange(len(items))
        match dice.choice(["in", "in", "in", "in", "drop", "again", "swap", "junk"]):
            case "in":
                items[index] = changed(dice, items[index])
            case "drop":
                del items[index]
            case "again":
                items.insert(index, items[dice.randrange(len(items))])
            case "swap":
                other = dice.randrange(len(items))
                items[index], items[other] = items[other], items[index]
            case "junk":
                return dice.choice(JUNK)
        return type(value)(items) if type(value) in (list, tuple) else items
    if isinstance(value, bytes) and len(value) > 1 and dice.random() < 0.5:
        return garbled(dice, value)
    if type(value) is int and dice.random() < 0.5:
        return value + dice.randint(-3, 3)
    return dice.choice(JUNK)


def garbled(dice: Random, data: bytes) -> bytes:
    """Bytes that are cut, have others put in, or are not what they were."""
    start = dice.randint(0, len(data))
    end = dice.randint(start, min(len(data), start + 8))
    match dice.choice(["flip", "flip", "cut", "splice", "insert"]):
        case "flip":
            start = min(start, len(data) - 1)
            end, middle = start + 1, bytes([data[start] ^ 1 << dice.randrange(8)])
        case "cut":
            return data[:start]
        case "splice":
            other = dice.randint(0, len(data))
            middle = data[other : other + 16]
        case _:
            middle = dice.randbytes(dice.randint(0, 8))
    garbage = data[:start] + middle + data[end:]
    return data[:start] if is_bomb(garbage) else garbage


def is_bomb(data: bytes) -> bool:
    """Whether the interpreter's own unpickler would make room for millions of memos."""
    try:
        for opcode, arg, _ in pickletools.genops(data):
            if "PUT" in opcode.name and isinstance(arg, int) and arg > 1 << 16:
                return True
    except Exception:  # as far as it can be read
        return False
    return False


# ── messages ────────────────────────────────────────────────────────────────────────────────────


def record(world: World) -> list[tuple[list[Any], list[Tensor]]]:
    """The messages of a link: each kind of call, stream, control and none at all."""
    link = world.run(new_link("fuzz", 1 << 40))
    small, large = torch.ones(3), torch.ones(3000)

    def ask(name: str, *args: Any, stream: bool = False, due: Any = None, **kwargs: Any) -> None:
        (link.stream if stream else link.call)(Method(world.ref, name), (args, kwargs), due)

    def many() -> None:
        for number in range(3):
            ask("quick", number)

    def mixed() -> None:
        ask("quick", 1, due=world.clock + 5)
        ask("doubled", 2, small)
        ask("doubled", 3, value=large)
        ask("plain", [1, {"a": small}])
        ask("gated", 4)
        ask("doubled", 5, [large, large])

    def functions() -> None:
        link.call(Function(math.hypot), ((3, 4), {}), None)
        link.call(Create(Gate), ((), {}), None)

    def streams() -> None:
        ask("items", 6, 3, False, stream=True)
        ask("plain_items", 7, 3, True, stream=True)

    def controls() -> None:
        link.cancel(0)
        link.cancel(7)
        link._grant(11, 3)

    steps = [many, mixed, functions, streams, controls, lambda: link._send(())]
    steps.append(lambda: link._send((), goodbye="it failed"))
    found = []
    world.turn()
    for step in steps:
        world.loop.call_soon(step)
        world.turn()
        for _, data, tensors in world.network.messages:
            found.append(([*pickle.loads(data)], tensors))
        world.network.messages.clear()
    world.network._waiting.clear()
    link.close()
    world.turn()
    return found


async def new_link(caller: str, number: int) -> Link:
    return Link(caller, number, PEER, lambda _: None, lambda *_: None)


class Victim:
    """A server that is sent anything, and a good caller who must not notice."""

    def __init__(self) -> None:
        self.world = World(2)
        self.world.actor.gates = defaultdict(Gate)
        self.recorded = record(self.world)
        self.lines = itertools.count(1)
        self.replies: list[Any] = []
        self.good = 0

    def hit(self, fields: Any, tensors: Any) -> None:
        self.hit_bytes(dump(fields), tensors)

    def hit_bytes(self, data: Any, tensors: Any) -> None:
        self.replies.append(self.world.server.accept(data, tensors))

    def check(self) -> None:
        """The good caller is answered; the others' calls end when they leave; nothing is left."""
        world = self.world
        world.turn()
        self.good += 1
        task = world.task(world.call("quick", self.good))
        stream = world.task(collect(world.call("plain_items", self.good, 3, False)))
        world.deliver_all(lambda: task.done() and stream.done())
        assert task.result() == self.good
        assert stream.result() == [0, 1, 2]
        self._leave()
        assert not world.errors, world.errors

    def _leave(self) -> None:
        world, server = self.world, self.world.server
        mine = ("caller", 0)
        for caller in {caller for caller, _ in server._lines} - {"caller"}:
            world.loop.call_soon(server.lost, caller)
            goodbye = caller, 1 << 41, 0, -1, (), (), (), (), (), (), ""
            self.hit(goodbye, ())
        for gate in world.actor.gates.values():
            gate.open()
        world.actor.gates.clear()
        lines = [line for key, line in server._lines.items() if key != mine]
        world.deliver_all(lambda: not any(line.jobs for line in lines))
        world.turn()
        assert all(reply.done() for reply in self.replies), "everybody is answered"
        assert all(line.on_loop == 0 for line in lines)
        tasks = asyncio.all_tasks(world.loop)
        assert len(tasks) <= 1, f"the host's alone may stay: {tasks}"
        self.replies.clear()
        server.peers.goodbyes.clear()
        server.peers._farewells.clear()
        server._lines = {mine: server._lines[mine]}

    def close(self) -> None:
        try:
            self.world.part()
        finally:
            self.world.close()


async def collect(stream: Any) -> list[Any]:
    return [item async for item in stream]


@pytest.fixture
def victim() -> Iterator[Victim]:
    victim = Victim()
    yield victim
    victim.close()


def test_messages_that_are_not_as_they_were(victim: Victim) -> None:
    """Each field, at any depth, dropped, repeated, exchanged or of another kind."""

    @slow
    @given(rolls)
    def hit(dice: Random) -> None:
        line = next(victim.lines)
        for seq in range(dice.randint(1, 2)):
            fields, tensors = dice.choice(victim.recorded)
            fields = [fields[0], line, seq, *fields[3:]]
            for _ in range(dice.randint(1, 3)):
                fields = changed(dice, fields)
            few = dice.randint(0, len(tensors))
            victim.hit(fields, tensors if dice.random() < 0.5 else tensors[:few])
        victim.check()

    hit()


@pytest.mark.parametrize("budget", [1j, "soon", b"", [1.0], object])
def test_a_budget_that_is_no_number(victim: Victim, budget: Any) -> None:
    """Is its call's error, not one that the loop meets when it looks at the time."""
    fields, tensors = next(each for each in victim.recorded if len(each[0][4]) == 1)
    victim.hit([fields[0], next(victim.lines), 0, *fields[3:7], [budget], *fields[8:]], tensors)
    victim.check()


def test_messages_whose_bytes_are_not_as_they_were(victim: Victim) -> None:
    """Cut, flipped, spliced; and anything at all in place of them."""

    @slow
    @given(rolls)
    def hit(dice: Random) -> None:
        fields, tensors = dice.choice(victim.recorded)
        raw = dump((fields[0], next(victim.lines), 0, *fields[3:]))
        for _ in range(dice.randint(1, 2)):
            raw = garbled(dice, raw) or b"\x00"
        victim.hit_bytes(raw, tensors)
        victim.check()

    hit()


def test_messages_twice_out_of_order_and_after_a_gap(victim: Victim) -> None:
    """Of one line: what comes again is refused, what is missing delays only that line."""

    @slow
    @given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 6)), min_size=1, max_size=8))
    def hit(arrivals: list[tuple[int, int]]) -> None:
        line = next(victim.lines)
        for seq, which in arrivals:
            fields, tensors = victim.recorded[which]
            victim.hit(("fuzz", line, seq, *fields[3:]), tensors)
        victim.check()

    hit()


NOBODY = ((), (), (), ())
METHOD = (0, "quick")


def calls(*groups: Any, numbers: Any = (0,), order: Any = (), budgets: Any = ()) -> Any:
    return numbers, order, groups, budgets


LIES: dict[str, Any] = {
    "no call": calls(numbers=()),
    "calls without a group": calls(),
    "a group without calls": calls((METHOD, False, (), 0, [])),
    "more in the group": calls((METHOD, False, (), 10**12, [])),
    "ends, by the million": calls((METHOD, False, (), 1, [("ended", 10**12)])),
    "ends, more than calls": calls((METHOD, False, (), 1, [("ended", 2)])),
    "tensors that are not there": calls((METHOD, False, (), 1, [("tensor", 1)])),
    "many tensors": calls((METHOD, False, (), 1, [("tensor", 10**12)])),
    "fewer than none": calls((METHOD, False, (), 1, [("tensor", -1)])),
    "empty tensors": calls((METHOD, False, (), 1, [(("uint8", (0,)), (b"", 10**12))])),
    "a huge shape": calls((METHOD, False, (), 1, [(("uint8", (1 << 40,)), (b"", 1))])),
    "too few bytes": calls((METHOD, False, (), 1, [(("float64", (2,)), (b"12345678", 1))])),
    "too many bytes": calls((METHOD, False, (), 1, [(("uint8", (2,)), (b"12345678", 1))])),
    "names of nothing": calls((METHOD, False, ("a", "b"), 1, [("plain", [1])])),
    "packed, but not there": calls((METHOD, False, None, 1, [])),
    "packed, but plain": calls((METHOD, False, None, 1, [("plain", [5])])),
    "packed, but a Failure": calls((METHOD, False, None, 1, [("failed", [(1, 2, 3, 4)])])),
    "an order without end": calls((METHOD, False, (), 1, []), order=(0, 0)),
    "an order beyond": calls((METHOD, False, (), 1, []), order=(7,)),
    "an order too short": calls((METHOD, False, (), 2, []), numbers=(0, 1), order=(0,)),
    "numbers twice": calls((METHOD, False, (), 2, []), numbers=(5, 5)),
    "numbers that are none": calls((METHOD, False, (), 1, []), numbers=("a",)),
    "a time that is none": calls((METHOD, False, (), 1, []), budgets=("soon",)),
    "a name that is none": calls(((0, 5), False, (), 1, [])),
    "an object that is none": calls((([], "quick"), False, (), 1, [])),
    "a stream of it": calls((METHOD, True, (), 1, [("ended", 10**9)])),
}


@pytest.mark.parametrize("what", LIES)
def test_a_message_that_lies(victim: Victim, what: str) -> None:
    """About what it holds: its own calls fail, and no room is made for what is only declared."""
    lie = LIES[what]
    victim.hit(("fuzz", 1, 0, -1, *lie, (), (), None), ())
    failed: set[Any] = set()
    for poll in itertools.count(1):
        if failed == {*lie[0]}:
            break
        victim.world.deliver_all(victim.replies[-1].done)
        if isinstance(answer := victim.replies[-1].wait(), Failure):
            break
        results = load_results(answer)[0]
        keys = [key for key, value in results if isinstance(value, Failure)]
        assert keys, f"neither {lie[0]} nor the rest of it: {results}"
        failed |= {key[0] if isinstance(key, tuple) else key for key in keys}
        assert failed <= {*lie[0]}
        victim.hit(("fuzz", 1, poll, -1, *calls(numbers=()), (), (), None), ())
    victim.check()


def test_room_is_made_for_as_many_as_there_are() -> None:
    """And not for as many as are declared."""
    for count in (10**12, 3, 0, -1):
        with pytest.raises(ValueError, match="a group of"):
            Group((METHOD, False, (), count, []), iter(()), 2)


WRONG = ["caller", None, [], 5, True, 1.5, b"x", {}]


@pytest.mark.parametrize("field", range(11))
@pytest.mark.parametrize("wrong", WRONG, ids=repr)
def test_a_field_of_another_kind(victim: Victim, field: int, wrong: Any) -> None:
    """No message: its sender is told, and nothing of it is done."""
    fields: list[Any] = ["fuzz", 1, 0, -1, *NOBODY, [], [], None]
    kinds = [str, int, int, int, *[list] * 6, type(None)]
    if type(wrong) in (kinds[field], str if field == 10 else None):
        return
    fields[field] = wrong
    victim.hit(fields, ())
    with pytest.raises(RemoteError, match="no message"):
        victim.replies[0].wait().get()
    assert not victim.world.server.callers() - {"caller"}
    victim.check()


@pytest.mark.parametrize("numbers", [(5, 5), ("a",), (True,), (1.0,), ((1,),)])
def test_numbers_that_make_no_sense(victim: Victim, numbers: Any) -> None:
    """Likewise."""
    group = METHOD, False, (), len(numbers), []
    victim.hit(("fuzz", 1, 0, -1, *calls(group, numbers=numbers), (), (), None), ())
    with pytest.raises(RemoteError, match="a number of its own"):
        victim.replies[0].wait().get()
    victim.check()


def test_a_call_whose_number_is_a_running_ones(victim: Victim) -> None:
    """Is refused, and the one that runs is answered."""
    fields, tensors = next(each for each in victim.recorded if b"gated" in dump(each[0]))
    victim.hit(["fuzz", 1, 0, *fields[3:]], tensors)
    victim.world.turn()
    (line,) = (each for key, each in victim.world.server._lines.items() if key[0] == "fuzz")
    victim.world.deliver_all(lambda: len(line.jobs) == 1)  # the one at its gate
    (number,) = line.jobs
    again = calls((METHOD, False, (), 1, []), numbers=(number,))
    victim.hit(("fuzz", 1, 1, -1, *again, (), (), None), ())
    with pytest.raises(RemoteError, match="running one's"):
        victim.replies[1].wait().get()
    victim.world.actor.gates[4].open()
    victim.world.deliver_all(lambda: not line.jobs)
    victim.hit(("fuzz", 1, 1, -1, *NOBODY, (), (), None), ())
    replies = victim.replies[0], victim.replies[2]
    victim.world.deliver_all(replies[0].done)
    victim.world.deliver_all(lambda: replies[1].done() or "0 orphans" in repr(line))
    replies = tuple(reply for reply in replies if reply.done())
    found = [each for reply in replies for each in load_results(reply.wait())[0]]
    assert [value for key, value in found if key == number] == [4]
    victim.check()


CONTROLS = [
    ([[]], (), None),
    ([5, None, {}], [(1,)], None),
    ((), [(1, "x")], None),
    ((), [5], ""),
]


@pytest.mark.parametrize("controls", CONTROLS)
def test_controls_that_make_no_sense(victim: Victim, controls: Any) -> None:
    """They are dropped, and the calls beside them are made."""
    victim.world.turn()
    packed = pack(Function(math.hypot))
    group = (packed.data, 0), False, (), 1, [("plain", [3]), ("plain", [4])]
    victim.hit(("fuzz", 1, 0, -1, (0,), (), (group,), (), *controls), ())
    victim.world.deliver_all(victim.replies[0].done)
    results, _ = pickle.loads(victim.replies[0].wait())
    assert results == [([0], ("plain", [5.0]))]
    victim.check()


def test_a_stream_is_granted_what_is_no_number(victim: Victim) -> None:
    """Its credit stays what it was."""
    fields, tensors = next(each for each in victim.recorded if each[0][6] and each[0][6][0][1])
    victim.hit(["fuzz", 1, 0, *fields[3:]], tensors)
    victim.world.turn()
    number = fields[4][0]
    for seq, credit in enumerate(["x", [], math.nan, None], 1):
        victim.hit(("fuzz", 1, seq, -1, *NOBODY, (), [(number, credit)], None), ())
    victim.check()


def test_only_members_call(victim: Victim) -> None:
    """Whoever else gives a name is refused, and nothing is kept of him."""
    victim.world.server.peers.members = {"caller", "callee"}
    for caller in ("stranger", "", "caller\x00"):
        victim.hit((caller, 0, 0, -1, *NOBODY, (), (), None), ())
        answer = victim.replies[-1].wait()
        with pytest.raises(RemoteError, match="no worker"):
            answer.get()
    assert [*victim.world.server._lines] in ([], [("caller", 0)])
    assert victim.world.server.peers.watched(b"stranger").done()
    victim.world.server.peers.members = None
    victim.check()


@pytest.mark.parametrize("error", RAISED)
@pytest.mark.parametrize("where", ["argument", "target", "frame"])
def test_what_unpickling_raises(victim: Victim, where: str, error: type[BaseException]) -> None:
    """Is the answer of that call, or of that message, and ends neither thread nor loop."""
    column = "packed", [(pack(((Bad(error),), {})).data, 0)]
    target = (pack(Function(math.hypot)).data, 0)
    if where == "target":
        target = (pack(Bad(error)).data, 0)
    fields = ["fuzz", 1, 0, -1, *calls((target, False, None, 1, [column])), (), (), None]
    if where == "frame":
        fields[0] = Bad(error)
    victim.hit(fields, ())
    victim.world.deliver_all(victim.replies[0].done)
    answer = victim.replies[0].wait()
    if where != "frame":
        pending = Pending({0: SimpleNamespace(settle=lambda value: answers.append(value))})  # type: ignore[dict-item]
        answers: list[Any] = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("aiorpc_torch._pending.Wait", SimpleNamespace)
            pending.take(SimpleNamespace(wait=lambda: answer), "callee", [])  # type: ignore[arg-type]
        answer = answers[0]
    with pytest.raises(BaseException) as caught:  # noqa: PT011
        answer.get()
    assert not isinstance(caught.value, tuple(RAISED[:5])), "those stay where they are raised"
    victim.check()


def nested(depth: int) -> bytes:
    return pickle.EMPTY_LIST * depth + pickle.APPEND * (depth - 1) + pickle.STOP


BYTES = {
    "none": b"",
    "no pickle": b"hello",
    "a pickle of nothing": pickle.dumps(None),
    "a long text that is not there": pickle.PROTO + b"\x05" + pickle.BINUNICODE8 + b"\xff" * 8,
    "many bytes that are not there": pickle.BINBYTES8 + (1 << 36).to_bytes(8, "little") + b".",
    "more bytes than can be": pickle.BINBYTES8 + (1 << 62).to_bytes(8, "little") + b".",
    "a frame that is not there": pickle.FRAME + (1 << 60).to_bytes(8, "little"),
    "a number without end": pickle.LONG4 + b"\xff\xff\xff\x7f" + b"\x01",
    "deep": nested(DEEP),
    "a class": pickle.dumps(Foreign()),
    "a function": pickle.dumps(throw),
    "an error": pickle.dumps(Bad(SystemExit)),
}


def test_frames_run_nothing(victim: Victim) -> None:
    """Neither a message's nor an answer's: what they name is not even looked up."""
    ran.clear()
    victim.hit(["fuzz", 1, 0, -1, *NOBODY, [], [Noted()], None], ())
    data = pickle.dumps(([([0], ("plain", [Noted()]))], []))
    with pytest.raises(RemoteError):
        Pending().take(SimpleNamespace(wait=lambda: data), "callee", [])  # type: ignore[arg-type]
    assert not ran
    victim.check()


def test_one_argument_that_ends_processes_beside_others(victim: Victim) -> None:
    """Of a message's calls only its own fails."""
    good, bad = pack(((3, 4), {})).data, pack(((Bad(SystemExit),), {})).data
    group = (
        (pack(Function(math.hypot)).data, 0),
        False,
        None,
        2,
        [("packed", [(bad, 0), (good, 0)])],
    )
    victim.hit(("fuzz", 1, 0, -1, *calls(group, numbers=(0, 1)), (), (), None), ())
    victim.world.deliver_all(victim.replies[0].done)
    found = dict(load_results(victim.replies[0].wait())[0])
    assert found[1] == 5.0
    assert "SystemExit" in found[0].summary
    victim.check()


@pytest.mark.parametrize("what", [*BYTES, "a text", "a number", "a tensor"])
def test_what_is_no_message(victim: Victim, what: str) -> None:
    """Its sender is told so."""
    others = {"a text": "hello", "a number": 5, "a tensor": torch.ones(2)}
    victim.hit_bytes({**BYTES, **others}[what], ())
    with pytest.raises(RemoteError, match="cannot take the message in"):
        victim.replies[0].wait().get()
    victim.check()


@pytest.mark.parametrize("what", BYTES)
@pytest.mark.parametrize("where", ["argument", "target", "result", "error"])
def test_what_is_no_pickle(victim: Victim, where: str, what: str) -> None:
    """In place of one that a user's would be: that call alone fails."""
    good, bad = (pack(Function(math.hypot)).data, 0), (BYTES[what], 0)
    if where in ("argument", "target"):
        target = bad if where == "target" else good
        group = target, False, None, 1, [("packed", [bad])]
        victim.hit(("fuzz", 1, 0, -1, *calls(group), (), (), None), ())
    else:
        value = ("failed", [("w", "s", "t", bad[0])]) if where == "error" else ("packed", [bad])
        data = pickle.dumps(([([0], value)], []))
        Pending().take(SimpleNamespace(wait=lambda: data), "callee", [])  # type: ignore[arg-type]
        if where == "error":
            with pytest.raises(Exception):  # noqa: B017, PT011
                Failure("w", "s", "t", bad[0]).get()
    victim.check()


ALL = [dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)]


@pytest.mark.parametrize("dtype", ALL, ids=str)
def test_bytes_of_any_dtype(dtype: torch.dtype) -> None:
    """Also of those that cannot be made of bytes, which may end the process: an error at most."""
    warnings.simplefilter("ignore")  # torch warns of what is experimental
    is_quantised = str(dtype).startswith("torch.q")
    for shape, count in (((), 1), ((2,), 1), ((1, 2), 2), ((0,), 1)):
        data = bytes(dtype.itemsize * math.prod(shape) * count)
        if is_quantised and data:
            with pytest.raises(ValueError, match="are not"):
                from_bytes((dtype, shape), data, count)
        elif not is_quantised:
            found = from_bytes((dtype, shape), data, count)
            assert [tuple(each.shape) for each in found] == [shape] * count


# ── answers ─────────────────────────────────────────────────────────────────────────────────────


class Liar:
    """A caller of a callee that answers anything."""

    def __init__(self) -> None:
        self.world = World(2)
        self.world.actor.gates = defaultdict(Gate)
        self.number = itertools.count(1)

    def begin(self) -> list["asyncio.Task[Any]"]:
        """Calls of each kind, on a link of their own; what can be done of them is done."""
        world = self.world
        world.link = world.run(new_link("caller", next(self.number)))
        tasks = [world.task(world.call("quick", 1)), world.task(world.call("gated", 2))]
        tensors = torch.ones(3), torch.ones(3000)
        tasks += [world.task(world.call("doubled", 3, each)) for each in tensors]
        tasks.append(world.task(world.call("wrong", 4)))
        tasks.append(world.task(collect(world.call("plain_items", 5, 3, False))))
        world.turn()
        while world.network.messages:
            world.network.deliver(0)
            world.turn()
        return tasks

    def answer(self, change: Callable[[Any], Any]) -> None:
        """Give the first answer there is, as it is changed."""
        network = self.world.network
        self.world.deliver_all(lambda: bool(network.answers))
        future, done = network.answers.pop(0)
        network._waiting.remove(future)
        future.set_result(change(done.wait()))
        self.world.turn()

    def honest(self) -> None:
        """From now on every answer is what it should be."""
        network = self.world.network
        for _ in range(20):
            network.deliver(0)
            network.answer(0)
            self.world.turn()

    def check(self, tasks: list["asyncio.Task[Any]"]) -> None:
        """A later call is answered; and when the peer is gone, nobody waits any more."""
        world = self.world
        task = world.task(world.call("quick", 9))
        world.deliver_all(task.done)
        if not isinstance(task.exception(), ReferenceError):  # it was told of an object
            assert task.result() == 9
        world.link.lost(WorkerLost("callee", "it lies"))
        world.turn()
        assert all(each.done() for each in tasks), "nobody is left waiting"
        for each in tasks:
            each.exception()  # looked at
        assert not world.link.waiting
        assert len(world.link._window) == 0
        for gate in world.actor.gates.values():
            gate.open()
        world.actor.gates.clear()
        world.loop.call_soon(world.server.lost, "caller")
        world.deliver_all(lambda: world.server.tally()[1] == 0)
        assert not world.errors, world.errors
        world.network.messages.clear()
        world.network.answers.clear()
        world.network._waiting.clear()
        world.server._lines.clear()

    def close(self) -> None:
        self.world.close()


@pytest.fixture
def liar() -> Iterator[Liar]:
    liar = Liar()
    yield liar
    liar.close()


def in_plain(answer: Any) -> tuple[Any, list[Tensor]]:
    data, tensors = (answer, []) if isinstance(answer, bytes) else answer
    return pickle.loads(data), [*tensors]


def test_answers_that_are_not_as_they_were(liar: Liar) -> None:
    """Each part of them, dropped, repeated, exchanged or of another kind."""

    @slow
    @given(rolls)
    def hit(dice: Random) -> None:
        def change(answer: Any) -> Any:
            plain, tensors = in_plain(answer)
            for _ in range(dice.randint(1, 3)):
                plain = changed(dice, plain)
            tensors = tensors[: dice.randint(0, len(tensors))]
            raw = pickle.dumps(plain)
            return (raw, tensors) if tensors or dice.random() < 0.5 else raw

        tasks = liar.begin()
        for _ in range(dice.randint(1, 2)):
            liar.answer(change)
        liar.honest()
        liar.check(tasks)

    hit()


def test_answers_whose_bytes_are_not_as_they_were(liar: Liar) -> None:
    """Cut, flipped, spliced."""

    @slow
    @given(rolls)
    def hit(dice: Random) -> None:
        def change(answer: Any) -> Any:
            if isinstance(answer, bytes):
                return garbled(dice, answer)
            return garbled(dice, answer[0]), answer[1]

        tasks = liar.begin()
        liar.answer(change)
        liar.honest()
        liar.check(tasks)

    hit()


NONSENSE: dict[str, Any] = {
    "nothing": None,
    "a number": 5,
    "a text": "hello",
    "no bytes": b"",
    "an error": ValueError("as a value"),
    "three": (b"", [], []),
    "a class": pickle.dumps(Foreign()),
    "raises": pickle.dumps(Bad(KeyboardInterrupt)),
    "no columns": pickle.dumps((5, [])),
    "ends": pickle.dumps(([([0], ("ended", 10**12))], [])),
    "no key": pickle.dumps(([([[]], ("plain", [1]))], [])),
    "a long key": pickle.dumps(([([(0, 0, 0, 0)], ("plain", [1]))], [])),
    "learned": pickle.dumps(([], ["x"])),
    "learned nothing": pickle.dumps(([], None)),
    "an item of a call": pickle.dumps(([([(0, 0, 1)], ("plain", [1]))], [])),
    "an item's price": pickle.dumps(([([(5, 0, "x")], ("plain", [1]))], [])),
    "an item of far away": pickle.dumps(([([(5, 1 << 40, 1)], ("plain", [1]))], [])),
    "items twice": pickle.dumps(([([(5, 1, 1), (5, 1, 1)], ("plain", [1, 1]))], [])),
}


@pytest.mark.parametrize("what", NONSENSE)
def test_an_answer_that_makes_no_sense(liar: Liar, what: str) -> None:
    """May have been anybody's: whoever was waiting is told at once, later calls are not."""
    tasks = liar.begin()
    liar.answer(lambda _: NONSENSE[what])
    for task in tasks:
        with pytest.raises(RemoteError, match=r"an answer of worker 'callee'.*cannot be read"):
            task.result()
    liar.honest()
    assert liar.world.actor.cancelled == {2}, "what still ran is cancelled"
    liar.check(tasks)


def test_a_value_in_place_of_a_stream(liar: Liar) -> None:
    """Whoever iterates is told; what raises is raised."""
    for column in [("plain", [1]), ("failed", [Failure.of(ValueError(1), "w").plain()])]:
        tasks = liar.begin()
        liar.answer(lambda _, column=column: pickle.dumps(([([5], column)], [])))
        error = tasks[5].exception()
        assert isinstance(error, RemoteError if column[0] == "plain" else ValueError)
        liar.check(tasks)


def test_a_stream_whose_message_makes_no_sense(victim: Victim) -> None:
    """Its consumer is not left waiting, though the callee knew of no stream."""
    world = victim.world
    stream = world.task(collect(world.call("items", 1, 3, False)))
    world.turn()
    future, data, tensors = world.network.messages.pop()
    fields = [*pickle.loads(data)]
    fields[7] = ("soon",)  # its budget
    world.network.messages.append((future, dump(fields), tensors))
    world.deliver_all(stream.done)
    with pytest.raises(TypeError):
        stream.result()
    victim.check()


@pytest.mark.parametrize("error", RAISED)
def test_what_an_answer_raises(error: type[BaseException]) -> None:
    """Torch raises whatever class the peer names: it is the transport's error, and no more."""

    def wait() -> None:
        raise error("named by the peer")

    answer: Any = SimpleNamespace(wait=wait)
    with pytest.raises(RpcError):
        Pending().take(answer, "callee", [])


@pytest.mark.parametrize("error", RAISED[:5])
def test_a_failure_that_is_not_for_the_caller(error: type[BaseException]) -> None:
    """Written by hand, since none of ours would be."""
    failure = Failure("callee", "it stops", "text", pickle.dumps(error("stop")))
    with pytest.raises(RemoteError, match="it stops"):
        failure.get()


# ── the order, whatever is lost on the way ──────────────────────────────────────────────────────

LOSSES: dict[str, Callable[[bytes], Any]] = {
    "cut": lambda data: data[:-5],
    "empty": lambda _: b"",
    "another": lambda _: pickle.dumps(5),
    "a class": lambda _: pickle.dumps(Foreign()),
    "a field too few": lambda data: dump(pickle.loads(data)[:-1]),
    "a stranger's": lambda data: dump(("stranger", *pickle.loads(data)[1:])),
}


def test_the_order_outlives_messages_that_arrive_broken() -> None:
    """Their own calls fail; all others are made, in order, and credit and cancels go again."""

    @slow
    @given(
        st.lists(st.tuples(st.sampled_from([None, None, *LOSSES]), st.integers(0, 5)), max_size=10)
    )
    def hit(plan: list[tuple[str | None, int]]) -> None:
        world = World(2)
        try:
            world.server.peers.members = {"caller"}
            lossy(world, plan)
        finally:
            world.close()

    hit()


def lossy(world: World, plan: list[tuple[str | None, int]]) -> None:
    world.actor.gates = defaultdict(Gate)
    broken, tasks, streams = set(), [], []
    for number, (loss, which) in enumerate(plan):
        tasks.append(world.task(world.call("quick", number)))
        if which == 0:
            streams.append(world.task(collect(world.call("plain_items", 1000 + number, 9, False))))
        if which == 1:
            gated = world.task(world.call("gated", 1000 + number))
            world.turn()
            gated.cancel()
        world.turn()
        if loss is not None and world.network.messages:
            future, data, tensors = world.network.messages.pop()
            broken |= {n for n in range(number + 1) if not tasks[n].done()}
            world.network.messages.append((future, LOSSES[loss](data), tensors))
        if which > 2:
            world.network.deliver(which)
            world.network.answer(which)
            world.turn()
    world.deliver_all(lambda: world.is_quiet() and not world.network.messages)
    for number, task in enumerate(tasks):
        assert task.done()
        if task.exception() is None:
            assert task.result() == number
        else:
            assert number in broken
            assert isinstance(task.exception(), RemoteError)
    for stream in streams:
        assert stream.exception() is not None or stream.result() == [*range(9)]
    quick = [number for number in world.actor.started if number < 1000]
    assert quick == sorted(quick), "in the order in which they were made"
    last = world.task(world.call("quick", len(plan)))
    world.deliver_all(last.done)
    assert last.result() == len(plan)
    world.part()


@pytest.mark.parametrize("loss", LOSSES)
def test_credit_that_arrives_broken_goes_again(victim: Victim, loss: str) -> None:
    """Else its stream would wait for ever."""
    world = victim.world
    stream = world.task(collect(world.call("plain_items", 1, 99, False)))
    broken: set[int] = set()

    def spoil() -> bool:
        for number, (future, data, tensors) in enumerate(world.network.messages):
            with contextlib.suppress(Exception):  # it is spoilt already
                fields = pickle.loads(data)
                if fields[9] and fields[2] not in broken and len(broken) < 3:  # no replacement
                    world.network.messages[number] = (future, LOSSES[loss](data), tensors)
                    broken.add(fields[2])
        return stream.done()

    world.server.peers.members = {"caller"}
    world.deliver_all(spoil)
    assert stream.result() == [*range(99)]
    assert len(broken) == 3
    world.server.peers.members = None
    victim.check()


def test_a_message_that_was_taken_in_after_all(liar: Liar) -> None:
    """Only its answer was lost: the replacement is dropped, and others wait on undisturbed."""
    world = liar.world
    world.actor.gates[1] = Gate()
    first = world.task(world.call("gated", 1))
    world.turn()
    second = world.task(world.call("quick", 2))
    world.turn()
    while world.network.messages:
        world.network.deliver(0)
        world.turn()
    future, _ = world.network.answers.pop()
    world.network._waiting.remove(future)
    future.set_exception(RuntimeError("an answer that torch could not read"))
    world.turn()
    with pytest.raises(RemoteError, match="torch could not read"):
        second.result()
    liar.honest()
    assert not first.done()
    world.actor.gates[1].open()
    world.deliver_all(first.done)
    assert first.result() == 1
    liar.check([])


def test_a_replacement_that_arrives_broken(victim: Victim) -> None:
    """Nothing more is tried, and nobody who was waiting is left so."""
    world = victim.world
    tasks = [world.task(world.call("quick", n)) for n in range(5)]
    world.turn()
    while world.network.messages:
        future, _, _ = world.network.messages.pop(0)
        future.set_result(Failure.of(RemoteError("not taken in"), "callee"))
        world.turn()
    for task in tasks:
        with pytest.raises(RemoteError, match="not taken in"):
            task.result()
    assert not world.link.waiting
    world.link = world.run(new_link("caller", 99))


# ── the doors, and a real world ─────────────────────────────────────────────────────────────────


async def test_doors_that_are_given_anything(world: aiorpc.Worker) -> None:
    """Each answers with an error, at most, and goes on."""
    for args in [(5,), (None,), ("x",), (b"",), (b"", 5), (b"x", [torch.ones(1)]), ([], {})]:
        failure = _doors.answer(*args).wait()
        with pytest.raises(RemoteError):
            failure.get()
    for name in (b"stranger", b"\xff", "text", 5):
        assert _doors.watch(name).done()
    assert _doors.ping(None).done()
    assert await call(world.name, math.hypot, 3, 4) == 5


@pytest.mark.worlds
async def test_a_peer_that_sends_junk() -> None:
    """Through torch's own door: the victim serves on, and nothing of it stays."""
    junk = [*BYTES.values(), 5, "text", None]
    junk += [
        dump(("evil", 70 + n, 0, -1, *lie, (), (), None)) for n, lie in enumerate(LIES.values())
    ]
    junk += [dump(("stranger", 1, 0, -1, *NOBODY, (), (), None))]
    junk += [dump(("evil", 78, 5, -1, *NOBODY, [[]], [5], None))]
    async with aiorpc.local_world(["evil", "victim"]):
        counter = await create("victim", actors.Counter, 0)
        sending = asyncio.create_task(call("evil", actors.send_junk, "victim", junk))
        for number in range(200):
            assert await remote(counter).add(1) == number + 1
        assert await sending >= len(junk), "of two more: all but what is kept open"
        assert await call("evil", actors.send_junk, "main", junk) >= len(junk)
        assert await remote(counter).add(1) == 201
        assert await call("victim", math.hypot, 3, 4) == 5
        assert (await call("victim", aiorpc.stats)).running == 1, "that very call"


@pytest.mark.worlds
async def test_a_peer_that_answers_junk() -> None:
    """Its callers get errors, whatever class it names; all else goes on."""
    async with aiorpc.local_world(["evil", "good"]):
        for n in range(7):
            await call("evil", actors.answer_junk, n)
            with pytest.raises(RpcError):
                await call("evil", math.hypot, 3, 4)
            assert await call("good", math.hypot, 3, 4) == 5
        assert await call("evil", math.hypot, 3, 4) == 5, "it is honest again"
