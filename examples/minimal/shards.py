"""A model that is sharded over two trainers by FSDP; an actor follows both, and has it whole."""

import asyncio
import tempfile

import torch
from torch import distributed as dist, nn
from torch.distributed.fsdp import fully_shard

import aiorpc_torch as aiorpc
from aiorpc_torch.training import Weights, follow

TRAINERS = ["trainer0", "trainer1"]


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 1))


def loss_of(model: nn.Module) -> torch.Tensor:
    return (model(x := torch.randn(64, 4)) - x.sum(1, keepdim=True)).square().mean()


class Trainer:
    """One of two. What talks to the other one is a plain `def`, so it runs in a thread."""

    def join(self, rank: int, place: str) -> None:
        dist.init_process_group("gloo", init_method=f"file://{place}", rank=rank, world_size=2)
        self.model = fully_shard(make_model(), mesh=dist.init_device_mesh("cpu", (2,)))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.02)
        self.weights = Weights(self.model.state_dict())  # DTensors: its own shards
        aiorpc.register("policy", self.weights)

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.optimizer.zero_grad()
            loss_of(self.model).backward()
            self.optimizer.step()

    async def publish(self) -> int:
        return await self.weights.publish(self.model.state_dict())


async def main() -> None:
    model = make_model()
    with tempfile.TemporaryDirectory() as folder:
        async with aiorpc.local_world(TRAINERS):
            trainers = aiorpc.remote(await aiorpc.create(TRAINERS, Trainer))
            await trainers.join(aiorpc.each([0, 1]), f"{folder}/group")
            async with await follow("policy", on=TRAINERS, into=model) as policy:
                await trainers.train(200)
                await policy.wait((await trainers.publish())[0])
                print(f"version {policy.version}, learned: {loss_of(model) < 0.5}")


if __name__ == "__main__":
    asyncio.run(main())
