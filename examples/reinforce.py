"""CartPole-v1 until it is solved: REINFORCE by an agent with several observers.

The program of "Getting Started with Distributed RPC Framework" with the roles inverted. There an
observer asks for each action and reports each reward, and the agent records both by observer. Here
an episode is a coroutine of the agent: `await remote(observer).step(action)` is the one call a
step, and the data of the episode are in its local variables.

The task is solved at a running reward over 475. In each round every observer plays one episode, of
which the worst counts. Then some episodes more are played with the best action, not a drawn one.

    python -m examples.reinforce --observers 2
    torchrun --nproc-per-node 3 -m examples.reinforce
"""

import argparse
import asyncio
import os
import sys
import time
from collections.abc import Callable, Sequence
from random import Random
from statistics import mean

import aiorpc_torch as aiorpc

from ._learning import CartPole, Episode, Learner

SOLVED = 475.0
FRESH = 0.05  # weight of a round in the running reward


@aiorpc.exclusive
class Observer(CartPole):
    """An environment for remote calls: one at a time, since its methods run in threads.

    Its worker calls `close` when the last RRef of it is dropped.
    """


class Agent(Learner):
    """An agent that plays its observers' environments and learns from each round."""

    def __init__(self, observers: aiorpc.Group[Observer], seed: int, device: str = "cpu") -> None:
        super().__init__(seed, device)
        self.observers = observers
        self.draws = [Random(f"{seed}, {number}").random for number in range(len(observers))]
        self.running, self.episodes, self.steps = 0.0, 0, 0

    async def round(self, draws: Sequence[Callable[[], float]]) -> list[Episode]:
        """Play an episode of every observer, all at once; `draws` are of numbers from 0 to 1."""
        return await asyncio.gather(*map(self._episode, self.observers, draws))

    async def _episode(self, observer: aiorpc.RRef[Observer], draw: Callable[[], float]) -> Episode:
        state, done = await aiorpc.remote(observer).reset(), False
        states, actions, rewards = [], [], []
        while not done:
            states.append(state)
            actions.append(int(draw() < self.chances(state.unsqueeze(0))[0]))
            state, reward, done = await aiorpc.remote(observer).step(actions[-1])
            rewards.append(reward)
        return Episode.of(states, actions, rewards)

    async def solve(self, most: int) -> bool:
        """Learn until the task is solved or `most` episodes are played; return True if solved."""
        while self.running <= SOLVED and self.episodes < most:
            played = await self.round(self.draws)
            self.learn(played)
            self.episodes += len(played)
            self.steps += sum(len(episode.actions) for episode in played)
            worst = min(float(episode.rewards.sum()) for episode in played)
            self.running += FRESH * (worst - self.running)
            print(f"{self.episodes:,} episodes: {worst:.0f}, running reward {self.running:.1f}")
        return self.running > SOLVED

    async def evaluate(self, episodes: int) -> list[float]:
        """Return the rewards of `episodes` episodes with the best action, not a drawn one."""
        played: list[Episode] = []
        while len(played) < episodes:
            played += await self.round([lambda: 0.5] * len(self.observers))
        return [float(episode.rewards.sum()) for episode in played[:episodes]]


async def lead(names: Sequence[str], options: argparse.Namespace) -> bool:
    """Train and evaluate with observers on the workers of `names`; return True if solved."""
    seeds = [10_000 * options.seed + number for number in range(len(names))]
    observers = await aiorpc.create(names, Observer, aiorpc.each(seeds))
    agent, start = Agent(observers, options.seed, options.device), time.monotonic()
    solved = await agent.solve(options.max_episodes)
    seconds = time.monotonic() - start
    said = f"solved: running reward {agent.running:.1f} after {agent.episodes:,} episodes, "
    said += f"{agent.steps:,} steps, {seconds:.0f} s ({agent.steps / seconds:,.0f} steps/s)"
    print(said if solved else f"not {said}")
    rewards = await agent.evaluate(options.evaluate)
    print(f"greedy: mean reward {mean(rewards):.1f} of {len(rewards)}, least {min(rewards):.0f}")
    return solved


async def main(options: argparse.Namespace) -> bool:
    """Lead as the agent on rank 0; serve on the other workers until it has left."""
    rank = int(os.environ.get("RANK", -1))  # of torchrun, or of a terminal for each worker
    local = aiorpc.local_world(
        [f"observer{number}" for number in range(options.observers)], name="agent"
    )
    name = f"observer{rank - 1}" if rank else "agent"
    async with local if rank < 0 else aiorpc.worker(name) as me:
        if me.rank:
            await me.serve(until="agent")
        return me.rank > 0 or await lead(me.peers, options)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--seed", type=int, default=0)
    add("--observers", type=int, default=2, help="number of observer processes")
    add("--max-episodes", type=int, default=2_000, help="episodes of all observers, at most")
    add("--evaluate", type=int, default=10, metavar="N", help="greedy episodes at the end")
    add("--device", default="cpu", help="device of the agent's network, such as cuda:0")
    add("--quick", action="store_true", help="ten episodes, as a check")
    options = parser.parse_args()
    if options.quick:
        options.max_episodes, options.evaluate = 10, 2
    solved = asyncio.run(main(options))
    sys.exit(not (solved or options.quick))
