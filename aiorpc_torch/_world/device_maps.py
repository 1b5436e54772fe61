"""The device maps of all workers of a world, checked by each worker in the same words.

torch checks device maps where `init_rpc` starts a world. This library starts its agents one by one
and checks the maps itself, once all workers are known.
"""

from collections.abc import Mapping, Sequence

import torch

from .._torch.devices import Names
from .registration import Seat


def settle(seats: Sequence[Seat]) -> list[Names]:
    """The device maps of all workers, in their order; "auto" is the same index on both sides.

    Raises:
        ValueError: if one of them cannot be; it names the worker, the peer and the device.
    """
    counts = {seat.name: seat.devices for seat in seats}
    found = [_automatic(seat, counts) for seat in seats]
    for seat, maps in zip(seats, found, strict=True):
        for peer, devices in maps.items():
            _check(seat.name, peer, devices, counts)
    return found


def _automatic(seat: Seat, counts: Mapping[str, int]) -> Names:
    if not isinstance(seat.device_maps, str):
        return seat.device_maps
    common = {peer: min(seat.devices, count) for peer, count in counts.items()}
    return {
        peer: {f"cuda:{index}": f"cuda:{index}" for index in range(count)}
        for peer, count in common.items()
        if count
    }


def _check(worker: str, peer: str, devices: Mapping[str, str], counts: Mapping[str, int]) -> None:
    if peer not in counts:
        raise ValueError(
            f"worker {worker!r} has a device map for {peer!r}, and there is no such worker: "
            f"there are {', '.join(counts)}"
        )
    taken: dict[str, str] = {}
    for own, theirs in devices.items():
        said = f"worker {worker!r} maps its {own} to {theirs} of {peer!r}"
        for owner, device in ((worker, own), (peer, theirs)):
            if torch.device(device).index >= counts[owner]:
                raise ValueError(f"{said}, but {owner!r} has {_devices(counts[owner])}")
        if theirs in taken:
            raise ValueError(f"{said}, and its {taken[theirs]} too: one device for each")
        taken[theirs] = own


def _devices(count: int) -> str:
    return f"{count or 'no'} CUDA device{'s' * (count != 1)}"
