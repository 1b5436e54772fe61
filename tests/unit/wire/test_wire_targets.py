"""Targets as a message holds them: by names where they have one, else pickled."""

import functools
import json
import math
import operator
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from torch import nn

from aiorpc_torch import batched
from aiorpc_torch._wire.exceptions import RemoteFailure
from aiorpc_torch._wire.pickling import PickledValue
from aiorpc_torch._wire.plain import dump, reader
from aiorpc_torch._wire.targets import (
    BoundTarget,
    CreateTarget,
    FetchTarget,
    FunctionTarget,
    MethodTarget,
    Target,
)
from aiorpc_torch._wire.wire_targets import (
    NamedTarget,
    decode_target,
    encode_target,
    name_of,
    read_named,
)

ONE = (0, 3)

read = reader(NamedTarget | bytes)


class Outer:
    class Inner:
        def method(self) -> None: ...

        @classmethod
        def by_class(cls) -> str:
            return cls.__qualname__

        @staticmethod
        def static() -> None: ...


@batched(max_size=4)
def together(values: list[int]) -> list[int]:
    return values


def across(target: Target) -> Any:
    """What a peer makes of it, through the bytes of a message."""
    sent = encode_target(target, target.on if isinstance(target.on, tuple) else None)
    if isinstance(sent, PickledValue):
        return decode_target(sent.data, sent.tensors)
    return decode_target(read(dump(sent)), ())


class Alike(type):
    """The metaclass of classes that are equal."""

    def __eq__(cls, other: object) -> bool:
        return isinstance(other, Alike)

    def __hash__(cls) -> int:
        return 1


class One(metaclass=Alike): ...


class Other(metaclass=Alike): ...


class Unhashable(type):
    def __eq__(cls, other: object) -> bool:
        return cls is other


class Odd(metaclass=Unhashable):
    @classmethod
    def by_class(cls) -> None: ...


@functools.lru_cache
def cached() -> None: ...


def homeless() -> None: ...


homeless.__module__ = None  # type: ignore[assignment]


NAMED: list[Any] = [
    math.hypot,
    torch.add,
    torch.nn.functional.gelu,
    torch.relu,
    json.dumps,
    operator.add,
    nn.Linear,
    nn.Linear.forward,
    OrderedDict,
    OrderedDict.fromkeys,
    int,
    list.append,
    dict.fromkeys,
    torch.Tensor.add,
    Outer,
    Outer.Inner,
    Outer.Inner.method,
    Outer.Inner.by_class,
    Outer.Inner.static,
    together,
    One,
    Other,
    Odd,
    Odd.by_class,
    cached,
    homeless,
    np.add,
    np.stack,
]


@pytest.mark.parametrize("function", NAMED, ids=range(len(NAMED)))
@pytest.mark.parametrize(
    "kind", [FunctionTarget, CreateTarget, functools.partial(BoundTarget, ONE)]
)
def test_what_has_a_name(kind: Any, function: Any) -> None:
    """Arrives as the same object, without a pickle."""
    target = kind(function)
    assert isinstance(encode_target(target, target.on), NamedTarget)
    found = across(target)
    assert type(found) is type(target)
    assert found == target
    assert getattr(found, "function", found[0]) is function or not isinstance(function, type)


@pytest.mark.parametrize("target", [MethodTarget(ONE, "m"), FetchTarget(ONE)])
def test_an_object_and_its_method(target: Target) -> None:
    assert across(target) == target


def test_a_name_that_leads_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Is no name: of a function that another one has replaced in its module, for one."""

    def replaced() -> None: ...

    replaced.__qualname__, replaced.__module__ = "hypot", "math"
    assert name_of(replaced) is None
    replaced.__module__ = "no_such_module"
    assert name_of(replaced) is None


@pytest.mark.parametrize(
    "target",
    [
        NamedTarget("function", None, "absent", "math"),
        NamedTarget("function", None, "x", "no_such_module"),
        NamedTarget("function", ONE, "hypot", "math"),
        NamedTarget("bound", None, "hypot", "math"),
        NamedTarget("method", None, "m"),
        NamedTarget("fetch", None),
        NamedTarget("else", None, "hypot", "math"),
        NamedTarget("function", None, "", ""),
        NamedTarget("method", b"no RRef", "m"),
        NamedTarget("method", dump(((0,) * 6 + ("int",), "no mode")), "m"),
        b"no pickle",
    ],
    ids=str,
)
def test_what_leads_nowhere(target: NamedTarget | bytes) -> None:
    """An error of the calls, which says so."""
    found = decode_target(target, ())
    assert isinstance(found, RemoteFailure)
    with pytest.raises(Exception, match=r"."):
        found.raise_()


@given(
    st.builds(
        NamedTarget,
        st.sampled_from(["method", "bound", "function", "create", "fetch"]) | st.text(max_size=4),
        st.none() | st.tuples(st.integers(0, 9), st.integers(0, 9)) | st.binary(max_size=30),
        st.text(max_size=8),
        st.text(max_size=8),
    )
)
def test_reading_names_asks_for_names_alone(target: NamedTarget) -> None:
    """Whatever they are: what they name is asked for once at most, by text."""
    asked: list[Any] = []

    def find_named(path: str, module: str) -> Any:
        asked.append((path, module))
        return abs

    try:
        found = read_named(target, find_named)
    except ValueError:
        assert asked == []
        return
    assert asked in ([], [(target.name, target.module)])
    assert type(found).__name__.lower().startswith(target.kind)
