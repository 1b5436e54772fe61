"""The environment that a launcher sets: torchrun, Slurm or Kubernetes.

torchrun's variables come first, each by itself: a batch script may export MASTER_ADDR, and leave
the ranks to Slurm. Nothing is read that an argument of `worker()` gives.
"""

import contextlib
import itertools
import os
import re
from collections.abc import Iterator
from typing import NamedTuple
from urllib.parse import urlsplit

from .._directory.etcd_place import Place, is_etcd_url
from .._node.config import new_local_url
from .._port.tls import Tls
from .._torch.agent import process_worker_id

NAMES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""torchrun's variables, by whose names settings are found."""

PORT = "AIORPC_TORCH_PORT"
TLS = ("AIORPC_TORCH_TLS_CERT", "AIORPC_TORCH_TLS_KEY", "AIORPC_TORCH_TLS_CA")

DEFAULT_PORT = 29500  # torch's own
# Below the random ports of Linux (32768 to 60999), above those of common services.
_FIRST_PORT, _PORTS = 15000, 10000
_PORTS_OF_A_JOB = 97  # steps; jobs with consecutive ids may share a node
_SLURM_SIZES = ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
_INDEX = "JOB_COMPLETION_INDEX"


class Setting(NamedTuple):
    """A value of the environment, and where it comes from."""

    value: str
    source: str


def find_setting(name: str) -> Setting:
    """Return the value of torchrun's variable `name`, or its equivalent by another launcher.

    Raises:
        ValueError: if there is none, or none that can be read; it tells what to set.
    """
    if value := os.environ.get(name):
        return Setting(value, name)
    found: Setting | None = None
    if is_slurm_task():
        found = _in_slurm(name)
    elif _INDEX in os.environ and name == "RANK":
        found = Setting(os.environ[_INDEX], _INDEX)
    elif _INDEX in os.environ and name == "MASTER_PORT":
        found = Setting(str(DEFAULT_PORT), "default")
    if found is None:
        raise ValueError(_missing(name))
    return found


def find_number(name: str, given: int | None) -> int:
    """Return `given`, or the number that the environment has for `name` if it is None."""
    if given is not None:
        return given
    return _number(*find_setting(name))


def _number(value: str, source: str) -> int:
    try:
        return int(value)
    except ValueError:
        raise ValueError(f"{source} must be a number, got {value!r}") from None


def rank_and_size(
    name: str | None, rank: int | None, world_size: int | None, *, join: bool
) -> tuple[int, int]:
    """Return the given rank and world size or the environment's; -1 for a worker that joins."""
    if not join:
        return find_number("RANK", rank), find_number("WORLD_SIZE", world_size)
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


def find_port(port: int | None) -> int | None:
    """Return `port`, or AIORPC_TORCH_PORT plus the number of this worker on its host."""
    if port is not None or not os.environ.get(PORT):
        return port
    base = _number(os.environ[PORT], PORT)
    for name in ("LOCAL_RANK", "SLURM_LOCALID"):
        if (local := os.environ.get(name)) and (name == "LOCAL_RANK" or is_slurm_task()):
            return base + _number(local, name)
    return base


def find_tls(tls: Tls | None) -> Tls | None:
    """Return `tls`, or that of the files which the environment names."""
    if tls is not None or not any(os.environ.get(name) for name in TLS):
        return tls
    if missing := [name for name in TLS if not os.environ.get(name)]:
        raise ValueError(f"TLS needs {', '.join(TLS)}: {' and '.join(missing)} is not set")
    return Tls(*(os.environ[name] for name in TLS))


def is_single_host(init_method: str | None, world_size: int) -> bool:
    """Return whether all workers are known to be on this machine."""
    if init_method is not None or world_size == 1:
        return init_method is None
    local_size = os.environ.get("LOCAL_WORLD_SIZE")  # torchrun's, for the world of its environment
    if not local_size and is_slurm_task() and not os.environ.get("MASTER_ADDR"):
        with contextlib.suppress(ValueError):
            if len(_first_hosts()) == 1 and (tasks := _in_slurm("WORLD_SIZE")):
                local_size = tasks.value
    return local_size == str(world_size)


def meeting_url(init_method: str | None, world_size: int) -> str:
    """Return the URL at which the workers find rank 0, as torch's `init_method`."""
    if init_method not in (None, "env://"):
        if not isinstance(init_method, str):
            raise TypeError(f"init_method must be a str such as file:///path, got {init_method!r}")
        if is_etcd_url(init_method):
            Place.parse(init_method)  # raises
            return init_method
        url = urlsplit(init_method)
        if url.scheme not in ("file", "unix") and (url.scheme != "tcp" or url.port is None):
            expected = "tcp://host:port, file:///path, etcd://host:port/name or env://"
            raise ValueError(f"init_method must be {expected}, got {init_method!r}")
        return init_method
    if world_size == 1:  # whatever is in the environment: none is to be met
        return new_local_url()
    host, port = find_setting("MASTER_ADDR"), find_number("MASTER_PORT", None)
    if all(os.environ.get(name) for name in ("MASTER_ADDR", "MASTER_PORT")):
        return "env://"  # torchrun's own store may be there
    return f"tcp://[{host.value}]:{port}" if ":" in host.value else f"tcp://{host.value}:{port}"


def _missing(name: str) -> str:
    """Return the text of the error that there is no `name`."""
    remedy = ", as torchrun sets it"
    if is_slurm_task():
        remedy = ", as srun sets SLURM_NTASKS"  # all else of a task has a value
    elif _INDEX in os.environ:
        remedy = _MANIFEST[name]
    elif "SLURM_JOB_ID" in os.environ:
        remedy = (
            ". This process is in a Slurm job, but it is no task of a step (there is no "
            "SLURM_STEP_NODELIST): start it with srun"
        )
    elif name == "MASTER_ADDR" and "MASTER_PORT" not in os.environ:
        name, remedy = "MASTER_ADDR and MASTER_PORT", ""
    argument = "init_method" if name.startswith("MASTER") else name.lower()
    return f"worker() needs {argument}=, or {name} in the environment{remedy}"


# ── Slurm ───────────────────────────────────────────────────────────────────────────────────────


def is_slurm_task() -> bool:
    """Return whether srun started this process, or its shell.

    The shell of a batch script has SLURM_PROCID=0 and the number of tasks of its job, but is none
    of them: it has no step. As rank 0 it would wait for peers that no process is.
    """
    return all(os.environ.get(name) for name in ("SLURM_PROCID", "SLURM_STEP_NODELIST"))


def _in_slurm(name: str) -> Setting | None:
    match name:
        case "RANK":
            return Setting(os.environ["SLURM_PROCID"], "SLURM_PROCID")
        case "WORLD_SIZE":
            # An interactive shell is a step of one task, and keeps the job's SLURM_NTASKS.
            sizes = (Setting(os.environ.get(each, ""), each) for each in _SLURM_SIZES)
            return next((each for each in sizes if each.value), None)
        case "MASTER_ADDR":
            first, *others = _first_hosts()
            # One node needs only its loopback interface, which no other machine reaches.
            return Setting(first if others else "localhost", "SLURM_STEP_NODELIST")
        case _:  # a port that differs between steps, also of other jobs, which may share a node
            job, step = (os.environ.get(each, "") for each in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
            if not job.isdecimal():
                return Setting(str(DEFAULT_PORT), "default")
            number = int(job) * _PORTS_OF_A_JOB + (int(step) if step.isdecimal() else 0)
            return Setting(str(_FIRST_PORT + number % _PORTS), "SLURM_JOB_ID and SLURM_STEP_ID")


def _first_hosts() -> list[str]:
    """Return the first hosts of the step, at most two. Task 0 runs on the first."""
    try:
        return [*itertools.islice(expand_hosts(os.environ["SLURM_STEP_NODELIST"]), 2)]
    except ValueError as exc:
        raise ValueError(f"SLURM_STEP_NODELIST {exc}; set MASTER_ADDR") from None


# Slurm's lists of hosts: `node[03-05,9],gpu1` means node03, node04, node05, node9 and gpu1.
_NUMBERS = r"[0-9]+(?:-[0-9]+)?"
_BRACKET = re.compile(rf"\[({_NUMBERS}(?:,{_NUMBERS})*)\]")
_HOST = re.compile(rf"(?:[^\s\[\],]|{_BRACKET.pattern})+")
_LIST = re.compile(rf"{_HOST.pattern}(?:,{_HOST.pattern})*")


def expand_hosts(text: str) -> Iterator[str]:
    """Return the hosts of a list, in Slurm's order: of several brackets the last runs fastest."""
    ranges = (each for numbers in _BRACKET.findall(text) for each in _ranges(numbers))
    if not _LIST.fullmatch(text) or any(first > last for first, last, _ in ranges):
        raise ValueError(f"must be a list of hosts such as node[03-05,9],gpu1, got {text!r}")
    names = (match[0] for match in _HOST.finditer(text))
    return itertools.chain.from_iterable(map(_expand, names))


def _ranges(numbers: str) -> Iterator[tuple[int, int, int]]:
    """Yield first and last number, and width, of the ranges in a bracket."""
    for part in numbers.split(","):
        first, _, last = part.partition("-")
        yield int(first), int(last or first), len(first)


def _expand(host: str) -> Iterator[str]:
    """Yield lazily: a range may be far longer than what its reader needs."""
    bracket = _BRACKET.search(host)
    if bracket is None:
        yield host
        return
    for first, last, width in _ranges(bracket[1]):
        for number in range(first, last + 1):
            for rest in _expand(host[bracket.end() :]):
                yield f"{host[: bracket.start()]}{number:0{width}}{rest}"


# ── Kubernetes ──────────────────────────────────────────────────────────────────────────────────

# A pod does not see how many completions its job has, nor the name of a service for its pods.
_MANIFEST = {
    "WORLD_SIZE": (
        ". Add it to env: of the container in the Job's manifest, with the number of completions: "
        '{name: WORLD_SIZE, value: "8"}'
    ),
    "MASTER_ADDR": (
        ". Add it to env: of the container in the Job's manifest, with the name of the pod of "
        'index 0 behind a headless service: {name: MASTER_ADDR, value: "JOB-0.SERVICE"}'
    ),
}
