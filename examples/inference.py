"""Many clients, one vision model: requests of all of them, batched as they come.

The model is in this process, under a name. Clients in processes of their own look it up, and each
asks for many users at once. `infer` is `@batched`: the network runs once for all requests that have
come meanwhile. A request that has waited too long, or is given up, is not computed at all. If too
many wait, a new one fails at once. `refine` streams: each batch is looked at again and again, and a
client leaves it when its answer changes no more.

    python -m examples.inference --model resnet18 --clients 4 --users 32
    python -m examples.inference --device cuda:0 --pad-to 4 8 16    # three batch sizes, all warm
    python -m examples.inference --trace spans.jsonl    # needs opentelemetry-sdk

Under torchrun, or with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT in the environment of a
terminal for each worker, rank 0 is the server and the others are the clients.
"""

import argparse
import asyncio
import functools
import os
import statistics
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torchvision
from torch import Tensor

import aiorpc_torch as aiorpc

CLASSES = 100
IMAGES = 32  # of each client
VIEWS = 8  # of an image, at most
CLOSE = 0.001  # probability by which a last view changes an answer


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
        @aiorpc.batched(
            max_size=options.max_size,
            max_wait=options.max_wait,
            max_pending=options.max_pending,
            stack=True,
            pad_to=options.pad_to,
            device=options.device,
        )
        def infer(self, images: Tensor) -> Tensor:
            """Answer for one image [3, H, W] each; they come stacked, on the device."""
            return self.answer(images)

        @aiorpc.batched(
            max_size=options.max_size,
            stack=True,
            pad_to=options.pad_to,
            device=options.device,
        )
        def refine(self, images: Tensor) -> Iterator[Tensor]:
            """Yield the mean answers for one, two, ... views of each image [3, H, W]."""
            total = self.answer(images)
            yield total
            for views in range(2, VIEWS + 1):
                images = images.roll(1, dims=3).flip(3)
                total = total + self.answer(images)
                yield total / views

    return Served


class Outcome(NamedTuple):
    """The outcome of a client's requests."""

    latencies: list[float]  # seconds, of answered requests
    late: int
    shed: int

    def __str__(self) -> str:
        median = statistics.median(self.latencies) * 1e3 if self.latencies else 0.0
        answered = f"{len(self.latencies):,} answered (median {median:.1f} ms)"
        return f"{answered}, {self.late:,} late, {self.shed:,} shed"


class Client:
    """A client that asks about images of noise, for many users."""

    def __init__(self, model: aiorpc.RRef[Any], side: int, seed: int) -> None:
        self.model, generator = aiorpc.remote(model), torch.Generator().manual_seed(seed)
        shape = (IMAGES, 3, side, side)
        self.images = torch.randint(256, shape, dtype=torch.uint8, generator=generator).unbind()

    @classmethod
    async def start(cls, side: int, seed: int) -> "Client":
        """Make a client of the model that the server has registered."""
        return cls(await aiorpc.lookup("model", on="server"), side, seed)

    async def ask(self, users: int, seconds: float, deadline: float) -> Outcome:
        """Have each user ask again and again; a user that is shed waits for a deadline."""
        loop = asyncio.get_running_loop()
        outcomes: list[float | str] = []
        end = loop.time() + seconds

        async def use(number: int) -> None:
            while (start := loop.time()) < end:
                try:
                    with aiorpc.timeout(deadline):
                        await self.model.infer(self.images[number % len(self.images)])
                    outcomes.append(loop.time() - start)
                except aiorpc.CallTimeout:
                    outcomes.append("late")
                except aiorpc.QueueFull:
                    outcomes.append("shed")
                    await asyncio.sleep(deadline)

        await asyncio.gather(*map(use, range(users)))
        latencies = [each for each in outcomes if isinstance(each, float)]
        return Outcome(latencies, outcomes.count("late"), outcomes.count("shed"))

    async def refine(self) -> list[int]:
        """Take answers for each image until they are close; return how many each took."""

        async def look(image: Tensor) -> int:
            views, before = 0, torch.zeros(CLASSES)
            async for answer in self.model.refine(image):
                views += 1
                if torch.dist(answer, before, float("inf")) < CLOSE:
                    break
                before = answer
            return views

        return await asyncio.gather(*map(look, self.images))

    async def give_up(self) -> tuple[int, int]:
        """Ask about all images at once, give up every other one; return (given up, answered)."""
        requests = [asyncio.create_task(self.model.infer(image)) for image in self.images]
        await asyncio.sleep(0.001)
        given_up = [request.cancel() for request in requests[1::2]].count(True)
        results = await asyncio.gather(*requests, return_exceptions=True)
        return given_up, sum(isinstance(each, Tensor) for each in results)


async def serve(clients: tuple[str, ...], options: argparse.Namespace) -> None:
    """Serve the model, have the clients ask, and print what came of it."""
    model = served(options)(options.model, options.device, options.seed)
    most = torch.zeros(options.max_size, 3, options.side, options.side, dtype=torch.uint8)
    for size in options.pad_to or [options.max_size]:
        await asyncio.to_thread(model.answer, most[:size].to(options.device))  # warms up
    aiorpc.register("model", model)
    seeds = range(options.seed, options.seed + len(clients))
    group = await aiorpc.create(clients, Client.start, options.side, aiorpc.each(seeds))
    print(f"server: process {os.getpid()}, {options.model} on {options.device}", flush=True)
    asked = aiorpc.remote(group).ask(options.users, options.seconds, options.deadline)
    async for client, outcome in asked:  # at the end it raises `GroupError` if some were lost
        print(f"{client.owner_name()}: {outcome}", flush=True)
    before = model.computed
    given_up, answered = map(sum, zip(*await aiorpc.remote(group).give_up(), strict=True))
    asked_about = f"{IMAGES * len(group)} images asked about at once, {given_up} given up"
    print(f"{asked_about}: {answered} answered, {model.computed - before} computed")
    async for client, views in aiorpc.remote(group).refine():
        looked = f"{len(views)} images looked at {sum(views)} times of {len(views) * VIEWS}"
        print(f"{client.owner_name()}: {looked}", flush=True)
    for name, found in aiorpc.observe.stats().batches.items():
        images = f"{found.items:,} images in {found.batches:,} batches of {found.mean:.1f}"
        waited = f"{(found.wait_p50 or 0) * 1e3:.1f} ms, p99 {(found.wait_p99 or 0) * 1e3:.1f} ms"
        print(f"{name.rpartition('.')[2]}: {images} on average; waited: p50 {waited}")


async def main(options: argparse.Namespace) -> None:
    """Serve on rank 0; ask on the other workers until rank 0 has left."""
    clients = [f"client{number}" for number in range(options.clients)]
    rank = os.environ.get("RANK")  # of torchrun, or of a terminal for each worker
    name, trace = ["server", *clients][int(rank or 0)], None
    if options.trace:  # to set a tracer provider in each process is all that traces need
        from ._spans import write_spans

        trace = functools.partial(write_spans, options.trace)
        trace(name)
    local = aiorpc.local_world(clients, name=name, initializer=trace)
    async with aiorpc.worker(name) if rank else local as me:
        await (me.serve("server") if me.rank else serve(me.peers, options))


if __name__ == "__main__":
    clients = int(os.environ.get("WORLD_SIZE", 3)) - 1
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--model", default="mobilenet_v3_small", help="name in torchvision.models")
    add("--side", type=int, default=64, help="pixels of an image's side")
    add("--device", default="cpu", help="device of the model: cpu, cuda:0, ...")
    add("--clients", type=int, default=clients, help="number of client processes")
    add("--users", type=int, default=16, help="users of each client")
    add("--seconds", type=float, default=3.0, help="seconds in which they ask")
    add("--deadline", type=float, default=0.3, help="seconds for a request")
    add("--max-size", type=int, default=16, help="images in a batch, at most")
    add("--pad-to", type=int, nargs="+", help="the only numbers of images that the network gets")
    add("--max-wait", type=float, default=0.0, help="seconds that a batch waits")
    add("--max-pending", type=int, default=64, help="waiting requests, at most")
    add("--seed", type=int, default=0)
    add("--trace", metavar="FILE", help="append the spans of all processes to a file")
    add("--quick", action="store_true", help="half a second with small images")
    options = parser.parse_args()
    if options.model not in torchvision.models.list_models(torchvision.models):
        parser.error(f"torchvision has no classifier called {options.model}")
    if options.quick:
        options.seconds, options.side = 0.5, 32
    asyncio.run(main(options))
