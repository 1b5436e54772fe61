"""Questions of one connection to its peer: where calls stand.

Each has a time limit. A peer that does not answer delays nothing, and is asked few more questions.
If its event loop is blocked, a thread of torch's tells in which line.
"""

import asyncio
import contextlib
import functools
import itertools
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from .._aio.deadlines import in_seconds
from .._aio.places import Line
from .._endpoint import entry_points
from .._torch.transport import send, wrap_future
from .._wire.frames import WHERE
from .._wire.plain import dump
from .._wire.targets import call_name
from .._wire.where import (
    MOST_CALLS,
    CallNode,
    Key,
    Limits,
    Question,
    Standings,
    key_of,
    read_answer,
    read_lines,
    standings_of,
)

if TYPE_CHECKING:
    from .connection import Connection

MAX_ASKED = 16  # questions without an answer
KEPT = 1.0  # seconds that the answer for a call which is about to time out is kept

LATE_INTERVAL = 0.1  # seconds between two questions for calls that will time out

Answer = Callable[[Sequence[CallNode]], None]
_Then = Callable[[Sequence[CallNode] | None], None]


class Questions:
    """The questions of one connection. Confined to its event loop."""

    def __init__(self, connection: "Connection") -> None:
        self._key, self._peer, self._pending = connection.key, connection.peer, connection.pending
        self._connection = connection
        self._ids = itertools.count()
        self._asked: dict[int, tuple[_Then, Sequence[asyncio.TimerHandle]]] = {}
        self._is_looking = False  # by torch RPC
        self._loop_lines: Sequence[Line] = ()  # at which the event loop of the peer stands
        self._late_soon: dict[int, float] = {}
        self._next_late = 0.0
        self._known: dict[int, Sequence[CallNode]] = {}

    def ask(
        self, numbers: Sequence[int], path: Sequence[Key], limits: Limits, then: Answer
    ) -> None:
        """Call `then` with where pending calls stand, at the latest when the time limit is over."""
        numbers = [each for each in numbers if each in self._pending][: limits.most]
        unsent = {each: self._connection.why_unsent(each) for each in numbers}
        sent = [each for each in numbers if unsent[each] is None]
        nodes = [self._node(each, why) for each, why in unsent.items() if why is not None]
        if not sent:
            then(nodes)
            return

        def complete(answer: Sequence[CallNode] | None) -> None:
            for node in self._silent(sent, limits.seconds) if answer is None else answer:
                if node.method:
                    nodes.append(node)
                # The peer has no name for a call that does not run there. Such a call waits no more
                # if it has its result by now.
                elif (receiver := self._pending.get(node.key[-1])) is not None:
                    nodes.append(node._replace(method=call_name(receiver.target)))
            then(nodes)

        if len(self._asked) >= MAX_ASKED:
            complete(None)
            return
        question, loop = next(self._ids), asyncio.get_running_loop()
        timers = (
            loop.call_later(limits.seconds / 3, self._look_at_loop, question),
            loop.call_later(limits.seconds, self._end, question, None),
        )
        self._asked[question] = complete, timers
        self._connection.send(WHERE, dump(Question(question, sent, [*path], limits)))

    def _look_at_loop(self, question: int) -> None:
        """Ask by torch RPC, whose threads answer, where an event loop stands that does not."""
        if question not in self._asked or self._is_looking:
            return
        self._loop_lines = ()
        with contextlib.suppress(Exception):  # torch has stopped
            looking = wrap_future(send(self._peer, entry_points.loop_lines, b""))
            looking.add_done_callback(self._on_loop_lines)
            self._is_looking = True

    def _on_loop_lines(self, looking: "asyncio.Future[Any]") -> None:
        self._is_looking = False
        if not looking.cancelled() and isinstance(looking.exception() or looking.result(), bytes):
            with contextlib.suppress(ValueError):
                self._loop_lines = read_lines(looking.result())

    def on_answer(self, data: bytes) -> None:
        """Handle an answer of the peer."""
        self._end(*read_answer(data))

    def _end(self, question: int, answer: Sequence[CallNode] | None) -> None:
        if (asked := self._asked.pop(question, None)) is not None:
            then, timers = asked
            for each in timers:
                each.cancel()
            then(answer)

    def _node(self, number: int, state: str) -> CallNode:
        """Return what this process knows of a pending call."""
        receiver = self._pending[number]
        age, method = time.monotonic() - receiver.started, call_name(receiver.target)
        key, (caller, *_) = key_of(self._key, number), self._key
        return CallNode(0, key, method, self._peer.name, caller, age, state)

    def _silent(self, numbers: Sequence[int], seconds: float) -> list[CallNode]:
        state = (
            f"unknown: its worker has not answered within {in_seconds(seconds)}. The event loop "
            "there is blocked, or the process is stopped or out of reach"
        )
        lines, self._loop_lines = self._loop_lines, ()
        if lines:
            state = "waits: the event loop there is blocked"
        left = [each for each in numbers if each in self._pending]
        return [self._node(each, state)._replace(lines=lines) for each in left]

    # ── calls that will time out ────────────────────────────────────────────────────────────────

    def foresee(self, number: int, seconds: float) -> None:
        """Ask where a call stands that times out in `seconds`; many calls share a question."""
        if not self._late_soon:
            wait = max(0.0, self._next_late - time.monotonic())
            asyncio.get_running_loop().call_later(wait, self._ask_for_late)
        if len(self._late_soon) < MOST_CALLS:
            self._late_soon[number] = seconds

    def _ask_for_late(self) -> None:
        self._next_late = time.monotonic() + LATE_INTERVAL
        numbers, self._late_soon = self._late_soon, {}
        limits = Limits(MOST_CALLS, 0.8 * max(numbers.values()))
        self.ask([*numbers], (), limits, self._keep)

    def _keep(self, answer: Sequence[CallNode]) -> None:
        """Keep the parts of an answer until the calls time out."""
        starts = [at for at, each in enumerate(answer) if not each.depth]
        for start, end in itertools.pairwise([*starts, len(answer)]):
            number = answer[start].key[-1]
            self._known[number] = answer[start:end]
            drop = functools.partial(self._known.pop, number, None)
            asyncio.get_running_loop().call_later(KEPT, drop)

    def text_of(self, number: int) -> str:
        """Return where a call has stood that has timed out, "" if that is unknown."""
        nodes = self._known.pop(number, ())
        return f". It stood here:\n{Standings(standings_of(nodes))}" if nodes else ""
