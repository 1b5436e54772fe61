"""A model cut over two processes, trained with distributed autograd."""

import asyncio

import torch
from torch import Tensor, nn

import aiorpc_torch as aiorpc
from aiorpc_torch import RRef, autograd, create, remote


class Stage:
    def __init__(self, seed: int, *sizes: int) -> None:
        torch.manual_seed(seed)
        self.layers = nn.Sequential(nn.Linear(*sizes), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layers(x)
        return result

    def parameters(self) -> list[RRef[Tensor]]:
        return [RRef(parameter) for parameter in self.layers.parameters()]


async def main() -> None:
    async with aiorpc.local_world(["first", "second"]):
        first = await create("first", Stage, 0, 4, 16)
        second = await create("second", Stage, 1, 16, 1)
        parameters = [*await remote(first).parameters(), *await remote(second).parameters()]
        optimizer = await autograd.DistributedOptimizer.create(torch.optim.SGD, parameters, lr=0.5)

        torch.manual_seed(2)
        x = torch.randn(64, 4)
        y = x.mean(1, keepdim=True).tanh()
        losses = []
        for _ in range(60):
            async with autograd.context() as context:  # records calls through both processes
                out = await remote(second).forward(await remote(first).forward(x))
                loss = nn.functional.mse_loss(out, y)
                await context.backward([loss])
                await optimizer.step(context)
            losses.append(float(loss.detach()))
        print("learned:", losses[-1] < losses[0] / 20)


if __name__ == "__main__":
    asyncio.run(main())
