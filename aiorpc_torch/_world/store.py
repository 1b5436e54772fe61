"""torch's key-value store where a world meets: opened, asked, and its errors put in words."""

import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from urllib.parse import urlparse

from .._torch.compat import FileStore, TCPStore
from .._torch.compat import Store as TorchStore
from ..errors import WorldTimeout
from .network import await_listener, is_here, listener
from .registration import Seat

_NOTHING = "\0"  # which nobody writes
_PAUSE = 0.2  # seconds between two attempts to speak with who listens there


class Store:
    """At `init_method`, as the worker at `seat` sees it. Its methods block, at most `timeout`."""

    def __init__(self, init_method: str, seat: Seat, timeout: float) -> None:
        self._init_method = init_method
        self._seat = seat
        self._timeout = timeout
        self._store: TorchStore | None = None
        # A restarted torchrun keeps its store, and with it what was written by those who died.
        self._root = f"aiorpc/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        self._page = 0  # one store may serve several worlds in a row
        self._is_gone = self._is_used = False

    def __repr__(self) -> str:
        return f"<Store at {self._init_method}, page {self._page}>"

    @property
    def is_here(self) -> bool:
        """Whether it goes with this process."""
        return self._seat.rank == 0 and isinstance(self._store, TCPStore)

    @property
    def was_of_the_past(self) -> bool:
        """Whether it went with the rank 0 of an earlier world: there will be another.

        So one may be of which this worker has seen nothing yet; one where it has written is not.
        """
        return self._is_gone and (self._page > 0 or not self._is_used)

    def close(self) -> None:
        """Nothing is asked any more; others may listen at its address."""
        self._store = None

    def turn(self) -> None:
        """What is written here is of the past: go on with a new page."""
        self._page += 1

    def has(self, *names: str) -> bool:
        """Whether all of these are written."""
        return bool(self._ask(lambda store: store.check([self._key(name) for name in names])))

    def get(self, name: str) -> str:
        """What is written there, which somebody has."""
        found = self.read(name)
        assert found is not None, f"nobody has written {name}"
        return found

    def read(self, name: str) -> str | None:
        """What is written there, if anything is."""
        # torch's own `get` waits, and prints its frames if the connection ends meanwhile (2.13,
        # 2.15; tests/test_network.py).
        found = self.swap(name, _NOTHING, _NOTHING)
        return None if found == _NOTHING else found

    def set(self, name: str, value: str) -> None:
        """Write."""
        self._is_used = True
        self._ask(lambda store: store.set(self._key(name), value))

    def add(self, name: str, more: int) -> int:
        """Add to a counter, which starts at 0; its new value."""
        self._is_used = True
        return int(self._ask(lambda store: store.add(self._key(name), more)))

    def swap(self, name: str, held: str, value: str) -> str:
        """Write if `held` is there, "" standing for nothing; what is there then."""
        self._is_used |= value != _NOTHING
        found = self._ask(lambda store: store.compare_set(self._key(name), held, value))
        return str(found.decode())

    def _key(self, name: str) -> str:
        return f"{self._root}/{self._page}/{name}"

    def _ask(self, question: Callable[[TorchStore], Any]) -> Any:
        assert self._store is not None
        try:
            return question(self._store)
        except RuntimeError as exc:  # rank 0's process is gone, or cut off
            self._is_gone = True
            raise WorldTimeout(
                f"the store at {self._init_method} does not answer: rank 0, which keeps it, has "
                f"given up or died ({str(exc).splitlines()[0]})",
                [0],
            ) from exc

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

    def open(self, left: threading.Event, patience: float) -> None:
        """Open it; rank 0 makes it, unless torchrun has. `left` or `patience` ends the wait for it.

        Raises:
            WorldTimeout: if there is none within the time.
        """
        where = urlparse(self._init_method)
        self._page, self._is_gone, self._is_used = 0, False, False
        if where.scheme == "file":
            self._store = FileStore(where.path + ".names", self._seat.world_size)
            return
        host, port, is_master = self._address(where.hostname, where.port)
        if is_master:
            self._store = self._connect(host, port, is_master)
        else:
            self._store = self._visit(host, port, left, patience)

    def _visit(self, host: str, port: int, left: threading.Event, patience: float) -> TCPStore:
        end = time.monotonic() + patience
        while True:
            if why := await_listener(host, port, end - time.monotonic(), left):
                raise WorldTimeout(
                    f"no store at {host}:{port} within {self._timeout:g} s: is rank 0 up? ({why})",
                    [0],
                )
            try:
                return self._connect(host, port, False)
            except RuntimeError as exc:  # that of the last world, say, which is closing
                if time.monotonic() > end or left.wait(_PAUSE):
                    said = str(exc).splitlines()[0]
                    raise WorldTimeout(
                        f"the store at {host}:{port} does not answer: {said}", [0]
                    ) from exc

    def _connect(self, host: str, port: int, is_master: bool) -> TCPStore:
        return TCPStore(
            host,
            port,
            world_size=None,
            is_master=is_master,
            timeout=timedelta(seconds=max(1.0, self._timeout)),
            wait_for_workers=False,
            multi_tenant=True,  # that of the world before may still be closing
            # By itself torch listens on every interface (2.13, 2.15; tests/test_network.py).
            master_listen_fd=listener(self.host, port) if is_master else None,
        )

    def _address(self, host: str | None, port: int | None) -> tuple[str, int, bool]:
        if host is not None and port is not None:
            return host, port, self._seat.rank == 0
        agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        return (
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            self._seat.rank == 0 and not agent,
        )
