"""Servers of etcd, alone or in a cluster."""

import contextlib
import json
import os
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pytest

from aiorpc_torch._directory.etcd_value import EtcdValue
from tests.support.example_programs import free_port

T = TypeVar("T")

HAS_ETCD = shutil.which("etcd") is not None
needs_etcd = pytest.mark.skipif(not HAS_ETCD, reason="needs etcd: apt-get install etcd-server")
START = 60.0  # seconds for an etcd to start, or for a cluster to go on without a member


class Member:
    """An etcd, alone or one of a cluster."""

    def __init__(self, folder: Path, options: Sequence[str] = (), scheme: str = "http") -> None:
        self.folder = folder
        self.folder.mkdir()
        self.port, self.peer_port = free_port(), free_port()
        self.client = f"{scheme}://127.0.0.1:{self.port}"
        self.peer = f"http://127.0.0.1:{self.peer_port}"
        self.options = options
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self.port}"

    def start(self, cluster: str) -> None:
        given = {
            "name": self.name,
            "data-dir": str(self.folder / "data"),
            "listen-client-urls": self.client,
            "advertise-client-urls": self.client,
            "listen-peer-urls": self.peer,
            "initial-advertise-peer-urls": self.peer,
            "initial-cluster": cluster,
        }
        words = [word for name, value in given.items() for word in (f"--{name}", value)]
        environment = {k: v for k, v in os.environ.items() if not k.startswith("ETCD")}
        with open(self.folder / "log", "ab") as log:
            self.process = subprocess.Popen(
                ["etcd", *words, *self.options],
                cwd=self.folder,
                env=environment,
                stdout=log,
                stderr=log,
            )

    def send(self, number: int) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def end(self) -> None:
        if self.process is not None:
            self.process.kill()  # a process that is stopped too
            self.process.wait(START)

    def ask(self, path: str, *, token: str = "", **request: Any) -> dict[str, Any]:
        """Return the answer of the gateway, without the code that is tested."""
        headers = {"Content-Type": "application/json"} | ({"Authorization": token} if token else {})
        data = json.dumps(request).encode()
        url = urllib.request.Request(f"{self.client}/v3/{path}", data, headers)
        with urllib.request.urlopen(url, timeout=START) as answer:
            found: dict[str, Any] = json.load(answer)
        return found

    def is_leader(self) -> bool:
        status = self.ask("maintenance/status")
        return bool(status["leader"] == status["header"]["member_id"])


class Cluster:
    """Members of one etcd."""

    def __init__(self, members: Sequence[Member]) -> None:
        self.members = members
        self._initial = ",".join(f"{each.name}={each.peer}" for each in members)

    def start(self, members: Sequence[Member] | None = None) -> None:
        for each in members or self.members:
            each.start(self._initial)

    def url(self, name: str = "world", login: str = "", query: str = "") -> str:
        return f"etcd://{login}{','.join(each.host for each in self.members)}/{name}{query}"

    def value(self, **parts: str) -> EtcdValue:
        return EtcdValue(self.url(**parts))


@contextlib.contextmanager
def running(*members: Member, **parts: str) -> Iterator[Cluster]:
    """Start these members, and wait until they answer."""
    cluster = Cluster(members)
    try:
        cluster.start()
        value = cluster.value(**parts)
        eventually(value.read)
        yield cluster
    finally:
        for each in members:
            each.end()


def eventually(ask: Callable[[], T]) -> T:
    """Return the first result of `ask` that comes without an OSError."""
    end = time.monotonic() + START
    while True:
        try:
            return ask()
        except OSError:
            if time.monotonic() > end:
                raise
        time.sleep(0.05)
