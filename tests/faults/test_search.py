"""Each operation with each fault at each of its steps: it ends, and nothing of it is left.

A case that fails names its steps. `python -m tests.faults -o OPERATION -f FAULT` runs it alone.
"""

import gc
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support import samples

from .faults import FAULTS, Fault, is_possible
from .killing import kill_at
from .operations import OPERATIONS, WORLDS, Operation
from .search import Search

# In `make test` each operation meets these faults, and one more in turn. Of those on tensor sockets
# only one does: each takes a second.
ALWAYS = ("cancel", "torch raises", "watching raises", "socket fails", "no memory")
IN_TURN = ("deadline", "writing raises", "end at the callee", "lost peer", "leave")
ON_SOCKETS = {"large result over sockets"}
ENDS = "local batches of a def in a row"  # goes on while its world ends
LEFT = {  # to the rest
    "calls on routes",
    "streams on routes",
    "weights by a relay",
    "weights joined and recovered",
    "weights written into",
}
SAMPLE = 10  # steps in `make test` of a case, evenly spread
STARTING = 5  # the same of a case in which a world starts for each step
LEAVING = 25  # the same in the rest, of a case on tensor sockets
DIAGONALS = 8  # all steps of every eighth case are tried in `make test-rest`


def sample_of(position: int, operation: Operation, fault: Fault) -> int:
    """Return how many steps a case has in `make test`; 0 leaves it to the rest."""
    if operation.name in LEFT:
        return 0
    is_quick = fault.name in (*ALWAYS, IN_TURN[position % len(IN_TURN)])
    if fault.name == "torch raises":
        is_quick = operation.way == "torch"
    if operation.way == "sockets":
        is_quick &= operation.name in ON_SOCKETS
    if not is_quick and not (fault.leaves and operation.name == ENDS):
        return 0
    return STARTING if fault.leaves or operation.around not in WORLDS else SAMPLE


def _cases() -> Iterator[Any]:
    for position, operation in enumerate(OPERATIONS):
        for column, fault in enumerate(FAULTS):
            if not is_possible(fault, operation.around, operation.way):
                continue
            name = f"{operation.name}-{fault.name}".replace(" ", "_")
            sample = sample_of(position, operation, fault)
            if sample:
                yield pytest.param(operation, fault, sample, id=name)
            # On sockets, some of the steps at which a world is left: each takes a second.
            most = LEAVING if fault.leaves and operation.way == "sockets" else None
            # The ways of one operation follow one another, so they meet different faults.
            marks = samples.mark(position, column, of=DIAGONALS)
            yield pytest.param(operation, fault, most, id=f"{name}-all", marks=marks)


@pytest.fixture(scope="module", autouse=True)
def _without_old_garbage() -> Iterator[None]:
    """A search collects garbage often: what is there already takes no part."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("operation", "fault", "sample"), [*_cases()])
def test_a_fault_at_each_step(operation: Operation, fault: Fault, sample: int | None) -> None:
    """The operation ends as it may, nothing is left on either side, and the next calls work."""
    report = Search(operation, fault).run(sample)
    assert not report.findings, report.text()


@pytest.mark.parametrize(
    ("operation", "fault"),
    [
        ("lone call", "cancel"),
        ("lone call", "writing raises"),
        ("large argument over torch", "torch raises"),
        ("watched calls", "watching raises"),
    ],
)
def test_each_kind_of_step_is_met(operation: str, fault: str) -> None:
    """A search without a step would find nothing."""
    [found] = [each for each in OPERATIONS if each.name == operation]
    [injected] = [each for each in FAULTS if each.name == fault]
    assert Search(found, injected).run(2).steps > 0


KILLED = {"lone call", "slow def", "queued calls", "large argument", "large argument over torch"}
KILLED |= {"large result", "large result over torch", "stream", "stream over torch", "batch"}
KILLED |= {"large argument over sockets", "large result over sockets", "stream over sockets"}
KILLED |= {"long stream of a def", "group call", "large group call", "group map", "any of a group"}


@pytest.mark.slow
@pytest.mark.worlds
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "operation",
    [
        pytest.param(operation, id=operation.name.replace(" ", "_"))
        for operation in OPERATIONS
        if operation.name in KILLED
    ],
)
def test_the_peer_is_killed_at_each_step(operation: Operation) -> None:
    """The call raises WorkerLost or has its result, and nothing of it is left at the caller."""
    step, is_hit, found = 0, True, dict[int, list[str]]()
    while is_hit:
        is_hit, found[step] = kill_at(operation, step)
        step += 1
    assert not {step: each for step, each in found.items() if each}
