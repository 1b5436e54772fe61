"""Do strangers that connect to a worker disturb its calls, or leak its memory?

Thousands of connections go to its abstract Unix socket and to a TCP port, without a valid proof:
silent ones, garbage, half a hello, a hello with a wrong proof, and half a hello followed by the
header of a frame of 2 GiB. Calls go on meanwhile. Afterwards a thousand more calls must be answered
correctly, and no connection or memory of the strangers may be left.

    python -m benchmarks.strangers [--count N] [--limit S]
"""

import argparse
import asyncio
import contextlib
import os
import random
import socket
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from statistics import median
from typing import Any, NamedTuple

import aiorpc_torch as aiorpc
from aiorpc_torch import call, create, remote
from aiorpc_torch._endpoint import entry_points
from aiorpc_torch._server import server as servers
from aiorpc_torch._server.listener import MAX_UNPROVEN, PROOF_TIMEOUT, Listener
from aiorpc_torch._wire.frames import CALLS, HEADER
from aiorpc_torch._wire.handshake import (
    HELLO,
    NONCE,
    Addresses,
    Credentials,
    Party,
    encode_hello,
    new_nonce,
)

from ._compare import lay_out, machine, number
from ._peers_process import process
from ._process import resident_memory

COUNT = 20_000
LIMIT = 60.0  # seconds for all strangers
AT_ONCE = 4 * MAX_UNPROVEN  # strangers at most
CALLS_AFTER = 1_000
HUGE = 1 << 31  # bytes that a header announces
MB = 1_000_000

Address = str | tuple[str, int]
Ends = Counter[tuple[str, str]]
"""Number of strangers by kind and by how they ended."""


class Server:
    async def double(self, x: int) -> int:
        return 2 * x


# ── in the worker ───────────────────────────────────────────────────────────────────────────────


class Left(NamedTuple):
    """Leftovers of strangers in the worker."""

    unproven: int
    memory: int  # bytes
    files: int


_listeners: list[Listener] = []


async def listen() -> Addresses:
    """Return the addresses of this worker; open a TCP port if it has none."""
    server = entry_points.serving()
    assert isinstance(server, servers.Server)
    assert server._listener is not None
    _listeners.append(server._listener)
    addresses = server._listener.addresses
    if addresses.tcp is None:
        me = Party(server.name, 0)
        _listeners.append(Listener(me, "127.0.0.1", server.accept, server.accept_socket))
        addresses = Addresses(addresses.namespace, addresses.unix, _listeners[-1].addresses.tcp)
    return addresses


async def left() -> Left:
    unproven = sum(len(each._unproven) for each in _listeners)
    return Left(unproven, resident_memory(os.getpid()), len(os.listdir("/proc/self/fd")))


async def listen_no_more() -> None:
    """Close the port that `listen` has opened."""
    for each in _listeners[1:]:
        each.close()


# ── strangers, in a process of their own ────────────────────────────────────────────────────────


def garbage(_: bytes) -> bytes:
    return random.randbytes(HELLO)


def half_hello(nonce: bytes) -> bytes:
    return wrong_proof(nonce)[: HELLO // 2]


def wrong_proof(nonce: bytes) -> bytes:
    """Return a hello with a wrong proof."""
    return encode_hello(
        Credentials(Party("stranger", 0), Party("server", 1)), 0, nonce, new_nonce()
    )


def huge_frame(nonce: bytes) -> bytes:
    return half_hello(nonce) + HEADER.pack(HUGE, CALLS)


KINDS = {
    "silent": lambda _: b"",
    "garbage": garbage,
    "half a hello": half_hello,
    "a wrong proof": wrong_proof,
    "a header of 2 GiB": huge_frame,
}


def visit_all(told: Connection, addresses: list[Address], count: int) -> None:
    """Act as `count` strangers, kind after kind; report how they ended."""
    told.send(asyncio.run(_visit_all(addresses, count)))


async def _visit_all(addresses: list[Address], count: int) -> Ends:
    ends: Ends = Counter()

    async def visit_some(kind: str, numbers: Iterator[int]) -> None:
        for each in numbers:
            ends[kind, await visit(addresses[each % len(addresses)], kind)] += 1

    for kind in KINDS:
        # A finished stranger starts the next; one that is kept waiting delays no other.
        numbers = iter(range(count // len(KINDS)))
        await asyncio.gather(*(visit_some(kind, numbers) for _ in range(AT_ONCE)))
    return ends


async def visit(address: Address, kind: str) -> str:
    """Act as one stranger; return how it ended, or after a timeout that it is still open."""
    loop = asyncio.get_running_loop()
    with await connect(address) as visiting:
        try:
            async with asyncio.timeout(2 * PROOF_TIMEOUT):
                nonce = await loop.sock_recv(visiting, NONCE)
                if not nonce:
                    return "refused at once"
                await loop.sock_sendall(visiting, KINDS[kind](nonce))
                while await loop.sock_recv(visiting, 4096):
                    pass
            return "closed"
        except OSError:
            return "closed"
        except TimeoutError:
            return "STILL OPEN"


async def connect(address: Address) -> socket.socket:
    """Connect once the backlog accepts a connection."""
    loop = asyncio.get_running_loop()
    family = socket.AF_UNIX if isinstance(address, str) else socket.AF_INET
    visiting = socket.socket(family, socket.SOCK_STREAM)
    visiting.setblocking(False)
    if not isinstance(address, str):
        await loop.sock_connect(visiting, address)
        return visiting
    while True:  # not by asyncio, whose connect seems to succeed with a full backlog
        with contextlib.suppress(BlockingIOError):
            visiting.connect(f"\0{address}")
            return visiting
        await asyncio.sleep(0.001)


# ── in the worker that calls ────────────────────────────────────────────────────────────────────


@dataclass(slots=True)
class Visit:
    """Measurements of the whole run."""

    ends: Ends = field(default_factory=Counter)
    seconds: float = 0.0
    before: Left | None = None
    after: Left | None = None
    quiet: list[float] = field(default_factory=list)  # µs of a call without strangers
    beside: list[float] = field(default_factory=list)  # µs of a call beside strangers
    new: list[float] = field(default_factory=list)  # ms of the first call of a new connection
    failed: list[str] = field(default_factory=list)  # errors of failed new connections
    wrong: int = 0


async def measure(count: int, limit: float) -> Visit:
    found = Visit()
    async with aiorpc.local_world(["server"]) as me:
        server = await create("server", Server)
        where = await call(me.peers[0], listen)
        addresses: list[Address] = [where.unix]
        addresses += [where.tcp] if where.tcp is not None else []
        found.wrong += await many_calls(server, CALLS_AFTER, found.quiet)
        found.before = await call("server", left)
        begin = time.perf_counter()
        with process(visit_all, addresses, count) as strangers:
            over = asyncio.Event()
            anew = asyncio.create_task(calls_anew(server, over, found))
            while not strangers.poll():
                if time.perf_counter() - begin > limit:
                    sys.exit(f"the strangers were not done in {limit:g} s")
                found.wrong += await many_calls(server, 10, found.beside)
                await asyncio.sleep(0.05)
            found.ends = strangers.recv()
        found.seconds = time.perf_counter() - begin
        over.set()
        await anew
        found.wrong += await many_calls(server, CALLS_AFTER, [])
        found.after = await call("server", left)
        await call("server", listen_no_more)
    return found


async def many_calls(server: Any, count: int, times: list[float]) -> int:
    """Make `count` calls, add their µs to `times`, and return the number of wrong results."""
    wrong = 0
    for x in range(count):
        start = time.perf_counter()
        wrong += await remote(server).double(x) != 2 * x
        times.append((time.perf_counter() - start) * 1e6)
    return wrong


async def calls_anew(server: Any, over: asyncio.Event, found: Visit) -> None:
    """Call on new connections until the strangers are over."""
    while not over.is_set():
        try:
            found.new.append(await asyncio.to_thread(call_anew, server))
        except aiorpc.RpcError as exc:
            found.failed.append(str(exc))
        await asyncio.sleep(0.1)


def call_anew(server: Any) -> float:
    """Return the ms of a call by a new loop, which needs a connection of its own."""

    async def first_call() -> float:
        start = time.perf_counter()
        await remote(server).double(1)
        return (time.perf_counter() - start) * 1e3

    return asyncio.run(first_call())


def show(found: Visit, count: int) -> bool:
    """Print the measurements; return True if all is well."""
    before, after = found.before, found.after
    assert before is not None
    assert after is not None
    outcomes = sorted({end for _, end in found.ends})
    kinds = [(kind, *(f"{found.ends[kind, end]:,}" for end in outcomes)) for kind in KINDS]
    lay_out([("strangers", *outcomes), *kinds])
    print(f"\n{count:,} in {found.seconds:.1f} s, at most {AT_ONCE} at once\n")
    grown = (after.memory - before.memory) / MB
    lines = [
        ("", "before", "after"),
        ("unproven connections", f"{before.unproven}", f"{after.unproven}"),
        ("memory of the worker, MB", *(f"{each.memory / MB:.1f}" for each in (before, after))),
        ("its open files", f"{before.files}", f"{after.files}"),
    ]
    lay_out(lines)
    print(f"\nmemory: {grown:+.1f} MB; wrong results: {found.wrong}\n")
    timed = [
        ("a call, no strangers about", "µs", found.quiet),
        ("a call meanwhile", "µs", found.beside),
        ("a new connection's first call meanwhile", "ms", found.new),
    ]
    lay_out(
        [
            ("", "unit", "calls", "median", "longest"),
            *(
                (what, unit, f"{len(times):,}", number(median(times)), number(max(times)))
                for what, unit, times in timed
                if times
            ),
        ]
    )
    if found.failed:
        print(f"\n{len(found.failed)} new connections FAILED; the last: {found.failed[-1]}")
    print(f"\n{machine()}")
    is_open = any(end == "STILL OPEN" for _, end in found.ends)
    return not (found.wrong or after.unproven or is_open)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="The effect of strangers on a worker.")
    parser.add_argument("--count", type=int, default=COUNT, metavar="N", help="number of strangers")
    parser.add_argument("--limit", type=float, default=LIMIT, metavar="S", help="seconds for all")
    given = parser.parse_args()
    if not show(asyncio.run(measure(given.count, given.limit)), given.count):
        sys.exit("not all is well")
