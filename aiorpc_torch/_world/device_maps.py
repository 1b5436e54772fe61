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

    The work is linear in the workers and in the maps. With "auto" the first workers that have as
    many devices share their maps; one that has joined has its own.

    Raises:
        ValueError: if a map is invalid; it names the worker, the peer and the device.
    """
    counts = {each.name: each.devices for each in registrations}
    auto = _Auto(registrations)
    found = []
    for each in registrations:
        if isinstance(each.device_maps, str):  # valid: both sides have these devices
            found.append(auto.maps_of(each))
            continue
        for peer, devices in each.device_maps.items():
            if not each.joined or entering in (each.name, peer):
                _check_name(each, peer, counts, is_own=each.name == entering)
                _check(each.name, peer, devices, counts)
        found.append(each.device_maps)
    return found


class _Auto:
    """The maps of workers with "auto"."""

    def __init__(self, registrations: Sequence[Registration]) -> None:
        self._with_devices = [each for each in registrations if each.devices]
        self._of_first: dict[int, NamedDeviceMaps] = {}  # by their number of devices

    def maps_of(self, registration: Registration) -> NamedDeviceMaps:
        """Return the map of one worker for each peer that was in the world at its start."""
        if not registration.devices:
            return {}
        if registration.joined:
            return self._maps(registration.devices, registration.rank)
        if registration.devices not in self._of_first:
            self._of_first[registration.devices] = self._maps(registration.devices, -1)
        return self._of_first[registration.devices]

    def _maps(self, devices: int, last_joined: int) -> NamedDeviceMaps:
        known = (each for each in self._with_devices if not each.joined or each.rank <= last_joined)
        return {each.name: _same_index(min(devices, each.devices)) for each in known}


def _same_index(devices: int) -> dict[str, str]:
    return {f"cuda:{index}": f"cuda:{index}" for index in range(devices)}


def _check_name(
    registration: Registration, peer: str, counts: Mapping[str, int], *, is_own: bool
) -> None:
    """Check that a peer is a worker; a first worker may have a map for one that joins later."""
    if peer in counts or not (registration.joined or is_own):
        return
    text = (
        f"worker {registration.name!r} has a device map for {peer!r}, which is not a worker of "
        f"this world: {', '.join(counts)}"
    )
    if registration.joined:
        raise ValueError(text)
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
