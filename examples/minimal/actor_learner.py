"""Actors play with a policy and a learner improves it, all at the same time."""

import asyncio

import torch
from torch import Tensor

import aiorpc_torch as aiorpc

PAYOFFS = torch.tensor([0.2, 0.5, 0.9])  # of the arms of a bandit


class Learner:
    def __init__(self) -> None:
        self.logits = torch.zeros(3, requires_grad=True)
        self.optimizer = torch.optim.Adam([self.logits], lr=0.05)

    @aiorpc.batched(max_size=64)
    async def act(self, actors: list[int]) -> list[int]:  # once for all actors that wait
        return torch.multinomial(self.logits.softmax(0), len(actors), replacement=True).tolist()

    @aiorpc.batched(max_size=64, stack=True)
    def learn(self, arms: Tensor, rewards: Tensor) -> Tensor:  # REINFORCE with a baseline
        advantage = rewards - PAYOFFS.mean()
        loss = -(self.logits.log_softmax(0)[arms] * advantage).mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return arms

    async def payoff(self) -> float:
        return float(self.logits.detach().softmax(0) @ PAYOFFS)


class Actor:
    async def play(self, learner: aiorpc.RRef[Learner], games: int) -> None:
        await asyncio.gather(*(self._game(learner, number) for number in range(games)))

    async def _game(self, learner: aiorpc.RRef[Learner], number: int) -> None:
        for _ in range(50):
            arm = await aiorpc.remote(learner).act(number)
            await aiorpc.remote(learner).learn(arm, torch.bernoulli(PAYOFFS[arm]))


async def main() -> None:
    async with aiorpc.local_world(["learner", "actor0", "actor1"]):
        learner = await aiorpc.create("learner", Learner)
        actors = await aiorpc.create(["actor0", "actor1"], Actor)
        playing = asyncio.ensure_future(aiorpc.remote(actors).play(learner, 32))
        payoffs = list[float]()
        while not playing.done():
            async with aiorpc.paused(learner):  # neither `act` nor `learn` runs meanwhile
                payoffs.append(await aiorpc.remote(learner).payoff())
            await asyncio.wait([playing], timeout=0.2)
        await playing
        print("better than at first:", await aiorpc.remote(learner).payoff() > payoffs[0] + 0.2)


if __name__ == "__main__":
    asyncio.run(main())
