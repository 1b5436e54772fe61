"""Numbers of the world as this worker knows it, and of its own place in it. In any thread."""

from collections import Counter
from dataclasses import dataclass
from typing import Any

from .._endpoint import entry_points
from .._peers.peers import State

STATES = {
    State.ALIVE: "alive",
    State.LOST: "lost",
    State.ABANDONED: "abandoned",
    State.FAILED: "failed",
    State.LEFT: "left",
    State.ENDED: "left",
}


@dataclass(frozen=True, slots=True)
class WorldNumbers:
    """The workers of a world, as one of them knows them.

    Attributes:
        worker: name of this worker.
        size: number of workers that have not left.
        states: number of workers in each state, this one included.
        restarts: how often this worker's process was started again.
        is_coordinator: whether this worker keeps the directory, None in a world without one.
        names: names under which objects are registered here, by the objects' ids.
    """

    worker: str
    size: int
    states: dict[str, int]
    restarts: int
    is_coordinator: bool | None
    names: dict[int, str]


def world_numbers() -> WorldNumbers | None:
    """Return the numbers of the world, None outside of one."""
    node: Any = entry_points.current()
    if node is None or node.members.name not in node.members.workers:  # it starts
        return None
    members, names = node.members, node.server.names
    states = Counter(STATES[each.state] for each in members.everybody())
    found = ((name, names.find(name)) for name in names.names())
    objects = {id(rref.local_value()): name for name, rref in found if rref is not None}
    size = states.total() - states["left"]
    is_coordinator = members.coordinator == members.name if members.coordinator else None
    return WorldNumbers(members.name, size, dict(states), members.restarts, is_coordinator, objects)
