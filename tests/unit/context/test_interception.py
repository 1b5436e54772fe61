"""Interceptors, without calls: their end."""

from collections.abc import Callable
from typing import Any

import pytest

from aiorpc_torch._context.interception import CallInfo, Interceptor, begin_group, intercept
from tests.support.hooks import hooks as hooks

pytestmark = pytest.mark.usefixtures("hooks")


class Recorder(Interceptor):
    """Records the ends of calls."""

    def __init__(self) -> None:
        self.ends: list[BaseException | None] = []

    def on_call(self, call: CallInfo) -> Callable[[BaseException | None], Any]:
        return self.ends.append


def test_a_call_that_ends_twice() -> None:
    """The event loop may answer a call while a thread that begins it finds it answered."""
    recorders = [Recorder(), Recorder()]
    for each in recorders:
        intercept(each)
    _, end = begin_group(CallInfo("group", "f", "main", "", 0.0))
    assert end is not None
    end(None)
    end(LookupError("late"))
    assert [each.ends for each in recorders] == [[None], [None]]
