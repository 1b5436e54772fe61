"""How fast do items come out of a remote generator?

Torch has no streams. The other side is what its users write instead: one call an item, in the
fastest form with a window of calls in flight, whose answers are taken in order.

    python -m benchmarks.streams [--quick] [--repeat N] [--plot PATH]
"""

import argparse
import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from functools import partial
from time import perf_counter

import torch
from torch import Tensor
from torch._C._distributed_rpc import WorkerInfo
from torch.distributed import rpc
from torch.distributed.rpc import RRef

import aiorpc_torch as aiorpc
from aiorpc_torch import remote

from ._compare import Row, arguments, show, swept, take_turns
from ._plot import ALSO_OURS, OURS, RAW, Curve, Panel, draw, pair

SMALL = 4  # floats in a small item
WINDOW = 64  # calls of raw torch in flight
LARGE_WINDOW = 8  # for large items; the fastest of 1 to 64
LARGE = 64 * 1024  # bytes from which an item is large
AT_ONCE = 16
MB = 1_000_000
SIZES = [4, 64, 256, 1_024, 4_096, 16_384, 65_536, 262_144]  # in floats


class Source:
    """A source that yields one tensor again and again, so that only the transport is measured."""

    async def on_loop(self, count: int, floats: int) -> AsyncIterator[Tensor]:
        item = torch.ones(floats)
        for _ in range(count):
            yield item

    def plain(self, count: int, floats: int) -> Iterator[Tensor]:
        item = torch.ones(floats)
        for _ in range(count):
            yield item


items: dict[int, Tensor] = {}


def item_of(floats: int) -> Tensor:
    if floats not in items:
        items[floats] = torch.ones(floats)
    return items[floats]


async def main(given: argparse.Namespace) -> tuple[list[Row], list[Panel]]:
    quick, repeat = given.quick, given.repeat
    async with aiorpc.local_world(["server"]):
        peer = rpc.get_worker_info("server")
        source = await aiorpc.create("server", Source)
        rows = [
            *await small_rows(source, peer, repeat, 1_000 if quick else 10_000),
            await large_row(source, peer, repeat, 50 if quick else 300),
            await first_row(source, peer, repeat, 20 if quick else 300),
        ]
        return rows, await panels(source, peer, repeat, quick) if given.plot else []


# ── ours ────────────────────────────────────────────────────────────────────────────────────────


async def consume(source: RRef[Source], method: str, count: int, floats: int) -> int:
    taken = 0
    async for _ in getattr(remote(source), method)(count, floats):
        taken += 1
    return taken


async def rate(source: RRef[Source], method: str, count: int, floats: int) -> float:
    start = perf_counter()
    taken = await consume(source, method, count, floats)
    return taken / (perf_counter() - start)


async def rate_at_once(source: RRef[Source], count: int, at_once: int = AT_ONCE) -> float:
    """Return the items per second of all streams together."""
    start = perf_counter()
    each = [consume(source, "on_loop", count // at_once, SMALL) for _ in range(at_once)]
    return sum(await asyncio.gather(*each)) / (perf_counter() - start)


async def first(source: RRef[Source], streams: int) -> float:
    start = perf_counter()
    for _ in range(streams):
        async for _ in remote(source).on_loop(1, SMALL):
            break
    return (perf_counter() - start) / streams * 1e6


# ── raw torch ───────────────────────────────────────────────────────────────────────────────────


def raw_pipelined(peer: WorkerInfo, count: int, floats: int, window: int = WINDOW) -> float:
    start = perf_counter()
    flying: deque[torch.futures.Future[Tensor]] = deque()
    for _ in range(count):
        if len(flying) >= window:
            flying.popleft().wait()
        flying.append(rpc.rpc_async(peer, item_of, args=(floats,), timeout=0))
    while flying:
        flying.popleft().wait()
    return count / (perf_counter() - start)


def raw_one_by_one(peer: WorkerInfo, count: int, floats: int) -> float:
    start = perf_counter()
    for _ in range(count):
        rpc.rpc_sync(peer, item_of, args=(floats,), timeout=0)
    return count / (perf_counter() - start)


def raw_first(peer: WorkerInfo, calls: int) -> float:
    return 1e6 / raw_one_by_one(peer, calls, SMALL)


# ── rows ────────────────────────────────────────────────────────────────────────────────────────


async def small_rows(source: RRef[Source], peer: WorkerInfo, repeat: int, count: int) -> list[Row]:
    pipelined = partial(raw_pipelined, peer, count // 4, SMALL)  # a rate needs fewer items
    one_by_one = partial(raw_one_by_one, peer, count // 10, SMALL)
    on_loop = partial(rate, source, "on_loop", count, SMALL)
    plain = partial(rate, source, "plain", count, SMALL)
    many = partial(rate_at_once, source, count)

    async def row(what: str, ours: Callable[[], Awaitable[float]], raw: Callable[[], float]) -> Row:
        return Row(what, "items/s", await take_turns(repeat, ours, raw))

    return [
        await row(f"async generator; {WINDOW} calls in flight", on_loop, pipelined),
        await row(f"plain generator; {WINDOW} calls in flight", plain, pipelined),
        await row(f"{AT_ONCE} streams at once; {WINDOW} calls in flight", many, pipelined),
        await row("async generator; rpc_sync", on_loop, one_by_one),
    ]


async def large_row(source: RRef[Source], peer: WorkerInfo, repeat: int, count: int) -> Row:
    async def ours() -> float:
        return await rate(source, "on_loop", count, MB // 4)

    runs = await take_turns(
        repeat, ours, partial(raw_pipelined, peer, count, MB // 4, LARGE_WINDOW)
    )
    return Row(f"items of 1 MB; {LARGE_WINDOW} calls in flight", "MB/s", runs)


async def first_row(source: RRef[Source], peer: WorkerInfo, repeat: int, streams: int) -> Row:
    ours = partial(first, source, streams)
    runs = await take_turns(repeat, ours, partial(raw_first, peer, streams))
    return Row("time to the first item; rpc_sync", "µs", runs)


# ── the figure ──────────────────────────────────────────────────────────────────────────────────


async def panels(source: RRef[Source], peer: WorkerInfo, repeat: int, quick: bool) -> list[Panel]:
    budget = 400 if quick else 4_000
    return [
        await sizes_panel(source, peer, repeat, [4, 25_000] if quick else SIZES, budget),
        await streams_panel(source, peer, repeat, [1, 16] if quick else [1, 4, 16, 64], budget),
    ]


def count_of(floats: int, budget: int) -> int:
    """Return the number of items to measure for a size: 200 MB at most."""
    return max(20, min(budget, 50 * MB // floats))


async def sizes_panel(
    source: RRef[Source], peer: WorkerInfo, repeat: int, sizes: list[int], budget: int
) -> Panel:
    async def ours(method: str, floats: int) -> float:
        return await rate(source, method, count_of(floats, budget), floats)

    def raw(floats: int) -> float:
        window = WINDOW if floats * 4 < LARGE else LARGE_WINDOW
        return raw_pipelined(peer, count_of(floats, budget), floats, window)

    on_loop = await swept(repeat, sizes, partial(ours, "on_loop"), raw)
    plain = await swept(repeat, sizes, partial(ours, "plain"), raw)
    found = [size * 4.0 for size in sizes]
    curves = [
        Curve("async generator", OURS, found, [each.ours for each in on_loop]),
        Curve("plain generator", ALSO_OURS, found, [each.ours for each in plain]),
        Curve("raw torch: calls in a window", RAW, found, [each.raw for each in on_loop]),
    ]
    return Panel("One stream", "size of an item, bytes", "items/s", curves, log="xy")


async def streams_panel(
    source: RRef[Source], peer: WorkerInfo, repeat: int, streams: list[int], budget: int
) -> Panel:
    async def ours(at_once: int) -> float:
        return await rate_at_once(source, budget, at_once)

    def raw(_: int) -> float:
        return raw_pipelined(peer, budget // 2, SMALL)

    runs = await swept(repeat, streams, ours, raw)
    curves = pair(streams, runs, f"raw torch: {WINDOW} calls in flight")
    return Panel("Streams at once, items of 16 bytes", "streams", "items/s, all together", curves)


if __name__ == "__main__":
    given = arguments("The speed of items from a remote generator.")
    rows, drawn = asyncio.run(main(given))
    show(rows)
    draw(drawn, given.plot)
