"""Functions and classes that travel by value: what does, under which identity, and without it."""

import sys
import types
from collections.abc import Callable
from typing import Any

import pytest

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


def test_what_peers_can_import_goes_by_name() -> None:
    """Also inside of a function that goes by value: its pickle holds the name."""
    assert across(by_name) is by_name
    assert across(Named) is Named
    assert b"Named" in pack(lambda: Named).data
    assert type(across((lambda: 0, Named()))[1]) is Named
    with pytest.raises(by_value.NotByName, match="<lambda> cannot be pickled by name"):
        by_value.refuse_by_value(lambda: 0)


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


def test_a_target_that_peers_can_import_is_its_name() -> None:
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
