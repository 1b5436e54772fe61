"""Many clients, one vision model: requests of all of them, batched as they come.

The model is in this process. Clients in processes of their own ask at random times, and do not wait
for an answer before they ask again (an open loop). `infer` is `@batched`: the network runs once for
all requests that have come meanwhile. A request that has waited too long, or is given up, is not
computed at all. If too many wait, a new one fails at once.

    python -m examples.inference --model resnet18 --clients 4 --seconds 5
    python -m examples.inference --device cuda:0
"""

import argparse
import asyncio
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torchvision
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from torch import Tensor

import aiorpc_torch as aiorpc
from aiorpc_torch import RRef, batched, remote

from ._launch import add_world, end, launch, serve
from ._report import WAYS, Left, Outcome, Row, batches, draw, row, table

CLASSES = 100
LOADS = [
    0.3,
    0.6,
    0.9,
    1.5,
    2.5,
    4.0,
    6.0,
]  # of the images per second that the model does one by one
QUICK = [0.5, 3.0]


class Model:
    """A network of torchvision, with weights from a seed."""

    def __init__(self, name: str, device: str, seed: int) -> None:
        torch.manual_seed(seed)
        net = torchvision.models.get_model(name, weights=None, num_classes=CLASSES)
        self.net = net.eval().to(device)
        self.computed = 0

    @torch.inference_mode()
    def answer(self, images: Tensor) -> Tensor:
        """Return the probabilities [B, classes] of images [B, 3, H, W] of bytes."""
        self.computed += len(images)
        return torch.softmax(self.net(images.float() / 127.5 - 1.0), dim=1)


def served(options: argparse.Namespace) -> type[Any]:
    """Return the class of the served model, with batches and device of the command line."""

    class Served(Model):
        @batched(
            max_size=options.max_size,
            max_wait=options.max_wait,
            max_pending=options.max_pending,
            stack=True,
            device=options.device,
        )
        def infer(self, images: Tensor) -> Tensor:
            """Answer for one image [3, H, W] each; they come stacked, on the device."""
            return self.answer(images)

        @batched(max_size=1, max_pending=options.max_pending, stack=True, device=options.device)
        def infer_alone(self, images: Tensor) -> Tensor:
            """Answer one by one, for comparison."""
            return self.answer(images)

    return Served


class Client:
    """A client that asks about images of noise, as many independent users would."""

    def __init__(self, model: RRef[Any], side: int, seed: int) -> None:
        self.model = model
        self.chance = random.Random(seed)
        generator = torch.Generator().manual_seed(seed)
        shape = (32, 3, side, side)
        self.images = torch.randint(256, shape, dtype=torch.uint8, generator=generator).unbind()

    async def load(self, way: str, rate: float, seconds: float, deadline: float) -> Outcome:
        """Ask at `rate` a second, at random, whether or not earlier requests are answered."""
        outcome, loop = Outcome(), asyncio.get_running_loop()
        due = loop.time()
        end = due + seconds
        async with asyncio.TaskGroup() as requests:
            while (due := due + self.chance.expovariate(rate)) < end:
                await asyncio.sleep(due - loop.time())
                requests.create_task(self._ask(way, due, deadline, outcome))
        return outcome

    async def _ask(self, way: str, due: float, deadline: float, outcome: Outcome) -> None:
        loop = asyncio.get_running_loop()
        ask = getattr(remote(self.model), way)
        try:
            # Since it was due, not since it was sent, so that a late client hides no latency.
            with aiorpc.timeout(max(0.0, due + deadline - loop.time())):
                await ask(self.chance.choice(self.images))
        except aiorpc.CallTimeout:
            outcome.late += 1
        except aiorpc.QueueFull:
            outcome.shed += 1
        else:
            outcome.latencies.append(loop.time() - due)

    async def give_up(self) -> tuple[int, int]:
        """Ask about all images at once, give up every other one; return (given up, answered)."""
        ask = remote(self.model).infer_alone
        requests = [asyncio.create_task(ask(image)) for image in self.images]
        await requests[0]
        for request in requests[1::2]:
            request.cancel()
        results = await asyncio.gather(*requests, return_exceptions=True)
        return len(requests[1::2]), sum(isinstance(each, Tensor) for each in results)

    async def describe(self) -> str:
        return f"process {os.getpid()}"


class Bench:
    """The model and its clients, some of which may be lost meanwhile."""

    def __init__(self, model: Any, clients: dict[str, RRef[Client]], console: Console) -> None:
        self.model = model
        self.clients = clients
        self.console = console
        self.lost: list[str] = []

    async def capacity(self, image: Tensor, seconds: float) -> float:
        """Return images per second, one by one, without other load."""
        count, start = 0, time.perf_counter()
        while (spent := time.perf_counter() - start) < seconds:
            await self.model.infer_alone(image)
            count += 1
        return count / spent

    async def measure(self, way: str, rate: float, seconds: float, deadline: float) -> Row:
        """Have all clients together ask at `rate` for `seconds`."""
        left, share, start = Left(way), rate / len(self.clients), time.perf_counter()
        outcomes = await self._all("load", way, share, seconds, deadline)
        took = max(seconds, time.perf_counter() - start)
        return row(way, outcomes, seconds, took, left)

    async def give_up(self) -> str:
        """Have clients give up requests; return a line with the saved work."""
        before, count = self.model.computed, len(self.clients)
        found = await self._all("give_up")
        given_up, answered = (sum(each) for each in zip(*found, strict=True))
        return (
            f"{2 * given_up} images asked about at once by {count} clients, {given_up} given up: "
            f"{answered} answered, {self.model.computed - before} computed"
        )

    async def _all(self, method: str, *args: Any) -> list[Any]:
        """Call a method of every living client; return the results."""
        calls = [getattr(remote(client), method)(*args) for client in self.clients.values()]
        results = await asyncio.gather(*calls, return_exceptions=True)
        for name, result in zip([*self.clients], results, strict=True):
            if isinstance(result, aiorpc.WorkerLost):
                del self.clients[name]
                self.lost.append(name)
                self.console.print(f"{name} is lost; the others ask on")
            elif isinstance(result, BaseException):
                raise result
        if not self.clients:
            sys.exit("every client is lost")
        return [result for result in results if not isinstance(result, BaseException)]


# ── the program ─────────────────────────────────────────────────────────────────────────────────


async def main(me: aiorpc.Worker, options: argparse.Namespace) -> list[str]:
    """Serve and measure in the first worker; ask in the others, until it ends."""
    if me.rank:
        await serve("server")
        return []
    if torch.device(options.device).type == "cuda" and not torch.cuda.is_available():
        sys.exit(f"no {options.device} here: torch finds no CUDA device")
    console = Console(width=None if sys.stdout.isatty() else 120, highlight=False)
    model = served(options)(options.model, options.device, options.seed)
    clients = {
        name: await aiorpc.create(name, Client, RRef(model), options.side, options.seed + rank)
        for rank, name in enumerate(me.peers, 1)
    }
    bench = Bench(model, clients, console)
    rows = await work(bench, options)
    end()
    title = f"{options.model} on {options.device}, {options.clients} clients"
    console.print(f"latency against load: {draw(rows, options.plot, title)}")
    return bench.lost


async def work(bench: Bench, options: argparse.Namespace) -> list[Row]:
    """Measure each load, batched and one by one; then clients that give up."""
    console = bench.console
    console.print(f"server: process {os.getpid()}, {options.model} on {options.device}")
    for name, client in bench.clients.items():
        console.print(f"{name}: {await remote(client).describe()}")
    image = torch.zeros(3, options.side, options.side, dtype=torch.uint8)
    most = image.repeat(options.max_size, 1, 1, 1).to(options.device)
    await asyncio.to_thread(bench.model.answer, most)  # warms up
    capacity = await bench.capacity(image, min(1.0, options.seconds))
    console.print(f"one by one, alone: {capacity:,.0f} images a second")
    rates = options.rates or [capacity * load for load in (QUICK if options.quick else LOADS)]
    rows = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=len(rates) * len(WAYS))
        for rate in rates:
            for way, words in WAYS.items():
                progress.update(task, description=f"{rate:,.0f} a second, {words}")
                rows.append(await bench.measure(way, rate, options.seconds, options.deadline))
                progress.advance(task)
    console.print(table(rows))
    console.print(await bench.give_up())
    console.print(batches())
    return rows


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="mobilenet_v3_small", help="name in torchvision.models")
    parser.add_argument("--side", type=int, default=64, help="pixels of an image's side")
    parser.add_argument("--device", default="cpu", help="device of the model: cpu, cuda:0, ...")
    parser.add_argument("--clients", type=int, default=2, help="number of client processes")
    parser.add_argument("--rates", type=float, nargs="+", help="images a second (default: found)")
    parser.add_argument("--seconds", type=float, default=3.0, help="seconds of each load")
    parser.add_argument("--deadline", type=float, default=0.3, help="seconds for a request")
    parser.add_argument("--max-size", type=int, default=16, help="images in a batch, at most")
    parser.add_argument("--max-wait", type=float, default=0.0, help="seconds that a batch waits")
    parser.add_argument("--max-pending", type=int, default=64, help="waiting requests, at most")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="two loads, half a second each")
    parser.add_argument("--plot", type=Path, default=Path("out/inference.png"))
    add_world(parser)
    options = parser.parse_args()
    if options.model not in torchvision.models.list_models(torchvision.models):
        parser.error(f"torchvision has no classifier called {options.model}")
    if options.clients < 1:
        parser.error("--clients is at least 1")
    try:
        aiorpc.Fill(options.max_size, options.max_wait, max_pending=options.max_pending)
        torch.device(options.device)
    except (ValueError, RuntimeError) as exc:
        parser.error(str(exc).splitlines()[0])
    if options.quick:
        options.seconds, options.side = 0.5, 32
    return options


if __name__ == "__main__":
    options = arguments()
    names = ["server", *(f"client{number}" for number in range(options.clients))]
    if lost := launch(main, names, options, on_failure="continue"):
        sys.exit(f"lost on the way: {', '.join(lost)}")
