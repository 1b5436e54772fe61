"""1,000 slow connections at the metrics port of a real process."""

import asyncio
import os
import resource
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import pytest

from tests.support.scripts import ROOT
from tests.support.slack import SLACK

CLIENTS = 1000
MAX_CONNECTIONS = 64  # at once
REQUEST_TIMEOUT = 10.0  # seconds from a connection to the last byte of the answer
PROGRAM = """
import sys
from aiorpc_torch import observe
print(observe.serve_metrics().port, flush=True)
sys.stdin.read()
"""


class Served:
    """A process that serves its metrics."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        assert process.stdout is not None
        self.port = int(process.stdout.readline())
        self._pid = process.pid
        self.descriptors, self.threads = self.now()

    def now(self) -> tuple[int, int]:
        """Return the numbers of its descriptors and threads."""
        folder = f"/proc/{self._pid}"
        return len(os.listdir(f"{folder}/fd")), len(os.listdir(f"{folder}/task"))

    def scrape(self) -> bytes:
        url = f"http://127.0.0.1:{self.port}/metrics"
        with urllib.request.urlopen(url, timeout=REQUEST_TIMEOUT) as answer:
            return answer.read()  # type: ignore[no-any-return]


@contextmanager
def process() -> Iterator[Served]:
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    ) as found:
        try:
            yield Served(found)
        finally:
            found.kill()


@contextmanager
def many_files() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= hard < 2 * CLIENTS:
        pytest.skip(f"this process may open {hard} files only")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2 * CLIENTS), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def be_slow(port: int, connected: "asyncio.Semaphore") -> None:
    """Send a byte every two seconds, until the other end closes the connection."""
    loop = asyncio.get_running_loop()
    with socket.socket() as client:
        client.setblocking(False)
        await loop.sock_connect(client, ("127.0.0.1", port))
        connected.release()
        try:
            while True:
                await loop.sock_sendall(client, b"G")
                await asyncio.sleep(2.0)
        except ConnectionError:
            pass


@asynccontextmanager
async def slow_clients(port: int) -> AsyncIterator["set[asyncio.Task[None]]"]:
    """Run the slow clients in the block, all of which have connected; yield those that still are.

    While they connect, each pushes another one out, and that may be a scrape.
    """
    tasks, connected = set[asyncio.Task[None]](), asyncio.Semaphore(0)
    for _ in range(CLIENTS):
        task = asyncio.ensure_future(be_slow(port, connected))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
    try:
        for _ in range(CLIENTS):
            await connected.acquire()
        yield tasks
    finally:
        for task in tasks:
            task.cancel()


@pytest.mark.slow
@pytest.mark.promise("watching.metrics_strangers")
async def test_slow_connections() -> None:
    """They cost a fixed number of descriptors and no threads, keep out no scrape, and end."""
    with many_files(), process() as served:
        async with slow_clients(served.port) as left:
            most, scrapes, start = 0, 0, time.monotonic()
            while left:
                descriptors, threads = served.now()
                most = max(most, descriptors)
                assert threads == served.threads
                if time.monotonic() > start + scrapes:  # one a second
                    scrapes += 1
                    assert b"aiorpc_client_calls_total" in await asyncio.to_thread(served.scrape)
                await asyncio.sleep(0.01)
            lasted = time.monotonic() - start
        end = time.monotonic() + SLACK
        while served.now() != (served.descriptors, served.threads):
            assert time.monotonic() < end
            await asyncio.sleep(0.01)
    assert most <= served.descriptors + MAX_CONNECTIONS + 1
    assert lasted < 3 * REQUEST_TIMEOUT
    assert scrapes >= REQUEST_TIMEOUT / 2
