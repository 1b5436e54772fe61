"""Functions that have no name of their own, called: they travel as they are."""

import functools
import json
from typing import Any

import pytest

from aiorpc_torch import call

pytestmark = pytest.mark.usefixtures("world")


class Own:
    def method(self) -> str:
        return "own"


class Five:
    """An object that can be called, and has the name of a function."""

    def __init__(self) -> None:
        functools.update_wrapper(self, json.dumps)

    def __call__(self) -> int:
        return 5


@pytest.mark.parametrize(
    ("function", "args", "expected"),
    [
        (functools.partial(max, 3), (2,), 3),
        ([4].index, (4,), 0),
        (Own().method, (), "own"),
        (Five(), (), 5),
        ("x".upper, (), "X"),
    ],
    ids=["a partial", "of a list", "of an object", "an object", "of a text"],
)
async def test_what_has_a_state_is_pickled(
    function: Any, args: tuple[Any, ...], expected: object
) -> None:
    """As it is now."""
    assert await call("main", function, *args) == expected


async def test_a_name_that_a_message_cannot_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    """Is pickled: of a function whose module is a file with a name that is not UTF-8, for one."""

    def odd() -> str:
        return "odd"

    odd.__qualname__ = "o\udcff"
    monkeypatch.setitem(globals(), odd.__qualname__, odd)
    assert await call("main", odd) == "odd"
