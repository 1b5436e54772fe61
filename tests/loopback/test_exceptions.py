"""How exceptions cross: as themselves, with all they carry; or as `RemoteError`, with the text."""

import asyncio
import copy
import pickle
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from aiorpc_torch import CallTimeout, Fill, RemoteError, WorkerLost, batched, call, testing
from aiorpc_torch.types import RemoteTraceback
from tests.support.odd_exceptions import (
    INTACT,
    TEXT_ONLY,
    UNPRINTABLE,
    BadStr,
    Counting,
    Formatted,
    KeywordOnly,
    MyGroup,
    OwnReduce,
    OwnState,
    Registered,
    local,
    look,
    with_attributes,
    with_notes,
)

Way = Callable[[BaseException], Awaitable[BaseException]]

pytestmark = pytest.mark.usefixtures("ps")


@pytest.fixture
async def ps() -> AsyncIterator[None]:
    """A world of one worker with that name."""
    async with testing.world(name="ps"):
        yield


_sent: list[BaseException] = []


def throw() -> None:
    exc = _sent[-1]
    raise exc  # the raising line


def give() -> list[BaseException]:
    return _sent[-1:]


async def cross(exc: BaseException) -> BaseException:
    """Return what a caller gets of an exception that a function raises."""
    _sent.append(exc)
    try:
        await call("ps", throw)
    except BaseException as caught:
        return caught
    finally:
        _sent.clear()
    raise AssertionError


async def as_a_value(exc: BaseException) -> BaseException:
    """Return what a caller gets of an exception that is in a result."""
    _sent.append(exc)
    [found] = await call("ps", give)
    _sent.clear()
    return found


class Agent:
    """Fails in a batch."""

    def __init__(self, exc: BaseException, callers: int) -> None:
        self.exc = exc
        self.callers = callers

    @batched(Fill(lambda self: self.callers, 60.0))
    def select(self, numbers: list[int]) -> list[int]:
        raise self.exc


async def replicas(exc: BaseException, callers: int) -> list[BaseException]:
    """Return what each caller of a batch gets of the exception that its function raises."""
    agent = Agent(exc, callers)
    return await asyncio.gather(*map(agent.select, range(callers)), return_exceptions=True)


async def as_a_replica(exc: BaseException) -> BaseException:
    return (await replicas(exc, 1))[0]


ways = pytest.mark.parametrize("way", [cross, as_a_value, as_a_replica])


# ── what arrives as itself ──────────────────────────────────────────────────────────────────────


@pytest.mark.promise("exceptions.itself")
@ways
@pytest.mark.parametrize("make", INTACT.values(), ids=INTACT)
async def test_arrives_as_itself(make: Callable[[], BaseException], way: Way) -> None:
    """Its class, arguments, attributes, notes and text are those of the one that was raised."""
    sent = make()
    got = await way(sent)
    assert got is not sent
    assert look(got) == look(sent)
    assert str(got) == str(sent)
    assert repr(got) == repr(sent)


@pytest.mark.promise("exceptions.constructor")
@ways
async def test_no_constructor_runs_at_the_other_end(
    way: Way,
) -> None:
    """The exception is made again around its `__init__`, so nothing is formatted twice."""
    sent = Counting("once")
    before = Counting.made
    assert (await way(sent)).args == ("once!",)
    assert Counting.made == before


class ExitsWhenPickled(Exception):
    def __reduce__(self) -> Any:
        raise SystemExit(3)


@pytest.mark.parametrize("make", [ExitsWhenPickled, lambda: ValueError(ExitsWhenPickled())])
async def test_an_exception_that_exits_when_it_is_pickled(make: Callable[[], Exception]) -> None:
    """Its text crosses, and the worker that tells of it goes on."""
    got = await cross(make())
    assert type(got) is RemoteError
    assert "raised" in str(got)


@ways
async def test_a_class_that_says_how_it_pickles_is_obeyed(
    way: Way,
) -> None:
    """`__reduce__`, `__setstate__` and `copyreg` of the class are used, not gone around."""
    got = await way(OwnReduce("x"))
    assert (type(got), got.args, got.history) == (OwnReduce, ("x",), ("reduced",))
    assert vars(await way(with_attributes(OwnState("x"), a=1))) == {"a": 1, "restored": True}
    registered = await way(Registered(code=5))
    assert (type(registered), registered.code) == (Registered, 5)


@ways
async def test_a_group_crosses_with_all_its_members(
    way: Way,
) -> None:
    """Members with awkward constructors too, however deep, and `except*` takes it apart."""
    inner = ExceptionGroup("inner", [KeywordOnly(name="n", value=1), KeyError("k")])
    sent = ExceptionGroup("outer", [Formatted(1, "a"), inner])
    got = await way(sent)
    assert look(got) == look(sent)
    assert isinstance(got, ExceptionGroup)
    assert [look(exc) for exc in got.exceptions] == [look(exc) for exc in sent.exceptions]
    matched, rest = got.split(KeyError)
    assert matched is not None
    assert rest is not None
    assert matched.exceptions[0].exceptions[0].args == ("k",)


@ways
async def test_a_group_of_ones_own(way: Way) -> None:
    """A subclass of ExceptionGroup with a constructor of its own crosses, members and all."""
    got = await way(MyGroup([Formatted(1, "a"), ValueError("b")], "mine"))
    assert isinstance(got, MyGroup)
    assert (got.label, got.message) == ("mine", "group mine")
    assert [look(exc) for exc in got.exceptions] == [look(Formatted(1, "a")), look(ValueError("b"))]


@pytest.mark.promise("exceptions.text")
@pytest.mark.parametrize("make", TEXT_ONLY.values(), ids=TEXT_ONLY)
async def test_what_cannot_cross_arrives_as_text(make: Callable[[], BaseException]) -> None:
    """A `RemoteError` that names the worker, the class and the text; the traceback is its cause."""
    sent = make()
    got = await cross(sent)
    assert type(got) is RemoteError
    assert "'ps'" in str(got)
    assert type(sent).__qualname__ in str(got)
    cause = got.__cause__
    assert isinstance(cause, RemoteTraceback)
    assert "text of it" in cause.text
    assert "raise exc  # the raising line" in cause.text


@pytest.mark.parametrize("name", [*TEXT_ONLY][1:])  # of StopIteration Python makes RuntimeError
async def test_a_replica_of_it_is_a_text_too(name: str) -> None:
    """It names the function that was running, and its cause is the exception itself."""
    sent = TEXT_ONLY[name]()
    got = await as_a_replica(sent)
    assert type(got) is RemoteError
    assert str(got).startswith("Agent.select raised ")
    assert type(sent).__qualname__ in str(got)
    assert got.__cause__ is sent


async def test_half_a_group_is_named_in_full() -> None:
    """Of a group that cannot cross the text still holds every member, and each one's lines."""
    got = await cross(
        ExceptionGroup("the group", [Formatted(7, "this one could"), local("this cannot")])
    )
    assert isinstance(got, RemoteError)
    assert isinstance(got.__cause__, RemoteTraceback)
    for text in ("the group", "[7] this one could", "this cannot"):
        assert text in got.__cause__.text


def explode(value: int) -> None:
    raise KeyError(f"value {value}")  # where it went off


def library_frame() -> None:
    explode(3)


@pytest.mark.promise("exceptions.cause")
async def test_the_cause_tells_where_it_was_raised() -> None:
    """`RemoteTraceback` with the worker, and the text down to the line that raised."""
    with pytest.raises(KeyError) as caught:
        await call("ps", library_frame)
    got = caught.value
    cause = got.__cause__
    assert isinstance(cause, RemoteTraceback)
    assert cause.worker == "ps"
    assert 'raise KeyError(f"value {value}")  # where it went off' in cause.text
    assert cause.text.startswith("Traceback (most recent call last):\n")
    assert cause.text.rstrip().endswith("KeyError: 'value 3'")
    assert str(cause) == f"on worker 'ps':\n\n{cause.text}"


@pytest.mark.promise("exceptions.cause")
async def test_the_remote_text_is_in_the_callers_traceback() -> None:
    """What a user sees printed holds both sides."""
    got = await cross(Formatted(503, "busy"))
    printed = "".join(traceback.format_exception(got))
    assert "on worker 'ps':" in printed
    assert "the raising line" in printed
    assert printed.rstrip().endswith("Formatted: [503] busy")


def chain() -> None:
    try:
        explode(1)
    except KeyError as first:
        raise Formatted(2, "second") from first


async def test_the_chain_on_the_worker_is_in_the_text() -> None:
    """A cause and a context there are told here, though they stay there."""
    with pytest.raises(Formatted) as caught:
        await call("ps", chain)
    got = caught.value
    assert isinstance(got.__cause__, RemoteTraceback)
    assert "value 1" in got.__cause__.text
    assert "direct cause" in got.__cause__.text


async def test_replicas_are_distinct_with_a_common_cause() -> None:
    """One for each caller: each its own object, like the original, which is the cause of all."""
    original = with_notes(Formatted(1, "x"), "a note")
    copies = await replicas(original, 5)
    assert len({id(each) for each in (original, *copies)}) == 6
    for each in copies:
        assert each.__cause__ is original
        assert look(each) == look(original)
    copies[0].add_note("of the first caller")
    assert original.__notes__ == copies[1].__notes__ == ["a note"]


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
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(values, max_size=4).map(tuple), st.dictionaries(names, values, max_size=4))
async def test_any_arguments_and_attributes_survive(
    args: tuple[Any, ...], attributes: dict[str, Any]
) -> None:
    """Class, `args` and `__dict__` of any exception whose parts can be pickled."""
    sent = AnyArguments(args, attributes, fixed=1)
    for way in (cross, as_a_value, as_a_replica):
        got = await way(sent)
        assert type(got) is AnyArguments
        assert got.args == args
        assert vars(got) == {**attributes, "fixed": 1}


@pytest.mark.promise("exceptions.itself")
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(values, max_size=3).map(tuple), st.sampled_from([ValueError, KeyError, OSError]))
async def test_any_builtin_survives(args: tuple[Any, ...], cls: type[Exception]) -> None:
    """Whatever a builtin is given, what arrives carries what was sent."""
    sent = cls(*args)
    assert look(await cross(sent)) == look(sent)


# ── errors of calls, exceptions that resist, several hops ───────────────────────────────────────


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


async def test_an_exception_that_cannot_be_printed() -> None:
    """A raising `__str__` stops nothing: the class crosses, and the text names it."""
    got = await cross(BadStr("arg"))
    assert type(got) is BadStr
    assert got.args == ("arg",)
    assert isinstance(got.__cause__, RemoteTraceback)
    assert "BadStr" in got.__cause__.text


@pytest.mark.parametrize("make", UNPRINTABLE.values(), ids=UNPRINTABLE)
async def test_describing_never_raises(make: Callable[[], BaseException]) -> None:
    """Python's own printing fails for some exceptions; the caller still hears of them."""
    got = await cross(make())
    assert isinstance(got.__cause__, RemoteTraceback)
    assert "raise exc  # the raising line" in got.__cause__.text
    assert isinstance(await as_a_replica(make()), Exception)


async def pass_on() -> None:
    try:
        await call("ps", throw)
    except Formatted as exc:
        exc.add_note("passed on")
        raise


@pytest.mark.promise("exceptions.hops")
async def test_a_second_hop_keeps_the_class() -> None:
    """What a worker passes on from another worker arrives as itself once more."""
    _sent.append(sent := Formatted(1, "x"))
    with pytest.raises(Formatted) as caught:
        await call("ps", pass_on)
    got = caught.value
    assert (got.args, got.code, got.reason) == (sent.args, 1, "x")
    assert got.__notes__ == ["passed on"]
    assert isinstance(got.__cause__, RemoteTraceback)
    assert "on worker 'ps':" in got.__cause__.text  # of the first hop, in that of the second
    assert "in pass_on" in got.__cause__.text
