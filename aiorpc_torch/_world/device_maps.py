"""Device maps of all workers of a world, resolved and checked alike by each worker.

torch checks device maps where `init_rpc` starts a world. This library starts its agents one by one
and checks the maps itself, once all workers are known.
"""

import logging
from collections.abc import Mapping, Sequence

import torch

from .._directory.registration import Registration
from .._torch.devices import NamedDeviceMaps

log = logging.getLogger("aiorpc_torch")


def resolve_device_maps(
    registrations: Sequence[Registration], entering: str = ""
) -> list[NamedDeviceMaps]:
    """Return every worker's device maps, in order; "auto" becomes the same index on both sides.

    torch takes a worker's own maps at its start. So a first worker has a map for one that joins
    later only if it names that one; with "auto" it has none. Of those that joined, only the maps of
    this worker, which is `entering`, are checked, and those for it.

    Raises:
        ValueError: if a map is invalid; it names the worker, the peer and the device.
    """
    counts = {each.name: each.devices for each in registrations}
    found = []
    for each in registrations:
        known = [other for other in registrations if not other.joined or other.rank <= each.rank]
        maps = _resolve(each, {other.name: other.devices for other in known})
        for peer, devices in maps.items():
            if not each.joined or entering in (each.name, peer):
                _check_name(each, peer, counts, is_own=each.name == entering)
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


def _check_name(
    registration: Registration, peer: str, counts: Mapping[str, int], *, is_own: bool
) -> None:
    """Check that a peer is a worker; a first worker may have a map for one that joins later."""
    if peer in counts:
        return
    text = (
        f"worker {registration.name!r} has a device map for {peer!r}, which is not a worker of "
        f"this world: {', '.join(counts)}"
    )
    if registration.joined:
        raise ValueError(text)
    if is_own:
        log.warning("%s. It counts once %r joins", text, peer)


def _check(worker: str, peer: str, devices: Mapping[str, str], counts: Mapping[str, int]) -> None:
    mapped: dict[str, str] = {}
    for own, theirs in devices.items():
        entry = f"worker {worker!r} maps its {own} to {theirs} of {peer!r}"
        for owner, device in ((worker, own), (peer, theirs)):
            if owner in counts and torch.device(device).index >= counts[owner]:
                raise ValueError(f"{entry}, but {owner!r} has {_count_text(counts[owner])}")
        if theirs in mapped:
            raise ValueError(
                f"{entry}, and its {mapped[theirs]} too: map each device to a different one"
            )
        mapped[theirs] = own


def _count_text(count: int) -> str:
    return f"{count or 'no'} CUDA device{'s' * (count != 1)}"
