"""A learner whose process dies: its weights are in the memory of those who follow them."""

import asyncio

import torch
from torch import nn

import aiorpc_torch as aiorpc
from aiorpc_torch.training import Weights, follow, recover


class Learner:
    """Model, optimizer and step are one tree: whoever comes back needs all of them."""

    def __init__(self) -> None:
        self.model = nn.Linear(4, 1)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.02)
        self.step = 0

    def state(self) -> dict[str, object]:
        parts = {"model": self.model, "optimizer": self.optimizer}
        return {"step": self.step, **{name: each.state_dict() for name, each in parts.items()}}

    @classmethod
    async def begin(cls) -> "Learner":
        """Make a learner, in a replacement process with the state that its followers have."""
        learner = cls()
        if (found := await recover("learner")) is not None:
            learner.model.load_state_dict(found.tree["model"])
            learner.optimizer.load_state_dict(found.tree["optimizer"])
            learner.step = found.tree["step"]
        learner.weights = Weights(learner.state(), version=found.version if found else 0)
        aiorpc.register("learner", learner.weights)
        return learner

    async def train(self, steps: int) -> tuple[int, float]:
        for _ in range(steps):
            x = torch.randn(64, 4)
            loss = (self.model(x) - x.sum(1, keepdim=True)).square().mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.step += 1
        await self.weights.publish(self.state())
        return self.step, loss.item()


async def main() -> None:
    async with aiorpc.local_world(["learner"], max_restarts=1):
        learner = aiorpc.remote(await aiorpc.supervised("learner", Learner.begin), retries=1)
        async with await follow("learner") as copy:  # here, as an actor would
            for version in (1, 2):
                step, loss = await learner.train(200)
                print(f"version {await copy.wait(version)}, step {step}, learned: {loss < 0.5}")
                if version == 1:
                    aiorpc.testing.kill("learner")


if __name__ == "__main__":
    asyncio.run(main())
