"""One agent, many observers: REINFORCE on CartPole-v1 with batched inference.

PyTorch's tutorial on batch RPC processing as coroutines. Observers in processes of their own play
environments, each in a coroutine, and ask the agent about every single state: `await
remote(agent).select(state)`. `select` is `@batched`, so the agent's network runs once for all calls
that have come meanwhile. No observer waits for another, and no code holds a lock.

In a round each environment plays whole episodes until it has made its steps; then the agent learns
from all of them. The agent answers with a probability and the observer draws. So learning depends
on the seed only, not on the batches or on the process of an environment.

    python -m examples.cartpole                                     # the demo, in a minute
    python -m examples.cartpole --observers 10 --envs-per-observer 1 --rounds 10 --no-batched
    torchrun --nproc-per-node 3 -m examples.cartpole
"""

import argparse
import asyncio
import contextlib
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

import aiorpc_torch as aiorpc
from aiorpc_torch import RRef, batched, create, remote

from ._display import Display, report
from ._launch import add_world, end, launch, serve
from ._learning import CartPole, Episode, Learner


class Agent(Learner):
    """An agent that answers observers and learns from their episodes."""

    def __init__(self, seed: int, device: str = "cpu") -> None:
        super().__init__(seed, device)
        self.rewards: list[float] = []
        self.steps = self.batches = 0

    @batched(max_size=256, stack=True)
    async def select(self, states: Tensor) -> list[float]:
        """Return the probabilities of a push to the right; states come stacked: [B, 4]."""
        return self._count(self.chances(states))

    async def select_alone(self, state: Tensor) -> float:
        """Return the same for one state [4], unbatched, for comparison."""
        return self._count(self.chances(state.unsqueeze(0)))[0]

    def _count(self, chances: list[float]) -> list[float]:
        self.steps += len(chances)
        self.batches += 1
        return chances


class Observer:
    """An observer that plays environments, each in a coroutine of its own."""

    def __init__(self, agent: RRef[Agent], seeds: Sequence[int]) -> None:
        self.agent = agent
        self.environments = [CartPole(seed) for seed in seeds]

    async def play(self, method: str, steps: int) -> list[Episode]:
        """Play whole episodes of each environment, until each has made `steps` steps."""
        select = getattr(remote(self.agent), method)
        return await together([_play(each, select, steps) for each in self.environments])


async def _play(environment: CartPole, select: Any, steps: int) -> list[Episode]:
    episodes: list[Episode] = []
    while steps > 0:
        episodes.append(await _episode(environment, select))
        steps -= len(episodes[-1].actions)
    return episodes


async def _episode(environment: CartPole, select: Any) -> Episode:
    state, done = environment.reset(), False
    states, actions, rewards = [], [], []
    while not done:
        states.append(state)
        actions.append(environment.draw(await select(state)))
        state, reward, done = environment.step(actions[-1])
        rewards.append(reward)
    return Episode.of(states, actions, rewards)


async def together(plays: Sequence[Any]) -> list[Episode]:
    """Return the episodes of all, in the order of `plays`."""
    return [episode for episodes in await asyncio.gather(*plays) for episode in episodes]


class Team:
    """The agent of this process and its observers."""

    def __init__(self, agent: Agent, observers: Sequence[RRef[Observer]], steps: int) -> None:
        self.agent = agent
        self.observers = observers
        self.steps = steps

    async def play(self, method: str) -> list[Episode]:
        """Play a round of every environment."""
        return await together([remote(each).play(method, self.steps) for each in self.observers])

    async def train(self, method: str, rounds: int, seconds: float) -> None:
        """Play and learn, for `rounds` rounds or `seconds` seconds at most."""
        end = time.monotonic() + seconds
        while rounds > 0 and time.monotonic() < end:
            episodes = await self.play(method)
            self.agent.learn(episodes)
            self.agent.rewards += [float(each.rewards.sum()) for each in episodes]
            rounds -= 1

    async def speed(self, method: str, seconds: float) -> float:
        """Return agent steps per second of playing without learning."""
        before, start = self.agent.steps, time.monotonic()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(
                seconds
            ):  # it cancels the calls, and so the remote coroutines
                while True:
                    await self.play(method)
        return (self.agent.steps - before) / (time.monotonic() - start)


async def gather_team(names: Sequence[str], options: argparse.Namespace) -> Team:
    """Make an agent here, and an observer on every worker of `names`."""
    agent, each = Agent(options.seed, options.device), options.environments
    seeds = [10_000 * options.seed + number for number in range(each * len(names))]
    observers = [
        await create(name, Observer, RRef(agent), seeds[number * each : (number + 1) * each])
        for number, name in enumerate(names)
    ]
    return Team(agent, observers, options.steps)


async def main(me: aiorpc.Worker, options: argparse.Namespace) -> None:
    """Serve as an observer, or lead as the agent."""
    if me.rank:
        await serve("agent")
        return
    await lead(me.peers, options)
    end()


async def lead(names: Sequence[str], options: argparse.Namespace) -> None:
    """Train, then measure both ways to select alternately."""
    team = await gather_team(names, options)
    print(f"{options.observers} observers play {options.environments} environments each")
    with Display(team.agent):
        method = "select" if options.batched else "select_alone"
        await team.train(method, options.rounds, options.seconds)
    speeds: dict[str, list[float]] = {"select": [], "select_alone": []}
    for method in (
        list(speeds) * 2 if options.compare else ()
    ):  # alternately, since the load of a machine changes
        speeds[method].append(await team.speed(method, options.compare))
    report(team.agent.rewards, speeds, options)


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--seconds", type=float, help="seconds of training (30, unless --rounds is given)")
    add("--rounds", type=int, default=sys.maxsize, help="rounds of training, at most")
    add("--steps", type=int, default=100, help="steps of each environment in a round, at least")
    add("--compare", type=float, default=2.0, help="seconds of the comparison; 0: none")
    add(
        "--batched",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="batch calls while training",
    )
    add("--observers", type=int, default=2, help="number of observer processes")
    add("--envs-per-observer", "--environments", dest="environments", type=int, default=16)
    add("--device", default="cpu", help="device of the agent's network, such as cuda:0")
    add("--seed", type=int, default=0)
    add("--plot", type=Path, default=Path("out/cartpole.png"))
    add("--quick", action="store_true", help="two short rounds, as a check")
    add_world(parser)
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.steps, options.compare = 2, 50, min(options.compare, 0.3)
    if min(options.observers, options.environments, options.steps) < 1:
        parser.error("there is at least one observer, one environment and one step")
    if options.seconds is None:
        options.seconds = 30.0 if options.rounds == sys.maxsize else math.inf
    return options


if __name__ == "__main__":
    given = arguments()
    launch(main, ["agent", *(f"observer{number}" for number in range(given.observers))], given)
