"""Device maps: which CUDA device of a peer receives the tensors of a device of this worker.

torch checks them in `init_rpc`. This library starts agents one by one, and checks the maps once all
workers are known. Every worker then raises the same error.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

DeviceMaps = Mapping[str, Mapping[Any, Any]] | Literal["auto"]

DeviceMapping = Mapping[torch.device, torch.device]
"""From devices of this worker to those of a peer, which tensors for it may be on beside the CPU."""

NO_DEVICES: DeviceMapping = {}

NamedDeviceMaps = dict[str, dict[str, str]]
"""For each peer, from names of own devices to names of the peer's."""

AUTO: Literal["auto"] = "auto"


def normalize_device_maps(maps: DeviceMaps) -> NamedDeviceMaps | Literal["auto"]:
    """Return device maps with the names of the devices, as workers exchange them.

    Raises:
        ValueError: if a device is not a CUDA device, or has no index.
        TypeError: if `maps` is not a map of maps.
    """
    if isinstance(maps, str):
        if maps != AUTO:
            raise ValueError(f'device_maps must be a map for each peer, or "auto", got {maps!r}')
        return AUTO
    return {
        peer: {_name(own): _name(theirs) for own, theirs in devices.items()}
        for peer, devices in maps.items()
    }


def _name(device: Any) -> str:
    # `torch.device(0)` works only where there is a device (2.13).
    found = torch.device("cuda", device) if type(device) is int else torch.device(device)
    if found.type != "cuda" or found.index is None:
        raise ValueError(
            f"a device in device_maps must be a CUDA device with its index, as 'cuda:0', got "
            f"{str(found)!r}. CPU tensors need no map"
        )
    return str(found)


@dataclass(frozen=True, slots=True)
class DeviceRoutes:
    """The devices on which one worker's tensors may be when they are sent.

    They are known before the first message: torch wants a future's devices when it is made.
    """

    used: list[torch.device] = field(default_factory=list)
    """All devices below, sorted."""

    calls: Mapping[str, dict[torch.device, torch.device]] = field(default_factory=dict)
    """For each peer, from devices of arguments for it to the peer's devices: this worker's map."""

    answers: Mapping[str, dict[torch.device, torch.device]] = field(default_factory=dict)
    """For each peer, this worker included, from devices of results for it to the peer's devices:
    the reverse of the peer's own map."""

    @classmethod
    def for_worker(cls, worker: str, maps: Mapping[str, NamedDeviceMaps]) -> "DeviceRoutes":
        """Return the routes of `worker`, given the maps of all workers."""
        calls = {
            peer: {torch.device(here): torch.device(there) for here, there in each.items()}
            for peer, each in maps[worker].items()
        }
        answers = {
            peer: {torch.device(here): torch.device(there) for there, here in each[worker].items()}
            for peer, each in maps.items()
            if worker in each
        }
        used = {device for each in (calls, answers) for found in each.values() for device in found}
        return cls(sorted(used, key=str), calls, answers)


def check_sendable(tensors: Sequence[Tensor], mapped: Collection[torch.device], peer: str) -> None:
    """Raise ValueError for a tensor that torch would not send to `peer`, or not correctly."""
    for tensor in tensors:
        if (device := tensor.device).type == "cpu":
            continue
        refuse_sparse(tensors)
        if device not in mapped:
            raise ValueError(
                f"a tensor on {device} cannot be sent to worker {peer!r}: move it to the CPU, or "
                f'enter the world with device_maps={{{peer!r}: {{"{device}": "cuda:0"}}}}, say, or '
                'with device_maps="auto"'
            )


def refuse_sparse(tensors: Iterable[Tensor]) -> None:
    """Raise ValueError for a sparse tensor in a message with tensors on a device.

    torch assigns devices to the storages of a message by the index of the tensor. A sparse tensor
    has several storages.
    """
    for tensor in tensors:
        if tensor.layout is not torch.strided:
            raise ValueError(
                f"a tensor of layout {tensor.layout} on {tensor.device} cannot be sent in one call "
                "or result with tensors on a device: send its indices and values, or to_dense()"
            )
