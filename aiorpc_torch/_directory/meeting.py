"""The place at which the workers of a world find its directory.

`tcp://host:port`, or MASTER_ADDR and MASTER_PORT: a store of torch, its TCPStore, in rank 0's
process, which writes the address of the directory into it. There `init_process_group` shares it,
whichever of the two is first. With TLS the directory itself listens at that address. `unix://name`:
an abstract Unix socket, for worlds on one machine. There the directory is always at rank 0.

`file:///path`, the store of torchrun's agent, and etcd can be rewritten when the directory moves:
see `record`.

An address that was written has the random id of its directory, which the greeting confirms. So the
address of a run that has ended is not taken for that of a new one.
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
from .._aio.host import network_namespace
from .._aio.sockets import connect_unix, is_same_user, listen_unix
from .._port import network
from .._port.port import Port
from .._torch.compat import TCPStore
from .._torch.store import NoStoreError, StoreClient
from .._wire.plain import dump
from .directory_stream import NoDirectoryError
from .etcd_place import is_etcd_url
from .etcd_value import EtcdValue
from .record import Claim, Record, claim_place, read_record
from .shared_values import FileValue, SharedValue, StoreValue

T = TypeVar("T")

# One key for all attempts of torchrun. Its TORCHELASTIC_RESTART_COUNT is not the attempt: only the
# agent whose worker has failed counts on, the others start theirs again with the number before.
_KEY = "aiorpc/rank0"
_CONNECT_TIMEOUT = 2.0  # seconds: a lost SYN is sent again after one second, then after three
_BIND_TIMEOUT = 5.0  # seconds for the directory of the last world to close
_RESET_AT_CLOSE = struct.pack("ii", 1, 0)
RETRY_INTERVAL = 0.05  # seconds between two attempts


class Seen(NamedTuple):
    """The value at a place, and the record that it is."""

    value: bytes | None
    record: Record | None


_NOTHING = Seen(None, None)


class Connected(NamedTuple):
    """A connection to a directory, whose id is "" if any will do."""

    world: str
    sockets: list[socket.socket]


class Listening(NamedTuple):
    """The sockets of a new directory, its id, and its claim if the place can be rewritten."""

    world: str
    sockets: list[socket.socket]
    claim: Claim | None = None


class Meeting:
    """The place of `init_method`. Most methods may block without end (`blocking_on`).

    That is a URL, or `env://` for MASTER_ADDR and MASTER_PORT. One of etcd needs its extra: an
    ImportError says so. `interface` is that of rank 0, if it is known.
    """

    def __init__(self, init_method: str, interface: str | None = None) -> None:
        # Where rank 0's directory is reached, if each worker has one port. A fixed address and a
        # Unix socket stay what they are.
        self.port: Port | None = None
        self._url = urlparse("etcd:" if is_etcd_url(init_method) else init_method)
        self._init_method = init_method
        self._interface = interface
        self._store: TCPStore | None = None  # of this process
        self._listening: socket.socket | None = None  # of the store: its descriptor
        is_fixed = self._url.scheme == "tcp"
        host, port = (self._url.hostname, self._url.port) if is_fixed else (None, None)
        self._is_in_environment = self._url.scheme not in ("file", "unix", "etcd") and port is None
        if self._is_in_environment:
            host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        self._address = host or "", port or 0
        self._has_agent = (
            self._is_in_environment and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        )
        self._value = self._shared_value()

    def _shared_value(self) -> SharedValue | None:
        match self._url.scheme:
            case "file":
                return FileValue(Path(self._url.path + ".rank0"))
            case "etcd":
                return EtcdValue(self._init_method)
            case "unix":
                return None
        return StoreValue(_KEY, lambda: StoreClient(_connect_tcp(self._address)))

    def __str__(self) -> str:
        if self._url.scheme == "etcd":
            return str(self._value)  # without a password
        if self._url.scheme in ("file", "unix"):
            return self._url.geturl()
        host, port = self._address
        return f"{host}:{port}"

    @property
    def host(self) -> str | None:
        """Return the host of rank 0, None if it is unknown."""
        host, _ = self._address
        # Some launchers set `localhost` for rank 0 alone.
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
        return self._url.scheme == "unix" or (has_tls and not self.is_movable)

    @property
    def is_movable(self) -> bool:
        """Return whether another worker than rank 0 can keep the directory."""
        return self._url.scheme in ("file", "etcd") or self._has_agent

    @property
    def is_local(self) -> bool:
        """Return whether it is for a world whose other workers end with rank 0."""
        return self._url.scheme == "unix"

    def is_here(self, record: Record) -> bool:
        """Return whether its directory is reached by a Unix socket, which ends with its process."""
        return bool(record.namespace) and record.namespace == network_namespace()

    # ── rank 0 ──────────────────────────────────────────────────────────────────────────────────

    def listen(self, holder: str, lease: float = 0.0, seen: Seen = _NOTHING) -> Listening | None:
        """Return the sockets of a new directory; None if another one was quicker.

        The worker `holder` keeps it. If the place can be rewritten, `seen` is there, and the record
        stands for `lease` seconds. Raises OSError if another program has the address.
        """
        world = secrets.token_hex(16)
        if self._url.scheme == "unix":
            name = f"aiorpc-{self._url.netloc}"
            return Listening(world, [self._retry(lambda: listen_unix(name))])
        if self._is_direct:
            at_port = self._retry(lambda: network.listen(self.host, self._address[1]))
            return Listening(world, [at_port])
        if not self.is_movable:
            self._store = self._retry(self._open_store)
        sockets = [listen_unix(f"aiorpc-{world}")]
        with contextlib.ExitStack() as undo:
            undo.callback(_close, sockets)
            record, claim = self._record(world, holder, lease, sockets), None
            if self._store is not None:
                self._store.set(_KEY, dump(record).hex())
            else:
                value = self._shared_value()  # for the thread of the directory
                assert value is not None
                claim = claim_place(value, seen.value, seen.record, record, time.monotonic())
                if claim is None:
                    return None
            undo.pop_all()
        return Listening(world, sockets, claim)

    def _record(
        self, world: str, holder: str, lease: float, sockets: list[socket.socket]
    ) -> Record:
        """Return the record of a directory, which listens for other machines too if it has to."""
        host, port = "", 0
        interface = self._interface or network.interface_towards(self.host)
        if self.port is not None:
            if not network.is_loopback_host(self.port.host):
                host, port = self.port.host, self.port.number
        elif self._store is not None:
            if not network.is_loopback_host(self.host or ""):
                sockets.append(network.listen(self.host, 0))
                port = sockets[-1].getsockname()[1]
        elif address := network.own_address(interface):
            sockets.append(network.listen(address, 0))
            host, port = sockets[-1].getsockname()[:2]
        return Record(world, holder, network_namespace(), host, port, lease)

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
                    text += ". If that is an old process of rank 0, frozen perhaps, end it first"
                    raise OSError(exc.errno, text) from exc
            time.sleep(RETRY_INTERVAL)

    def _open_store(self) -> TCPStore:
        """Return a store at the address. Raises OSError if another process has the address."""
        host, port = self._address
        options: dict[str, Any] = {"timeout": timedelta(seconds=_CONNECT_TIMEOUT)}
        options |= {"is_master": True, "multi_tenant": True, "wait_for_workers": False}
        try:
            listening = network.listen(self.host, port)
        except OSError as exc:
            try:  # a server of this process is shared
                return TCPStore(host, port, None, **options)
            except RuntimeError:
                raise exc from None
        # torch would listen at all addresses. It closes the descriptor.
        self._listening = listening
        close_on_fork(listening)
        own = listening.getsockname()[0]
        return TCPStore(own, port, None, master_listen_fd=listening.fileno(), **options)

    def withdraw(self) -> None:
        """Let go of the store, and of connections, without a wait.

        The store goes on for a process group that shares it, with an address that is out of date.
        """
        if self._listening is not None:
            self._listening.detach()
        self._store = self._listening = None
        if self._value is not None:
            self._value.close()

    # ── the others ──────────────────────────────────────────────────────────────────────────────

    def look(self) -> Seen:
        """Return the record. Raises OSError or NoDirectoryError if the place is not reached."""
        assert self._value is not None
        try:
            value = self._value.read()
        except NoStoreError as exc:
            raise NoDirectoryError.of(exc.first) from exc
        try:
            return Seen(value, None if value is None else read_record(value))
        except ValueError:  # of another version, or another program
            return Seen(value, None)

    def clear(self, seen: Seen) -> None:
        """Remove the record if it is still what was seen. Raises OSError as `look`."""
        assert self._value is not None
        assert seen.value is not None
        self._value.clear(seen.value)

    def connect(self) -> Connected:
        """Return a connection to the directory. Raises OSError or NoDirectoryError without one."""
        if self._url.scheme == "unix":
            return Connected("", [_connect_unix(self._url.netloc)])
        if self._is_direct:
            return Connected("", [_connect_tcp(self._address)])
        record = self.look().record
        if record is None:
            raise OSError("rank 0 has not written its address yet")
        return self.dial(record)

    def dial(self, record: Record) -> Connected:
        """Return a connection to the directory of a record. Raises OSError as `connect`."""
        if record.is_closed:
            raise OSError(f"worker {record.holder!r} kept it, and has left; another one takes over")
        if self.is_here(record):
            return Connected(record.world, [_connect_unix(record.world)])
        if not record.port:
            raise OSError(
                f"worker {record.holder!r}, which keeps it, listens on its own machine only"
            )
        address = record.host or self._address[0], record.port
        return Connected(record.world, [_connect_tcp(address)])

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


def _close(sockets: list[socket.socket]) -> None:
    for each in sockets:
        each.close()


def _connect_tcp(address: tuple[str, int]) -> socket.socket:
    with network.looking_up(address[0]):
        socket.getaddrinfo(*address)
    # It looks up once more. Its wait, which is for the network, would be blamed on the name.
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
