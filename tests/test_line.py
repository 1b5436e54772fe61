"""One caller's line, as the callee sees it: what is done finds a message to go back with."""

from collections.abc import Callable
from typing import Any

import pytest

from aiorpc_torch._columns import PLAIN
from aiorpc_torch._line import Line
from aiorpc_torch._message import load_results


class Reply:
    """A message's future."""

    results: list[Any] | None = None

    def set_result(self, answer: Any) -> None:
        self.results, _ = load_results(answer)


@pytest.mark.parametrize("is_stream", [False, True])
def test_what_waited_for_a_message_goes_with_the_next(is_stream: bool) -> None:
    """Also if that brings a call which will not be done before its result is there."""
    soon: list[Callable[[], None]] = []
    line = Line("a", soon.append, ())

    def turn() -> None:
        steps, soon[:] = [*soon], []
        for step in steps:
            step()

    first, second = Reply(), Reply()
    carrier = line.admit(first, 2, poll=False, own=False)  # type: ignore[arg-type]
    line.done(carrier, (0, PLAIN, "early"))
    turn()
    assert first.results == [(0, "early")]
    if is_stream:
        line.more(((1, 0, 1), PLAIN, "item"))
    else:
        line.done(carrier, (1, PLAIN, "late"))
    turn()  # there is no message to go with
    line.admit(second, 1, poll=False, own=False)  # type: ignore[arg-type]
    turn()
    assert second.results == ([((1, 0, 1), "item")] if is_stream else [(1, "late")])
