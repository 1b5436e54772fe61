"""Device maps of all workers of a world, resolved and checked alike by each worker.

torch checks device maps where `init_rpc` starts a world. This library starts its agents one by one
and checks the maps itself, once all workers are known.
"""

from collections.abc import Mapping, Sequence

import torch

from .._torch.devices import NamedDeviceMaps
from .registration import Registration


def resolve_device_maps(
    registrations: Sequence[Registration], entering: str = ""
) -> list[NamedDeviceMaps]:
    """Return every worker's device maps, in order; "auto" becomes the same index on both sides.

    A worker that joined has maps for those before it, which have none for it: torch takes a
    worker's own maps at its start. Of those that joined only the one that is `entering` is checked.

    Raises:
        ValueError: if a map is invalid; it names the worker, the peer and the device.
    """
    found = []
    for each in registrations:
        known = [other for other in registrations if not other.joined or other.rank <= each.rank]
        counts = {other.name: other.devices for other in known}
        maps = _resolve(each, counts)
        for peer, devices in maps.items():
            if not each.joined or each.name == entering:
                _check(each.name, peer, devices, counts)
        found.append(maps)
    return found


def _resolve(registration: Registration, counts: Mapping[str, int]) -> NamedDeviceMaps:
    if not isinstance(registration.device_maps, str):
        return registration.device_maps
    common = {peer: min(registration.devices, count) for peer, count in counts.items()}
    return {
        peer: {f"cuda:{index}": f"cuda:{index}" for index in range(count)}
        for peer, count in common.items()
        if count
    }


def _check(worker: str, peer: str, devices: Mapping[str, str], counts: Mapping[str, int]) -> None:
    if peer not in counts:
        raise ValueError(
            f"worker {worker!r} has a device map for {peer!r}, which is not a worker of this "
            f"world: {', '.join(counts)}"
        )
    mapped: dict[str, str] = {}
    for own, theirs in devices.items():
        entry = f"worker {worker!r} maps its {own} to {theirs} of {peer!r}"
        for owner, device in ((worker, own), (peer, theirs)):
            if torch.device(device).index >= counts[owner]:
                raise ValueError(f"{entry}, but {owner!r} has {_count_text(counts[owner])}")
        if theirs in mapped:
            raise ValueError(
                f"{entry}, and its {mapped[theirs]} too: map each device to a different one"
            )
        mapped[theirs] = own


def _count_text(count: int) -> str:
    return f"{count or 'no'} CUDA device{'s' * (count != 1)}"
