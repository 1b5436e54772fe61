"""One agent, many observers: REINFORCE on CartPole-v1 with batched inference.

PyTorch's tutorial on batch RPC processing as coroutines. Observers in processes of their own play
environments, each in a coroutine, and ask the agent about every single state: `await
remote(agent).select(state)`. `select` is `@batched`, so the agent's network runs once for all calls
that have come meanwhile. No observer waits for another, and no code holds a lock.

In a round each environment plays whole episodes until it has made its steps; then the agent learns
from all of them. The agent answers with a probability and the observer draws. So learning depends
on the seed only, not on the batches or on the process of an environment.

    python -m examples.cartpole                                     # the demo, half a minute
    python -m examples.cartpole --observers 10 --environments 1 --rounds 10 --no-batched
    torchrun --nproc-per-node 3 -m examples.cartpole
"""

import argparse
import asyncio
import itertools
import os
import time
from collections.abc import Sequence
from statistics import mean
from typing import Any

from torch import Tensor

import aiorpc_torch as aiorpc

from ._learning import CartPole, Episode, Learner


class Agent(Learner):
    """An agent that answers observers and learns from their episodes."""

    @aiorpc.batched(max_size=256, stack=True)
    async def select(self, states: Tensor) -> list[float]:
        """Return the probabilities of a push to the right; states come stacked: [B, 4]."""
        return self.chances(states)

    async def select_alone(self, state: Tensor) -> float:
        """Return the same for one state [4], unbatched, for comparison."""
        return self.chances(state.unsqueeze(0))[0]


class Observer:
    """An observer that plays environments, each in a coroutine of its own."""

    def __init__(self, agent: aiorpc.RRef[Agent], seeds: Sequence[int]) -> None:
        self.agent = agent
        self.environments = [CartPole(seed) for seed in seeds]

    async def play(self, method: str, steps: int) -> list[Episode]:
        """Play whole episodes of each environment, until each has made `steps` steps."""
        select = getattr(aiorpc.remote(self.agent), method)
        plays = [self._play(each, select, steps) for each in self.environments]
        return [*itertools.chain(*await asyncio.gather(*plays))]

    async def _play(self, environment: CartPole, select: Any, steps: int) -> list[Episode]:
        episodes: list[Episode] = []
        while steps > 0:
            state, done = environment.reset(), False
            states, actions, rewards = [], [], []
            while not done:
                states.append(state)
                actions.append(environment.draw(await select(state)))
                state, reward, done = environment.step(actions[-1])
                rewards.append(reward)
            episodes.append(Episode.of(states, actions, rewards))
            steps -= len(actions)
        return episodes


async def new_team(
    names: Sequence[str], options: argparse.Namespace
) -> tuple[Agent, aiorpc.Group[Observer]]:
    """Make an agent here, and an observer on every worker of `names`."""
    agent, size = Agent(options.seed, options.device), options.environments
    firsts = [10_000 * options.seed + size * number for number in range(len(names))]
    seeds = [range(first, first + size) for first in firsts]
    return agent, await aiorpc.create(names, Observer, aiorpc.RRef(agent), aiorpc.each(seeds))


async def train(
    agent: Agent, observers: aiorpc.Group[Observer], method: str, steps: int
) -> list[Episode]:
    """Play a round of every environment, and learn from it; return its episodes."""
    episodes = [*itertools.chain(*await aiorpc.remote(observers).play(method, steps))]
    agent.learn(episodes)
    return episodes


async def lead(names: Sequence[str], options: argparse.Namespace) -> None:
    """Train the agent of this process with observers on the workers of `names`."""
    agent, observers = await new_team(names, options)
    print(f"{len(observers)} observers play {options.environments} environments each", flush=True)
    method = "select" if options.batched else "select_alone"
    start, steps, rewards = time.monotonic(), 0, list[float]()
    for number in range(options.rounds):
        episodes = await train(agent, observers, method, options.steps)
        found = [float(episode.rewards.sum()) for episode in episodes]
        steps, rewards = steps + int(sum(found)), rewards + found
        seconds = time.monotonic() - start
        done = f"round {number + 1}: {len(found)} episodes, mean reward {mean(found):.1f}"
        print(f"{done}; {steps / seconds:,.0f} agent steps/s", flush=True)
        if seconds > options.seconds:
            break
    for name, batches in aiorpc.observe.stats().batches.items():
        print(f"{name}: {batches.items:,} calls in {batches.batches:,} batches")
    first, last = mean(rewards[:10]), mean(rewards[-10:])
    print(f"reward, first ten episodes: {first:.1f}, last ten of {len(rewards)}: {last:.1f}")


async def main(options: argparse.Namespace) -> None:
    """Lead as the agent on rank 0; serve on the other workers until it has left."""
    rank = int(os.environ.get("RANK", -1))  # of torchrun, or of a terminal for each worker
    local = aiorpc.local_world(
        [f"observer{number}" for number in range(options.observers)], name="agent"
    )
    name = f"observer{rank - 1}" if rank else "agent"
    async with local if rank < 0 else aiorpc.worker(name) as me:
        await (me.serve(until="agent") if me.rank else lead(me.peers, options))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--seconds", type=float, default=30.0, help="seconds of training, about")
    add("--rounds", type=int, default=1_000_000, help="rounds of training, at most")
    add("--steps", type=int, default=100, help="steps of each environment in a round, at least")
    add("--no-batched", dest="batched", action="store_false", help="answer each call by itself")
    add("--observers", type=int, default=2, help="number of observer processes")
    add("--environments", type=int, default=16, help="number of environments of an observer")
    add("--device", default="cpu", help="device of the agent's network, such as cuda:0")
    add("--seed", type=int, default=0)
    add("--quick", action="store_true", help="two short rounds, as a check")
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.steps = 2, 50
    asyncio.run(main(options))
