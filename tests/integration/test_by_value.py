"""Functions and classes that travel by value, to another process."""

import dataclasses
import enum
import linecache
import sys
import types
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

import pytest
import torch
from hypothesis import given, strategies as st

import aiorpc_torch as aiorpc
from aiorpc_torch import call
from aiorpc_torch.testing import world

pytest.importorskip("cloudpickle")

T = TypeVar("T")


@pytest.fixture(scope="module")
def me() -> Iterator[Any]:
    """A worker beside another one, "a"."""
    with aiorpc.in_thread(world(["a"])) as found:
        yield found


def by_name(x: int) -> int:
    return x


def same(value: Any) -> Any:
    return value


_classes: list[type] = []


def keep(one: type) -> None:
    _classes.append(one)


def is_kept(value: Any) -> bool:
    return type(value) is _classes[-1]


values = st.recursive(
    st.none() | st.integers() | st.text() | st.floats(allow_nan=False),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(value=values)
def test_a_lambda_brings_its_closure(me: Any, value: Any) -> None:
    """Any value, and a tensor beside it."""
    tensor = torch.arange(3.0)
    got = me.run(call("a", lambda: (value, tensor)))
    assert got[0] == value
    assert torch.equal(got[1], tensor)


def test_a_local_function_is_copied_elsewhere(me: Any) -> None:
    """With defaults and keywords; the sender's own is the same object when it comes back."""

    def f(x: int, *, y: int = 3) -> int:
        return by_name(x) + y

    assert (me.run(call("a", f, 1)), me.run(call("a", f, 1, y=5))) == (4, 6)
    assert me.run(call("a", same, f)) is f
    assert me.run(call("a", same, [f, {"f": f}])) == [f, {"f": f}]


def place(function: Any) -> str:
    return str(function.__code__.co_filename)


def test_the_place_of_a_function_travels(me: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its file; and where that is the sender's alone, its lines: a cell, named as IPython does."""
    assert me.run(call("a", place, lambda: 1)) == __file__
    file, source = "/kernel/7.py", "def outer():\n    return lambda: {}['key']\n"
    lines = source.splitlines(keepends=True)
    monkeypatch.setitem(linecache.cache, file, (len(source), None, lines, file))
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(source, file, "exec"), names)
    shown = types.SimpleNamespace(format_code_name=lambda name: ("Cell", f"In[{name[-4]}]"))
    ipython: Any = types.ModuleType("IPython")
    ipython.get_ipython = lambda: types.SimpleNamespace(compile=shown)
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    with pytest.raises(KeyError) as caught:
        me.run(call("a", names["outer"]()))
    told = """File "Cell In[7]", line 2, in <lambda>\n    return lambda: {}['key']"""
    assert told in str(caught.value.__cause__)


def test_only_a_newline_ends_a_line_of_code(me: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A form feed, or a separator of Unicode in a text, ends none."""
    source, file = "x = 'a\x0cb\u2028c'\n\ndef outer():\n    return lambda: {}['key']\n", "<cell 8>"
    lines = [f"{line}\n" for line in source.split("\n")]
    monkeypatch.setitem(linecache.cache, file, (len(source), None, lines, file))
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(source, file, "exec"), names)
    with pytest.raises(KeyError) as caught:
        me.run(call("a", names["outer"]()))
    told = """File "<cell 8>", line 4, in <lambda>\n    return lambda: {}['key']"""
    assert told in str(caught.value.__cause__)


def test_a_class_that_is_sent_twice_is_one_elsewhere(me: Any) -> None:
    """The second pickle of a class does not set it anew."""

    class Base:
        pass

    class Derived(Base):
        pass

    me.run(call("a", keep, Derived))
    assert me.run(call("a", is_kept, Derived()))
    assert me.run(call("a", isinstance, Derived(), Base))


def test_values_of_a_local_class_come_back(me: Any) -> None:
    """Of the sender's own class; its copy elsewhere has no name either that could be looked up."""

    class Plain:
        pass

    class Colour(enum.Enum):
        RED = 1

    @dataclasses.dataclass
    class Point(Generic[T]):
        x: T

    assert type(me.run(call("a", same, Plain()))) is Plain
    assert me.run(call("a", same, Colour.RED)) is Colour.RED
    assert me.run(call("a", same, Point(1))) == Point(1)
    assert me.run(call("a", lambda: Point.__qualname__)) == Point.__qualname__


def test_a_function_of_a_call_is_pickled_as_it_is_now(me: Any) -> None:
    """The cache of targets holds no function that travels by value."""
    number = 1

    def f() -> int:
        return number

    assert me.run(call("a", f)) == 1
    number = 2
    assert me.run(call("a", f)) == 2
