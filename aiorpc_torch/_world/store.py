"""A client of torch's key-value store, at which the workers of a world meet."""

import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from urllib.parse import urlparse

from .._torch.compat import FileStore, Store as TorchStore, TCPStore
from ..errors import WorldTimeout
from .network import bind_listener, check_listener, is_loopback_host
from .registration import Registration

_ABSENT = "\0"  # a value that no worker writes
_RETRY_INTERVAL = 0.05  # seconds between two attempts to connect


class StoreClient:
    """A client of the store at `init_method`. Its methods block up to `timeout` seconds.

    One store may serve several worlds in a row. Each is an epoch, with its own prefix of the keys.
    """

    def __init__(self, init_method: str, registration: Registration, timeout: float) -> None:
        self._init_method = init_method
        self._registration = registration
        self._timeout = timeout
        self._store: TorchStore | None = None
        # A restarted torchrun keeps its store, with the keys of the processes that died.
        self._prefix = f"aiorpc/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        self._epoch = 0
        self._has_failed = self._has_written = False

    @property
    def is_server(self) -> bool:
        """Return whether the store ends with this process."""
        return self._registration.rank == 0 and isinstance(self._store, TCPStore)

    @property
    def is_stale(self) -> bool:
        """Return whether the store closed with an earlier world; the next world opens a new one.

        A store that fails in a later epoch is stale, and one to which this worker wrote nothing.
        """
        return self._has_failed and (self._epoch > 0 or not self._has_written)

    def close(self) -> None:
        """Drop the connection; rank 0 frees the store's address."""
        self._store = None

    def next_epoch(self) -> None:
        """Ignore what was written so far: read and write the keys of the next epoch."""
        self._epoch += 1

    def has(self, *names: str) -> bool:
        """Return whether all of these keys exist."""
        return bool(self._request(lambda store: store.check([self._key(name) for name in names])))

    def get(self, name: str) -> str:
        """Return the value of a key that exists."""
        found = self.read(name)
        assert found is not None, f"no value of {name}"
        return found

    def read(self, name: str) -> str | None:
        """Return the value of a key, None if it does not exist."""
        # torch's own `get` waits, and prints its frames if the connection ends meanwhile (2.13,
        # 2.15; tests/network/test_two_hosts.py).
        found = self.compare_set(name, _ABSENT, _ABSENT)
        return None if found == _ABSENT else found

    def set(self, name: str, value: str) -> None:
        """Write a key."""
        self._has_written = True
        self._request(lambda store: store.set(self._key(name), value))

    def add(self, name: str, amount: int) -> int:
        """Add to a counter, which starts at 0, and return its new value."""
        self._has_written = True
        return int(self._request(lambda store: store.add(self._key(name), amount)))

    def compare_set(self, name: str, expected: str, value: str) -> str:
        """Write if the value is `expected`, "" if there is none; return the value afterwards."""
        self._has_written |= value != _ABSENT
        found = self._request(lambda store: store.compare_set(self._key(name), expected, value))
        return str(found.decode())

    def _key(self, name: str) -> str:
        return f"{self._prefix}/{self._epoch}/{name}"

    def _request(self, request: Callable[[TorchStore], Any]) -> Any:
        assert self._store is not None
        try:
            return request(self._store)
        except RuntimeError as exc:  # rank 0's process ended, or is cut off
            self._has_failed = True
            raise WorldTimeout(
                f"the store at {self._init_method} does not answer: rank 0, which hosts it, has "
                f"given up or died ({str(exc).splitlines()[0]})",
                [0],
            ) from exc

    @property
    def host(self) -> str | None:
        """Return the host of rank 0, None if it is unknown.

        `localhost` in the environment is unknown: some launchers set it for rank 0 alone.
        """
        url = urlparse(self._init_method)
        if url.scheme == "file" or url.hostname is not None:
            return url.hostname
        host = os.environ["MASTER_ADDR"]
        return None if is_loopback_host(host) else host

    def open(self, cancelled: threading.Event, timeout: float) -> None:
        """Connect to the store; rank 0 creates it, unless torchrun did.

        Raises:
            WorldTimeout: if there is no store in time.
        """
        url = urlparse(self._init_method)
        self._epoch, self._has_failed, self._has_written = 0, False, False
        if url.scheme == "file":
            # The last process that closes it deletes it, if so many have closed it.
            size = max(1, self._registration.world_size)
            self._store = FileStore(url.path + ".names", size)
            return
        host, port, is_master = self._address(url.hostname, url.port)
        if is_master:
            self._store = self._connect(host, port, is_master)
        else:
            self._store = self._connect_to_server(host, port, cancelled, timeout)

    def _connect_to_server(
        self, host: str, port: int, cancelled: threading.Event, timeout: float
    ) -> TCPStore:
        end = time.monotonic() + timeout
        while True:
            try:
                # torch's own wait takes up to twice its timeout, and prints frames (seen on 2.13
                # and 2.15).
                check_listener(host, port, end - time.monotonic())
                return self._connect(host, port, False)
            except (OSError, RuntimeError) as exc:  # the store of the last world is closing, say
                if time.monotonic() > end or cancelled.wait(_RETRY_INTERVAL):
                    raise WorldTimeout(self._no_store(f"{host}:{port}", exc), [0]) from exc

    def _no_store(self, address: str, exc: Exception) -> str:
        if isinstance(exc, OSError):
            return (
                f"no store at {address} within {self._timeout:g} s ({exc}). Check that rank 0 "
                "runs and that its address is reachable"
            )
        return f"the store at {address} does not answer: {str(exc).splitlines()[0]}"

    def _connect(self, host: str, port: int, is_master: bool) -> TCPStore:
        return TCPStore(
            host,
            port,
            world_size=None,
            is_master=is_master,
            timeout=timedelta(seconds=max(1.0, self._timeout)),
            wait_for_workers=False,
            multi_tenant=True,  # the store of the last world may still be closing
            # By itself torch listens on every interface.
            # (2.13, 2.15; tests/network/test_two_hosts.py)
            master_listen_fd=bind_listener(self.host, port) if is_master else None,
        )

    def _address(self, host: str | None, port: int | None) -> tuple[str, int, bool]:
        """Return the store's host and port, and whether this worker creates it."""
        is_first = self._registration.rank == 0
        if host is not None and port is not None:
            return host, port, is_first
        has_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        return host, port, is_first and not has_agent
