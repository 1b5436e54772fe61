"""Recovery of a learner's weights from the memory of their followers: `recover`.

Each worker with followers has one object that knows them, registered under a name of its own. So
`members` finds those of all living workers. (tests/unit/training/test_recovery.py)
"""

import asyncio
import logging
import operator
import weakref
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeVar

from .. import RpcError, RRef, WorkerGone, lookup, members, register, remote
from .receiver import Receiver
from .relays import own_host
from .snapshots import Snapshot, Version

K = TypeVar("K")

log = logging.getLogger("aiorpc_torch")


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
    is asked first. One that is lost as it answers is passed over. So is one that has written into
    its version, as training does, while another one is intact.

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
    holders, host = [*await members(_name_of(name))], own_host()
    questions = (remote(each).newest() for each in holders)
    replies = await asyncio.gather(*questions, return_exceptions=True)
    answers, failures = dict[RRef[Copies], Answer](), list[RpcError]()
    for holder, reply in zip(holders, replies, strict=True):
        if isinstance(reply, RpcError):
            failures.append(reply)
        elif isinstance(reply, BaseException):
            raise reply
        else:
            is_intact, version, where = reply
            answers[holder] = Answer(is_intact, version, where == host)
    for holder in in_order(answers):
        try:
            number, head, blocks = await remote(holder).take()
        except RpcError as exc:
            failures.append(exc)
            continue
        if not answers[holder].is_intact:
            log.warning(
                "version %d of %r is recovered from a follower that has written into it; no other "
                "has one: follow into a model that is not trained, or with copy=True",
                number,
                name,
            )
        return Recovered(number, Snapshot.received(head, blocks).load())
    for failure in failures:
        if not isinstance(failure, WorkerGone):  # it lives: a None would let the learner begin anew
            raise failure
    return None


class Answer(NamedTuple):
    """A worker's version: whether it is as it was published, its number, and whether it is near.

    Its number is -1 if the worker has none. It is near on this host.
    """

    is_intact: bool
    version: int
    is_near: bool


def in_order(answers: Mapping[K, Answer]) -> list[K]:
    """Return the workers that hold a version: intact ones first, then the newest, the nearest."""
    held = [each for each in answers if answers[each].version >= 0]
    return sorted(held, key=answers.__getitem__, reverse=True)


class Copies:
    """The versions that the followers of one name hold on this worker, as long as they live."""

    def __init__(self) -> None:
        self.receivers: weakref.WeakSet[Receiver] = weakref.WeakSet()

    def __reduce__(self) -> Any:  # with device maps, torch pickles what an RRef is made of
        return Copies, ()

    async def newest(self) -> tuple[bool, int, str]:
        """Return whether the version that is held is intact, its number or -1, and this host."""
        is_intact, number, _ = self._best()
        return is_intact, number, own_host()

    async def take(self) -> Version:
        """Return the version that is held; RpcError if it is gone."""
        _, number, snapshot = self._best()
        if snapshot is None:
            raise RpcError("the follower has gone")
        return snapshot.sent(number, ())

    def _best(self) -> tuple[bool, int, Snapshot | None]:
        newest = [each.newest for each in [*self.receivers] if each.newest is not None]
        held = [
            (snapshot.is_intact, number, snapshot)
            for number, snapshot in newest
            if snapshot.is_whole  # not shards of DTensors
        ]
        return max(held, key=operator.itemgetter(0, 1), default=(False, -1, None))


async def hold_copies(name: str, receiver: Receiver) -> None:
    """Let `recover` find what this receiver holds."""
    copies = Copies()
    try:
        register(_name_of(name), copies)
    except ValueError:  # there are others on this worker
        own = RRef(copies).owner_name()
        copies = (await lookup(_name_of(name), on=own)).local_value()
    copies.receivers.add(receiver)


def _name_of(weights: str) -> str:
    return f"copies of {weights}"
