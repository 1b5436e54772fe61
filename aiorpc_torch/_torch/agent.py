"""torch's RPC agent of this process: its start, its table of peers, its end.

It does the last steps of `init_rpc`. The first ones, a process group and a wait for every rank, may
block for half an hour or for ever. Each agent has a table of peers of its own, so that a dead peer
can be replaced; `_world` finds the peers and their addresses.

Facts of torch 2.13 and 2.15: an agent of a group without a world size accepts and removes peers at
any time. A replacement process needs a new worker id, since the broken pipe and the RRefs of the
old process stay under the old one. After `join`, closed pipes raise no error.
(tests/integration/test_rejoin.py, tests/integration/test_worlds.py)
"""

import atexit
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Protocol

import torch

from .._aio.fork import fork_text
from .._aio.host import allow_files
from .._aio.signals import abandon_threads, force_exit, has_threads
from . import rrefs
from .compat import (
    CPP_ERROR,
    HashStore,
    TensorPipeAgent,
    WorkerInfo,
    autograd_debug_info,
    current_agent,
    delete_rrefs,
    has_agent,
    hide_in_cpp_log,
    init_autograd,
    init_rpc_count,
    init_rpc_states,
    refuse_rpc,
    rpc,
    set_profiler_node,
    worker_names,
)
from .devices import DeviceRoutes, NamedDeviceMaps

_first_id: int | None = None  # the worker id of this process in its first world
_needs_stop = False  # an agent was started, and nothing has begun to stop it

CHANNELS = "AIORPC_TORCH_CHANNELS"


def process_worker_id() -> int | None:
    """Return the worker id that this process must have in every world, None before its first.

    torch's RRefs and autograd contexts of a process contain the id of its first world.
    """
    return _first_id


@dataclass(frozen=True, slots=True)
class PeerInfo:
    """A worker as its peers reach it."""

    name: str
    rank: int
    worker_id: int
    """torch's: unlike the rank, it is new for a replacement process."""
    address: str
    device_maps: NamedDeviceMaps = field(default_factory=dict)
    """For each peer's name, from its own devices to the peer's."""

    namespace: str = ""
    """Network namespace, "" if unknown."""

    endpoint: str = ""
    """Address and port for workers on other hosts, "" unless each worker has one port."""

    @property
    def info(self) -> WorkerInfo:
        """torch's reference to the worker."""
        return WorkerInfo(self.name, self.worker_id)


class Routes(Protocol):
    """The ways to peers that cannot be reached at their own address."""

    def address_of(self, peer: PeerInfo) -> str:
        """Return the address at which this process reaches a peer."""

    def forget(self, peer: PeerInfo) -> None:
        """Free the address of a peer, whose process has ended."""


def check_names_of_torch(transports: Sequence[str] | None, channels: Sequence[str] | None) -> None:
    """Raise ValueError for a transport or a channel that torch does not have."""
    for kind, names, known in (
        ("transport", transports, "uv, shm and, with InfiniBand, ibv"),
        ("channel", channels, "basic, cma, mpt_uv and those of CUDA"),
    ):
        for name in names or ():
            options: Any = {f"_{kind}s": [name]}
            try:
                rpc.TensorPipeRpcBackendOptions(**options)
            except RuntimeError:
                text = f"torch has no {kind} {name!r}: {kind}s are {known}"
                raise ValueError(text) from None


class Agent:
    """The RPC agent of this process, one in a world. To make one blocks for milliseconds.

    Worker ids are torch's. If every worker is in its `first_world`, torch counts the
    references to RRefs. `routes` has other addresses of the peers.
    """

    def __init__(
        self,
        name: str,
        worker_id: int,
        *,
        threads: int,
        transports: Sequence[str] | None,
        channels: list[str] | None = None,
        device_maps: Mapping[str, NamedDeviceMaps],
        first_world: bool,
        routes: Routes | None = None,
    ) -> None:
        global _first_id, _needs_stop
        options = rpc.TensorPipeRpcBackendOptions(
            num_worker_threads=threads,
            device_maps={**device_maps[name]},  # type: ignore[dict-item]  # torch takes str, too
            # Not shm: it polls from the start, 85 % of a core in a world of one without a peer.
            _transports=list(transports or ("uv",)),
            _channels=channels,
        )
        self._name = name
        self._is_first_world = first_world
        if _first_id is None:
            _first_id = worker_id
            init_autograd(worker_id)
        set_profiler_node(worker_id)  # for a profiler's events; torch cannot unset it
        rrefs.enter_world(worker_id, counted=first_world)
        self._routes = routes
        self._store = HashStore()
        self._maps = {**device_maps}
        self.routes = DeviceRoutes.for_worker(name, device_maps)
        """Devices on which tensors of this worker may be when they are sent."""
        _init_cuda(self.routes)
        # With the maps of this worker's calls to itself, which `add_peer` does not add.
        devices = {**self.routes.answers}, self.routes.used
        self._agent = TensorPipeAgent(self._store, name, worker_id, None, options, *devices)
        _needs_stop = True
        init_rpc_states(self._agent)
        self.address: str = self._store.get(f"addrs/{name}").decode()

    def add_peer(self, peer: PeerInfo) -> None:
        """Add a peer to torch's table. Callable from any thread."""
        if peer.name == self._name:
            return
        if self._maps.get(peer.name, {}) != peer.device_maps:  # of a replacement process
            self._maps[peer.name] = peer.device_maps
            self.routes = DeviceRoutes.for_worker(self._name, self._maps)
            _init_cuda(self.routes)
        address = peer.address if self._routes is None else self._routes.address_of(peer)
        self._store.set(f"addrs/{peer.name}", address)
        # The maps of all peers at each one's addition would be quadratic work: torch keeps those
        # that it has. (tests/unit/torch/test_agent.py)
        answers = self.routes.answers.get(peer.name)
        maps = {} if answers is None else {peer.name: answers}
        self._agent._update_group_membership(peer.info, self.routes.used, maps, True)
        names = worker_names()  # for torch's own gathering among all workers
        names.add(peer.name)
        allow_files(len(names))

    def free_name(self, old: PeerInfo) -> None:
        """Free the name of a process that is gone: another process may get it.

        Its worker id stays: torch repeats for 13 s a message that ends an RRef, and refers to the
        entry of the owner meanwhile. After its erasure torch would read freed memory.
        (2.15; tests/unit/torch/test_agent.py)
        """
        rrefs.past_ids.add(old.worker_id)
        if self._routes is not None:
            self._routes.forget(old)
        # torch forgets the maps that are not listed. An entry that stays would not be replaced.
        kept = {name: each for name, each in self.routes.answers.items() if name != old.name}
        name_only = WorkerInfo(old.name, -1)  # an id that no worker has
        self._agent._update_group_membership(name_only, self.routes.used, kept, False)

    def release_rrefs(self) -> None:
        """Drop the RRefs of peers' objects. Blocks until the owners, all alive, have confirmed."""
        if self._is_first_world:  # in later worlds torch's messages about RRefs do not arrive
            # A process that died, or left by itself, has given none back: torch logs an error.
            with hide_in_cpp_log(CPP_ERROR):
                delete_rrefs(timedelta(seconds=1))

    def drain(self) -> None:
        """Accept from now on that peers close their pipes. Blocks while calls are pending."""
        self._agent.join()

    def stop(self) -> None:
        """Close the pipes and take no further messages. Waits for running threads, not for peers.

        Replies to messages that were taken may still be completed, to no effect.
        """
        global _needs_stop
        _needs_stop = False  # once: a blocked thread of the agent would block the exit as well
        _shut_down()

    def release(self) -> None:
        """Free the stopped agent and its threads.

        Completing a reply after that reads freed memory: torch's callback refers to the agent
        without a reference. (2.15; tests/integration/test_rrefs_internals.py)
        """
        # torch's threads end with this object, not with the next run of the garbage collector.
        del self._agent


def channel_names(given: Sequence[str] | None) -> list[str] | None:
    """Return the names of TensorPipe's channels: `given`, else the environment's, else None.

    Where CUDA IPC does not work, the machine is the reason, not the program: so no program needs an
    option for it.
    """
    if given is not None:
        return [*given]
    return [name for name in os.environ.get(CHANNELS, "").split(",") if name] or None


def _init_cuda(routes: DeviceRoutes) -> None:
    # As `init_rpc` does: a peer may send before this process has used its device. A message that
    # arrives before that ends the process.
    if routes.used:
        torch.cuda.init()  # type: ignore[no-untyped-call]


# ── an agent that `init_rpc` started ────────────────────────────────────────────────────────────


def agent_generation() -> int | None:
    """Return a number that each `init_rpc` of this process changes, None while no agent runs."""
    return init_rpc_count() if has_agent() else None


def agent_name() -> str:
    """Return the name that this worker has in the agent that `init_rpc` started."""
    return str(current_agent().get_worker_info().name)


def adopt_agent() -> list[PeerInfo]:
    """Use the agent that `init_rpc` started, and leave it running; return all workers by id.

    Device maps are known of this worker only. Call it again after the agent was adopted before:
    RRefs stay valid.
    """
    global _first_id
    agent, generation = current_agent(), init_rpc_count()
    own: WorkerInfo = agent.get_worker_info()
    is_first = _first_id is None and generation == 1
    if _first_id is None:
        _first_id = own.id
    rrefs.enter_world(own.id, counted=is_first, generation=generation)
    infos = sorted(agent.get_worker_infos(), key=lambda info: info.id)
    others = (info for info in infos if info.id != own.id)
    maps = {info.name: devices for info in others if (devices := device_map_for(info))}
    return [adopted_peer(info, maps if info.id == own.id else {}) for info in infos]


def adopted_peer(info: WorkerInfo, device_maps: NamedDeviceMaps | None = None) -> PeerInfo:
    """Return a worker of a group that `init_rpc` started: its rank is torch's worker id."""
    return PeerInfo(info.name, info.id, info.id, "", device_maps or {})


def device_map_for(info: WorkerInfo) -> dict[str, str]:
    """Return the map, in the options of `init_rpc`, of this worker's devices to a peer's."""
    devices = current_agent()._get_device_map(info)
    return {str(own): str(theirs) for own, theirs in devices.items()}


def init_method() -> str:
    """Return the URL with which `init_rpc` was called."""
    return str(current_agent()._get_backend_options().init_method)


@atexit.register
def _stop_at_exit() -> None:
    # A process that exits inside its world would end with "terminate called" (2.13, 2.15).
    if _needs_stop and is_running():
        _shut_down()
    if has_threads():
        abandon_threads()
    # A backward that returns after Python has ended aborts the process, and torch's exit functions
    # wait for one without end. (2.13, 2.15; tests/integration/test_signals.py)
    failure = getattr(sys, "last_value", None)
    end = time.monotonic() + (5.0 if failure is None else 0.5)
    while _first_id is not None and int(autograd_debug_info()["num_current_backward_passes"]):
        if time.monotonic() > end:
            force_exit(130 if isinstance(failure, KeyboardInterrupt) else 1)
        time.sleep(0.01)


def _forget() -> None:
    """Leave the agent to the process that started it: a fork has none of its threads."""
    global _needs_stop
    _needs_stop = False
    rrefs.leave_to_parent()
    if fork_text():
        refuse_rpc()


os.register_at_fork(after_in_child=_forget)


def _shut_down() -> None:
    with rrefs.leaving_world():
        rpc.shutdown(graceful=False)


def is_running() -> bool:
    """Return whether this process has an RPC agent, also one that `init_rpc` started."""
    return has_agent()
