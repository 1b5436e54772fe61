"""The one port of a worker: where it is, and which peers are reached through it.

With it torch's RPC listens on the loopback interface alone, and reaches workers on other hosts by
tunnels between the ports. (tests/network/test_one_port.py)
"""

from collections.abc import Sequence
from dataclasses import replace

import torch

from .._aio.host import network_namespace
from .._directory.registration import Registration
from .._node.config import WorkerConfig
from .._port import network
from .._port.port import Port
from .._port.tunnels import Tunnels
from .._torch.agent import PeerInfo

_CHANNELS = ("cuda_ipc", "cma", "cuda_basic", "basic")  # in TensorPipe's order


def host_of_port(interface: str | None, rank_0: str | None) -> str:
    """Return the address to listen at: of the interface, else of the one towards rank 0's host."""
    interface = interface or network.interface_towards(rank_0)
    return network.own_address(interface) or network.loopback_address()


def channels_at_port(given: Sequence[str] | None) -> list[str]:
    """Return TensorPipe's channels, of those `given`, that need no further ports nor networks."""
    has_cuda = torch.version.cuda is not None  # else torch does not know the channels for it
    known = [each for each in _CHANNELS if has_cuda or not each.startswith("cuda")]
    return [each for each in known if given is None or each in given]


class OnePort:
    """The port of a worker, and the tunnels to others.

    Args:
        config: of the worker.
        host: the address to listen at.

    Raises:
        OSError: if the port is in use; the message names it.
        ValueError: if the certificate is not valid.
    """

    def __init__(self, config: WorkerConfig, host: str) -> None:
        if config.tls is not None:
            config.tls.check()
        self.port = Port(host, config.port or 0, config.tls, config.heartbeat)
        self._tunnels = Tunnels(self.port)
        self._namespace = network_namespace()

    def registration(self, own: Registration) -> Registration:
        """Return the registration of this worker, with its port."""
        is_secure = self.port.tls is not None
        return replace(own, endpoint=self.port.endpoint, is_secure=is_secure)

    def address_of(self, peer: PeerInfo) -> str:
        """Return the address at which torch's RPC of this process reaches a peer."""
        if peer.namespace and peer.namespace == self._namespace:
            return peer.address
        return self._tunnels.open(peer.name, peer.endpoint, peer.address)

    def forget(self, peer: PeerInfo) -> None:
        """Close the tunnel to a peer, whose process has ended."""
        self._tunnels.close(peer.name)

    def failure(self, peer: str) -> str:
        """Return why a peer was not reached, "" if that is unknown."""
        return self._tunnels.failure(peer)
