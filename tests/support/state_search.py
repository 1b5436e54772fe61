"""A search of all states of a model: breadth first, each state once, from snapshots of it."""

import contextlib
import copyreg
import gc
import io
import pickle
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from types import MethodType
from typing import Any, Protocol

import msgspec

Action = tuple[Any, ...]
"""A kind of action, and numbers of what it concerns."""


class Model(Protocol):
    """A world to search. An AssertionError of any method is a finding."""

    def steps(self) -> list[Action]:
        """Return what goes on by itself, in any order."""

    def pauses(self) -> list[Action]:
        """Return what happens once no step changes anything."""

    def releases(self) -> list[Action]:
        """Return what happens at last, if not before."""

    def events(self) -> list[Action]:
        """Return what may happen at any time."""

    def take(self, action: Action) -> None:
        """Take an action."""

    def check(self) -> None:
        """Check what holds always."""

    def check_rest(self) -> None:
        """Check what holds once nothing goes on."""

    def fingerprint(self) -> int:
        """Return the same number for states which nothing can tell apart."""

    def describe(self, action: Action) -> str:
        """Return an action, which is not taken yet, in words."""


@dataclass
class Result:
    """The extent of a search, and its finding."""

    states: int = 0
    transitions: int = 0
    rests: int = 0
    """States in which nothing goes on."""
    depth: int = 0
    """Actions to the last state, or to that of the finding."""
    finding: str = ""
    trace: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        extent = f"{self.states:,} states, {self.transitions:,} transitions, depth {self.depth}"
        return "\n".join([extent, self.finding, *self.trace])


# ── snapshots ───────────────────────────────────────────────────────────────────────────────────


class _Values:
    """Values that do not change, each with a number, the same for equal ones."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[type, bytes], int] = {}
        self._values: list[Any] = []
        self._known: dict[int, int] = {}  # numbers by id, of those in the list

    def number(self, value: Any) -> int:
        found = self._known.get(id(value))
        if found is None:
            key = type(value), msgspec.msgpack.encode(value)
            found = self._numbers.setdefault(key, len(self._values))
            if found == len(self._values):
                self._values.append(value)
                self._known[id(value)] = found
        return found

    def value(self, number: int) -> Any:
        return self._values[number]


_VALUES = _Values()
_VALUE_TYPES: set[type] = set()
_TABLE = copyreg.dispatch_table.copy()


def share_values(types: Iterable[type]) -> None:
    """Let snapshots share the values of those types, which do not change."""
    for each in types:
        _VALUE_TYPES.add(each)
        _TABLE[each] = _reduce


def _reduce(value: Any) -> tuple[Callable[[int], Any], tuple[int]]:
    return _value, (_VALUES.number(value),)


def _value(number: int) -> Any:
    return _VALUES.value(number)


def take_snapshot(world: Model) -> bytes:
    file = io.BytesIO()
    pickler = pickle.Pickler(file, pickle.HIGHEST_PROTOCOL)
    pickler.dispatch_table = _TABLE
    pickler.dump(world)
    return file.getvalue()


def restore(snapshot: bytes) -> Any:
    return pickle.loads(snapshot)


# ── fingerprints ────────────────────────────────────────────────────────────────────────────────


_ATOMS = frozenset({str, bool, float, type(None)})


class Flat:
    """A state as a flat list. Objects are numbered in the order in which they are found.

    Args:
        ignored: attributes that tell nothing, by type.
        first_name: integers from here on are names, numbered as objects are.
        family: of a name, that which it stands for by itself.
    """

    def __init__(
        self,
        ignored: dict[type, frozenset[str]],
        first_name: int,
        family: Callable[[int], tuple[Any, ...]],
    ) -> None:
        self.items: list[Any] = []
        self._ignored, self._first_name, self._family = ignored, first_name, family
        self._found: dict[int, int] = {}
        self._names: dict[int, tuple[Any, ...]] = {}
        self._counts: dict[tuple[Any, ...], int] = {}

    def add(self, value: Any) -> None:
        kind = type(value)
        if kind is int or kind in _ATOMS:
            self._add_all((value,))
        elif kind in _VALUE_TYPES:
            self.items.append(("value", _VALUES.number(value)))
        elif kind is dict:
            self.items.append(len(value))
            self._add_all(value)
            self._add_all(value.values())
        elif kind is list or kind is tuple:
            self.items.append(len(value))
            self._add_all(value)
        elif kind is set:
            self.items.append(len(value))
            self._add_all(sorted(value))
        elif kind is partial:
            self.add(value.func)
            self.add(value.args)
        elif kind is MethodType:
            self.items.append(value.__name__)
            self.add(value.__self__)
        elif (found := self._found.get(id(value))) is not None:
            self.items.append(("found", found))
        else:
            self._found[id(value)] = len(self._found)
            self.items.append(kind)
            self._add_all(self._values_of(kind, value))

    def _add_all(self, values: Iterable[Any]) -> None:
        for each in values:
            kind = type(each)
            if kind in _ATOMS:
                self.items.append(each)
            elif kind is int:
                self.items.append(each if each < self._first_name else self._name(each))
            else:
                self.add(each)

    def _values_of(self, kind: type, value: Any) -> Iterable[Any]:
        if not hasattr(value, "__dict__"):
            return (getattr(value, name) for name in vars(kind)["__slots__"])
        ignored = self._ignored.get(kind)
        if ignored is None:
            return [*vars(value).values()]
        return [each for name, each in vars(value).items() if name not in ignored]

    def _name(self, value: int) -> tuple[Any, ...]:
        if (name := self._names.get(value)) is None:
            family = self._family(value)
            count = self._counts[family] = self._counts.get(family, 0) + 1
            name = self._names[value] = (*family, count)
        return name


# ── search ──────────────────────────────────────────────────────────────────────────────────────


class _FindingError(Exception):
    """What a state or an action violates. `action` is the last one, None if there is none."""

    def __init__(self, number: int, action: Action | None, text: str) -> None:
        super().__init__(text)
        self.number, self.action = number, action


class _Search:
    def __init__(self, world: Model, limit: int) -> None:
        self.transitions = 0
        self.rests: list[int] = []
        self._limit = limit
        self._first = take_snapshot(world)
        self._numbers = {world.fingerprint(): 0}
        self._snapshots = {0: self._first}  # of the states that are not expanded yet
        self._before = array("l", [-1])
        self._actions: list[Action] = [()]
        self._edges: list[array[int]] = []  # without those of events

    @property
    def states(self) -> int:
        return len(self._actions)

    def run(self) -> None:
        number = 0
        while number < self.states:
            self._expand(number, self._snapshots.pop(number))
            number += 1
            if self.states > self._limit:
                raise _FindingError(number, None, f"more than {self._limit:,} states")
        self._check_ends()

    def _expand(self, number: int, snapshot: bytes) -> None:
        world: Model = restore(snapshot)
        edges = {self._take(number, snapshot, each) for each in world.steps()}
        if edges <= {number}:
            edges |= {self._take(number, snapshot, each) for each in world.pauses()}
        is_at_rest = edges <= {number}
        edges |= {self._take(number, snapshot, each) for each in world.releases()}
        for each in world.events():
            self._take(number, snapshot, each)
        self._edges.append(array("l", edges))
        if is_at_rest:
            self.rests.append(number)
            with _finding(number, None):
                world.check_rest()

    def _take(self, number: int, snapshot: bytes, action: Action) -> int:
        """Take an action; return the number of the state to which it leads."""
        self.transitions += 1
        world: Model = restore(snapshot)
        with _finding(number, action):
            world.take(action)
            world.check()
        found = self._numbers.setdefault(world.fingerprint(), self.states)
        if found == self.states:
            self._snapshots[found] = take_snapshot(world)
            self._before.append(number)
            self._actions.append(action)
        return found

    def _check_ends(self) -> None:
        """Check that each state leads to one in which nothing goes on."""
        before: list[list[int]] = [[] for _ in self._edges]
        for number, edges in enumerate(self._edges):
            for each in edges:
                before[each].append(number)
        ending, stack = {*self.rests}, [*self.rests]
        while stack:
            new = [each for each in before[stack.pop()] if each not in ending]
            ending.update(new)
            stack += new
        for number in range(self.states):
            if number not in ending:
                raise _FindingError(number, None, "from here it goes on without end")

    def path(self, number: int) -> list[Action]:
        """Return the actions that lead to a state."""
        actions: list[Action] = []
        while number:
            actions.append(self._actions[number])
            number = self._before[number]
        return actions[::-1]

    def trace(self, actions: Iterable[Action]) -> list[str]:
        """Return the actions in words."""
        world: Model = restore(self._first)
        lines = []
        for each in actions:
            lines.append(world.describe(each))
            with contextlib.suppress(*_FAULTS):
                world.take(each)
        return lines


_FAULTS = AssertionError, ValueError, KeyError, IndexError, AttributeError, TypeError


@contextlib.contextmanager
def _finding(number: int, action: Action | None) -> Iterator[None]:
    try:
        yield
    except _FAULTS as exc:
        raise _FindingError(number, action, f"{type(exc).__name__}: {exc}") from exc


def search(world: Model, limit: int = 1_000_000) -> Result:
    """Search all states that can follow, up to the first finding. No other is nearer."""
    found = _Search(world, limit)
    finding, trace = "", []
    gc.collect()
    threshold = gc.get_threshold()
    gc.freeze()  # each world is a cycle: what is here already need not be looked at each time
    gc.set_threshold(50_000)
    try:
        found.run()
        depth = len(found.path(found.states - 1))
    except _FindingError as exc:
        actions = found.path(exc.number) + ([] if exc.action is None else [exc.action])
        finding, trace, depth = str(exc), found.trace(actions), len(actions)
    finally:
        gc.set_threshold(*threshold)
        gc.unfreeze()
    return Result(found.states, found.transitions, len(found.rests), depth, finding, trace)
