"""The place at which the workers of a world find the directory of rank 0.

`tcp://host:port`, or MASTER_ADDR and MASTER_PORT: a store of torch, its TCPStore, into which rank 0
writes its address. Under torchrun its agent has the store, else rank 0's process. There
`init_process_group` shares it, whichever of the two is first. With TLS the directory itself listens
at that address. `file:///path`: rank 0 writes its address into a file beside that path.
`unix://name`: an abstract Unix socket, for worlds on one machine.

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
from typing import Any, NamedTuple, TypeVar
from urllib.parse import urlparse

from .._aio.fork import close_on_fork
from .._aio.unix_sockets import connect_unix, is_same_user, listen_unix
from .._port import network
from .._port.port import Port
from .._torch.compat import TCPStore
from .._torch.store import NoStoreError, StoreClient
from .._wire.handshake import network_namespace
from .._wire.plain import dump, reader
from .directory_stream import NoDirectoryError

T = TypeVar("T")

# One key for all attempts of torchrun. Its TORCHELASTIC_RESTART_COUNT is not the attempt: only the
# agent whose worker has failed counts on, the others start theirs again with the number before.
_KEY = "aiorpc/rank0"
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
    """Address for other namespaces, "" for that of the store."""
    port: int
    """Port for other namespaces, 0 if it listens at none."""


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
        self._store: TCPStore | None = None  # of this process
        self._listening: socket.socket | None = None  # of the store: its descriptor
        self._client: StoreClient | None = None  # connected, until rank 0 has written
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
        return self.port is not None and not self._is_direct

    @property
    def _is_direct(self) -> bool:
        """Return whether the directory itself listens at the place.

        A store of torch is neither encrypted nor asks for a certificate.
        """
        has_tls = self.port is not None and self.port.tls is not None
        is_published = self._url.scheme == "file" or self._has_agent
        return self._url.scheme == "unix" or (has_tls and not is_published)

    # ── rank 0 ──────────────────────────────────────────────────────────────────────────────────

    def listen(self) -> tuple[str, list[socket.socket]]:
        """Return the id of a new world, and the sockets at which its directory listens.

        Raises:
            OSError: if another program has the address.
        """
        self._world = secrets.token_hex(16)
        if self._url.scheme == "unix":
            return self._world, [self._retry(lambda: _listen_unix(self._url.netloc))]
        if self._is_direct:
            return self._world, [self._retry(lambda: network.listen(self.host, self._address[1]))]
        if self._url.scheme != "file" and not self._has_agent:
            self._store = self._retry(self._open_store)
        listening = [_listen_unix(self._world)]
        host, port = "", 0
        interface = self._interface or network.interface_towards(self.host)
        if self.port is not None:
            if not network.is_loopback_host(self.port.host):
                host, port = self.port.host, self.port.number
        elif self._store is not None:
            if not network.is_loopback_host(self.host or ""):
                listening.append(network.listen(self.host, 0))
                port = listening[-1].getsockname()[1]
        elif address := network.own_address(interface):
            listening.append(network.listen(address, 0))
            host, port = listening[-1].getsockname()[:2]
        self._publish(dump(Published(self._world, network_namespace(), host, port)))
        return self._world, listening

    def _retry(self, listen: Callable[[], T]) -> T:
        """Listen, as soon as the last world there has closed."""
        end = time.monotonic() + _BIND_TIMEOUT
        while True:
            try:
                return listen()
            except OSError as exc:
                if exc.errno != errno.EADDRINUSE:
                    raise
                if time.monotonic() > end:
                    text = f"another process listens at {self}, the address of rank 0"
                    if self._is_direct:
                        text += (
                            ", or a process group of this one: with tls= give the group another "
                            "MASTER_PORT, or the world another init_method="
                        )
                    raise OSError(exc.errno, text) from exc
            time.sleep(RETRY_INTERVAL)

    def _open_store(self) -> TCPStore:
        """Return a store at the address, with its server in this process.

        Raises:
            OSError: if another process has the address.
        """
        host, port = self._address
        try:
            listening = network.listen(self.host, port)
        except OSError as exc:
            try:  # a server of this process is shared
                return _torch_store(host, port, is_master=True)
            except RuntimeError:
                raise exc from None
        # torch would listen at all addresses. It closes the descriptor.
        self._listening = listening
        close_on_fork(listening)
        own = listening.getsockname()[0]
        return _torch_store(own, port, is_master=True, master_listen_fd=listening.fileno())

    def _publish(self, data: bytes) -> None:
        if self._url.scheme != "file":
            store = self._store or _torch_store(*self._address, is_master=False)
            store.set(_KEY, data.hex())
            return
        # In one step: another process reads all of it, or what was there before.
        new = self._file().with_name(f"{self._file().name}.{self._world}")
        new.write_bytes(data)
        new.replace(self._file())

    def withdraw(self) -> None:
        """Remove the address, which no directory has any more.

        A store goes on for a process group that shares it, with an address that is out of date.
        """
        if self._url.scheme == "file" and self._world:
            with contextlib.suppress(OSError, ValueError):
                if _read_published(self._file().read_bytes()).world == self._world:
                    self._file().unlink()
        if self._listening is not None:
            self._listening.detach()
        if self._client is not None:
            self._client.close()
        self._store = self._listening = self._client = None

    # ── the others ──────────────────────────────────────────────────────────────────────────────

    def connect(self) -> tuple[str, list[socket.socket]]:
        """Return the id of the world, "" if any will do, and a socket that is connected.

        Raises:
            OSError: if no directory listens.
            NoDirectoryError: if another program does.
        """
        if self._url.scheme == "unix":
            return "", [_connect_unix(self._url.netloc)]
        if self._is_direct:
            return "", [_connect_tcp(self._address)]
        found = self._read()
        if found.namespace and found.namespace == network_namespace():
            return found.world, [_connect_unix(found.world)]
        if not found.port:
            raise OSError("rank 0 listens on its own machine only")
        return found.world, [_connect_tcp((found.host or self._address[0], found.port))]

    def _read(self) -> Published:
        data = self._file().read_bytes() if self._url.scheme == "file" else self._read_store()
        try:
            return _read_published(data)  # type: ignore[no-any-return]
        except ValueError as exc:
            raise OSError(f"no address of rank 0: {exc}") from exc

    def refuse_store(self) -> None:
        """Raise an error if a store is in place of a directory with TLS, which does not answer."""
        client = StoreClient(_connect_tcp(self._address))
        with contextlib.closing(client):
            with contextlib.suppress(NoStoreError, TimeoutError, ConnectionResetError):
                client.read(_KEY)
                raise NoDirectoryError(
                    "it does not use TLS, and this worker has tls=: give it all or none, and a "
                    "process group of torch.distributed another address"
                )

    def _read_store(self) -> bytes:
        client, self._client = self._client or StoreClient(_connect_tcp(self._address)), None
        try:
            found = client.read(_KEY)
        except NoStoreError as exc:
            client.close()
            raise NoDirectoryError.of(exc.first) from exc
        except TimeoutError:
            self._client = client  # which goes on to wait
            raise
        except OSError:
            client.close()
            raise
        if found is None:
            self._client = client  # it will be asked again
            raise OSError("rank 0 has not written its address yet")
        client.close()
        return bytes.fromhex(found.decode())

    def _file(self) -> Path:
        return Path(self._url.path + ".rank0")


def _torch_store(host: str, port: int, *, is_master: bool, **options: Any) -> TCPStore:
    if not is_master:  # torch's own wait takes up to twice its timeout, and prints frames
        _connect_tcp((host, port)).close()
    options |= {"timeout": timedelta(seconds=_CONNECT_TIMEOUT), "wait_for_workers": False}
    return TCPStore(host, port, None, is_master, multi_tenant=True, **options)


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
