"""Which CUDA device of a worker stands for which of a peer's, for the tensors that travel.

torch checks device maps where `init_rpc` starts a world; this library starts its agents one by one
and checks them itself, once all workers are known: each finds the same, in the same words. Knows
names of devices, and no tensor.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

DeviceMap = Mapping[Any, Any]
DeviceMaps = Mapping[str, DeviceMap] | Literal["auto"]

Names = dict[str, dict[str, str]]
"""For each peer, the names of own devices and of the peer's."""

AUTO: Literal["auto"] = "auto"


def named(maps: DeviceMaps) -> Names | Literal["auto"]:
    """Device maps by the devices' names, as workers tell each other.

    Raises:
        ValueError: if a device is none of CUDA's, or has no index.
        TypeError: if it is no map at all.
    """
    if isinstance(maps, str):
        if maps != AUTO:
            raise ValueError(f'device_maps is a map for each peer, or "auto", not {maps!r}')
        return AUTO
    return {
        peer: {_name(own): _name(theirs) for own, theirs in devices.items()}
        for peer, devices in maps.items()
    }


def _name(device: Any) -> str:
    # torch takes an index only where there is a device (2.13).
    found = torch.device("cuda", device) if type(device) is int else torch.device(device)
    if found.type != "cuda" or found.index is None:
        raise ValueError(
            f"device_maps names CUDA devices by their index, as 'cuda:0', not {str(found)!r}: "
            "tensors on the CPU arrive there"
        )
    return str(found)


def how_many() -> int:
    """The CUDA devices of this process."""
    return torch.cuda.device_count()


@dataclass(frozen=True, slots=True)
class Reach:
    """The devices that one worker's tensors may be on, when they travel."""

    used: list[torch.device] = field(default_factory=list)
    """Those that any map names, in order."""

    calls: Mapping[str, frozenset[torch.device]] = field(default_factory=dict)
    """On which arguments for that peer may be."""

    answers: Mapping[str, frozenset[torch.device]] = field(default_factory=dict)
    """On which results for that peer may be: where its own map leads."""

    @classmethod
    def of(cls, worker: str, maps: Mapping[str, Names]) -> "Reach":
        """That of `worker`, by the maps of all."""
        calls = {peer: _all(devices) for peer, devices in maps[worker].items()}
        answers = {
            peer: _all(each[worker].values()) for peer, each in maps.items() if worker in each
        }
        used = {device for each in (calls, answers) for found in each.values() for device in found}
        return cls(sorted(used, key=str), calls, answers)


def _all(names: Iterable[str]) -> frozenset[torch.device]:
    return frozenset(map(torch.device, names))


def check(devices: Iterable[torch.device], mapped: Collection[torch.device], peer: str) -> None:
    """Raise ValueError for a device whose tensors torch would not send to `peer`."""
    for device in devices:
        if device.type != "cpu" and device not in mapped:
            raise ValueError(
                f"a tensor on {device} cannot be sent to worker {peer!r}: move it to the CPU, or "
                f'enter the world with device_maps={{{peer!r}: {{"{device}": "cuda:0"}}}}, say, or '
                'with device_maps="auto"'
            )
