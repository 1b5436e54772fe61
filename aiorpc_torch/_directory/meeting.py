"""The place at which the workers of a world find the directory of rank 0.

`tcp://host:port`: the directory listens there. `file:///path`: rank 0 writes its address into a
file beside that path. Under torchrun, whose agent listens at MASTER_PORT, rank 0 writes its address
into the agent's store. `unix://name`: an abstract Unix socket, for worlds on one machine.

An address that was written has the random id of its world, which the directory's greeting confirms.
So the address of a run that has ended is not taken for that of a new one.
"""

import contextlib
import errno
import os
import secrets
import socket
import struct
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlparse

from .._aio.unix_sockets import connect_unix, is_same_user, listen_unix
from .._port import network
from .._port.port import Port
from .._torch.compat import TCPStore
from .._wire.handshake import network_namespace
from .._wire.plain import dump, reader

# One key for all attempts of torchrun. Its TORCHELASTIC_RESTART_COUNT is not the attempt: only the
# agent whose worker has failed counts on, the others start theirs again with the number before.
_KEY = "aiorpc/rank0"
_ABSENT = "\0"  # a value that no worker writes
_CONNECT_TIMEOUT = 2.0  # seconds: a lost SYN is sent again after one second, then after three
_BIND_TIMEOUT = 5.0  # seconds for the directory of the last world to close
_RESET_AT_CLOSE = struct.pack("ii", 1, 0)
RETRY_INTERVAL = 0.05  # seconds between two attempts


class Published(NamedTuple):
    """An address of a directory, as rank 0 writes it."""

    world: str
    namespace: str
    """Network namespace in which its abstract Unix socket is reached."""
    host: str
    """Address for other namespaces, "" if it listens at none."""
    port: int


_read_published = reader(Published)


class Meeting:
    """The place of `init_method`. Methods block, for some seconds at most.

    Args:
        init_method: the URL, or `env://` for MASTER_ADDR and MASTER_PORT.
        interface: rank 0's network interface, if it is known.

    Attributes:
        port: where rank 0's directory is reached, if each worker has one port. A fixed address
            and a Unix socket stay what they are.
    """

    def __init__(self, init_method: str, interface: str | None = None) -> None:
        self.port: Port | None = None
        self._url = urlparse(init_method)
        self._interface = interface
        self._store: TCPStore | None = None
        self._world = ""  # that this process has published
        is_fixed = self._url.scheme == "tcp"
        host, port = (self._url.hostname, self._url.port) if is_fixed else (None, None)
        self._is_in_environment = self._url.scheme not in ("file", "unix") and port is None
        if self._is_in_environment:
            host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        self._address = host or "", port or 0
        self._has_agent = (
            self._is_in_environment and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        )

    def __str__(self) -> str:
        if self._url.scheme in ("file", "unix"):
            return self._url.geturl()
        host, port = self._address
        return f"{host}:{port}"

    @property
    def host(self) -> str | None:
        """Return the host of rank 0, None if it is unknown.

        `localhost` in the environment is unknown: some launchers set it for rank 0 alone.
        """
        host, _ = self._address
        if self._is_in_environment and network.is_loopback_host(host):
            return None
        return host or None

    @property
    def is_at_port(self) -> bool:
        """Return whether others find the directory at rank 0's one port."""
        return self.port is not None and (self._url.scheme == "file" or self._has_agent)

    # ── rank 0 ──────────────────────────────────────────────────────────────────────────────────

    def listen(self) -> tuple[str, list[socket.socket]]:
        """Return the id of a new world, and the sockets at which its directory listens.

        Raises:
            OSError: if another program has the address.
        """
        self._world = secrets.token_hex(16)
        if self._url.scheme == "unix":
            return self._world, [self._retry(lambda: _listen_unix(self._url.netloc))]
        if self._url.scheme != "file" and not self._has_agent:
            return self._world, [self._retry(lambda: network.listen(self.host, self._address[1]))]
        listening = [_listen_unix(self._world)]
        host, port = "", 0
        interface = self._interface or network.interface_towards(self.host)
        if self.port is not None:
            if not network.is_loopback_host(self.port.host):
                host, port = self.port.host, self.port.number
        elif address := network.own_address(interface):
            listening.append(network.listen(address, 0))
            host, port = listening[-1].getsockname()[:2]
        self._publish(dump(Published(self._world, network_namespace(), host, port)))
        return self._world, listening

    def _retry(self, listen: Callable[[], socket.socket]) -> socket.socket:
        """Listen, as soon as the directory of the last world has closed."""
        end = time.monotonic() + _BIND_TIMEOUT
        while True:
            try:
                return listen()
            except OSError as exc:
                if exc.errno != errno.EADDRINUSE:
                    raise
                if time.monotonic() > end:
                    text = f"another process listens at {self}, the address of rank 0"
                    raise OSError(exc.errno, text) from exc
            time.sleep(RETRY_INTERVAL)

    def _publish(self, data: bytes) -> None:
        if self._has_agent:
            self._agent_store().set(_KEY, data.hex())
            return
        # In one step: another process reads all of it, or what was there before.
        new = self._file().with_name(f"{self._file().name}.{self._world}")
        new.write_bytes(data)
        new.replace(self._file())

    def withdraw(self) -> None:
        """Remove the address, which no directory has any more."""
        if self._url.scheme == "file" and self._world:
            with contextlib.suppress(OSError, ValueError):
                if _read_published(self._file().read_bytes()).world == self._world:
                    self._file().unlink()
        self._store = None

    # ── the others ──────────────────────────────────────────────────────────────────────────────

    def connect(self) -> tuple[str, list[socket.socket]]:
        """Return the id of the world, "" if any will do, and a socket that is connected.

        Raises:
            OSError: if no directory listens.
        """
        if self._url.scheme == "unix":
            return "", [_connect_unix(self._url.netloc)]
        if self._url.scheme != "file" and not self._has_agent:
            return "", [_connect_tcp(self._address)]
        found = self._read()
        if found.namespace and found.namespace == network_namespace():
            return found.world, [_connect_unix(found.world)]
        if not found.host:
            raise OSError("rank 0 listens on its own machine only")
        return found.world, [_connect_tcp((found.host, found.port))]

    def _read(self) -> Published:
        data = self._read_agent_store() if self._has_agent else self._file().read_bytes()
        try:
            return _read_published(data)  # type: ignore[no-any-return]
        except ValueError as exc:
            raise OSError(f"no address of rank 0: {exc}") from exc

    def _file(self) -> Path:
        return Path(self._url.path + ".rank0")

    # ── torchrun's store ────────────────────────────────────────────────────────────────────────

    def _read_agent_store(self) -> bytes:
        try:
            # torch's own `get` waits, and prints its frames if the connection ends meanwhile (2.13,
            # 2.15).
            found = self._agent_store().compare_set(_KEY, _ABSENT, _ABSENT)
        except RuntimeError as exc:
            self._store = None
            raise OSError(str(exc).splitlines()[0]) from exc
        if found == _ABSENT.encode():
            raise OSError("rank 0 has not written its address yet")
        return bytes.fromhex(found.decode())

    def _agent_store(self) -> TCPStore:
        if self._store is None:
            host, port = self._address
            # torch's own wait takes up to twice its timeout, and prints frames (2.13, 2.15).
            _connect_tcp((host, port)).close()
            patience = timedelta(seconds=_CONNECT_TIMEOUT)
            self._store = TCPStore(
                host, port, None, False, timeout=patience, wait_for_workers=False
            )
        return self._store


def _listen_unix(name: str) -> socket.socket:
    return listen_unix(f"aiorpc-{name}")


def _connect_tcp(address: tuple[str, int]) -> socket.socket:
    found = socket.create_connection(address, _CONNECT_TIMEOUT)
    # Linux may choose the port that is asked for: such a socket is connected to itself, and rank 0
    # could not listen there.
    if found.getsockname() == found.getpeername():
        found.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_AT_CLOSE)  # frees it at once
        found.close()
        raise ConnectionRefusedError("no process listens there")
    return found


def _connect_unix(name: str) -> socket.socket:
    found = connect_unix(f"aiorpc-{name}")
    if not is_same_user(found):
        found.close()
        raise OSError("a process of another user listens there")
    return found
