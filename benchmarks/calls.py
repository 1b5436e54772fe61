"""What does a call cost, alone, among thousands and with large tensors, against torch's own RPC?

It also measures the lag of a loop that makes calls, and the delay of a call beside a large argument
to another object. torch's own calls go through the same world, with its transports.

    python -m benchmarks.calls [--quick] [--repeat N] [--plot PATH]
"""

import argparse
import asyncio
import gc
from functools import partial
from statistics import median
from time import perf_counter

import torch
from torch import Tensor
from torch._C._distributed_rpc import WorkerInfo
from torch.distributed import rpc
from torch.distributed.rpc import RRef

import aiorpc_torch as aiorpc
from aiorpc_torch import remote, wrap_future

from ._compare import Row, Runs, arguments, repeated, show, swept, take_turns
from ._lag import lag_rows
from ._plot import Panel, draw, pair

NAP = 0.01
SMALL = torch.rand(4)
MB = 1_000_000
LARGE = 128  # MB


class Server:
    def plain(self, x: Tensor) -> Tensor:
        return x

    async def on_loop(self, x: Tensor) -> Tensor:
        return x

    async def nap(self) -> None:
        await asyncio.sleep(NAP)

    async def take(self, x: Tensor) -> None:
        pass


# Not `torch.add` or the like, which torch calls without Python, unlike a user's function.
def echo(x: Tensor) -> Tensor:
    return x


def take(x: Tensor) -> None:
    pass


async def main(given: argparse.Namespace) -> tuple[list[Row], list[Panel]]:
    quick, repeat = given.quick, given.repeat
    calls = 500 if quick else 3_000
    async with aiorpc.local_world(["server"]):
        # By its WorkerInfo, and without a timeout to track: torch's quickest way.
        peer = rpc.get_worker_info("server")
        server = await aiorpc.create("server", Server)
        one = partial(remote(server).on_loop, SMALL)
        rows = [
            *await lone_rows(server, peer, repeat, 100 if quick else 500),
            *await at_once_rows(server, peer, repeat, calls),
            *await lag_rows(one, repeat, calls, 0.2 if quick else 1.0),
            await nap_row(server, repeat, 1_000),
            *await tensor_rows(server, peer, repeat, [16] if quick else [16, 128]),
            *await behind_rows(server, peer, repeat, 2 if quick else 5),
        ]
        return rows, await panels(server, peer, repeat, quick) if given.plot else []


# ── a lone call ─────────────────────────────────────────────────────────────────────────────────


async def lone_rows(server: RRef[Server], peer: WorkerInfo, repeat: int, calls: int) -> list[Row]:
    async def runs(method: str) -> Runs:
        ours = partial(lone, server, method, calls)
        return await take_turns(repeat, ours, partial(raw_lone, peer, calls))

    return [
        Row("lone call of a def", "µs", await runs("plain"), "≤ 1.0"),
        Row("lone call of an async def", "µs", await runs("on_loop"), "≤ 1.1"),
        Row("rpc_async, awaited", "µs", await bridge_runs(peer, repeat, calls), "the bridge alone"),
    ]


async def bridge_runs(peer: WorkerInfo, repeat: int, calls: int) -> Runs:
    """Measure the part of a lone call between torch's threads and a coroutine."""
    return await take_turns(repeat, partial(bridged, peer, calls), partial(raw_lone, peer, calls))


async def bridged(peer: WorkerInfo, calls: int) -> float:
    times = []
    for _ in range(calls):
        start = perf_counter()
        await wrap_future(rpc.rpc_async(peer, echo, args=(SMALL,), timeout=0))
        times.append(perf_counter() - start)
    return median(times) * 1e6


async def lone(server: RRef[Server], method: str, calls: int) -> float:
    times = []
    for _ in range(calls):
        start = perf_counter()
        await getattr(remote(server), method)(SMALL)
        times.append(perf_counter() - start)
    return median(times) * 1e6


def raw_lone(peer: WorkerInfo, calls: int) -> float:
    times = []
    for _ in range(calls):
        start = perf_counter()
        rpc.rpc_sync(peer, echo, args=(SMALL,), timeout=0)
        times.append(perf_counter() - start)
    return median(times) * 1e6


# ── thousands at once ───────────────────────────────────────────────────────────────────────────


async def at_once_rows(
    server: RRef[Server], peer: WorkerInfo, repeat: int, calls: int
) -> list[Row]:
    async def runs(method: str) -> Runs:
        ours = partial(all_at_once, server, method, calls)
        return await take_turns(repeat, ours, partial(raw_all_at_once, peer, calls))

    return [
        Row(f"{calls:,} at once of a def", "calls/s", await runs("plain"), "≥ 10"),
        Row(f"{calls:,} at once of an async def", "calls/s", await runs("on_loop"), "≥ 10"),
        Row("the same, no garbage collection", "calls/s", await no_gc_runs(server, repeat, calls)),
    ]


async def no_gc_runs(server: RRef[Server], repeat: int, calls: int) -> Runs:
    """Measure calls at once without garbage collections."""
    gc.disable()
    await aiorpc.call("server", gc.disable)
    try:
        return await repeated(repeat, partial(all_at_once, server, "on_loop", calls))
    finally:
        await aiorpc.call("server", gc.enable)
        gc.enable()


async def all_at_once(server: RRef[Server], method: str, calls: int) -> float:
    start = perf_counter()
    await asyncio.gather(*(getattr(remote(server), method)(SMALL) for _ in range(calls)))
    return calls / (perf_counter() - start)


def raw_all_at_once(peer: WorkerInfo, calls: int) -> float:
    start = perf_counter()
    torch.futures.wait_all(
        [rpc.rpc_async(peer, echo, args=(SMALL,), timeout=0) for _ in range(calls)]
    )
    return calls / (perf_counter() - start)


# ── large tensors ───────────────────────────────────────────────────────────────────────────────


async def tensor_rows(
    server: RRef[Server], peer: WorkerInfo, repeat: int, sizes: list[int]
) -> list[Row]:
    rows = []
    for size in sizes:
        ours = partial(carry_mb, server, size)
        runs = await take_turns(repeat, ours, partial(raw_carry_mb, peer, size))
        rows.append(Row(f"{size} MB there and back", "MB/s", runs, "≥ 0.95"))
    return rows


def trips(size: float) -> int:
    return min(500, int(512 / size))


async def carry(server: RRef[Server], big: Tensor, trips: int) -> float:
    start = perf_counter()
    for _ in range(trips):
        await remote(server).plain(big)
    return 2 * trips * big.nbytes / MB / (perf_counter() - start)


def raw_carry(peer: WorkerInfo, big: Tensor, trips: int) -> float:
    start = perf_counter()
    for _ in range(trips):
        rpc.rpc_sync(peer, echo, args=(big,), timeout=0)
    return 2 * trips * big.nbytes / MB / (perf_counter() - start)


# ── small calls while a large argument is on its way ────────────────────────────────────────────


async def behind_rows(
    server: RRef[Server], peer: WorkerInfo, repeat: int, larges: int
) -> list[Row]:
    """Measure a small call while 128 MB travel to another object of that worker."""
    other = await aiorpc.create("server", Server)
    big = torch.rand(LARGE * MB // 4)
    waits: dict[str, list[tuple[float, float]]] = {"ours": [], "raw": []}

    async def ours() -> float:
        beside = await beside_large(server, other, big, larges)
        waits["ours"].append((beside, await lone(server, "on_loop", 100)))
        return beside

    def raw() -> float:
        beside = raw_beside_large(peer, big, larges)
        waits["raw"].append((beside, raw_lone(peer, 100)))
        return beside

    runs = await take_turns(repeat, ours, raw)
    factors = [[beside / alone for beside, alone in way[1:]] for way in waits.values()]
    what = f"lone call beside {LARGE} MB to another object"
    return [
        Row(what, "µs", runs),
        Row("the same, against a lone call by itself", "times", Runs(*factors)),
    ]


async def beside_large(
    server: RRef[Server], other: RRef[Server], big: Tensor, larges: int
) -> float:
    times = []
    for _ in range(larges):
        large = asyncio.ensure_future(remote(other).take(big))
        await asyncio.sleep(0)  # the large call is sent
        while not large.done():
            start = perf_counter()
            await remote(server).on_loop(SMALL)
            times.append(perf_counter() - start)
        await large
    return median(times) * 1e6


def raw_beside_large(peer: WorkerInfo, big: Tensor, larges: int) -> float:
    times = []
    for _ in range(larges):
        large = rpc.rpc_async(peer, take, args=(big,), timeout=0)
        while not large.done():
            start = perf_counter()
            rpc.rpc_sync(peer, echo, args=(SMALL,), timeout=0)
            times.append(perf_counter() - start)
        large.wait()
    return median(times) * 1e6


# ── methods that wait ───────────────────────────────────────────────────────────────────────────


async def nap_row(server: RRef[Server], repeat: int, calls: int) -> Row:
    # A method in raw torch waits by blocking the thread of its call. With two threads, each hundred
    # calls would take half a second.
    runs = await repeated(repeat, partial(naps, server, calls))
    return Row(f"{calls:,} at once that sleep {NAP * 1e3:.0f} ms", "s", runs, "≤ 0.15")


async def naps(server: RRef[Server], calls: int) -> float:
    start = perf_counter()
    await asyncio.gather(*(remote(server).nap() for _ in range(calls)))
    return perf_counter() - start


# ── the figure ──────────────────────────────────────────────────────────────────────────────────


async def panels(server: RRef[Server], peer: WorkerInfo, repeat: int, quick: bool) -> list[Panel]:
    counts = [1, 16, 256] if quick else [1, 4, 16, 64, 256, 1_000, 4_000]
    at_once = await swept(repeat, counts, partial(rate, server), partial(raw_rate, peer))
    sizes = [1.0, 16.0] if quick else [0.0625, 0.25, 1.0, 4.0, 16.0, 64.0]
    carried = await swept(repeat, sizes, partial(carry_mb, server), partial(raw_carry_mb, peer))
    return [
        Panel("Calls at once", "calls at once", "calls/s", pair(counts, at_once, "raw torch")),
        Panel(
            "Large tensors", "size, MB", "MB/s there and back", pair(sizes, carried, "raw torch")
        ),
    ]


def rounds(at_once: int) -> int:
    return max(1, 1_000 // at_once)


async def rate(server: RRef[Server], at_once: int) -> float:
    start = perf_counter()
    for _ in range(rounds(at_once)):
        await all_at_once(server, "on_loop", at_once)
    return rounds(at_once) * at_once / (perf_counter() - start)


def raw_rate(peer: WorkerInfo, at_once: int) -> float:
    start = perf_counter()
    for _ in range(rounds(at_once)):
        raw_all_at_once(peer, at_once)
    return rounds(at_once) * at_once / (perf_counter() - start)


async def carry_mb(server: RRef[Server], size: float) -> float:
    return await carry(server, torch.rand(int(size * MB) // 4), trips(size))


def raw_carry_mb(peer: WorkerInfo, size: float) -> float:
    return raw_carry(peer, torch.rand(int(size * MB) // 4), trips(size))


if __name__ == "__main__":
    given = arguments("The cost of a call, compared with torch.distributed.rpc.")
    rows, drawn = asyncio.run(main(given))
    show(rows)
    draw(drawn, given.plot)
