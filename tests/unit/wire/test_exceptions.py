"""How exceptions cross: as themselves, with all they carry; or as `RemoteError`, with the text."""

import asyncio
import copy
import copyreg
import dataclasses
import errno
import io
import pickle
import threading
import traceback
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, strategies as st

from aiorpc_torch import (
    BatchContractError,
    CallTimeout,
    NotInWorld,
    RemoteError,
    RpcError,
    WorkerLost,
    WorldTimeout,
)
from aiorpc_torch._wire.exceptions import (
    RemoteFailure,
    copy_exception,
    ensure_raisable,
    reduce_exception,
)
from aiorpc_torch.types import RemoteTraceback


def raised(exc: BaseException) -> BaseException:
    """`exc` with a traceback, as a worker catches it."""
    try:
        raise exc  # the raising line
    except BaseException as caught:
        return caught


def travel(failure: RemoteFailure) -> BaseException:
    """What a caller gets: the failure is pickled, and opened elsewhere."""
    return pickle.loads(pickle.dumps(failure)).exception()


def cross(exc: BaseException) -> BaseException:
    return travel(RemoteFailure.of(raised(exc), "ps"))


class Packer(pickle.Pickler):
    """How a value that holds exceptions is packed."""

    def reducer_override(self, obj: Any) -> Any:
        return reduce_exception(obj) if isinstance(obj, BaseException) else NotImplemented


def as_a_value(exc: BaseException) -> BaseException:
    file = io.BytesIO()
    Packer(file, pickle.HIGHEST_PROTOCOL).dump([exc])
    return pickle.loads(file.getvalue())[0]


def as_a_replica(exc: BaseException) -> BaseException:
    return copy_exception(exc, "f")


ways = pytest.mark.parametrize("way", [cross, as_a_value, as_a_replica])


# ── classes as users write them ─────────────────────────────────────────────────────────────────


class Formatted(Exception):
    """Several arguments, one formatted string to super."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(f"[{code}] {reason}")
        self.code = code
        self.reason = reason


class KeywordOnly(ValueError):
    def __init__(self, *, name: str, value: object) -> None:
        super().__init__(f"{name} is not {value!r}")
        self.name = name
        self.value = value


class NoSuper(Exception):
    """Never calls super: its arguments are those of the constructor."""

    def __init__(self, left: int, right: int) -> None:
        self.total = left + right


class Counting(Exception):
    """Its constructor has an effect that must not happen again at the other end."""

    made = 0

    def __init__(self, text: str) -> None:
        type(self).made += 1
        super().__init__(f"{text}!")


class Slotted(Exception):
    __slots__ = ("code", "unset")

    def __init__(self, code: int) -> None:
        super().__init__("slotted")
        self.code = code


@dataclasses.dataclass
class Data(Exception):
    code: int
    text: str = "no text"


@dataclasses.dataclass(frozen=True)
class Frozen(Exception):
    code: int


@dataclasses.dataclass(frozen=True)
class FrozenEmpty(Exception):
    pass


class OsFormatted(OSError):
    def __init__(self, path: str, reason: str) -> None:
        super().__init__(errno.EACCES, reason, path)
        self.reason = reason


class Mixin:
    """Not an exception, and first among the bases."""

    def describe(self) -> str:
        return f"described {self}"


class Mixed(Mixin, LookupError):
    pass


class MyGroup(ExceptionGroup[Exception]):
    def __new__(cls, excs: list[Exception], label: str) -> "MyGroup":
        self = super().__new__(cls, f"group {label}", excs)
        self.label = label
        return self

    def __init__(self, excs: list[Exception], label: str) -> None:
        pass

    def derive(self, excs: Any) -> "MyGroup":
        return MyGroup(list(excs), self.label)


class OwnReduce(Exception):
    """Says itself how it is pickled."""

    def __init__(self, text: str, *, history: tuple[str, ...] = ()) -> None:
        super().__init__(text)
        self.history = history

    def __reduce__(self) -> Any:
        return _own, (self.args[0], (*self.history, "reduced"))


def _own(text: str, history: tuple[str, ...]) -> OwnReduce:
    return OwnReduce(text, history=history)


class OwnState(Exception):
    """Only its state is its own to restore."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, restored=True)


class Registered(Exception):
    """Pickled by a function in `copyreg`."""

    def __init__(self, *, code: int) -> None:
        super().__init__("registered")
        self.code = code


copyreg.pickle(Registered, lambda exc: (_registered, (exc.code,)))


def _registered(code: int) -> Registered:
    return Registered(code=code)


class BadReduce(Exception):
    def __reduce__(self) -> Any:
        raise ZeroDivisionError("in __reduce__")


class BadStr(Exception):
    def __str__(self) -> str:
        raise ZeroDivisionError("in __str__")


class BadState(Exception):
    def __setstate__(self, state: Any) -> None:
        raise ZeroDivisionError("in __setstate__")


class Unreadable(Exception):
    """Pickles, and comes back as something that is no exception."""

    def __reduce__(self) -> Any:
        return str, ("not an exception",)


class SubCancelled(asyncio.CancelledError):
    pass


def local(text: str) -> Exception:
    class Local(Exception):
        pass

    return Local(text)


def with_attributes(exc: BaseException, **attributes: object) -> BaseException:
    vars(exc).update(attributes)
    return exc


def with_notes(exc: BaseException, *notes: str) -> BaseException:
    for note in notes:
        exc.add_note(note)
    return exc


# ── what arrives as itself ──────────────────────────────────────────────────────────────────────

INTACT: dict[str, Callable[[], BaseException]] = {
    "plain": lambda: Exception(),
    "several arguments": lambda: ValueError("a", 1, None, (2.5, {"k": [1]})),
    "KeyError": lambda: KeyError("missing"),
    "KeyError of a tuple": lambda: KeyError(("a", 1)),
    "OSError of three": lambda: OSError(2, "x", "file"),
    "OSError of two files": lambda: OSError(18, "x", "from", None, "to"),
    "OSError of a text": lambda: OSError("only text"),
    "FileNotFoundError": lambda: FileNotFoundError(2, "No such file", "/tmp/ö"),
    "BlockingIOError": lambda: BlockingIOError(11, "again", 7),
    "UnicodeDecodeError": lambda: UnicodeDecodeError("utf-8", b"\xff\xfe", 0, 1, "invalid"),
    "UnicodeEncodeError": lambda: UnicodeEncodeError("ascii", "ö", 0, 1, "ordinal"),
    "ImportError": lambda: ImportError("no", name="pkg.mod", path="/x/y.py"),
    "ModuleNotFoundError": lambda: ModuleNotFoundError("no", name="pkg"),
    "SyntaxError": lambda: SyntaxError("bad", ("f.py", 3, 7, "x = = 1", 3, 8)),
    "AssertionError": lambda: AssertionError("1 != 2"),
    "RecursionError": lambda: RecursionError("deep"),
    "TimeoutError": lambda: TimeoutError("late"),
    "StopIteration in an argument": lambda: ValueError(StopIteration(3)),
    "formatted": lambda: Formatted(503, "busy"),
    "keyword only": lambda: KeywordOnly(name="lr", value=-1.0),
    "no super": lambda: NoSuper(1, 2),
    "slots": lambda: Slotted(7),
    "dataclass": lambda: Data(3),
    "dataclass by keyword": lambda: Data(code=3, text="t"),
    "frozen dataclass": lambda: Frozen(3),
    "frozen dataclass by keyword": lambda: Frozen(code=3),
    "frozen dataclass without fields": lambda: FrozenEmpty(),
    "OSError with a constructor": lambda: OsFormatted("/etc/x", "denied"),
    "mixin": lambda: Mixed("here"),
    "attributes set later": lambda: with_attributes(ValueError("x"), code=3, seen=[1, {2}]),
    "attributes on a formatted one": lambda: with_attributes(Formatted(1, "x"), extra="more"),
    "notes": lambda: with_notes(ValueError("x"), "first note", "zweite, ä\\n"),
    "umlauts, emoji, backslashes": lambda: ValueError("C:\\users\\xyz\\N{x} größer 🦊 \x00 \u2028"),
    "lone surrogate": lambda: ValueError("\udc80"),
    "bytes": lambda: ValueError(b"\x00\xff"),
    "exception as an argument": lambda: ValueError(Formatted(1, "inner")),
    "exception as an attribute": lambda: with_attributes(ValueError(), inner=Formatted(1, "x")),
    "WorkerLost": lambda: WorkerLost("ps", "it was killed"),
    "WorkerLost by a call": lambda: WorkerLost("ps", "it was killed", method="PS.update"),
    "CallTimeout": lambda: CallTimeout("no answer in 3 s"),
    "CallTimeout of a call": lambda: CallTimeout("too late", worker="ps", method="PS.update"),
    "WorldTimeout": lambda: WorldTimeout("ranks 1 and 2 are missing", [1, 2]),
    "NotInWorld": lambda: NotInWorld("nobody"),
    "RemoteError": lambda: RemoteError("worker 'a' raised X"),
    "RpcError": lambda: RpcError("something"),
    "RemoteTraceback": lambda: RemoteTraceback("ps", "Traceback: ö\\x"),
    "BatchContractError": lambda: BatchContractError("f returned None"),
}


def look(exc: object) -> object:
    """All that an exception carries, as values to compare."""
    if isinstance(exc, BaseException):
        slots = [name for cls in type(exc).__mro__ for name in cls.__dict__.get("__slots__", ())]
        own = {name: getattr(exc, name) for name in slots if hasattr(exc, name)} | vars(exc)
        fields = "errno strerror filename filename2 characters_written name path msg lineno text"
        own |= {name: getattr(exc, name, None) for name in fields.split()} | own
        return type(exc), look(exc.args), look(own)
    if isinstance(exc, list | tuple):
        return [look(value) for value in exc]
    if isinstance(exc, dict):
        return {key: look(value) for key, value in exc.items()}
    return exc


@pytest.mark.promise("exceptions.itself")
@ways
@pytest.mark.parametrize("make", INTACT.values(), ids=INTACT)
def test_arrives_as_itself(
    make: Callable[[], BaseException], way: Callable[[BaseException], BaseException]
) -> None:
    """Its class, arguments, attributes, notes and text are those of the one that was raised."""
    sent = make()
    got = way(sent)
    assert got is not sent
    assert look(got) == look(sent)
    assert str(got) == str(sent)
    assert repr(got) == repr(sent)


@pytest.mark.promise("exceptions.pickle")
def test_errors_of_calls_pickle_plainly() -> None:
    """They keep their text and attributes through `pickle` and `copy`."""
    late = CallTimeout("too late", worker="ps", method="PS.update")
    lost = WorkerLost("ps", "it was killed", method="PS.update")
    for sent in (late, lost, CallTimeout("too late"), CallTimeout(), WorkerLost("ps")):
        for got in (pickle.loads(pickle.dumps(sent)), copy.copy(sent)):
            assert look(got) == look(sent)
            assert str(got) == str(sent)
    assert (late.worker, late.method) == (lost.worker, lost.method) == ("ps", "PS.update")
    assert str(lost) == "worker 'ps' is lost: it was killed; PS.update may have run"
    assert CallTimeout("too late").method is WorkerLost("ps").method is None


@pytest.mark.promise("exceptions.constructor")
@ways
def test_no_constructor_runs_at_the_other_end(
    way: Callable[[BaseException], BaseException],
) -> None:
    """The exception is made again around its `__init__`, so nothing is formatted twice."""
    sent = Counting("once")
    before = Counting.made
    assert way(sent).args == ("once!",)
    assert Counting.made == before


class ExitsWhenPickled(Exception):
    def __reduce__(self) -> Any:
        raise SystemExit(3)


@pytest.mark.parametrize("make", [ExitsWhenPickled, lambda: ValueError(ExitsWhenPickled())])
def test_an_exception_that_exits_when_it_is_pickled(make: Callable[[], Exception]) -> None:
    """Its text crosses, and the worker that tells of it goes on."""
    got = travel(RemoteFailure.of(raised(make()), "ps"))
    assert type(got) is RemoteError
    assert "raised" in str(got)


@ways
def test_a_class_that_says_how_it_pickles_is_obeyed(
    way: Callable[[BaseException], BaseException],
) -> None:
    """`__reduce__`, `__setstate__` and `copyreg` of the class are used, not gone around."""
    got = way(OwnReduce("x"))
    assert (type(got), got.args, got.history) == (OwnReduce, ("x",), ("reduced",))
    assert vars(way(with_attributes(OwnState("x"), a=1))) == {"a": 1, "restored": True}
    registered = way(Registered(code=5))
    assert (type(registered), registered.code) == (Registered, 5)


@ways
def test_a_group_crosses_with_all_its_members(
    way: Callable[[BaseException], BaseException],
) -> None:
    """Members with awkward constructors too, however deep, and `except*` takes it apart."""
    inner = ExceptionGroup("inner", [KeywordOnly(name="n", value=1), KeyError("k")])
    sent = ExceptionGroup("outer", [Formatted(1, "a"), inner])
    got = way(sent)
    assert look(got) == look(sent)
    assert isinstance(got, ExceptionGroup)
    assert [look(exc) for exc in got.exceptions] == [look(exc) for exc in sent.exceptions]
    matched, rest = got.split(KeyError)
    assert matched is not None
    assert rest is not None
    assert matched.exceptions[0].exceptions[0].args == ("k",)


@ways
def test_a_group_of_ones_own(way: Callable[[BaseException], BaseException]) -> None:
    """A subclass of ExceptionGroup with a constructor of its own crosses, members and all."""
    got = way(MyGroup([Formatted(1, "a"), ValueError("b")], "mine"))
    assert isinstance(got, MyGroup)
    assert (got.label, got.message) == ("mine", "group mine")
    assert [look(exc) for exc in got.exceptions] == [look(Formatted(1, "a")), look(ValueError("b"))]


# ── what cannot arrive as itself ────────────────────────────────────────────────────────────────

TEXT_ONLY: dict[str, Callable[[], BaseException]] = {
    "StopIteration": lambda: StopIteration("text of it"),
    "StopAsyncIteration": lambda: StopAsyncIteration("text of it"),
    "SystemExit": lambda: SystemExit("text of it"),
    "KeyboardInterrupt": lambda: KeyboardInterrupt("text of it"),
    "CancelledError": lambda: asyncio.CancelledError("text of it"),
    "subclass of CancelledError": lambda: SubCancelled("text of it"),
    "GeneratorExit": lambda: GeneratorExit("text of it"),
    "local class": lambda: local("text of it"),
    "lock as an attribute": lambda: with_attributes(ValueError("text of it"), a=threading.Lock()),
    "lock as an argument": lambda: ValueError("text of it", threading.Lock()),
    "lambda as an attribute": lambda: with_attributes(ValueError("text of it"), a=lambda: None),
    "raising __reduce__": lambda: BadReduce("text of it"),
    "raising __setstate__": lambda: with_attributes(BadState("text of it"), a=1),
    "comes back as a str": lambda: Unreadable("text of it"),
    "group with one that cannot": lambda: ExceptionGroup("g", [KeyError(1), local("text of it")]),
}


@pytest.mark.promise("exceptions.text")
@pytest.mark.parametrize("make", TEXT_ONLY.values(), ids=TEXT_ONLY)
def test_what_cannot_cross_arrives_as_text(make: Callable[[], BaseException]) -> None:
    """A `RemoteError` that names the worker, the class and the text; the traceback is its cause."""
    sent = make()
    got = cross(sent)
    assert type(got) is RemoteError
    assert "'ps'" in str(got)
    assert type(sent).__qualname__ in str(got)
    cause = got.__cause__
    assert isinstance(cause, RemoteTraceback)
    assert "text of it" in cause.text
    assert "raise exc  # the raising line" in cause.text


@pytest.mark.parametrize("make", TEXT_ONLY.values(), ids=TEXT_ONLY)
def test_a_replica_of_it_is_a_text_too(make: Callable[[], BaseException]) -> None:
    """It names the function that was running, and its cause is the exception itself."""
    sent = make()
    got = copy_exception(sent, "Agent.select")
    assert type(got) is RemoteError
    assert str(got).startswith("Agent.select raised ")
    assert type(sent).__qualname__ in str(got)
    assert got.__cause__ is sent


def test_half_a_group_is_named_in_full() -> None:
    """Of a group that cannot cross the text still holds every member, and each one's lines."""
    got = cross(ExceptionGroup("the group", [Formatted(7, "this one could"), local("this cannot")]))
    assert isinstance(got, RemoteError)
    assert isinstance(got.__cause__, RemoteTraceback)
    for text in ("the group", "[7] this one could", "this cannot"):
        assert text in got.__cause__.text


def test_an_exception_that_cannot_be_printed() -> None:
    """A raising `__str__` stops nothing: the class crosses, and the text says what failed."""
    failure = RemoteFailure.of(raised(BadStr("arg")), "ps")
    got = travel(failure)
    assert type(got) is BadStr
    assert got.args == ("arg",)
    assert "BadStr" in failure.summary
    assert "BadStr" in failure.text


UNPRINTABLE: dict[str, Callable[[], BaseException]] = {
    "SyntaxError of nonsense": lambda: SyntaxError("text of it", ("f", "a", "b", "c", "d", "e")),
    "SyntaxError with numbers": lambda: with_text(SyntaxError("text of it"), 5),
    "notes that are none": lambda: with_attributes(ValueError("text of it"), __notes__=5),
    "a name that is none": lambda: NameError("text of it", name=5),
    "a cycle of causes": lambda: with_itself(ValueError("text of it")),
    "a module that is none": lambda: type("Odd", (Exception,), {"__module__": 5})("text of it"),
}


def with_text(exc: SyntaxError, text: Any) -> SyntaxError:
    exc.lineno, exc.text = 1, text
    return exc


def with_itself(exc: BaseException) -> BaseException:
    exc.__cause__ = exc
    return exc


@pytest.mark.parametrize("make", UNPRINTABLE.values(), ids=UNPRINTABLE)
def test_describing_never_raises(make: Callable[[], BaseException]) -> None:
    """Python's own printing fails for some exceptions; the caller still hears of them."""
    failure = RemoteFailure.of(raised(make()), "ps")
    assert "raise exc  # the raising line" in failure.text
    assert failure.summary
    got = travel(failure)
    assert isinstance(got.__cause__, RemoteTraceback)
    assert isinstance(copy_exception(make(), "f"), Exception)


@pytest.mark.promise("exceptions.text")
def test_a_class_that_is_not_here_arrives_as_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the callee can import and the caller cannot."""
    sent = pickle.dumps(RemoteFailure.of(raised(Formatted(1, "far away")), "ps"))
    monkeypatch.delitem(globals(), "Formatted")
    got = pickle.loads(sent).exception()
    assert type(got) is RemoteError
    assert "Formatted: [1] far away" in str(got)


# ── the cause ───────────────────────────────────────────────────────────────────────────────────


def explode(value: int) -> None:
    raise KeyError(f"value {value}")  # where it went off


def library_frame() -> None:
    explode(3)


@pytest.mark.promise("exceptions.cause")
def test_the_cause_tells_where_it_was_raised() -> None:
    """`RemoteTraceback` with the worker, and the text down to the line that raised."""
    try:
        library_frame()
    except KeyError as exc:
        got = travel(RemoteFailure.of(exc, "trainer0"))
    cause = got.__cause__
    assert isinstance(cause, RemoteTraceback)
    assert cause.worker == "trainer0"
    assert 'raise KeyError(f"value {value}")  # where it went off' in cause.text
    assert cause.text.startswith("Traceback (most recent call last):\n")
    assert cause.text.rstrip().endswith("KeyError: 'value 3'")
    assert str(cause) == f"on worker 'trainer0':\n\n{cause.text}"


@pytest.mark.promise("exceptions.cause")
def test_the_remote_text_is_in_the_callers_traceback() -> None:
    """What a user sees printed holds both sides."""
    got = cross(Formatted(503, "busy"))
    printed = "".join(traceback.format_exception(raised(got)))
    assert "on worker 'ps':" in printed
    assert "the raising line" in printed
    assert printed.rstrip().endswith("Formatted: [503] busy")


def test_the_chain_on_the_worker_is_in_the_text() -> None:
    """A cause and a context there are told here, though they stay there."""
    try:
        try:
            explode(1)
        except KeyError as first:
            raise Formatted(2, "second") from first
    except Formatted as exc:
        got = travel(RemoteFailure.of(exc, "ps"))
    assert isinstance(got.__cause__, RemoteTraceback)
    assert "value 1" in got.__cause__.text
    assert "direct cause" in got.__cause__.text


def test_never_raised_and_without_a_traceback() -> None:
    """An exception that was made and not raised crosses all the same."""
    got = travel(RemoteFailure.of(Formatted(1, "x"), "ps"))
    assert look(got) == look(Formatted(1, "x"))
    assert isinstance(got.__cause__, RemoteTraceback)


def test_each_look_makes_a_new_exception() -> None:
    """Two who raise the same failure do not write into one traceback."""
    failure = RemoteFailure.of(raised(ValueError("x")), "ps")
    assert failure.exception() is not failure.exception()
    with pytest.raises(ValueError, match="x") as caught:
        raise failure.exception()
    assert isinstance(caught.value.__cause__, RemoteTraceback)
    assert repr(failure) == "<RemoteFailure on ps: ValueError: x>"


@pytest.mark.promise("exceptions.hops")
def test_a_second_hop_keeps_the_class() -> None:
    """What a worker passes on from another worker arrives as itself once more."""
    once = cross(Formatted(1, "x"))
    twice = travel(RemoteFailure.of(raised(once), "relay"))
    assert look(twice) == look(once)
    assert isinstance(twice.__cause__, RemoteTraceback)
    assert twice.__cause__.worker == "relay"
    assert "on worker 'ps':" in twice.__cause__.text


def test_replicas_are_distinct_with_a_common_cause() -> None:
    """One for each caller: each its own object, like the original, which is the cause of all."""
    original = raised(with_notes(Formatted(1, "x"), "a note"))
    copies = [copy_exception(original, "f") for _ in range(5)]
    assert len({id(each) for each in (original, *copies)}) == 6
    for each in copies:
        assert each.__cause__ is original
        assert look(each) == look(original)
    copies[0].add_note("of the first caller")
    assert original.__notes__ == copies[1].__notes__ == ["a note"]


@pytest.mark.promise("exceptions.exits")
def test_only_what_must_not_be_raised_is_changed() -> None:
    """`raisable` hands an exception back as it is, unless it would mean the caller's own task."""
    exc = ValueError("x")
    assert ensure_raisable(exc, "f") is exc
    assert exc.__cause__ is None
    stop = asyncio.CancelledError()
    changed = ensure_raisable(stop, "f")
    assert type(changed) is RemoteError
    assert changed.__cause__ is stop


# ── any exception ───────────────────────────────────────────────────────────────────────────────


class AnyArguments(Exception):
    """What it takes is not what it passes on."""

    def __init__(self, given: tuple[Any, ...], attributes: dict[str, Any], **more: Any) -> None:
        super().__init__(*given)
        self.__dict__.update(attributes, **more)


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    # A lone surrogate is a str of Python's that no file takes.
    | st.text(st.characters())
    | st.binary(),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(), inner, max_size=4)
        | st.frozensets(st.integers(), max_size=4)
    ),
    max_leaves=8,
)
names = st.text(st.characters(categories=("L",)), min_size=1).filter(str.isidentifier)


@pytest.mark.promise("exceptions.itself")
@given(st.lists(values, max_size=4).map(tuple), st.dictionaries(names, values, max_size=4))
def test_any_arguments_and_attributes_survive(
    args: tuple[Any, ...], attributes: dict[str, Any]
) -> None:
    """Class, `args` and `__dict__` of any exception whose parts can be pickled."""
    sent = AnyArguments(args, attributes, fixed=1)
    for way in (cross, as_a_value, as_a_replica):
        got = way(sent)
        assert type(got) is AnyArguments
        assert got.args == args
        assert vars(got) == {**attributes, "fixed": 1}


@pytest.mark.promise("exceptions.itself")
@given(st.lists(values, max_size=3).map(tuple), st.sampled_from([ValueError, KeyError, OSError]))
def test_any_builtin_survives(args: tuple[Any, ...], cls: type[Exception]) -> None:
    """Whatever a builtin is given, what arrives carries what was sent."""
    sent = cls(*args)
    assert look(cross(sent)) == look(sent)
