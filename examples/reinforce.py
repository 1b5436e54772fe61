"""CartPole-v1 until it is solved: REINFORCE by an agent with several observers.

The program of "Getting Started with Distributed RPC Framework", turned inside out. There an
observer asks for each action and reports each reward, and the agent keeps books of who did what.
Here an episode is a coroutine of the agent: `await remote(observer).step(action)` is the one call a
step, and what belongs to the episode is in its local variables.

Solved is a running reward over 475: in each round every observer plays one episode, of which the
worst counts. Then the best action, not a drawn one, is taken in some episodes more.

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
FRESH = 0.05  # of a round in the running reward

Choose = Callable[[float], int]  # of how likely 1 is, an action


def drawing(seed: str) -> Choose:
    """By chance: 1 as likely as it shall be."""
    chance = random.Random(seed)
    return lambda likely: int(chance.random() < likely)


class Agent(Learner):
    """Plays the environments of its observers, and learns from each round."""

    def __init__(self, observers: Sequence[RRef[CartPole]], seed: int, device: str = "cpu") -> None:
        super().__init__(seed, device)
        self.observers = observers
        self.draws = [drawing(f"{seed}, {number}") for number in range(len(observers))]
        self.running = 0.0
        self.rewards: list[float] = []  # of each round: the worst observer's
        self.steps = 0

    async def round(self, chooses: Sequence[Choose]) -> list[Episode]:
        """An episode of every observer, all at once."""
        return await asyncio.gather(*map(self._episode, self.observers, chooses))

    async def _episode(self, observer: RRef[CartPole], choose: Choose) -> Episode:
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
        """The rewards of so many episodes with the best action, not a drawn one."""
        rounds = math.ceil(episodes / len(self.observers))
        greedy: list[Choose] = [round] * len(self.observers)
        played = [each for _ in range(rounds) for each in await self.round(greedy)]
        return [float(each.rewards.sum()) for each in played[:episodes]]


async def solve(agent: Agent, episodes: int) -> bool:
    """Learn until it is solved, or so many episodes are played; whether it is."""
    columns = MofNCompleteColumn(), BarColumn(), TextColumn("{task.description}")
    with Progress(*columns, TimeElapsedColumn()) as progress:
        bar = progress.add_task("", total=int(SOLVED))
        while agent.running <= SOLVED and len(agent.rewards) * len(agent.observers) < episodes:
            await agent.improve()
            found = f"running reward; {len(agent.rewards):,} rounds, {agent.steps:,} steps"
            progress.update(bar, completed=int(agent.running), description=found)
    return agent.running > SOLVED


async def main(me: aiorpc.Worker, options: argparse.Namespace) -> bool:
    """Observers serve, and the agent leads; False if it was not solved."""
    if me.rank:
        await serve("agent")
        return True
    solved = await lead(me.peers, options)
    end()
    return solved


async def lead(names: Sequence[str], options: argparse.Namespace) -> bool:
    """Train and evaluate; whether it was solved."""
    observers = [
        await create(name, CartPole, 10_000 * options.seed + number)
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
    """What the command line says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--seed", type=int, default=0)
    add("--observers", type=int, default=2, help="processes")
    add("--max-episodes", type=int, default=2_000, help="of all observers together")
    add("--evaluate", type=int, default=10, metavar="N", help="episodes at the end")
    add("--device", default="cpu", help="of the agent's network, such as cuda:0")
    add("--plot", type=Path, default=Path("out/reinforce.png"))
    add("--quick", action="store_true", help="ten episodes, to see that it works")
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
