"""Frames, payloads and answers that are malformed or hostile, against a real worker.

No input ends a process, leaves a caller waiting, disturbs another call or leaks. Real frames are
recorded and then changed, as plain values and as bytes. The content of user pickles is made by
hand, so that no harmful global can be named by chance.
"""

import asyncio
import contextlib
import itertools
import logging
import math
import pickle
import pickletools
import warnings
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from torch import Tensor
from torch.distributed import rpc

import aiorpc_torch as aiorpc
from aiorpc_torch import RpcError, RRef, WorkerLeft, call, remote
from aiorpc_torch._client import pool, torch_transfers
from aiorpc_torch._endpoint import entry_points
from aiorpc_torch._server import result_sender, session
from aiorpc_torch._wire import exceptions, pickling
from aiorpc_torch._wire.exceptions import RemoteFailure
from aiorpc_torch._wire.frames import CALLS, CLOSE, CONTROL, RESULTS, SLOT
from aiorpc_torch._wire.messages import (
    MAX_HEADS,
    decode_reply,
    load_payload,
    numbers_of,
)
from aiorpc_torch._wire.payloads import detach_data
from aiorpc_torch._wire.pickling import pack
from aiorpc_torch._wire.targets import FunctionTarget, MethodTarget
from aiorpc_torch._wire.tensors import from_bytes
from aiorpc_torch._world.directory_client import WORLD_TASK
from aiorpc_torch.autograd import context
from aiorpc_torch.errors import RemoteError
from aiorpc_torch.testing import Gate
from tests.support.malformed import (
    BYTES,
    LIES,
    NONSENSE,
    PICKLES,
    POWER,
    Bad,
    Foreign,
    dump,
    group,
    head,
    packed,
)
from tests.support.raw_connections import CONNECTION, SOON, Stranger, Tap, read, server
from tests.support.received_calls import load_calls

is_property = pytest.mark.hypothesis  # which its plugin cannot see in a function of a test

CREDIT = 1 << 12  # items that a stream may send
# One seed each: what an answer holds depends on threads, and may not decide what is drawn.
rolls = st.randoms(use_true_random=True)
slow = settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])


@pytest.fixture(autouse=True)
def _only_what_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes changed by chance cannot name what would do harm."""
    known = ("aiorpc_torch.", "tests.", "torch", "copyreg", "math", "builtins")

    def find_class(self: Any, module: str, name: str) -> Any:
        if not module.startswith(known) or name in ("exec", "eval", "input", "exit", "breakpoint"):
            raise pickle.UnpicklingError(f"{module}.{name} is not for a test")
        return find(self, module, name)

    find = pickling._ValueUnpickler.find_class
    monkeypatch.setattr(pickling._ValueUnpickler, "find_class", find_class)
    monkeypatch.setattr(exceptions, "pickle", Careful)


class Careful:
    """`pickle`, for exceptions that come in."""

    Pickler, HIGHEST_PROTOCOL = pickle.Pickler, pickle.HIGHEST_PROTOCOL

    class Unpickler(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            if name in ("system", "exec", "eval", "exit"):
                raise pickle.UnpicklingError("not for a test")
            return super().find_class(module, name)


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR, "aiorpc_torch")  # thousands of warnings otherwise


# ── what is made of a frame ─────────────────────────────────────────────────────────────────────


class Harmful:
    """What is noticed when it is unpickled: `os.system` is called then."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        import os

        return os.system, (f"touch {self.path}",)


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
    "packed", "failed", "ended", "held", "float32", "\udcff", b"", b"\x80", b"\x80\x05N.", (), [],
    {}, set(), (1, 2), (0, 0, 0), [[]], [(1, 2)], {"a": 1}, ["ab", 1], [b"", 0], ("float32", (2,)),
    ("float32", (0,)), ("float32", (-1, -2)), ("float32", (1 << 40, 1 << 40)),
    ("uint8", (0, 1 << 62)), ("qint32", (1,)), ("held", [1 << 40]),
    ("no", ()), bytearray(b"x"), "x" * 5000, pack([1]).data, pack(Bad(SystemExit)).data,
    pack(MethodTarget(0, "quick")).data, pack(FunctionTarget(math.hypot)).data, Foreign(),
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
    if isinstance(value, bytes) and len(value) > 1 and dice.random() < 0.7:
        inside = message_in(value)
        if inside and dice.random() < 0.7:  # the head of a group, for one
            return dump(changed(dice, inside))
        return garbled(dice, value)
    if type(value) is int and dice.random() < 0.5:
        return value + dice.randint(-3, 3)
    return dice.choice(JUNK)


def message_in(data: bytes) -> list[Any] | None:
    """The fields of a message, None if the bytes are none."""
    try:
        found = read(data)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, list) else None


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
    """Whether the interpreter's own unpickler would allocate memory for millions of memos."""
    try:
        for opcode, arg, _ in pickletools.genops(data):
            if "PUT" in opcode.name and isinstance(arg, int) and arg > 1 << 16:
                return True
    except Exception:  # as far as it can be read
        return False
    return False


# ── a worker that is sent anything ──────────────────────────────────────────────────────────────


class Target:
    """What is called. Nothing of it waits for ever."""

    async def quick(self, number: int) -> int:
        return number

    async def doubled(self, number: int, value: Tensor) -> Tensor:
        return value * 2

    async def wrong(self, number: int) -> None:
        raise ValueError(number)

    def plain(self, number: int) -> int:
        return number

    async def items(self, number: int, count: int) -> AsyncIterator[int]:
        for item in range(count):
            yield item

    def plain_items(self, number: int, count: int) -> Iterator[int]:
        yield from range(count)


class Victim:
    """A world of one, its loop, and recorded frames of each kind."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.runner = asyncio.Runner()
        self.patch = patch
        self.stack = contextlib.AsyncExitStack()
        self.errors: list[dict[str, Any]] = []
        self.numbers = itertools.count(CONNECTION)
        self.runner.get_loop().set_exception_handler(lambda _, error: self.errors.append(error))
        self.run(self.stack.enter_async_context(aiorpc.local_world(0)))
        self.rref = RRef(Target())
        self.target = remote(self.rref)
        self.frames: list[tuple[int, Any]] = []
        self.payloads: list[tuple[Any, list[Tensor]]] = []
        with pytest.MonkeyPatch.context() as recording:
            self.run(self.record(recording))

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        async def in_time() -> Any:
            async with asyncio.timeout(2 * SOON):
                return await work

        return self.runner.run(in_time())

    async def record(self, patch: pytest.MonkeyPatch) -> None:
        """Each kind of call, stream and control."""
        tap, send = Tap(patch), torch_transfers.send

        def tapped(peer: Any, endpoint: Any, data: bytes, tensors: Any = ()) -> Any:
            if endpoint is entry_points.payload and (fields := read(data))[1] == -1:  # no context
                self.payloads.append((fields, [*tensors]))
            return send(peer, endpoint, data, tensors)

        patch.setattr(torch_transfers, "send", tapped)
        target, small, large = self.target, torch.ones(3), torch.ones(60_000)
        for value in (0, 2.5, "text", b"bytes", None, True, small):
            await target.quick(value)
        await asyncio.gather(*(target.quick(number) for number in range(3)))
        await asyncio.gather(
            remote(self.rref, timeout=5).quick(1), target.doubled(2, small),
            target.doubled(3, value=small), target.plain([1, {"a": small}]), target.wrong(4),
            call("main", math.hypot, 3, 4), call("main", Gate), return_exceptions=True,
        )  # fmt: skip
        await asyncio.gather(target.doubled(5, large), target.plain([large, large, {"a": small}]))
        async with context():  # whose calls have slots, also where there is shared memory
            await target.doubled(8, small)
        await asyncio.gather(taken(target.items(6, 99)), taken(target.plain_items(7, 99)))
        for kind in (CALLS, SLOT, CONTROL):
            self.frames += [(kind, read(data)) for _, each, data in tap.frames if each == kind]
        assert {kind for kind, _ in self.frames} == {CALLS, SLOT, CONTROL}

    def calls(self, *, alone: bool) -> list[Any]:
        """Return the fields of recorded frames of one call, or of several."""
        found = [fields for kind, fields in self.frames if kind == CALLS]
        return [each for each in found if alone is (len(load_numbers(each)) == 1)]

    async def hit(self, *frames: tuple[int, bytes]) -> list[tuple[Any, Any]]:
        """Send frames; each call of theirs is answered, or the connection closed. The results."""
        stranger = await Stranger.proven(number=next(self.numbers))
        try:
            return await self.answers(stranger, frames)
        finally:
            await stranger.leave()

    async def answers(self, stranger: Stranger, frames: Any) -> list[tuple[Any, Any]]:
        """Send frames; return what comes back."""
        waiting: set[Any] = set()
        for kind, data in frames:
            stranger.send(kind, data)
            with contextlib.suppress(Exception):
                waiting |= {*numbers_of(load_calls(data))} if kind == CALLS else set()
        # A stream of which a changed number asks for millions of items waits after these.
        stranger.send(CONTROL, ((), [(number, CREDIT) for number in waiting]))
        found: list[tuple[Any, Any]] = []
        items: Counter[Any] = Counter()
        while waiting and (said := await stranger.frame(is_plain=False)) is not None:
            kind, data = said
            if kind == CLOSE:
                why, text = read(data)
                assert why == "broken"
                found.append((CLOSE, text))
                break
            assert kind == RESULTS
            results = decode_reply(data)
            found += results
            for key, _ in results:
                number = key[0] if isinstance(key, tuple) else key
                is_item = isinstance(key, tuple) and key[2] != 0
                items[number] += is_item
                if not is_item or items[number] >= CREDIT:
                    waiting.discard(number)
        else:
            assert not waiting, "the connection was closed without a word"
        return found

    def check(self) -> None:
        """Ordinary calls are answered, and nothing of the others is left."""
        self.run(self.is_well())
        assert not self.errors, self.errors

    async def is_well(self) -> None:
        assert await self.target.quick(7) == 7
        assert await taken(self.target.plain_items(0, 3)) == [0, 1, 2]
        while server().sessions.tally()[1]:  # noqa: ASYNC110
            await asyncio.sleep(0)
        assert len(server().sessions) == 1
        tasks = {
            task
            for task in asyncio.all_tasks()
            if task.get_name() not in ("aiorpc-connect", WORLD_TASK)
        }
        assert len(tasks) == 1, tasks

    def close(self) -> None:
        try:
            self.run(self.stack.aclose())
        finally:
            self.runner.close()


def load_numbers(fields: Any) -> list[int]:
    """The numbers of the calls in a frame of these fields."""
    return [number for each in fields for number in each[1]]


async def taken(stream: Any) -> list[Any]:
    return [item async for item in stream]


@pytest.fixture
def victim(monkeypatch: pytest.MonkeyPatch) -> Iterator[Victim]:
    victim = Victim(monkeypatch)
    yield victim
    victim.close()


@pytest.mark.promise("security.frames")
@is_property
@pytest.mark.parametrize("alone", [(True,), (False,), (True, False)], ids=str)
def test_changed_frames_of_calls(victim: Victim, alone: tuple[bool, ...]) -> None:
    """Each field, at any depth, dropped, repeated, exchanged or of another kind."""

    @slow
    @given(rolls)
    def hit(dice: Random) -> None:
        frames = []
        for _ in range(dice.randint(1, 2)):
            fields = dice.choice(victim.calls(alone=dice.choice(alone)))
            for _ in range(dice.randint(1, 3)):
                fields = changed(dice, fields)
            frames.append((CALLS, dump(fields)))
        victim.run(victim.hit(*frames))
        victim.check()

    hit()


@is_property
def test_frames_whose_bytes_are_not_as_they_were(victim: Victim) -> None:
    """Cut, flipped, spliced; and anything at all in place of them."""

    @slow
    @given(rolls)
    def hit(dice: Random) -> None:
        kind, fields = dice.choice(victim.frames)
        data = dump(fields)
        for _ in range(dice.randint(1, 2)):
            data = garbled(dice, data) or b"\x00"
        victim.run(victim.hit((kind, data)))
        victim.check()

    hit()


@pytest.mark.usefixtures("over_torch")
@is_property
def test_slots_and_controls_that_are_not_as_they_were(victim: Victim) -> None:
    """Among real frames; and with payloads that belong to none of them."""

    @slow
    @given(rolls)
    def hit(dice: Random) -> None:
        victim.run(among(dice))
        victim.check()

    async def among(dice: Random) -> None:
        stranger = await Stranger.proven(number=next(victim.numbers))
        for _ in range(dice.randint(1, 5)):
            kind, fields = dice.choice(victim.frames)
            stranger.send(kind, changed(dice, fields) if dice.random() < 0.7 else fields)
        answers = []
        for _ in range(dice.randint(0, 3)):
            fields, tensors = dice.choice(victim.payloads)
            fields = [stranger.session.key, *fields[1:]]
            if dice.random() < 0.7:
                fields = changed(dice, fields)
            few = dice.randint(0, len(tensors))
            tensors = tensors if dice.random() < 0.7 else tensors[:few]
            answers.append(by_torch(entry_points.payload, dump(fields), tensors))
        await stranger.leave()
        for answer in answers:
            await outcome(answer)

    hit()


def by_torch(endpoint: Any, *args: Any) -> Any:
    """A message of torch's to this worker, past our own path."""
    return rpc.rpc_async("main", endpoint, args=args)


async def outcome(answer: Any) -> Any:
    """What torch says, a value or an error."""
    async with asyncio.timeout(SOON):
        try:
            return await aiorpc.wrap_future(answer)
        except Exception as exc:
            return exc


async def results_of(answer: Any) -> list[Any]:
    """The results in torch's answer."""
    found = await outcome(answer)
    return decode_reply(*detach_data(*((found, ()) if isinstance(found, bytes) else found)))


# ── frames that lie ─────────────────────────────────────────────────────────────────────────────

THREE_FOUR = ("plain", [3]), ("plain", [4])


def numbered(*numbers: Any) -> Any:
    """A frame of calls with these numbers."""
    return [group(("plain", [3] * len(numbers)), ("plain", [4] * len(numbers)), numbers=numbers)]


NO_CALLS: dict[str, Any] = {
    "no call": [],
    "a group without a call": numbered(),
    "a group without a call behind another": [*numbered(1), *numbered()],
    "numbers twice": numbered(5, 5),
    "numbers twice, in two groups": [*numbered(5, 6), *numbered(6, 7)],
    "a negative number": numbered(-1),
    "a number of 65 bits": numbered(1 << 64),
    "numbers that are texts": numbered("a"),
    "numbers that are bools": numbered(True),
    "numbers that are fractions": numbered(1.0),
    "a field too few": [group(*THREE_FOUR)[:2]],
    "a field too many": [(*group(*THREE_FOUR), (), ())],
    "a number": 5,
    "a group that is a number": [5],
    "a head that is none": [(None, (0,), ())],
    "a head that is a text": [("m", (0,), ())],
    "columns that are none": [(head(), (0,), None)],
    "columns that are a text": [(head(), (0,), "")],
    "a column that is a text": [group(("plain", "3"))],
    "a time that is a text": [group(budgets=("soon",))],
    "a complex time": [group(budgets=(1j,))],
    "more times than calls": [group(budgets=(1.0, 2.0))],
    "batches that are numbers": [(*group()[:4], (5,))],
    "context variables that are numbers": [(*group()[:4], (), (5,))],
    "a control that is a text": (["x"], ()),
    "a control that is none": ([None], ()),
    "credit that is a text": ((), [(0, "x")]),
    "credit that is a fraction": ((), [(0, math.nan)]),
    "credit without an end": ((), [(0, -(1 << 70))]),
}


@pytest.mark.promise("security.frames")
@pytest.mark.parametrize("what", LIES)
def test_a_frame_that_lies(victim: Victim, what: str) -> None:
    """Only its own calls fail, and no memory is allocated for declared sizes."""
    found = dict(victim.run(victim.hit((CALLS, dump(LIES[what])))))
    assert all(isinstance(value, RemoteFailure) for value in found.values()), found
    assert {key[0] if isinstance(key, tuple) else key for key in found} == {
        *load_numbers(LIES[what])
    }
    victim.check()


@pytest.mark.promise("security.memory")
def test_a_caller_with_ever_new_heads(victim: Victim) -> None:
    """Each names another method: the session remembers a bounded number."""

    async def hit() -> int:
        stranger = await Stranger.proven(number=next(victim.numbers))
        for number in range(MAX_HEADS + 5):
            missing = (("function", None, f"missing{number}", "math"), 0)
            stranger.send(CALLS, [group(numbers=(number,), target=missing)])
            assert await stranger.frame(is_plain=False) is not None
        found = len(stranger.session.dispatcher.heads)
        await stranger.leave()
        return found

    assert victim.run(hit()) <= MAX_HEADS
    victim.check()


@pytest.mark.parametrize("kind", [CALLS, SLOT, CONTROL, RESULTS, CLOSE])
@pytest.mark.parametrize("what", [*NO_CALLS, *BYTES])
def test_a_frame_that_makes_no_sense(victim: Victim, kind: int, what: str) -> None:
    """Closes its connection: its sender is told why, and nothing of it is done."""
    data = dump({**NO_CALLS, **BYTES}[what])

    async def hit() -> list[Any]:
        stranger = await Stranger.proven(number=next(victim.numbers))
        stranger.send(kind, data)
        found = await stranger.frames()
        await stranger.leave()
        return found

    ((last, (why, text)),) = victim.run(hit())
    assert (last, why) == (CLOSE, "broken")
    assert "cannot read a frame" in text
    victim.check()


@pytest.mark.promise("security.frames_plain")
@pytest.mark.parametrize("kind", [CALLS, SLOT, CONTROL, RESULTS, CLOSE])
def test_frames_run_nothing(victim: Victim, kind: int, tmp_path: Any) -> None:
    """What they name is not even looked up, whoever reads them."""
    harmful = dump((Harmful(str(tmp_path / "done")), []))
    for load in (load_calls, load_payload, decode_reply):
        with pytest.raises(ValueError):  # noqa: PT011
            load(harmful)
    victim.run(victim.hit((kind, harmful)))
    assert isinstance(victim.run(outcome(by_torch(entry_points.payload, harmful))), RemoteFailure)
    victim.check()
    assert not [*tmp_path.iterdir()]


def test_a_call_whose_number_is_a_running_ones(victim: Victim) -> None:
    """Closes its connection, and the one that runs is cancelled; a payload is not taken."""
    gate = Gate()

    async def hit(by: str) -> None:
        stranger = await Stranger.proven(number=next(victim.numbers))
        standing = pack(MethodTarget(RRef(gate), "passed"))
        mine = (CALLS, [group(numbers=(3,), target=(standing.data, 0))])
        stranger.send(*mine)
        await gate.entered()
        if by == "frame":
            stranger.send(*mine)
            ((_, (why, text)),) = await stranger.frames()
            assert why == "broken"
            assert "already running" in text
        else:
            stranger.send(SLOT, (3, None))
            fields = stranger.session.key, -1, mine[1]
            assert await results_of(by_torch(entry_points.payload, dump(fields))) == []
        await stranger.leave()
        await gate.cancelled()

    for by in ("frame", "payload"):
        victim.run(hit(by))
        victim.check()
        gate = Gate()


@pytest.mark.parametrize(
    "controls",
    [
        ([99], [(99, 3)]),
        ([-1, 1 << 63], [(-1, -1), (0, -1), (1 << 63, 1 << 63)]),
    ],
)
def test_controls_of_nothing(victim: Victim, controls: Any) -> None:
    """They are dropped, and the calls behind them are made."""
    frames = (CONTROL, dump(controls)), (CALLS, dump([group(*THREE_FOUR)]))
    assert victim.run(victim.hit(*frames)) == [(0, 81.0)]
    victim.check()


@pytest.mark.parametrize("error", RAISED)
@pytest.mark.parametrize("where", ["argument", "target"])
def test_what_unpickling_raises(victim: Victim, where: str, error: type[BaseException]) -> None:
    """Is the answer of that call, and ends neither thread nor loop."""
    target = (pack(Bad(error)).data, 0) if where == "target" else POWER
    good, bad = pack(((3, 4), {})).data, pack(((Bad(error),), {})).data
    fields = [packed(bad, target=target), packed(good, numbers=(1,))]
    found = dict(victim.run(victim.hit((CALLS, dump(fields)))))
    assert found[1] == 81.0, "it fails alone"
    with pytest.raises(BaseException) as caught:  # noqa: PT011
        found[0].raise_()
    assert not isinstance(caught.value, tuple(RAISED[:5])), "those stay where they are raised"
    victim.check()


@pytest.mark.parametrize("what", PICKLES)
@pytest.mark.parametrize("where", ["argument", "target", "result", "error"])
def test_what_is_no_pickle(victim: Victim, where: str, what: str) -> None:
    """In place of one that a user's would be: that call alone fails."""
    bad = (PICKLES[what], 0)
    if where in ("argument", "target"):
        target = bad if where == "target" else POWER
        fields = [packed(bad[0], target=target)]
        (found,) = victim.run(victim.hit((CALLS, dump(fields))))
    else:
        error = "failed", [0], [("w", "s", "t", bad[0])]
        (found,) = decode_reply(dump([error if where == "error" else ("packed", [0], [bad])]))
    if isinstance(found[1], RemoteFailure):
        with pytest.raises(Exception):  # noqa: B017, PT011
            found[1].raise_()
    else:  # a pickle of something, after all
        assert where == "result"
    victim.check()


@pytest.mark.parametrize(
    "dtype", [each for each in vars(torch).values() if isinstance(each, torch.dtype)], ids=str
)
def test_bytes_of_any_dtype(dtype: torch.dtype) -> None:
    """Also of those that cannot be made of bytes, which may end the process: an error at most."""
    warnings.simplefilter("ignore")  # torch warns of what is experimental
    is_quantised = str(dtype).startswith("torch.q")
    for shape, count in (((), 1), ((2,), 1), ((1, 2), 2), ((0,), 1)):
        data = bytes(dtype.itemsize * math.prod(shape) * count)
        if is_quantised and data:
            with pytest.raises(ValueError, match="are not"):
                from_bytes((dtype, shape, ()), data, count)
        elif not is_quantised:
            found = from_bytes((dtype, shape, ()), data, count)
            assert [tuple(each.shape) for each in found] == [shape] * count


# ── torch endpoints ─────────────────────────────────────────────────────────────────────────────

ENDPOINTS = ["payload", "collect", "introduce", "leave_message", "departure"]


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_endpoints_that_are_given_anything(victim: Victim, endpoint: str) -> None:
    """Each answers, with an error at most, and goes on."""
    junk = [each for each in JUNK if not isinstance(each, Bad)]
    junk += [*map(dump, junk), *BYTES.values()]
    junk += [
        dump(each) for each in (("main", 0), ("main", "x"), ("nobody", 0), ([], 0, ""), (0, 0))
    ]
    junk += [b"{}"]
    said = [by_torch(getattr(entry_points, endpoint), each) for each in junk]
    for answer in said:
        found = victim.run(outcome(answer))
        assert isinstance(found, RemoteFailure | Exception | str | bytes | type(None)), found
    victim.check()


def test_payloads_without_a_slot(victim: Victim) -> None:
    """Of no connection, of no slot, and twice: each is answered, and one at most runs."""

    async def hit() -> None:
        stranger = await Stranger.proven(number=next(victim.numbers))
        key = stranger.session.key
        one = numbered(5)
        fields = dump((key, -1, one))
        unknown = dump((("nobody", 1, 2), -1, one))
        assert await results_of(by_torch(entry_points.payload, unknown)) == []
        early = by_torch(entry_points.payload, fields)
        while "1 payloads early" not in repr(stranger.session.dispatcher.slots):  # noqa: ASYNC110
            await asyncio.sleep(0)
        assert await results_of(by_torch(entry_points.payload, fields)) == []
        stranger.send(SLOT, (5, None))
        assert await results_of(early) == [(5, 81.0)]
        assert await results_of(by_torch(entry_points.payload, fields)) == []
        waits = by_torch(entry_points.payload, dump((key, -1, numbered(9))))
        stranger.send(SLOT, (9, [{}]))  # no object's key
        assert (await stranger.frame())[1][0] == "broken"  # type: ignore[index]
        await stranger.leave()
        assert await results_of(waits) == []

    victim.run(hit())
    victim.check()


# ── a callee that lies ──────────────────────────────────────────────────────────────────────────


class Liar:
    """Changes what a worker answers: the next frame of results, or answer of torch's."""

    def __init__(self, victim: Victim) -> None:
        self.victim = victim
        self.gate = Gate()
        self.gated = remote(RRef(self.gate))
        self.change: Callable[[Any], Any] | None = None
        self.base = 0  # number of the first of its calls
        self._frame = result_sender.frame
        victim.patch.setattr(result_sender, "frame", self.frame)

    def frame(self, kind: int, data: bytes) -> bytes:
        if kind == RESULTS and self.change is not None:
            change, self.change = self.change, None
            data = change(data)
        return self._frame(kind, data)

    async def begin(self, *others: Any) -> list["asyncio.Task[Any]"]:
        """Calls of each kind, of which the first results are lies."""
        target = self.victim.target
        await target.quick(0)
        self.base = pool.current().connection("main")._calls
        tasks = [asyncio.ensure_future(self.gated.passed())]
        await self.gate.entered()
        steps = [target.quick(1), target.doubled(2, torch.ones(3)), target.wrong(4)]
        steps += [taken(target.plain_items(5, 3)), *others]
        return tasks + [asyncio.ensure_future(each) for each in steps]

    async def end(self, tasks: list["asyncio.Task[Any]"]) -> None:
        """When the connection has gone, no caller waits any more."""
        self.change = None
        with contextlib.suppress(RpcError):  # it may be among those that are lied to
            await self.victim.target.quick(1)
        assert await self.victim.target.quick(2) == 2
        pool.current().connection("main").leave("ended", "", WorkerLeft("main", "it lies"))
        await asyncio.wait(tasks, timeout=SOON)
        assert all(task.done() for task in tasks), "no caller is left waiting"
        for task in tasks:
            task.cancelled() or task.exception()  # looked at
        assert aiorpc.observe.stats().in_flight == 0


@pytest.fixture
def liar(victim: Victim) -> Liar:
    return Liar(victim)


@is_property
def test_results_that_are_not_as_they_were(liar: Liar) -> None:
    """Each part of them, dropped, repeated, exchanged or of another kind; or their bytes."""

    @slow
    @given(rolls)
    def hit(dice: Random) -> None:
        def change(data: bytes) -> bytes:
            if dice.random() < 0.5:
                return garbled(dice, data)
            fields = read(data)
            for _ in range(dice.randint(1, 3)):
                fields = changed(dice, fields)
            return dump(fields)

        async def lie() -> None:
            liar.gate = Gate()
            liar.gated = remote(RRef(liar.gate))
            tasks = await liar.begin(liar.victim.target.doubled(3, torch.ones(60_000)))
            liar.change = change
            await asyncio.wait(tasks[1:], timeout=0.01)
            await liar.end(tasks)

        liar.victim.run(lie())
        liar.victim.check()

    hit()


@pytest.mark.parametrize("what", NONSENSE)
def test_results_that_make_no_sense(liar: Liar, what: str) -> None:
    """May have been anybody's: whoever was waiting is told at once, later calls are not."""

    async def lie() -> None:
        tasks = await liar.begin()
        junk = NONSENSE[what]
        liar.change = lambda _: junk(liar.base) if callable(junk) else junk
        found = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), SOON)
        for error in found:
            assert isinstance(error, RemoteError), found
            assert "'main' sent a frame, perhaps this result, that cannot be read" in str(error)
        await liar.gate.cancelled()
        assert await liar.victim.target.quick(9) == 9

    liar.victim.run(lie())
    liar.victim.check()


def test_an_item_that_costs_nothing(liar: Liar) -> None:
    """Only the end of a stream is free: who iterates is told, and does not wait for ever."""

    async def lie() -> None:
        target = liar.victim.target
        await target.quick(0)
        number = aiorpc.observe.stats().calls
        liar.change = lambda _: dump([("plain", [(number, 0, 0)], [1])])
        taking = asyncio.ensure_future(taken(target.items(5, 3)))
        await asyncio.wait((taking,), timeout=1.0)
        if not taking.done():
            taking.cancel()
            pytest.fail("it waits for ever")
        assert isinstance(taking.exception(), RemoteError)

    liar.victim.run(lie())
    liar.victim.check()


def test_a_value_in_place_of_a_stream(liar: Liar) -> None:
    """Whoever iterates is told; what raises is raised."""

    async def lie(column: Any) -> Any:
        target = liar.victim.target
        await target.quick(0)
        number = aiorpc.observe.stats().calls
        liar.change = lambda _: dump([(column[0], [number], column[1])])
        return (await asyncio.gather(taken(target.items(5, 3)), return_exceptions=True))[0]

    for column in [
        ("plain", [1]),
        ("failed", [RemoteFailure.of(ValueError(1), "w").on_the_wire()]),
    ]:
        error = liar.victim.run(lie(column))
        assert isinstance(error, RemoteError if column[0] == "plain" else ValueError), error
        liar.victim.check()


ANSWERS = {
    "nothing": None,
    "a number": 5,
    "a text": "hello",
    "no bytes": b"",
    "an error": ValueError("as a value"),
    "three": (b"", [], []),
    "tensors that are not there": (b"", []),
    "a class": dump(Foreign()),
    "a key that is none": dump([("plain", [[]], [1])]),
    "another's": dump([("plain", [1 << 50, (1, 2)], [1, 2])]),
}


@pytest.mark.usefixtures("over_torch")
@pytest.mark.parametrize("what", ANSWERS)
@pytest.mark.parametrize("endpoint", ["payload", "collect"])
def test_answers_of_torchs_that_make_no_sense(liar: Liar, endpoint: str, what: str) -> None:
    """That call alone fails, at once."""
    victim, answer = liar.victim, session.complete_reply
    large = torch.ones(60_000)

    def lie(reply: Any, results: Any) -> None:
        victim.patch.setattr(session, "complete_reply", answer)
        reply.set_result(ANSWERS[what])

    async def ask() -> Any:
        if endpoint == "payload":
            return await victim.target.doubled(3, large)
        return await call("main", torch.ones, 60_000)

    async def hit() -> Any:
        other = asyncio.ensure_future(liar.gated.passed())
        await liar.gate.entered()
        victim.patch.setattr(session, "complete_reply", lie)
        with pytest.raises(RpcError):
            await ask()
        assert torch.equal(await ask(), large * 2 if endpoint == "payload" else large)
        await liar.gate.open()
        await other

    victim.run(hit())
    victim.check()


@pytest.mark.parametrize("error", RAISED[:5])
def test_a_failure_that_is_not_for_the_caller(error: type[BaseException]) -> None:
    """Written by hand, since none of ours would be."""
    failure = RemoteFailure("callee", "it stops", "text", pickle.dumps(error("stop")))
    with pytest.raises(RemoteError, match="it stops"):
        failure.raise_()
