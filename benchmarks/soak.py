"""Does every one of a million mixed calls end exactly once and correctly, with nothing left over?

This process and two children serve. Two hundred clients here call all three, each with a seed of
its own: methods, tensors, batches, errors, streams, and calls that are relayed, given up or late.
The exit code is 1 if a call ended wrongly, did not end, or left something behind.

    python -m benchmarks.soak [--quick] [--calls N] [--clients N] [--seed N]
"""

import argparse
import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from statistics import median

import aiorpc_torch as aiorpc
from aiorpc_torch import RRef, call, create, remote

from ._compare import lay_out
from ._process import Census, census_at_rest
from ._soak_calls import Caller
from ._soak_display import Display
from ._soak_end import end, parse_sizes
from ._soak_run import WORKERS, Soak, Stuck
from ._soak_server import Server

SAMPLES = 20
LOOKS = 100  # in 10 s, until which cancelled calls must have ended everywhere
THREADS = 16  # for plain methods, started on demand
ENOUGH = 200_000  # calls from which on growth exceeds noise
GROWTH = 20.0  # bytes a call that memory may grow in the second half
LEFT = 0.01  # objects a call that may be left
Outcomes = Counter[tuple[str, str]]
"""Number of calls by kind and by how they ended."""

ONCE = {  # counters of the servers, and the kinds of calls that they count
    "plain": "plain",
    "on_loop": "on_loop",
    "tensor": "tensor",
    "batch": "batch",
    "refuse": "error",
    "unsendable": "unsendable",
    "unreadable": "unreadable",
}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="A million mixed calls, checked for leaks.")
    parser.add_argument("--quick", action="store_true", help="20,000 calls")
    parser.add_argument("--calls", type=int, metavar="N", help="number of calls (1,000,000)")
    parser.add_argument(
        "--clients", type=int, metavar="N", default=200, help="clients at once (200)"
    )
    parser.add_argument("--seed", type=int, metavar="N", default=0, help="seed of the clients (0)")
    return parse_sizes(parser, calls=(20_000, 1_000_000))


async def main(given: argparse.Namespace) -> list[str]:
    """Run the soak; return its problems."""
    with closing(Display(WORKERS, given.calls)) as display:
        async with aiorpc.local_world(WORKERS[1:]):
            soak = Soak(display, max(1, given.calls // SAMPLES))
            servers = [await create(worker, Server) for worker in WORKERS]
            clients = [Caller(f"{given.seed}/{n}", servers) for n in range(given.clients)]
            for server in servers:
                await remote(server).meet(servers)
            try:
                return await run(soak, servers, clients, given.calls)
            except Stuck as stuck:
                return [str(stuck), *soak.problems]


async def run(
    soak: Soak, servers: list[RRef[Server]], clients: list[Caller], calls: int
) -> list[str]:
    await soak.run(calls // SAMPLES, clients)  # warms up
    before = await rest(servers)
    await soak.run(calls, clients)
    after = await rest(servers)
    soak.display.close()
    show_outcomes(soak.outcomes)
    show_rest(soak, before, after)
    counts = await miscounted(servers, soak.outcomes)
    return [*soak.problems, *counts, *unrest(before, after, calls), *grown(soak)]


async def rest(servers: list[RRef[Server]]) -> list[Census]:
    """Sample every process once no call runs, or after a while if some still do."""
    for _ in range(LOOKS):
        if not any([await still_open(server) for server in servers]):
            break
        await asyncio.sleep(0.1)
    await asyncio.sleep(0.2)  # for the last messages of cancelled calls
    return [await call(worker, census_at_rest) for worker in WORKERS]


async def still_open(server: RRef[Server]) -> Counter[str]:
    """Return the calls that the server began and has not ended."""
    tally: tuple[Counter[str], Counter[str]] = await remote(server).tally()
    return tally[1]


# ── checks ──────────────────────────────────────────────────────────────────────────────────────


async def miscounted(servers: list[RRef[Server]], outcomes: Outcomes) -> list[str]:
    """Return the methods that did not run once for each call, or have not ended."""
    found = [await remote(server).tally() for server in servers]
    ran = sum((tally[0] for tally in found), Counter[str]())
    unended = sum((tally[1] for tally in found), Counter[str]())
    wanted = {name: calls_of(kind, outcomes) for name, kind in ONCE.items()}
    wanted["relay"] = relayed(outcomes)
    return [
        *[
            f"{name} ran {ran[name]:,} times for {calls:,} calls"
            for name, calls in wanted.items()
            if ran[name] != calls
        ],
        *[f"{calls:,} of {name} have not ended" for name, calls in unended.items()],
    ]


def calls_of(kind: str, outcomes: Outcomes) -> int:
    return sum(count for (each, _), count in outcomes.items() if each == kind)


def relayed(outcomes: Outcomes) -> int:
    """Return the runs of relayed calls: one more for each worker on the path."""
    return sum(
        count * (1 + int(outcome.split()[0]))
        for (kind, outcome), count in outcomes.items()
        if kind == "relay" and outcome[0].isdigit()
    )


def unrest(before: list[Census], after: list[Census], calls: int) -> Iterator[str]:
    """Yield the leftovers of ended calls in each process."""
    for worker, was, now in zip(WORKERS, before, after, strict=True):
        if now.tasks > was.tasks:
            yield f"{worker}: {now.tasks - was.tasks} tasks are left"
        if now.threads > was.threads + THREADS:
            yield f"{worker}: {now.threads - was.threads} threads are left"
        if now.blocks > was.blocks + max(10_000, LEFT * calls):
            yield f"{worker}: {now.blocks - was.blocks:,} objects are left"
        # The sampling call itself runs there, and is in flight here.
        flying, running = now.stats.in_flight - (worker == WORKERS[0]), now.stats.running - 1
        if flying or running:
            yield f"{worker}: {flying} calls in flight and {running} running at rest"


def growth(soak: Soak) -> Iterator[tuple[str, float]]:
    """Yield each process's growth in bytes a call, from the third quarter to the last."""
    samples = soak.samples
    third = samples[len(samples) // 2 : len(samples) * 3 // 4]
    last = samples[len(samples) * 3 // 4 :]
    for number, worker in enumerate(WORKERS):
        was, now = (median(found[number].memory for _, found in part) for part in (third, last))
        calls = median(settled for settled, _ in last) - median(settled for settled, _ in third)
        yield worker, (now - was) / calls


def grown(soak: Soak) -> Iterator[str]:
    if soak.settled < ENOUGH:
        return
    for worker, size in growth(soak):
        if size > GROWTH:
            yield f"{worker}: memory grows by {size:.0f} bytes a call"


# ── output ──────────────────────────────────────────────────────────────────────────────────────


def show_outcomes(outcomes: Outcomes) -> None:
    kinds = sorted({kind for kind, _ in outcomes})
    table = [("kind", "how they ended")]
    for kind in kinds:
        ends = {end: count for (each, end), count in sorted(outcomes.items()) if each == kind}
        said = ", ".join(f"{end} {count:,}" for end, count in ends.items())
        table.append((kind, said))
    print()
    lay_out(table)


def show_rest(soak: Soak, before: list[Census], after: list[Census]) -> None:
    table = [("at rest", "tasks", "objects left", "growth, bytes a call", "served", "late answers")]
    sizes = dict(growth(soak))
    for worker, was, now in zip(WORKERS, before, after, strict=True):
        size = f"{sizes[worker]:+.1f}" if soak.settled >= ENOUGH else "too few calls to tell"
        left = f"{now.blocks - was.blocks:+,}"
        stats = now.stats
        table.append((worker, f"{now.tasks}", left, size, f"{stats.served:,}", f"{stats.late:,}"))
    print()
    lay_out(table)


if __name__ == "__main__":
    given = arguments()
    end(asyncio.run(main(given)), f"\n{given.calls:,} calls: ")
