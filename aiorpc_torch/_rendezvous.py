"""How the workers of a world find each other before torch's own start.

`init_rpc` ignores every timeout: with one rank missing it waits for half an hour or for ever
(seen on torch 2.13 and 2.15). So the ranks first sign in at a store, whose list is at hand when
time is up. Knows torch's stores, nothing of RPC.
"""

import os
import threading
import time
from collections import Counter
from datetime import timedelta
from urllib.parse import urlparse

from torch._C._distributed_c10d import FileStore, Store, TCPStore

from ._interfaces import await_listener, is_here, listener
from .errors import WorldTimeout

_POLL = 0.02  # seconds between two looks at the list

# How often this process signed in at a place: one store may serve several worlds in a row.
_entered: Counter[str] = Counter()


class Meeting:
    """Where `world_size` workers sign in. `leave` makes a wait in another thread end."""

    def __init__(self, init_method: str, rank: int, world_size: int, timeout: float) -> None:
        self._init_method = init_method
        self._rank = rank
        self._world_size = world_size
        self._end = time.monotonic() + timeout
        self._timeout = timeout
        self._left = threading.Event()
        self._store: Store | None = None
        # A restarted torchrun keeps its store, and with it the names of those who died.
        restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self._prefix = f"aiorpc/{restart}/{_entered[init_method]}"
        _entered[init_method] += 1

    @property
    def host(self) -> str | None:
        """Where rank 0's machine is, None if nobody can say.

        Not where the environment calls it `localhost`: some launchers say so to rank 0 alone.
        """
        where = urlparse(self._init_method)
        if where.scheme == "file" or where.hostname is not None:
            return where.hostname
        host = os.environ["MASTER_ADDR"]
        return None if is_here(host) else host

    def sign_in(self, name: str) -> list[str]:
        """Every worker's name, in rank order, once all are here. Blocks; torch releases the GIL.

        Raises:
            WorldTimeout: naming the ranks that did not come in time.
            ValueError: if two workers have one name.
        """
        # Kept for the life of the world: rank 0's is the server that torch's own start uses too.
        self._store = self._open()
        self._store.set(self._key(self._rank), name)
        missing = list(range(self._world_size))
        while missing := [rank for rank in missing if not self._is_here(rank)]:
            if time.monotonic() > self._end or self._left.wait(_POLL):
                raise WorldTimeout(self._late(missing), missing)
        names = [self._store.get(self._key(rank)).decode() for rank in range(self._world_size)]
        _check_distinct(names)
        return names

    def leave(self) -> None:
        """Nobody waits for `sign_in` any more."""
        self._left.set()

    def remaining(self) -> float:
        """Seconds until the time is up."""
        return max(0.0, self._end - time.monotonic())

    def _key(self, rank: int) -> str:
        return f"{self._prefix}/{rank}"

    def _is_here(self, rank: int) -> bool:
        assert self._store is not None
        return self._store.check([self._key(rank)])

    def _late(self, missing: list[int]) -> str:
        ranks = ", ".join(map(str, missing))
        return (
            f"{len(missing)} of {self._world_size} workers did not come within "
            f"{self._timeout:g} s: rank {ranks}"
        )

    def _open(self) -> Store:
        where = urlparse(self._init_method)
        if where.scheme == "file":
            return FileStore(where.path + ".names", self._world_size)
        host, port, is_master = self._address(where.hostname, where.port)
        if not is_master and (why := await_listener(host, port, self._timeout, self._left)):
            raise WorldTimeout(
                f"no store at {host}:{port} within {self._timeout:g} s: is rank 0 up? ({why})", [0]
            )
        # multi_tenant: torch's own start opens a second store at the same port.
        return TCPStore(
            host,
            port,
            world_size=None,
            is_master=is_master,
            timeout=timedelta(seconds=max(1.0, self.remaining())),
            wait_for_workers=False,
            multi_tenant=True,
            # By itself torch listens on every interface (2.13, 2.15; tests/test_network.py).
            master_listen_fd=listener(self.host, port) if is_master else None,
        )

    def _address(self, host: str | None, port: int | None) -> tuple[str, int, bool]:
        if host is not None and port is not None:
            return host, port, self._rank == 0
        agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        return (
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            self._rank == 0 and not agent,
        )


def _check_distinct(names: list[str]) -> None:
    for rank, name in enumerate(names):
        if (first := names.index(name)) != rank:
            raise ValueError(f"ranks {first} and {rank} are both called {name!r}")
