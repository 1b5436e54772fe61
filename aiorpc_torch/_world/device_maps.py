"""Device maps of all workers of a world, resolved and checked alike by each worker.

torch checks device maps where `init_rpc` starts a world. This library starts its agents one by one
and checks the maps itself, once all workers are known.
"""

import functools
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

    @functools.cache
    def auto(devices: int, last_joined: int) -> NamedDeviceMaps:
        known = (each for each in registrations if not each.joined or each.rank <= last_joined)
        return {
            each.name: {f"cuda:{n}": f"cuda:{n}" for n in range(min(devices, each.devices))}
            for each in known
            if devices and each.devices
        }

    found = []
    for each in registrations:
        if isinstance(each.device_maps, str):  # valid: both sides have these devices
            found.append(auto(each.devices, each.rank if each.joined else -1))
            continue
        for peer, devices in each.device_maps.items():
            if not each.joined or entering in (each.name, peer):
                _check(each, peer, devices, counts, is_own=each.name == entering)
        found.append(each.device_maps)
    return found


def _check(
    registration: Registration,
    peer: str,
    devices: Mapping[str, str],
    counts: Mapping[str, int],
    *,
    is_own: bool,
) -> None:
    worker, mapped = registration.name, dict[str, str]()
    # A first worker may have a map for one that joins later.
    if peer not in counts and (registration.joined or is_own):
        text = (
            f"worker {worker!r} has a device map for {peer!r}, which is not a worker of this "
            f"world: {', '.join(counts)}"
        )
        if registration.joined:
            raise ValueError(text)
        log.warning("%s. It counts once %r joins", text, peer)
    for own, theirs in devices.items():
        entry = f"worker {worker!r} maps its {own} to {theirs} of {peer!r}"
        for owner, device in ((worker, own), (peer, theirs)):
            if (count := counts.get(owner)) is not None and torch.device(device).index >= count:
                has = f"{count or 'no'} CUDA device{'s' * (count != 1)}"
                raise ValueError(f"{entry}, but {owner!r} has {has}")
        if theirs in mapped:
            raise ValueError(
                f"{entry}, and its {mapped[theirs]} too: map each device to a different one"
            )
        mapped[theirs] = own
