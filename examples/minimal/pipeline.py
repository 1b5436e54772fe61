"""A model cut over two processes, trained with distributed autograd."""

import asyncio

import torch
from torch import Tensor, nn

import aiorpc_torch as aiorpc


class Stage:
    def __init__(self, seed: int, *sizes: int) -> None:
        torch.manual_seed(seed)
        self.layers = nn.Sequential(nn.Linear(*sizes), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layers(x)
        return result

    def parameters(self) -> list[aiorpc.RRef[Tensor]]:
        return [aiorpc.RRef(parameter) for parameter in self.layers.parameters()]


async def main() -> None:
    async with aiorpc.local_world(["first", "second"]):
        first = await aiorpc.create("first", Stage, 0, 4, 16)
        second = await aiorpc.create("second", Stage, 1, 16, 1)
        parameters = [
            *await aiorpc.remote(first).parameters(),
            *await aiorpc.remote(second).parameters(),
        ]
        optimizer = await aiorpc.autograd.DistributedOptimizer.create(
            torch.optim.SGD, parameters, lr=0.5
        )

        torch.manual_seed(2)
        x = torch.randn(64, 4)
        y = x.mean(1, keepdim=True).tanh()
        losses = []
        for _ in range(60):
            async with aiorpc.autograd.context() as context:  # records calls through both processes
                out = await aiorpc.remote(second).forward(await aiorpc.remote(first).forward(x))
                loss = nn.functional.mse_loss(out, y)
                await context.backward([loss])
                await optimizer.step(context)
            losses.append(float(loss.detach()))
        print("learned:", losses[-1] < losses[0] / 20)


if __name__ == "__main__":
    asyncio.run(main())
