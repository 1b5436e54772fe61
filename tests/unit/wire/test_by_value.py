"""Functions and classes that travel by value: what does, under which identity, and without it."""

import dataclasses
import enum
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st

from aiorpc_torch import batched
from aiorpc_torch._wire import by_value
from aiorpc_torch._wire.exceptions import RemoteFailure
from aiorpc_torch._wire.pickling import pack, unpack
from aiorpc_torch._wire.targets import FunctionTarget
from aiorpc_torch._wire.wire_targets import encode_target, name_of

pytest.importorskip("cloudpickle")


def across(value: Any) -> Any:
    packed = pack(value)
    got = unpack(packed.data, packed.tensors)
    if isinstance(got, RemoteFailure):
        got.raise_()
    return got


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], Any]:
    """Unpack as another process does: it knows no identity of this one."""

    def arrive(value: Any) -> Any:
        packed = pack(value)
        with monkeypatch.context() as patch:
            patch.setattr(by_value, "_objects", by_value._Objects())
            return unpack(packed.data, packed.tensors)

    return arrive


def by_name(x: int) -> int:
    return x


class Named:
    pass


def local_classes() -> tuple[type, ...]:
    class Failure(Exception):
        def __init__(self, code: int) -> None:
            super().__init__(f"code {code}")
            self.code = code

    class Color(enum.Enum):
        RED = 1

    @dataclasses.dataclass
    class Point:
        x: torch.Tensor
        kind: type = Named

    class Base:
        made = 0

        def name(self) -> str:
            return "base"

        def own(self) -> type:
            return Base

    class Derived(Base):
        def name(self) -> str:
            return "derived " + super().name()

    return Failure, Color, Point, Base, Derived


values = st.recursive(
    st.none() | st.integers() | st.text() | st.floats(allow_nan=False),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(values)
def test_a_lambda_brings_its_closure(value: Any) -> None:
    """Any value, and a tensor beside it."""
    tensor = torch.arange(3.0)
    packed = pack(lambda: (value, tensor))
    got = pickle_free(packed)
    assert got()[0] == value
    assert torch.equal(got()[1], tensor)


def pickle_free(packed: Any) -> Any:
    kept, by_value._objects = by_value._objects, by_value._Objects()
    try:
        return unpack(packed.data, packed.tensors)
    finally:
        by_value._objects = kept


def test_a_local_function_is_copied_elsewhere(elsewhere: Callable[[Any], Any]) -> None:
    """With defaults and keywords; the sender's own is the same object when it comes back."""

    def f(x: int, *, y: int = 3) -> int:
        return by_name(x) + y

    got = elsewhere(f)
    assert got is not f
    assert (got(1), got(1, y=5)) == (4, 6)
    assert across(f) is f
    assert across([f, {"f": f}]) == [f, {"f": f}]


def test_what_peers_can_import_goes_by_name() -> None:
    """Also inside of a function that goes by value: its pickle holds the name."""
    assert across(by_name) is by_name
    assert across(Named) is Named
    assert b"Named" in pack(lambda: Named).data
    assert type(across((lambda: 0, Named()))[1]) is Named
    with pytest.raises(by_value.NotByName, match="<lambda> cannot be pickled by name"):
        by_value.refuse_by_value(lambda: 0)


def test_a_class_that_is_sent_twice_is_one_elsewhere(elsewhere: Callable[[Any], Any]) -> None:
    """The second pickle of a class does not set it anew."""
    *_, base, derived = local_classes()
    first, second = elsewhere(derived), elsewhere(derived())
    assert type(second) is first
    assert isinstance(second, across(base))


def test_a_batched_method_keeps_its_policy(elsewhere: Callable[[Any], Any]) -> None:
    """The decorator travels with the function, whichever of them is pickled first."""

    class Model:
        @batched(max_size=7)
        async def infer(self, xs: list[int]) -> list[int]:
            return [*map(Model.scale, xs)]

        @staticmethod
        def scale(x: int) -> int:
            return 2 * x

    got = elsewhere(Model.infer)
    assert got._policy == Model.infer._policy
    assert got._is_method
    assert "Model.infer" in repr(got)
    assert across(Model.infer) is Model.infer


def test_a_function_of_a_call_is_pickled_as_it_is_now() -> None:
    """The cache of targets holds no function that travels by value."""
    number = 1

    def f() -> int:
        return number

    first = encode_target(FunctionTarget(f), None)
    number = 2
    second = encode_target(FunctionTarget(f), None)
    assert pickle_free(first).function() == 1
    assert pickle_free(second).function() == 2
    assert encode_target(FunctionTarget(by_name), None) == (
        "function", None, "by_name", __name__,
    )  # fmt: skip


def test_functions_of_main_go_by_value_only_without_a_file(
    monkeypatch: pytest.MonkeyPatch, elsewhere: Callable[[Any], Any]
) -> None:
    """A notebook's function is copied; a script's is found by its name."""
    main = types.ModuleType("__main__")
    exec("base = 3\ndef f(x): return base + x\nclass C: pass", vars(main))
    monkeypatch.setitem(sys.modules, "__main__", main)
    got = elsewhere(main.f)
    assert got is not main.f
    assert got(1) == 4
    assert across(main.C()).__class__ is main.C
    main.__file__ = "<stdin>"
    assert elsewhere(main.f) is not main.f
    main.__file__ = "/a/program.py"
    assert elsewhere(main.f) is main.f
    assert name_of(main.C) == ("C", "__main__")
    main.__file__ = None
    assert name_of(main.C) is None


# ── without cloudpickle ─────────────────────────────────────────────────────────────────────────


def test_without_cloudpickle_at_the_receiver(monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller learns that the extra is missing there."""
    packed = pack(lambda: 0)
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    for name in [name for name in sys.modules if name.startswith("cloudpickle.")]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr(by_value, "_objects", by_value._Objects())
    got = unpack(packed.data, packed.tensors)
    assert isinstance(got, RemoteFailure)
    with pytest.raises(ModuleNotFoundError, match=r"aiorpc_torch\[cloudpickle\]"):
        got.raise_()


def test_without_cloudpickle_a_notebooks_names_stay_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process itself resolves them; the error of any other names the extra."""
    main = types.ModuleType("__main__")
    exec("def f(x): return x", vars(main))
    monkeypatch.setitem(sys.modules, "__main__", main)
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    assert across(main.f) is main.f
    packed = pack(main.f)
    monkeypatch.setitem(sys.modules, "__main__", types.ModuleType("__main__"))
    got = unpack(packed.data, packed.tensors)
    assert isinstance(got, RemoteFailure)
    with pytest.raises(AttributeError, match=r"'f'.*aiorpc_torch\[cloudpickle\]"):
        got.raise_()
