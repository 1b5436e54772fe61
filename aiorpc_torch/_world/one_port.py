"""The one port of a worker: where it is, and which peers are reached through it.

With it torch's RPC listens on the loopback interface alone, and reaches workers on other hosts by
tunnels between the ports. (tests/network/test_one_port.py)
"""

from dataclasses import replace

from .._port.port import Port
from .._port.tunnels import Tunnels
from .._torch.agent import PeerInfo
from .._wire.handshake import network_namespace
from . import network
from .config import WorkerConfig
from .registration import Registration

CHANNELS = ("cuda_ipc", "cma", "cuda_basic", "basic")
"""TensorPipe's channels, in its order, that need no further ports nor other networks."""


def host_of_port(interface: str | None, rank_0: str | None) -> str:
    """Return the address to listen at: of the interface, else of the one towards rank 0's host."""
    interface = interface or network.interface_towards(rank_0)
    return network.own_address(interface) or network.loopback_address()


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
        self.port = Port(host, config.port or 0, config.tls)
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
        return self._tunnels.failures.get(peer, "")
