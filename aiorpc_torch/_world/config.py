"""The configuration of a worker, given by arguments or by torchrun's environment."""

import contextlib
import os
import re
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from .._aio.loops import LoopFactory, new_event_loop
from .._server.exports import Export
from .._torch.agent import process_worker_id
from .._torch.devices import DeviceMaps, cuda_device_count, normalize_device_maps
from .._version import __version__
from .._wire.handshake import network_namespace
from .registration import Registration

OnFailure = Literal["continue", "stop"]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeConfig:
    """The checked arguments that `worker()` and `attach()` have in common."""

    threads: int = 16
    start_timeout: float = 60.0
    stop_timeout: float | None = 10.0
    heartbeat: float = 10.0
    exports: tuple[Export, ...] | None = None

    def __post_init__(self) -> None:
        if self.threads < 1:
            raise ValueError(f"threads must be at least 1, got {self.threads}")
        if not 0.0 < self.heartbeat < float("inf"):
            raise ValueError(
                f"heartbeat must be a finite number of seconds above 0, got {self.heartbeat!r}"
            )


@dataclass(frozen=True, slots=True)
class WorkerConfig(NodeConfig):
    """The checked arguments of `worker()`, `local_world()` or `run_local()` for one worker."""

    name: str
    rank: int
    world_size: int
    init_method: str
    transports: Sequence[str] | None = None
    channels: Sequence[str] | None = None
    device_maps: DeviceMaps = field(default_factory=dict)
    interface: str | None = None
    on_failure: OnFailure = "continue"
    freeze_gc: bool = True
    is_local: bool = False
    join: bool = False  # enter a running world: rank and size are found there
    loop_factory: LoopFactory = new_event_loop  # in processes whose loop is ours

    def __post_init__(self) -> None:
        if not (self.join or 0 <= self.rank < self.world_size):
            raise ValueError(
                f"rank must be from 0 to world_size - 1, got {self.rank} with "
                f"world_size={self.world_size}"
            )
        if not re.fullmatch(r"[A-Za-z0-9_:-]{1,127}", self.name):
            raise ValueError(
                "a worker's name must be 1 to 127 letters, digits, '-', '_' or ':', "
                f"got {self.name!r}"
            )
        NodeConfig.__post_init__(self)  # `slots` breaks `super()` before Python 3.14
        if self.on_failure not in ("continue", "stop"):
            raise ValueError(f'on_failure must be "continue" or "stop", got {self.on_failure!r}')
        for option, names in (("transports", self.transports), ("channels", self.channels)):
            if isinstance(names, str):
                raise TypeError(f"{option} must be a list of names, got {names!r}")
        normalize_device_maps(self.device_maps)

    def registration(self) -> Registration:
        """Return what this worker tells its peers."""
        return Registration(
            self.name,
            self.rank,
            self.world_size,
            __version__,
            process_worker_id(),
            cuda_device_count(),
            normalize_device_maps(self.device_maps),
            network_namespace(),
            joined=self.join,
        )


# ── torchrun's environment ──────────────────────────────────────────────────────────────────────


def rank_and_size(
    name: str | None, rank: int | None, world_size: int | None, *, join: bool
) -> tuple[int, int]:
    """Return the given rank and world size or the environment's; -1 for a worker that joins.

    Raises:
        ValueError: if one is missing, or is given to a worker that joins, or that has no name.
        RuntimeError: if this process joins, and was in a world before.
    """
    if not join:
        return _int_from_env("RANK", rank), _int_from_env("WORLD_SIZE", world_size)
    if name is None:
        raise ValueError("worker(join=True) needs a name")
    if rank is not None or world_size is not None:
        raise ValueError(
            "worker(join=True) takes no rank and no world_size: it gets the next rank of the world "
            f"that runs, got rank={rank} and world_size={world_size}"
        )
    if process_worker_id() is not None:
        raise RuntimeError(
            "worker(join=True) needs a process that was in no world before: torch's RRefs of this "
            "one have the number of its first world. Start another process"
        )
    return -1, -1


def _int_from_env(variable: str, given: int | None) -> int:
    if given is not None:
        return given
    try:
        return int(os.environ[variable])
    except KeyError:
        raise ValueError(
            f"worker() needs {variable.lower()}=, or {variable} in the environment, as torchrun "
            "sets it"
        ) from None


def is_single_host(init_method: str | None, world_size: int) -> bool:
    """Return whether all workers are known to be on this machine."""
    local_size = os.environ.get("LOCAL_WORLD_SIZE")  # torchrun's, for the world of its environment
    return init_method is None and (world_size == 1 or local_size == str(world_size))


@contextlib.contextmanager
def rendezvous_url(init_method: str | None, world_size: int) -> Iterator[str]:
    """Yield the URL of the rendezvous, valid during the block, as torch's `init_method`."""
    if init_method is not None:
        yield init_method
    elif world_size == 1:  # whatever is in the environment: none is to be met
        with new_rendezvous_url() as url:
            yield url
    else:
        if missing := [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]:
            raise ValueError(
                f"worker() needs init_method=, or {' and '.join(missing)} in the environment"
            )
        yield "env://"


@contextlib.contextmanager
def new_rendezvous_url() -> Iterator[str]:
    """Yield the URL of a new file store on this machine, which opens no port."""
    with tempfile.TemporaryDirectory(prefix="aiorpc-", ignore_cleanup_errors=True) as folder:
        yield f"file://{folder}/store"
