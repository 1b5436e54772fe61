"""A sweep over learning rates: results as they come, and a trial that fails is one of them."""

import asyncio

import torch

import aiorpc_torch as aiorpc


class Trials:
    @aiorpc.max_concurrency(2)  # of this worker's threads, two train
    def train(self, rate: float) -> float:
        x = torch.zeros((), requires_grad=True)
        optimizer = torch.optim.SGD([x], lr=rate)
        for _ in range(200):
            if aiorpc.is_cancelled():  # nobody waits for the result any more
                break
            optimizer.zero_grad()
            loss = (x - 3) ** 2
            loss.backward()
            optimizer.step()
        if not loss.isfinite():
            raise FloatingPointError("it diverged")
        return float(loss.detach())


async def main() -> None:
    async with aiorpc.local_world(["worker0", "worker1"]) as me:
        trials = await aiorpc.create(me.peers, Trials)
        rates, losses = [0.001, 0.01, 0.5, 1.5], {}
        outcomes = trials.map_unordered(Trials.train, rates, in_flight=4, return_exceptions=True)
        async for rate, outcome in outcomes:
            if isinstance(outcome, BaseException):
                print(f"rate {rate}: {outcome}")
            else:
                losses[rate] = outcome
        print("best rate:", min(losses, key=losses.__getitem__))


if __name__ == "__main__":
    asyncio.run(main())
