"""How long do answers of the model server take, batched and one by one, by the load?

Clients ask at random times, at a mean rate, whether or not their earlier requests were answered: an
open loop. Latency counts from when a request was due.

    python -m benchmarks.inference [--quick] [--rates R ...] [--seconds S] [--plot PATH]
"""

import argparse
import asyncio
import time
from pathlib import Path

import torch

import aiorpc_torch as aiorpc
from aiorpc_torch import create, each, register, remote

from ._compare import lay_out, machine
from ._inference_report import WAYS, Left, OpenLoop, Row, row, served_both
from ._plot import OTHER, OURS, Curve, Panel, draw

HEADS = "", "asked/s", "answered/s", "p50", "p95", "p99", "late", "shed", "batch", "batches left"


async def measure(given: argparse.Namespace) -> list[Row]:
    """Measure each load in both ways, and print a line for each."""
    names = [f"client{number}" for number in range(given.clients)]
    async with aiorpc.local_world(names, name="server"):
        model = served_both(given)(given.model, given.device, 0)
        most = torch.zeros(given.max_size, 3, given.side, given.side, dtype=torch.uint8)
        await asyncio.to_thread(model.answer, most.to(given.device))  # warms up
        register("model", model)
        clients = await create(names, OpenLoop.start, given.side, each(range(len(names))))
        rows = []
        for rate in given.rates:
            for way in WAYS:
                left, start = Left(way), time.perf_counter()
                asked = way, rate / len(names), given.seconds, given.deadline
                outcomes = await remote(clients).load(*asked)
                took = max(given.seconds, time.perf_counter() - start)
                rows.append(row(way, outcomes, given.seconds, took, left))
        return rows


def panel(rows: list[Row], title: str) -> Panel:
    """Return latency against load: the median and p99 of either way."""
    curves = []
    for way, (colour, _) in zip(WAYS.values(), (OURS, OTHER), strict=True):
        found = [each for each in rows if each.way == way]
        loads = [each.asked for each in found]
        for name, mark, marker in (("p50", 0, "o"), ("p99", 2, "^")):
            runs = [[each.marks[mark]] for each in found]
            curves.append(Curve(f"{way}, {name}", (colour, marker), loads, runs))
    return Panel(title, "images asked for, a second", "latency, ms", curves, log="")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--model", default="mobilenet_v3_small", help="name in torchvision.models")
    add("--side", type=int, default=64, help="pixels of an image's side")
    add("--device", default="cpu", help="device of the model")
    add("--clients", type=int, default=2, help="number of client processes")
    add("--rates", type=float, nargs="+", default=[20, 40, 80, 160, 320], help="images a second")
    add("--seconds", type=float, default=5.0, help="seconds of each load")
    add("--deadline", type=float, default=0.3, help="seconds for a request")
    add("--max-size", type=int, default=16, help="images in a batch, at most")
    add("--max-wait", type=float, default=0.0, help="seconds that a batch waits")
    add("--max-pending", type=int, default=64, help="waiting requests, at most")
    add("--quick", action="store_true", help="two loads, half a second each")
    add("--plot", type=Path, metavar="PATH", help="draw a figure: .svg or .png")
    parser.set_defaults(pad_to=None)
    given = parser.parse_args()
    if given.quick:
        given.rates, given.seconds, given.side = [20, 160], 0.5, 32
    rows = asyncio.run(measure(given))
    lay_out([HEADS, *(each.cells() for each in rows)])
    print("\nmilliseconds from when a request was due to its answer")
    print(machine())
    if given.plot:
        title = f"{given.model} on {given.device}, {given.clients} clients"
        draw([panel(rows, title)], given.plot)
