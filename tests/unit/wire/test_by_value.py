"""Functions and classes that travel by value: what does, under which identity, and without it."""

import dataclasses
import enum
import json as json_module
import linecache
import pickle
import sys
import threading
import traceback
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st

from aiorpc_torch import RemoteError, batched
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


def test_the_place_of_a_function_travels(elsewhere: Callable[[Any], Any]) -> None:
    """Its file, and its lines where the file is the sender's alone: a cell, under IPython's name."""
    got = elsewhere(lambda: 1).__code__
    assert got.co_filename == __file__
    assert __file__ not in linecache.cache or linecache.cache[__file__][1] is not None
    file, source = "/kernel/7.py", "def outer():\n    return lambda: {}['key']\n"
    linecache.cache[file] = len(source), None, source.splitlines(keepends=True), file
    exec(compile(source, file, "exec"), made := {"__name__": "__main__"})
    inner = made["outer"]()  # type: ignore[operator]
    assert elsewhere(inner).__code__.co_filename == file
    shell = types.SimpleNamespace(
        compile=types.SimpleNamespace(format_code_name=lambda name: ("Cell", f"In[{name[-4]}]"))
    )
    ipython: Any = types.ModuleType("IPython")
    ipython.get_ipython = lambda: shell
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(sys.modules, "IPython", ipython)
            got = elsewhere(inner)
        del linecache.cache[file]
        with pytest.raises(KeyError) as caught:
            got()
        shown = "".join(traceback.format_exception(caught.value))
        assert """File "Cell In[7]", line 2, in <lambda>\n    return lambda: {}['key']""" in shown
    finally:
        linecache.clearcache()


def test_what_peers_can_import_goes_by_name() -> None:
    """Also inside of a function that goes by value: its pickle holds the name."""
    assert across(by_name) is by_name
    assert across(Named) is Named
    assert b"Named" in pack(lambda: Named).data
    assert type(across((lambda: 0, Named()))[1]) is Named
    with pytest.raises(by_value.NotByName, match="<lambda> cannot be pickled by name"):
        by_value.refuse_by_value(lambda: 0)


def test_classes_and_their_instances_are_the_senders_own() -> None:
    """A round trip keeps classes, members of enums, and the state of the classes."""
    failure, color, point, base, derived = local_classes()
    assert across((failure, color, point, base, derived)) == (failure, color, point, base, derived)
    assert across(color.RED) is color.RED
    got = across(point(torch.ones(2)))
    assert type(got) is point
    assert got.x.tolist() == [1, 1]
    base.made = 5
    methods = dict(vars(base))
    assert across(derived()).name() == "derived base"
    assert dict(vars(base)) == methods, "nothing of the class was replaced"


def test_a_class_that_is_sent_twice_is_one_elsewhere(elsewhere: Callable[[Any], Any]) -> None:
    """The second pickle of a class does not set it anew."""
    *_, base, derived = local_classes()
    first, second = elsewhere(derived), elsewhere(derived())
    assert type(second) is first
    assert isinstance(second, across(base))


def test_an_exception_comes_back_as_the_senders_own() -> None:
    """With its attributes, and a group of them."""
    failure = across(local_classes()[0])
    try:
        raise failure(7)
    except Exception as exc:
        remote = RemoteFailure.of(exc, "ps")
    got = remote.exception()
    assert type(got) is failure
    assert (got.code, str(got)) == (7, "code 7")
    group = RemoteFailure.of(ExceptionGroup("g", [failure(1)]), "ps").exception()
    assert isinstance(group, ExceptionGroup)
    assert type(group.exceptions[0]) is failure


def test_an_exception_that_no_other_process_knows_is_text() -> None:
    """Its class was never sent: nothing could catch it."""
    failure = local_classes()[0]
    got = RemoteFailure.of(failure(7), "ps").exception()
    assert isinstance(got, RemoteError)
    assert "code 7" in str(got)


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


def test_without_cloudpickle_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the sender of a lambda or a local class."""
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    for value in (lambda: 0, local_classes()[2], [local_classes()[0](1)]):
        with pytest.raises(pickle.PicklingError, match=r"aiorpc_torch\[cloudpickle\]"):
            pack(value)


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


def scale(x: int) -> int:
    return x


def scale_twice(x: int) -> int:
    return scale(scale(x))


def test_what_a_class_uses_is_defined_again_after_it_was_sent(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One warning for each change: workers that have the class keep what it used."""
    here = sys.modules[__name__]
    monkeypatch.setattr(here, "scale", lambda x: 2 * x)
    monkeypatch.setattr(scale_twice, "__qualname__", "<cell>.scale_twice")  # travels by value

    class Local:
        size = 3

        @staticmethod
        def act(x: int) -> int:
            return scale_twice(x)

        @batched(max_size=4)
        async def act_together(self, xs: list[int]) -> list[int]:
            return [scale_twice(x) for x in xs]

    for _ in range(2):
        pack(Local)
        pack(Local())
    assert not caplog.records
    monkeypatch.setattr(here, "scale", lambda x: 3 * x)
    pack(Local)
    pack(Local())
    (warning,) = caplog.messages
    assert warning.startswith("scale was defined again after ")
    assert warning.endswith(".Local again too, or restart them")


def test_a_constant_that_a_class_uses_is_changed_or_new_after_it_was_sent(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    here = sys.modules[__name__]
    monkeypatch.setattr(here, "rate", 0.5, raising=False)

    class Local:
        def act(self) -> Any:
            return rate, later, json  # type: ignore[name-defined]  # noqa: F821

    pack(Local)
    monkeypatch.setattr(here, "rate", float("0.5"))  # an equal one
    pack(Local)
    assert not caplog.records
    monkeypatch.setattr(here, "rate", 0.25)
    pack(Local)
    assert caplog.messages.pop().endswith(".Local again too, or restart them")
    monkeypatch.setattr(here, "later", 1, raising=False)
    monkeypatch.setattr(here, "json", json_module, raising=False)
    pack(Local)
    found = sorted(each.split(" was defined")[0] for each in caplog.messages[1:])
    assert found == ["json", "later"]
    assert "have no later. Define" in "".join(caplog.messages)


class Odd(str):
    """A constant whose equality raises."""

    __slots__ = ()
    __hash__ = str.__hash__

    def __eq__(self, _: object) -> bool:
        raise ZeroDivisionError


def test_globals_that_are_no_other_after_a_class_was_sent(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """NaN is that of before, a number that the class counts is no constant; and odd subclasses."""

    class Local:
        def act(self) -> Any:
            global counted
            counted += 1  # type: ignore[name-defined]
            return missing, odd  # type: ignore[name-defined]  # noqa: F821

    for count in range(2):
        for name, value in {"missing": float("nan"), "odd": Odd(), "counted": count}.items():
            monkeypatch.setattr(sys.modules[__name__], name, value, raising=False)
        pack(Local)
    assert not caplog.records


def test_a_global_that_was_none_or_a_list_when_a_class_was_sent(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is no new one."""

    class Local:
        def act(self) -> Any:
            return changing  # type: ignore[name-defined]  # noqa: F821

    for value in (None, 1, [2], 3):
        monkeypatch.setattr(sys.modules[__name__], "changing", value, raising=False)
        pack(Local)
    assert len(caplog.messages) == 3
    assert all(each.startswith("changing was defined again ") for each in caplog.messages)


@dataclasses.dataclass(frozen=True)
class Frozen(Exception):
    text: str


def test_a_frozen_exception_of_a_reduction() -> None:
    class Local:
        def __reduce__(self) -> Any:
            raise Frozen("refused")

    with pytest.raises(Frozen):
        pack((lambda: None, Local()))


def test_a_global_that_cannot_be_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "lock", threading.Lock(), raising=False)
    with pytest.raises(TypeError, match="cannot pickle") as error:
        pack(lambda: (lock, pytest))  # type: ignore[name-defined]  # noqa: F821
    (note,) = error.value.__notes__
    assert "<lambda> uses the global 'lock', which cannot be sent" in note
    assert error.value.__suppress_context__


@pytest.mark.timeout(30)
def test_a_class_whose_function_is_wrapped_around_itself() -> None:
    def around_itself(self: Any) -> int:
        return scale(1)

    around_itself.__wrapped__ = around_itself  # type: ignore[attr-defined]

    class Local:
        method = around_itself

    pack(Local)


def test_a_function_that_peers_import_has_no_copies(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Local:
        imported = scale_twice

    here = sys.modules[__name__]
    for _ in range(2):
        monkeypatch.setattr(here, "scale", lambda x: 2 * x)
        pack(Local)
    assert not caplog.records
