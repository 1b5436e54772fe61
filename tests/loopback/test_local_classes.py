"""Classes and functions that travel by value: they come back, and what is told of their globals."""

import dataclasses
import enum
import json as json_module
import pickle
import sys
import threading
from typing import Any

import pytest
import torch

from aiorpc_torch import RemoteError, batched, call

pytest.importorskip("cloudpickle")

pytestmark = pytest.mark.usefixtures("world")


def same(value: Any) -> Any:
    return value


async def back(value: Any) -> Any:
    """Return what comes back from a function that returns its argument."""
    return await call("main", same, value)


def taken(_: Any) -> None:
    """Take a value, and return nothing of it."""


async def send(value: Any) -> None:
    await call("main", taken, value)


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


async def test_classes_and_their_instances_are_the_senders_own() -> None:
    """A round trip keeps classes, members of enums, and the state of the classes."""
    failure, color, point, base, derived = local_classes()
    sent = failure, color, point, base, derived
    assert await back(sent) == sent
    assert await back(color.RED) is color.RED
    got = await back(point(torch.ones(2)))
    assert type(got) is point
    assert got.x.tolist() == [1, 1]
    base.made = 5
    methods = dict(vars(base))
    assert (await back(derived())).name() == "derived base"
    assert dict(vars(base)) == methods, "nothing of the class was replaced"


async def raising(exc: Exception) -> None:
    raise exc


async def test_an_exception_comes_back_as_the_senders_own() -> None:
    """With its attributes, and a group of them."""
    failure = local_classes()[0]
    with pytest.raises(failure) as raised:
        await call("main", raising, failure(7))
    got: Any = raised.value
    assert type(got) is failure
    assert (got.code, str(got)) == (7, "code 7")
    with pytest.raises(ExceptionGroup) as group:
        await call("main", raising, ExceptionGroup("g", [failure(1)]))
    assert type(group.value.exceptions[0]) is failure


async def raising_its_own() -> None:
    raise local_classes()[0](7)


async def test_an_exception_that_no_other_process_knows_is_text() -> None:
    """Its class was never sent: nothing could catch it."""
    with pytest.raises(RemoteError, match="code 7"):
        await call("main", raising_its_own)


async def test_without_cloudpickle_the_error_names_the_extra(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At the sender of a lambda or a local class."""
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    for value in (lambda: 0, local_classes()[2], [local_classes()[0](1)]):
        with pytest.raises(pickle.PicklingError, match=r"aiorpc_torch\[cloudpickle\]"):
            await send(value)


def scale(x: int) -> int:
    return x


def scale_twice(x: int) -> int:
    return scale(scale(x))


async def test_what_a_class_uses_is_defined_again_after_it_was_sent(
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
        await send(Local)
        await send(Local())
    assert not caplog.records
    monkeypatch.setattr(here, "scale", lambda x: 3 * x)
    await send(Local)
    await send(Local())
    (warning,) = caplog.messages
    assert warning.startswith("scale was defined again after ")
    assert warning.endswith(".Local again too, or restart them")


async def test_a_constant_that_a_class_uses_is_changed_or_new_after_it_was_sent(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    here = sys.modules[__name__]
    monkeypatch.setattr(here, "rate", 0.5, raising=False)

    class Local:
        def act(self) -> Any:
            return rate, later, json  # type: ignore[name-defined]  # noqa: F821

    await send(Local)
    monkeypatch.setattr(here, "rate", float("0.5"))  # an equal one
    await send(Local)
    assert not caplog.records
    monkeypatch.setattr(here, "rate", 0.25)
    await send(Local)
    assert caplog.messages.pop().endswith(".Local again too, or restart them")
    monkeypatch.setattr(here, "later", 1, raising=False)
    monkeypatch.setattr(here, "json", json_module, raising=False)
    await send(Local)
    found = sorted(each.split(" was defined")[0] for each in caplog.messages[1:])
    assert found == ["json", "later"]
    assert "have no later. Define" in "".join(caplog.messages)


class Odd(str):
    """A constant whose equality raises."""

    __slots__ = ()
    __hash__ = str.__hash__

    def __eq__(self, _: object) -> bool:
        raise ZeroDivisionError


async def test_globals_that_are_no_other_after_a_class_was_sent(
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
        await send(Local)
    assert not caplog.records


async def test_a_global_that_was_none_or_a_list_when_a_class_was_sent(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is no new one."""

    class Local:
        def act(self) -> Any:
            return changing  # type: ignore[name-defined]  # noqa: F821

    for value in (None, 1, [2], 3):
        monkeypatch.setattr(sys.modules[__name__], "changing", value, raising=False)
        await send(Local)
    assert len(caplog.messages) == 3
    assert all(each.startswith("changing was defined again ") for each in caplog.messages)


@dataclasses.dataclass(frozen=True)
class Frozen(Exception):
    text: str


async def test_a_frozen_exception_of_a_reduction() -> None:
    class Local:
        def __reduce__(self) -> Any:
            raise Frozen("refused")

    with pytest.raises(Frozen):
        await send((lambda: None, Local()))


async def test_a_global_that_cannot_be_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "lock", threading.Lock(), raising=False)
    with pytest.raises(TypeError, match="cannot pickle") as error:
        await send(lambda: (lock, pytest))  # type: ignore[name-defined]  # noqa: F821
    (note,) = [each for each in error.value.__notes__ if "global" in each]
    assert "<lambda> uses the global 'lock', which cannot be sent" in note
    assert error.value.__suppress_context__


@pytest.mark.timeout(30)
async def test_a_class_whose_function_is_wrapped_around_itself() -> None:
    def around_itself(self: Any) -> int:
        return scale(1)

    around_itself.__wrapped__ = around_itself  # type: ignore[attr-defined]

    class Local:
        method = around_itself

    await send(Local)


async def test_a_function_that_peers_import_has_no_copies(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Local:
        imported = scale_twice

    here = sys.modules[__name__]
    for _ in range(2):
        monkeypatch.setattr(here, "scale", lambda x: 2 * x)
        await send(Local)
    assert not caplog.records
