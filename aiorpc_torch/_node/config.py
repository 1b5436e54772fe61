"""The checked configuration of a worker."""

import os
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, Literal

import torch

from .._aio.host import network_namespace
from .._aio.loops import LoopFactory, new_event_loop
from .._directory.registration import MAX_PROCESSES, Registration, check_worker_name
from .._port.tls import Tls
from .._server.exports import Export
from .._torch.agent import check_names_of_torch, process_worker_id
from .._torch.devices import DeviceMaps, normalize_device_maps
from .._version import __version__

Initializer = Callable[[str], object]
"""A function that a process runs before its world; its argument is the name of its worker."""

OnFailure = Literal["continue", "stop"]


_TYPES = {int: "an int", str: "a str", Real: "a number of seconds", Tls: "a Tls"}


def check_type(option: str, value: Any, kind: type, more: str = "") -> None:
    """Raise TypeError for an argument of another type, before anything starts."""
    if not isinstance(value, kind) or isinstance(value, bool):
        raise TypeError(f"{option} must be {_TYPES[kind]}{more}, got {value!r}")


def check_on_failure(value: Any) -> None:
    """Raise ValueError for another value than those of `OnFailure`."""
    if value not in ("continue", "stop"):
        raise ValueError(f'on_failure must be "continue" or "stop", got {value!r}')


def is_list_of_names(value: Any) -> bool:
    """Return whether it is a sequence of str: one str is none."""
    is_list = isinstance(value, Sequence) and not isinstance(value, str)
    return is_list and all(isinstance(each, str) for each in value)


MIN_HEARTBEAT = 0.05
"""Seconds: a busy machine delays an answer to a ping by more than a few milliseconds."""


MIN_WATCHDOG = 1.0
"""Seconds: a garbage collection, or an import, holds up an event loop for tenths of one."""

WATCHDOG = "AIORPC_TORCH_WATCHDOG"


def watchdog_seconds(given: float | None) -> float | None:
    """Return `given`, else the number in the environment, else None."""
    text = os.environ.get(WATCHDOG, "")
    if given is not None or not text:
        return given
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{WATCHDOG} must be a number of seconds, got {text!r}") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeConfig:
    """The checked arguments that `worker()` and `attach()` have in common."""

    threads: int = 16
    start_timeout: float = 60.0
    stop_timeout: float | None = 10.0
    heartbeat: float = 10.0
    exports: tuple[Export, ...] | None = None
    max_restarts: int | None = None  # of the children of a local world; None in other worlds
    watchdog: float | None = None

    def __post_init__(self) -> None:
        check_type("threads", self.threads, int)
        check_type("start_timeout", self.start_timeout, Real)
        check_type("heartbeat", self.heartbeat, Real)
        if not self.start_timeout >= 0.0:  # nan is not
            raise ValueError(f"start_timeout must be at least 0 s, got {self.start_timeout!r}")
        if self.stop_timeout is not None:
            check_type("stop_timeout", self.stop_timeout, Real, " or None")
            if not self.stop_timeout >= 0.0:
                raise ValueError(f"stop_timeout must be at least 0 s, got {self.stop_timeout!r}")
        if self.threads < 1:
            raise ValueError(f"threads must be at least 1, got {self.threads}")
        if self.watchdog is not None:
            check_type("watchdog", self.watchdog, Real, " or None")
        for option, kind, least, seconds in (
            ("watchdog", "None or a finite", MIN_WATCHDOG, self.watchdog),
            ("heartbeat", "a finite", MIN_HEARTBEAT, self.heartbeat),
        ):
            if seconds is not None and not least <= seconds < float("inf"):
                text = f"{option} must be {kind} number of seconds, at least {least}"
                raise ValueError(f"{text}, got {seconds!r}")


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
    port: int | None = None
    tls: Tls | None = None
    on_failure: OnFailure = "continue"
    freeze_gc: bool = True
    is_local: bool = False
    join: bool = False  # enter a running world: rank and size are found there
    loop_factory: LoopFactory = new_event_loop  # in processes whose loop is ours
    initializer: Initializer | None = None  # in processes that run this configuration

    def __post_init__(self) -> None:
        check_type("a worker's name", self.name, str)
        check_type("rank", self.rank, int)
        check_type("world_size", self.world_size, int)
        if not (self.join or 0 <= self.rank < self.world_size):
            raise ValueError(
                f"rank must be from 0 to world_size - 1, got {self.rank} with "
                f"world_size={self.world_size}"
            )
        if self.world_size > MAX_PROCESSES:
            raise ValueError(f"world_size must be at most {MAX_PROCESSES}, got {self.world_size}")
        check_worker_name(self.name)
        NodeConfig.__post_init__(self)  # `slots` breaks `super()` before Python 3.14
        check_on_failure(self.on_failure)
        for option, names in (("transports", self.transports), ("channels", self.channels)):
            if names is not None and not is_list_of_names(names):
                raise TypeError(f"{option} must be a list of names, got {names!r}")
        check_names_of_torch(self.transports, self.channels)
        if not (self.initializer is None or callable(self.initializer)):
            raise TypeError(f"initializer must be a function, got {self.initializer!r}")
        normalize_device_maps(self.device_maps)
        if self.tls is not None:
            check_type("tls", self.tls, Tls)
        if self.port is not None:
            check_type("port", self.port, int)
            if not 0 < self.port < 65536:
                raise ValueError(f"port must be from 1 to 65535, got {self.port!r}")
        if self.has_one_port and self.transports and self.transports[-1] != "uv":
            raise ValueError(
                'with port= or tls= the last one of transports must be "uv", which reaches other '
                f"hosts, got {self.transports!r}"
            )

    @property
    def has_one_port(self) -> bool:
        """Return whether this worker has one TCP port for all connections."""
        return self.port is not None or self.tls is not None

    def initialize(self) -> None:
        """Run the initializer of the process, in the thread that will run the event loop."""
        if self.initializer is not None:
            self.initializer(self.name)

    def registration(self) -> Registration:
        """Return what this worker tells its peers."""
        return Registration(
            self.name,
            self.rank,
            self.world_size,
            __version__,
            process_worker_id(),
            torch.cuda.device_count(),
            normalize_device_maps(self.device_maps),
            network_namespace(),
            joined=self.join,
        )


def new_local_url() -> str:
    """Return the URL of a new world on this machine, which opens no port."""
    return f"unix://{secrets.token_hex(16)}"
