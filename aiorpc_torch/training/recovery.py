"""Recovery of a learner's weights from the memory of their followers: `recover`.

Each worker with followers has one object that knows them, registered under a name of its own. So
`members` finds those of all living workers. (tests/unit/training/test_recovery.py)
"""

import asyncio
import weakref
from collections.abc import Iterable, Mapping
from typing import Any, Generic, NamedTuple, TypeVar

from .. import RpcError, RRef, WorkerGone, lookup, members, register, remote
from .receiver import Receiver
from .relays import Version, own_host, version_of
from .snapshots import Snapshot

K = TypeVar("K")


class Recovered(NamedTuple):
    """A version that a follower held. Made by `recover`.

    Attributes:
        version: number of the version.
        tree: its tree, whose tensors are this process's own.
    """

    version: int
    tree: Any


async def recover(name: str) -> Recovered | None:
    """Return the newest whole version that any living follower of `name` holds; None without any.

        state = await recover("policy")
        if state is not None:
            model.load_state_dict(state.tree)
        weights = Weights(model.state_dict(), version=0 if state is None else state.version)
        aiorpc.register("policy", weights)

    It is for the process that replaces a learner: followers keep their versions in memory, and go
    on with the weights that it registers. Of several followers with the version, one on this host
    is asked first. One that is lost as it answers is passed over.

    The state of an optimizer, counters and random states are trees as well: publish them in the
    same tree, or under a name of their own, and follow that on another host.

    Args:
        name: name under which the weights are, or were, registered.

    Raises:
        TypeError: if the name is not a str.
        CallTimeout: if the deadline of `aiorpc.timeout` passes.
        RpcError: if followers live, and none of them could answer.
        NotInWorld: outside a world.
    """
    if not isinstance(name, str):
        raise TypeError(f"a name must be a str, got {name!r}")
    answers, failures = await _ask_all(await members(_name_of(name)))
    candidates, best = Candidates(answers), None
    while (candidate := candidates.next(-1 if best is None else best[0])) is not None:
        try:
            version = await remote(candidate).take()
        except RpcError as exc:
            failures.append(exc)
        else:
            best = version if best is None or version[0] > best[0] else best
    if best is not None and best[0] >= 0:
        number, head, blocks = best
        return Recovered(number, Snapshot.received(head, blocks).load())
    for failure in failures:
        if not isinstance(failure, WorkerGone):  # it lives: a None would let the learner begin anew
            raise failure
    return None


class Answer(NamedTuple):
    """The newest version that a worker holds, -1 for none, and whether it is on this host."""

    version: int
    is_near: bool


class Candidates(Generic[K]):
    """The order in which workers are asked for a version: the newest first, then the nearest."""

    def __init__(self, answers: Mapping[K, Answer]) -> None:
        held = [each for each in answers if answers[each].version >= 0]
        self._left = sorted(held, key=answers.__getitem__)
        self._answers = answers

    def next(self, version: int) -> K | None:
        """Return the next worker to ask, None if none has told of a newer one than that."""
        if not self._left or self._answers[self._left[-1]].version <= version:
            return None
        return self._left.pop()


async def _ask_all(
    holders: Iterable[RRef["Copies"]],
) -> tuple[dict[RRef["Copies"], Answer], list[RpcError]]:
    """Return what each worker holds, and the errors of the others."""
    host, asked = own_host(), [*holders]
    questions = (remote(each).newest() for each in asked)
    found, failures = dict[RRef[Copies], Answer](), list[RpcError]()
    replies = await asyncio.gather(*questions, return_exceptions=True)
    for holder, reply in zip(asked, replies, strict=True):
        if isinstance(reply, RpcError):
            failures.append(reply)
        elif isinstance(reply, BaseException):
            raise reply
        else:
            version, where = reply
            found[holder] = Answer(version, where == host)
    return found, failures


class Copies:
    """The versions that the followers of one name hold on this worker."""

    def __init__(self) -> None:
        self._receivers: weakref.WeakSet[Receiver] = weakref.WeakSet()

    def __reduce__(self) -> Any:  # with device maps, torch pickles what an RRef is made of
        return Copies, ()

    def add(self, receiver: Receiver) -> None:
        """Note a follower of this worker, as long as it lives."""
        self._receivers.add(receiver)

    async def newest(self) -> tuple[int, str]:
        """Return the number of the newest version that is held, -1 for none, and this host."""
        return self._newest()[0], own_host()

    async def take(self) -> Version:
        """Return the newest version that is held; its number is -1 if there is none."""
        return self._newest()

    def _newest(self) -> Version:
        newest = [each.newest for each in [*self._receivers] if each.newest is not None]
        held = [each for each in newest if each[1].is_whole]  # not shards of DTensors
        if not held:
            return -1, b"", {}
        number, snapshot = max(held, key=lambda each: each[0])
        return version_of(number, snapshot, ())


async def hold_copies(name: str, receiver: Receiver) -> None:
    """Let `recover` find what this receiver holds."""
    copies = Copies()
    try:
        register(_name_of(name), copies)
    except ValueError:  # there are others on this worker
        own = RRef(copies).owner_name()
        copies = (await lookup(_name_of(name), on=own)).local_value()
    copies.add(receiver)


def _name_of(weights: str) -> str:
    return f"copies of {weights}"
