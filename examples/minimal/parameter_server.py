"""A parameter server: one optimizer step for the gradients of all trainers."""

import asyncio

import torch
from torch import Tensor, nn

import aiorpc_torch as aiorpc

TRAINERS = ["trainer0", "trainer1", "trainer2"]


class Server:
    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(2, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.5)

    @aiorpc.batched(aiorpc.Round(len(TRAINERS)))  # runs once all trainers have called
    async def update(self, gradients: list[list[Tensor]]) -> dict[str, Tensor]:
        for parameter, *parts in zip(self.model.parameters(), *gradients, strict=True):
            parameter.grad = torch.stack(parts).mean(0)
        self.optimizer.step()
        return self.model.state_dict()

    async def state(self) -> dict[str, Tensor]:
        return self.model.state_dict()


class Trainer:
    async def train(self, server: aiorpc.RRef[Server], seed: int, steps: int) -> float:
        random = torch.Generator().manual_seed(seed)
        model = nn.Linear(2, 1)
        model.load_state_dict(await aiorpc.remote(server).state())
        for _ in range(steps):
            x = torch.randn(16, 2, generator=random)
            loss = nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))
            gradients = torch.autograd.grad(loss, list(model.parameters()))
            model.load_state_dict(await aiorpc.remote(server).update(list(gradients)))
        return loss.item()


async def main() -> None:
    async with aiorpc.local_world(["server", *TRAINERS]):
        server = await aiorpc.create("server", Server)
        trainers = await aiorpc.create(TRAINERS, Trainer)
        losses = await aiorpc.remote(trainers).train(
            server, aiorpc.each(range(3)), 50
        )  # all three at once
        print("trained:", all(loss < 1e-4 for loss in losses))


if __name__ == "__main__":
    asyncio.run(main())
