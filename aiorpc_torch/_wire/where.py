"""Questions to a worker where calls stand, its answers, and what is read from them.

A worker answers with the calls that it was asked about and what each of these waits for, over
workers, as one list in preorder. A call that waits for one above it closes a circle: it is listed
again, and not followed.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from .._aio.places import MOST_LINES, Line
from .._text import printable
from .messages import SessionKey
from .plain import dump, reader, wire_text

MOST_CALLS = 64
"""Calls in a question, and in its answer with all that they wait for."""

MAX_DEPTH = 16  # calls of which each waits for the next
_MAX_TEXT = 300  # characters of a name or a file

Key = tuple[str, int, int, int]
"""A call: the key of its session, and its number there."""

CALL, LOCK, TURN, BATCH, BLOCK = "call", "lock", "turn", "batch", "block"
"""Reasons to wait for a call: for its result; for the lock, the turn or the batch that it has; for
the end of its `async with`, which has entered a remote context manager."""


IDLE = "waits for what comes next"
"""State of a call that waits for long without a fault: of a follower, for the next version."""


def key_of(session: SessionKey, number: int) -> Key:
    """Return the key of a call of a session."""
    return *session, number


class Limits(NamedTuple):
    """The limits of an answer: its calls, and the seconds until it is not waited for any more."""

    most: int
    seconds: float

    def part(self, parts: int) -> "Limits":
        """Return the limits of a question to another worker, one of `parts` questions."""
        return Limits(max(1, (self.most - 1) // max(1, parts)), self.seconds * 0.8)


class CallNode(NamedTuple):
    """A call, or what else a call waits for, in an answer: a node of the tree, in preorder.

    Attributes:
        depth: number of nodes above it.
        key: identifier of the call.

    The others are those of `Standing`.
    """

    depth: int
    key: Key
    method: str
    worker: str
    caller: str
    age: float
    state: str = ""
    lines: Sequence[Line] = ()
    inside: str = ""
    reason: str = ""
    is_certain: bool = True
    is_again: bool = False

    def below(self, depth: int, reason: str, *, is_certain: bool) -> "CallNode":
        """Return this as a part of another answer; the reason is that of the calls asked about."""
        depth += self.depth
        if self.depth:
            return self._replace(depth=depth)
        return self._replace(depth=depth, reason=reason, is_certain=is_certain)


class Question(NamedTuple):
    """A question where calls of a connection stand.

    Attributes:
        id: number of the question.
        numbers: those of the calls.
        path: the calls that wait for these, each for the next.
        limits: those of the answer.
    """

    id: int
    numbers: list[int]
    path: list[Key]
    limits: Limits


_TEXTS = "method", "worker", "caller", "state", "inside", "reason"

_read_question = reader(Question)
_read_lines = reader(list[Line])
_read_answer = reader(tuple[int, list[CallNode]])


def read_question(data: bytes) -> Question:
    """Return a question of a peer, cut to what is answered."""
    found: Question = _read_question(data)
    most, seconds = found.limits
    limits = Limits(max(0, min(most, MOST_CALLS)), max(0.0, min(10.0, seconds)))
    return found._replace(numbers=found.numbers[: limits.most], limits=limits)


def dump_answer(question: int, nodes: Sequence[CallNode]) -> bytes:
    """Return the bytes of the answer to a question."""
    return dump((question, [_with_texts(each, _cut) for each in nodes[:MOST_CALLS]]))


def read_answer(data: bytes) -> tuple[int, list[CallNode]]:
    """Return the number of a question and the answer of a peer, with printable text."""
    question, nodes = _read_answer(data)
    shown = [_with_texts(each, _shown) for each in nodes[:MOST_CALLS]]
    return question, [each._replace(depth=max(0, min(each.depth, MOST_CALLS))) for each in shown]


def dump_lines(lines: Sequence[Line]) -> bytes:
    """Return the bytes of lines."""
    return dump(_lines_with_texts(lines, _cut))


def read_lines(data: bytes) -> list[Line]:
    """Return the lines of a peer, with printable text."""
    return _lines_with_texts(_read_lines(data), _shown)


def _cut(text: str) -> str:
    return wire_text(text if len(text) <= _MAX_TEXT else f"…{text[1 - _MAX_TEXT :]}")


def _shown(text: str) -> str:
    return printable(text, _MAX_TEXT)


def _with_texts(node: CallNode, change: Callable[[str], str]) -> CallNode:
    texts: dict[str, Any] = {name: change(getattr(node, name)) for name in _TEXTS}
    return node._replace(**texts, lines=_lines_with_texts(node.lines, change))


def _lines_with_texts(lines: Sequence[Line], change: Callable[[str], str]) -> list[Line]:
    few = lines[:MOST_LINES]
    return [Line(change(each.function), change(each.file), each.line) for each in few]


# ── what users see ──────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True, repr=False)
class Standing:
    """A call that has not ended: where it stands, and what it waits for. `str()` shows all of it.

    Attributes:
        id: identifier of the call, the same wherever it is listed.
        method: name of the method or function.
        worker: name of the worker that runs it.
        caller: name of the worker that has made the call.
        age: seconds since the call was made, or since it arrived; 0.0 for a batch or a task.
        state: state of the call, such as "waits", "runs in a thread",
            "waits for its turn on the object".
        lines: lines of the program at which it stands, the method's own first. Empty if no code of
            it runs, or none of the program's.
        inside: name of the function of Python or of this library that the last line has called, ""
            if it is unknown.
        reason: reason for which the call above waits for this one: "call", its result; "lock",
            "turn" or "batch", which this one has; "block", the end of an `async with` in this one;
            "" at the top.
        is_certain: False if the call above may wait for something else: it has several tasks, or
            who has the lock is a guess, since it belongs to the same object.
        is_again: True if this call is one of those above: they wait for each other.
        waits_for: calls that this one waits for, on any worker.
    """

    id: Key
    method: str
    worker: str
    caller: str
    age: float
    state: str
    lines: tuple[Line, ...]
    inside: str
    reason: str
    is_certain: bool
    is_again: bool
    waits_for: "tuple[Standing, ...]"

    def __repr__(self) -> str:
        more = ", ".join(each.name for each in self.waits_for)
        return f"<Standing {self.name}: {self.state}{f', for {more}' if more else ''}>"

    def __str__(self) -> str:
        return "\n".join(_text_of((self,)))

    @property
    def name(self) -> str:
        """Return the call in words."""
        return f"{self.method} on worker {self.worker!r}"

    def deadlocks(self) -> "list[tuple[Standing, ...]]":
        """Return the circles of calls that wait for each other: each waits for the next.

        The last one is the first one again. One of them with `is_certain` False may end by itself.
        """
        return _deadlocks((self,))


class Deadlock(tuple[Standing, ...]):
    """Calls of which each waits for the next; the last one is the first one again."""

    __slots__ = ()

    def __str__(self) -> str:
        what = "deadlock" if all(each.is_certain for each in self[1:]) else "perhaps a deadlock"
        names = " -> ".join(each.name for each in self)
        return f"{what}, these calls wait for each other: {names}"

    def __repr__(self) -> str:
        return f"<{self}>"


class Standings(tuple[Standing, ...]):
    """Calls and where they stand, the oldest first. `print` shows it as text."""

    __slots__ = ()

    def __str__(self) -> str:
        return "\n".join(_text_of(self)) or "no call waits"

    def deadlocks(self) -> list[tuple[Standing, ...]]:
        """Return the circles of calls that wait for each other, as `Standing.deadlocks`."""
        return _deadlocks(self)


def standings_of(nodes: Sequence[CallNode]) -> list[Standing]:
    """Return the calls of an answer with those that they wait for."""
    found: list[tuple[int, Standing]] = []  # with their depths, the first one last
    for node in reversed(nodes):
        below = []
        while found and found[-1][0] > node.depth:
            below.append(found.pop()[1])
        depth, *parts = node._replace(lines=(*node.lines,))
        found.append((depth, Standing(*parts, tuple(below))))  # type: ignore[arg-type, call-arg]
    return [each for _, each in reversed(found)]


_REASONS = {
    CALL: "waits for ",
    LOCK: "the lock is held by ",
    TURN: "the turn is held by ",
    BATCH: "it is in the batch ",
    BLOCK: "the `async with` is in ",
}
_GUESSES = {
    CALL: "it has called ",
    LOCK: "the lock may be held by ",
    BATCH: "the batch before is ",
}


def _text_of(calls: Sequence[Standing]) -> Iterator[str]:
    """Yield lines: each call with all that it waits for once, and each deadlock once."""
    shown: set[Key] = set()
    for call in calls:
        yield from _text(call, "", shown)
    yield from map(str, _deadlocks(calls))


def _text(call: Standing, indent: str, shown: set[Key]) -> Iterator[str]:
    reason = _REASONS.get(call.reason, "")
    if not call.is_certain:
        reason = _GUESSES.get(call.reason, reason)
    head = f"{indent}{reason}{call.name}"
    if call.id in shown:
        yield f"{head}: see above"
        return
    shown.add(call.id)
    lines = [str(each) for each in call.lines]
    at = " -> ".join(lines if len(lines) <= 2 else [lines[0], "...", lines[-1]])
    inside = f", in {call.inside}()" if call.inside else ""
    age = f", {call.age:.1f} s" if call.age else ""
    yield f"{head}{age}: {call.state}{' at ' if at else ''}{at}{inside}"
    for each in call.waits_for:
        yield from _text(each, f"{indent}  ", shown)


def _deadlocks(calls: Sequence[Standing]) -> list[tuple[Standing, ...]]:
    """Return each circle once, wherever it was entered."""
    found: dict[frozenset[Key], tuple[Standing, ...]] = {}
    for call in calls:
        for circle in _circles(call, ()):
            found.setdefault(frozenset(each.id for each in circle), Deadlock(circle))
    return [*found.values()]


def _circles(call: Standing, above: tuple[Standing, ...]) -> Iterator[tuple[Standing, ...]]:
    if call.is_again:
        start = next((at for at, each in enumerate(above) if each.id == call.id), None)
        if start is not None:
            yield (*above[start:], call)
    for each in call.waits_for:
        yield from _circles(each, (*above, call))
