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
import math
import random
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import aiorpc_torch as aiorpc
from aiorpc_torch import RRef, create, remote

from ._launch import add_world, end, launch, serve
from ._learning import CartPole, Episode, Learner
from ._plot import curves

SOLVED = 475.0
FRESH = 0.05  # weight of a round in the running reward

Choose = Callable[[float], int]  # from the probability of 1 to an action


def drawing(seed: str) -> Choose:
    """Return a function that draws 1 with the given probability, else 0."""
    chance = random.Random(seed)
    return lambda likely: int(chance.random() < likely)


@aiorpc.exclusive
class Observer(CartPole):
    """An environment for remote calls: one at a time, since its methods run in threads.

    Its worker calls `close` when the last RRef of it is dropped.
    """


class Agent(Learner):
    """An agent that plays its observers' environments and learns from each round."""

    def __init__(self, observers: Sequence[RRef[Observer]], seed: int, device: str = "cpu") -> None:
        super().__init__(seed, device)
        self.observers = observers
        self.draws = [drawing(f"{seed}, {number}") for number in range(len(observers))]
        self.running = 0.0
        self.rewards: list[float] = []  # the worst observer's reward of each round
        self.steps = 0

    async def round(self, chooses: Sequence[Choose]) -> list[Episode]:
        """Play an episode of every observer, all at once."""
        return await asyncio.gather(*map(self._episode, self.observers, chooses))

    async def _episode(self, observer: RRef[Observer], choose: Choose) -> Episode:
        state, done = await remote(observer).reset(), False
        states, actions, rewards = [], [], []
        while not done:
            states.append(state)
            actions.append(choose(self.chances(state.unsqueeze(0))[0]))
            state, reward, done = await remote(observer).step(actions[-1])
            rewards.append(reward)
        return Episode.of(states, actions, rewards)

    async def improve(self) -> None:
        """Play a round, and learn from it."""
        episodes = await self.round(self.draws)
        self.learn(episodes)
        self.steps += sum(len(each.actions) for each in episodes)
        self.rewards.append(min(float(each.rewards.sum()) for each in episodes))
        self.running += FRESH * (self.rewards[-1] - self.running)

    async def evaluate(self, episodes: int) -> list[float]:
        """Return the rewards of `episodes` episodes with the best action, not a drawn one."""
        rounds = math.ceil(episodes / len(self.observers))
        greedy: list[Choose] = [round] * len(self.observers)
        played = [each for _ in range(rounds) for each in await self.round(greedy)]
        return [float(each.rewards.sum()) for each in played[:episodes]]


async def solve(agent: Agent, episodes: int) -> bool:
    """Learn until the task is solved or `episodes` are played; return True if solved."""
    columns = MofNCompleteColumn(), BarColumn(), TextColumn("{task.description}")
    with Progress(*columns, TimeElapsedColumn()) as progress:
        bar = progress.add_task("", total=int(SOLVED))
        while agent.running <= SOLVED and len(agent.rewards) * len(agent.observers) < episodes:
            await agent.improve()
            found = f"running reward; {len(agent.rewards):,} rounds, {agent.steps:,} steps"
            progress.update(bar, completed=int(agent.running), description=found)
    return agent.running > SOLVED


async def main(me: aiorpc.Worker, options: argparse.Namespace) -> bool:
    """Serve as an observer, or lead as the agent; return False if the task was not solved."""
    if me.rank:
        await serve("agent")
        return True
    solved = await lead(me.peers, options)
    end()
    return solved


async def lead(names: Sequence[str], options: argparse.Namespace) -> bool:
    """Train and evaluate; return True if the task was solved."""
    observers = [
        await create(name, Observer, 10_000 * options.seed + number)
        for number, name in enumerate(names)
    ]
    agent, start = Agent(observers, options.seed, options.device), time.monotonic()
    solved = await solve(agent, options.max_episodes)
    seconds = time.monotonic() - start
    print(
        f"{'solved' if solved else 'not solved'}: running reward {agent.running:.1f} after "
        f"{len(agent.rewards) * len(observers):,} episodes, {agent.steps:,} steps, "
        f"{seconds:.0f} s ({agent.steps / seconds:,.0f} steps/s)"
    )
    rewards = await agent.evaluate(options.evaluate)
    print(f"greedy: mean reward {mean(rewards):.1f} of {len(rewards)}, least {min(rewards):.0f}")
    report(agent.rewards, options.plot)
    return solved


def report(rewards: Sequence[float], path: Path) -> None:
    """Draw the learning curve."""
    running = [0.0]
    for reward in rewards:
        running.append(running[-1] + FRESH * (reward - running[-1]))
    lines = {"worst of a round": rewards, "running reward": running[1:]}
    level = f"solved: {SOLVED:.0f}", SOLVED
    title = "REINFORCE on CartPole-v1"
    curves(path, lines, title=title, xlabel="round", ylabel="reward", level=level)
    print(f"learning curve: {path}")


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--seed", type=int, default=0)
    add("--observers", type=int, default=2, help="number of observer processes")
    add("--max-episodes", type=int, default=2_000, help="episodes of all observers, at most")
    add("--evaluate", type=int, default=10, metavar="N", help="greedy episodes at the end")
    add("--device", default="cpu", help="device of the agent's network, such as cuda:0")
    add("--plot", type=Path, default=Path("out/reinforce.png"))
    add("--quick", action="store_true", help="ten episodes, as a check")
    add_world(parser)
    options = parser.parse_args()
    if min(options.observers, options.max_episodes, options.evaluate) < 1:
        parser.error("there is at least one observer and one episode")
    if options.quick:
        options.max_episodes, options.evaluate = 10, 2
    return options


if __name__ == "__main__":
    given = arguments()
    names = ["agent", *(f"observer{number}" for number in range(given.observers))]
    solved = launch(main, names, given)
    sys.exit(not (solved or given.quick))
