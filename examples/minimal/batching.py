"""One forward pass for many callers: `@batched` collects calls that wait."""

import asyncio

import torch
from torch import Tensor, nn

import aiorpc_torch as aiorpc


class Policy:
    def __init__(self) -> None:
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 2))
        self.sizes: list[int] = []

    @aiorpc.batched(max_size=32, max_wait=0.05, stack=True)
    def act(self, states: Tensor) -> Tensor:  # [N, 4] in, [N] out; each caller gets its own row
        self.sizes.append(len(states))
        return self.net(states).argmax(1)

    async def batches(self) -> list[int]:
        return self.sizes


async def episode(policy: aiorpc.RRef[Policy], steps: int) -> int:
    """Play: each step waits for the action of the one before."""
    state, ones = torch.zeros(4), 0
    for _ in range(steps):
        action = await aiorpc.remote(policy).act(state)
        ones += int(action)
        state = torch.roll(state, 1) + action
    return ones


async def main() -> None:
    async with aiorpc.local_world(["learner"]):
        policy = await aiorpc.create("learner", Policy)
        await asyncio.gather(*(episode(policy, 20) for _ in range(64)))
        sizes = await aiorpc.remote(policy).batches()
        print(f"{sum(sizes)} calls, fewer batches: {len(sizes) < sum(sizes) / 8}")


if __name__ == "__main__":
    asyncio.run(main())
