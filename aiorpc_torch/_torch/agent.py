"""torch's RPC agent of this process: started, told of its peers, stopped.

The only room that knows how torch's RPC is set up. It does what `init_rpc` does in the end, without
what comes before: a process group, and a start that waits for a missing rank for half an hour or
for ever. Each agent keeps a table of its peers to itself, which is told of each of them, so that a
peer that died can have a successor. Who the peers are and where, `_rendezvous` finds out.

Seen on torch 2.13 and 2.15, held by tests/test_comeback.py and tests/test_worlds.py: an agent of a
group without a world size takes peers in and lets them go at any time; a peer's number must be new
if it comes back, since the broken pipe stays under the old one; after `join` what others close is
closed without a word.
"""

import atexit
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NoReturn

import torch
from torch.distributed import rpc

from . import rrefs
from .compat import (
    HashStore,
    TensorPipeAgent,
    WorkerInfo,
    autograd_debug_info,
    delete_rrefs,
    has_agent,
    init_autograd,
    init_rpc_states,
)
from .devices import Names

_first: int | None = None  # the number that this process had in its first world
_to_stop = False  # whether an agent was started whose end nobody has begun

# Shared memory polls from the agent's start: 85 % of a core in a world of one without a peer.
DEFAULT_TRANSPORTS = ("uv",)

# Seconds for a backward to end at the process's exit: of a program that failed, and of another.
_FAILED, _DONE = 0.5, 5.0


def keeps_number() -> int | None:
    """The number that this process should have in every world, None in its first.

    torch's RRefs and autograd contexts of a process carry its first number for good.
    """
    return _first


@dataclass(frozen=True, slots=True)
class Member:
    """A worker as others reach it."""

    name: str
    rank: int
    number: int
    """torch's: unlike the rank it is a new one for a worker that came back."""
    address: str
    device_maps: Names = field(default_factory=dict)
    """From its own devices to those of the peer of that name."""

    namespace: str = ""
    """Of the network: what tells it from others, "" if that is not known."""

    @property
    def info(self) -> WorkerInfo:
        """What torch calls it."""
        return WorkerInfo(self.name, self.number)


class Agent:
    """The agent of this process, called `name`. Made once in a world; blocks for milliseconds.

    In a world of `novices`, whose workers are all in their first, torch counts who holds an RRef.
    """

    def __init__(
        self,
        name: str,
        number: int,
        *,
        threads: int,
        transports: Sequence[str] | None,
        device_maps: Names,
        novices: bool,
    ) -> None:
        global _first, _to_stop
        options = rpc.TensorPipeRpcBackendOptions(
            num_worker_threads=threads,
            device_maps={**device_maps},  # type: ignore[dict-item]  # a dict of str is none of Any
            _transports=list(transports or DEFAULT_TRANSPORTS),
        )
        self._name = name
        self._novices = novices
        if _first is None:
            _first = number
            init_autograd(number)
        rrefs.begin(number, counted=novices)
        self._store = HashStore()
        self._agent = TensorPipeAgent(self._store, name, number, None, options, {}, [])
        self._members: dict[str, Member] = {}
        self._devices = {torch.device(own) for each in device_maps.values() for own in each}
        _to_stop = True
        init_rpc_states(self._agent)
        self.address: str = self._store.get(f"addrs/{name}").decode()

    def __repr__(self) -> str:
        return f"<Agent {self._name}, peers: {', '.join(self._members)}>"

    def meet(self, member: Member) -> None:
        """Learn of a peer. From any thread."""
        if member.name == self._name:
            return
        maps = {peer: self._reverse(each) for peer, each in self._members.items()}
        maps[member.name] = self._reverse(member)
        devices = {*self._devices, *(torch.device(own) for each in maps.values() for own in each)}
        self._members[member.name] = member
        self._update(member, member.name, devices, maps)

    def replace(self, member: Member) -> str:
        """A peer has come back; the name under which its predecessor's objects are known."""
        old = self._members.pop(member.name)
        maps = {peer: self._reverse(each) for peer, each in self._members.items()}
        # Without its entry, the objects that this process holds of it would have no owner at all.
        past = f"{old.name[:100]}:was:{old.number}"
        self._agent._update_group_membership(old.info, [*self._devices], maps, False)
        self._update(old, past, self._devices, maps)
        self.meet(member)
        return past

    def _update(self, member: Member, name: str, devices: set[torch.device], maps: Any) -> None:
        self._store.set(f"addrs/{name}", member.address)
        info = WorkerInfo(name, member.number)
        self._agent._update_group_membership(info, sorted(devices, key=str), maps, True)
        if devices:
            # torch's own start does so too: a peer may send before this process uses its device.
            torch.cuda.init()  # type: ignore[no-untyped-call]

    def _reverse(self, member: Member) -> dict[torch.device, torch.device]:
        """How answers to that peer map devices."""
        mine = member.device_maps.get(self._name, {})
        return {torch.device(here): torch.device(there) for there, here in mine.items()}

    def release(self) -> None:
        """Let go of the objects of others, which must all be alive. Blocks until they know it."""
        if self._novices:  # from others torch's messages about RRefs do not come
            delete_rrefs(timedelta(seconds=1))

    def seal(self) -> None:
        """From now on it is no news if a peer closes its pipes. Blocks while calls are pending."""
        self._agent.join()

    def stop(self) -> None:
        """Close the pipes and end the threads. Waits for no peer, but for what runs in a thread."""
        global _to_stop
        _to_stop = False  # once: what holds one of its threads would hold the process's exit too
        _shut_down()
        # torch's threads end with its object, which would wait for Python's collector of garbage.
        del self._agent


@atexit.register
def _stop_at_exit() -> None:
    # A process that ends inside its world would end with "terminate called" (2.13, 2.15).
    if _to_stop and is_running():
        _shut_down()
    # And one in which torch computes a backward, for a worker that died say, would be aborted when
    # that comes back to a Python that has ended, or would wait for it without end in torch's exit
    # functions. (2.13, 2.15; tests/test_signals.py)
    failure = getattr(sys, "last_value", None)
    end = time.monotonic() + (_DONE if failure is None else _FAILED)
    while _first is not None and int(autograd_debug_info()["num_current_backward_passes"]):
        if time.monotonic() > end:
            _abandon(130 if isinstance(failure, KeyboardInterrupt) else 1)
        time.sleep(0.01)


def _shut_down() -> None:
    with rrefs.closing():
        rpc.shutdown(graceful=False)


def _abandon(code: int) -> NoReturn:
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


def is_running() -> bool:
    """Whether this process has an agent, whoever started it."""
    return has_agent()
