"""Two learners with one model by DistributedDataParallel, and an actor that sends them batches.

torchrun --nproc-per-node 3 examples/minimal/torchrun_ddp.py
"""

import asyncio

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import aiorpc_torch as aiorpc

LEARNERS, STEPS = 2, 50
TRUE = torch.tensor([[2.0], [-3.0]])


class Learner:
    def __init__(self) -> None:
        self.batches: asyncio.Queue[tuple[Tensor, Tensor]] = asyncio.Queue(4)

    async def add(self, x: Tensor, y: Tensor) -> None:
        await self.batches.put((x, y))  # an actor that is too fast waits here


def start_group(rank: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    dist.init_process_group("gloo", rank=rank, world_size=LEARNERS)
    model = DistributedDataParallel(nn.Linear(2, 1, bias=False))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
    optimizer.zero_grad()
    nn.functional.mse_loss(model(x), y).backward()  # averages the gradients of all learners
    optimizer.step()


async def main() -> None:
    async with aiorpc.worker() as me:
        if me.rank >= LEARNERS:
            refs = [await aiorpc.lookup("learner", on=rank) for rank in range(LEARNERS)]
            learners = aiorpc.remote(aiorpc.Group(refs))
            for _ in range(STEPS):
                x = torch.randn(LEARNERS, 16, 2)
                await learners.add(aiorpc.each(x), aiorpc.each(x @ TRUE))
            return  # the end of the block waits until the learners have left
        aiorpc.register("learner", learner := Learner())
        # Collectives wait for the other learner: each of them runs in a thread.
        model, optimizer = await asyncio.to_thread(start_group, me.rank)
        for _ in range(STEPS):
            await asyncio.to_thread(step, model, optimizer, *await learner.batches.get())
        error = (next(model.parameters()).detach() - TRUE.T).abs().max()
        print(f"learner {me.rank} has learned: {bool(error < 0.1)}", flush=True)
        await asyncio.to_thread(dist.destroy_process_group)


if __name__ == "__main__":
    asyncio.run(main())
