"""Do strangers at rank 0's port, or at a worker's, disturb a world that starts and grows?

A process floods rank 0's TCP port before the world starts, and the port of each worker once it
listens: connections that say nothing, half-open ones that stay, HTTP, TLS, garbage, a registration
that is cut off and one of another world, at most 1,000 at once. Meanwhile the world starts, workers
join, call each other and leave. All must succeed, and the descriptors and the memory of rank 0 must
stay bounded.

    python -m benchmarks.strangers_at_rank_0 [--at-once N] [--joins N]
"""

import argparse
import asyncio
import contextlib
import os
import random
import socket
import struct
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator
from multiprocessing.connection import Connection
from typing import Any

import aiorpc_torch as aiorpc
from aiorpc_torch import call
from aiorpc_torch._directory.directory_messages import Register
from aiorpc_torch._directory.directory_server import MAX_STRANGERS
from aiorpc_torch._directory.directory_stream import encode, greeting
from aiorpc_torch._directory.registration import Registration
from aiorpc_torch._endpoint import entry_points
from aiorpc_torch._server import server as servers

from ._compare import lay_out, machine
from ._peers_process import process
from ._process import open_descriptors, resident_memory

AT_ONCE, JOINS = 1_000, 3
PATIENCE = 120.0  # seconds for each step of the world
STAY = 10.0  # seconds for which a stranger stays that is not closed
SPARE = 128  # descriptors of rank 0 beside those of strangers that the directory bounds

_register = greeting() + encode(Register(Registration("stranger", 0, 1, "1.0")))
KINDS = {
    "connects and closes": None,
    "stays, silent": b"",
    "HTTP": b"GET / HTTP/1.1\r\nHost: here\r\n\r\n",
    "a TLS hello": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(512),
    "garbage": random.Random(7).randbytes(4096),
    "half a registration": _register[: len(_register) // 2],
    "another world": greeting("1" * 32) + _register[len(greeting()) :],
    "a length of 4 GiB": greeting() + struct.pack("<I", 0xFFFFFFFF),
}


# ── strangers, in a process of their own ────────────────────────────────────────────────────────


def flood(told: Connection, first: tuple[str, int], at_once: int) -> None:
    """Be strangers at these addresses until told to end; then report how many there were."""
    told.send(asyncio.run(_flood(told, first, at_once)))


async def _flood(told: Connection, first: tuple[str, int], at_once: int) -> Counter[str]:
    counts: Counter[str] = Counter()
    addresses, over = [first], asyncio.Event()

    def obey() -> None:
        address = told.recv()
        if address is None:
            over.set()
        else:
            addresses.append(address)

    async def visit_again() -> None:
        while True:
            kind = random.choice([*KINDS])
            with contextlib.suppress(OSError, TimeoutError):
                await visit(random.choice(addresses), KINDS[kind])
                counts[kind] += 1
            await asyncio.sleep(0.05)

    asyncio.get_running_loop().add_reader(told.fileno(), obey)
    visiting = [asyncio.create_task(visit_again()) for _ in range(at_once)]
    await over.wait()
    for each in visiting:
        each.cancel()
    await asyncio.gather(*visiting, return_exceptions=True)
    return counts


async def visit(address: tuple[str, int], data: bytes | None) -> None:
    """Be one stranger, until it is closed."""
    loop = asyncio.get_running_loop()
    with socket.socket() as visiting:
        visiting.setblocking(False)
        async with asyncio.timeout(STAY):
            await loop.sock_connect(visiting, address)
            if data is None:
                return
            await loop.sock_sendall(visiting, data)
            while await loop.sock_recv(visiting, 4096):
                pass


# ── the world ───────────────────────────────────────────────────────────────────────────────────


async def listen() -> tuple[str, int]:
    """Let this worker listen at a TCP port, as for peers of other hosts; return the address."""
    server = entry_points.serving()
    assert isinstance(server, servers.Server)
    server.listen_at("127.0.0.1")
    assert server._listener is not None
    found = server._listener.addresses.tcp
    assert found is not None
    return found


def guest(told: Connection, name: str, options: dict[str, Any]) -> None:
    """Be a worker until told to leave."""

    async def live() -> None:
        async with aiorpc.worker(name, **options):
            told.send(time.monotonic())
            await asyncio.to_thread(told.recv)

    asyncio.run(live())
    told.send("left")


@contextlib.asynccontextmanager
async def guests(name: str, **options: Any) -> AsyncIterator[Connection]:
    """Run a worker in a process of its own, from its entry to its end."""
    with process(guest, name, options) as pipe:
        yield pipe


async def heard(pipe: Connection) -> Any:
    """Return what a process tells, in time."""
    if not await asyncio.to_thread(pipe.poll, PATIENCE):
        sys.exit("a worker did not enter or leave in time")
    return pipe.recv()


async def measure(at_once: int, joins: int) -> tuple[list[tuple[str, str]], Counter[str]]:
    with socket.create_server(("127.0.0.1", 0)) as held:
        address = held.getsockname()
    where: Any = {"init_method": f"tcp://{address[0]}:{address[1]}", "start_timeout": PATIENCE}
    rows: list[tuple[str, str]] = []
    with process(flood, address, at_once) as strangers:
        begin = time.monotonic()
        async with guests("w1", rank=1, world_size=2, **where) as first:
            async with aiorpc.worker("w0", rank=0, world_size=2, **where):
                await heard(first)
                rows.append(("start of two workers, s", f"{time.monotonic() - begin:.2f}"))
                begin_memory, most = resident_memory(os.getpid()), 0
                for port in (await listen(), await call("w1", listen)):
                    strangers.send(port)
                for number in range(joins):
                    begin = time.monotonic()
                    async with guests(f"late{number}", join=True, **where) as late:
                        await heard(late)
                        seconds = time.monotonic() - begin
                        for x in range(200):
                            assert await call(f"late{number}", abs, -x) == x
                            assert await call("w1", abs, -x) == x
                            most = max(most, open_descriptors())
                        late.send("leave")
                        await heard(late)
                    rows.append(
                        (f"join {number + 1}, s, with the start of Python", f"{seconds:.2f}")
                    )
                grown = (resident_memory(os.getpid()) - begin_memory) / 1e6
                strangers.send(None)
                counts: Counter[str] = await heard(strangers)
                rows.append(("most descriptors of rank 0", str(most)))
                rows.append(("memory of rank 0, MB more", f"{grown:.1f}"))
                first.send("leave")
    if most > 2 * MAX_STRANGERS + SPARE:
        sys.exit(f"rank 0 had {most} descriptors")
    return rows, counts


def main(given: argparse.Namespace) -> None:
    """Print what became of the world, and how many strangers there were."""
    rows, counts = asyncio.run(measure(given.at_once, given.joins))
    lay_out([("strangers", "number"), *((kind, f"{counts[kind]:,}") for kind in KINDS)])
    print(f"\nat most {given.at_once:,} at once\n")
    lay_out([("the world meanwhile", ""), *rows])
    print(f"\n{machine()}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Strangers at rank 0 and at workers.")
    parser.add_argument("--at-once", type=int, default=AT_ONCE, metavar="N", help="at most")
    parser.add_argument("--joins", type=int, default=JOINS, metavar="N", help="joins meanwhile")
    main(parser.parse_args())
