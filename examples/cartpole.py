"""One agent, many observers: REINFORCE on CartPole-v1 with batched inference.

The agent lives in this process. Observers in processes of their own play several environments
each, as coroutines, and ask the agent for every single action: `await remote(agent).select(state)`.
`select` is `@batched`, so the agent's network runs once for all who ask meanwhile. No observer
waits for another, and nobody holds a lock.

    python -m examples.cartpole --seconds 30 --observers 2 --environments 16
"""

import argparse
import asyncio
import contextlib
import os
import signal
import statistics
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium
import torch
from torch import Tensor, nn

import aiorpc_torch as aiorpc
from aiorpc_torch import Round, RRef, batched, remote

from ._board import Board, plot

Environment = gymnasium.Env[Any, Any]

ROUND = 8  # episodes in a learning step
GAMMA = 0.99


class Episode(NamedTuple):
    """What one environment saw from reset to end."""

    states: Tensor  # [T, 4] float32
    actions: Tensor  # [T] int64
    rewards: Tensor  # [T] float32


class Agent:
    """A policy that answers observers and learns from their episodes."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.policy = nn.Sequential(nn.Linear(4, 128), nn.ReLU(), nn.Linear(128, 2))
        self.optimizer = torch.optim.Adam(self.policy.parameters(), lr=5e-3)
        self.rewards: list[float] = []
        self.steps = 0
        self.batches = 0

    @batched(max_size=256, stack=True)
    async def select(self, states: Tensor) -> list[int]:
        """Sample an action for each state [4]; they come stacked: [B, 4]."""
        return self._sample(states)

    async def select_alone(self, state: Tensor) -> int:
        """The same for one state, unbatched: what it is compared with."""
        return self._sample(state.unsqueeze(0))[0]

    @batched(Round(size=ROUND))
    async def learn(self, episodes: list[Episode]) -> aiorpc.Broadcast[None]:
        """One step of REINFORCE on the episodes of a round."""
        returns = torch.cat([discounted(episode.rewards) for episode in episodes])
        weights = (returns - returns.mean()) / (returns.std() + 1e-6)
        logits = self.policy(torch.cat([episode.states for episode in episodes]))
        actions = torch.cat([episode.actions for episode in episodes])
        loss = (nn.functional.cross_entropy(logits, actions, reduction="none") * weights).mean()
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.rewards += [float(episode.rewards.sum()) for episode in episodes]
        return aiorpc.Broadcast(None)

    @torch.inference_mode()
    def _sample(self, states: Tensor) -> list[int]:
        self.steps += len(states)
        self.batches += 1
        logits = self.policy(states)
        chosen = torch.multinomial(torch.softmax(logits, dim=-1), num_samples=1)
        return chosen.squeeze(-1).tolist()


def discounted(rewards: Tensor) -> Tensor:
    """The return at each step [T]: G_t = r_t + gamma * G_{t+1}."""
    total, returns = 0.0, []
    for reward in reversed(rewards.tolist()):
        total = reward + GAMMA * total
        returns.append(total)
    return torch.tensor(returns[::-1])


class Observer:
    """Plays environments against the agent, each in a coroutine of its own."""

    def __init__(self, agent: RRef[Agent], environments: int, seed: int) -> None:
        self.agent = agent
        self.environments = [gymnasium.make("CartPole-v1") for _ in range(environments)]
        for number, environment in enumerate(self.environments):
            environment.reset(seed=seed + number)

    async def play(self, method: str, *, learn: bool) -> None:
        """Ask that method of the agent for every action, until the call is cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for environment in self.environments:
                tasks.create_task(self._play(environment, method, learn=learn))

    async def _play(self, environment: Environment, method: str, *, learn: bool) -> None:
        while True:
            episode = await self._episode(environment, method)
            if learn:
                await remote(self.agent).learn(episode)

    async def _episode(self, environment: Environment, method: str) -> Episode:
        select = getattr(remote(self.agent), method)
        states, actions, rewards, done = [], [], [], False
        state, _ = environment.reset()
        while not done:
            states.append(torch.from_numpy(state))
            actions.append(await select(states[-1]))
            state, reward, terminated, truncated, _ = environment.step(actions[-1])
            rewards.append(float(reward))
            done = terminated or truncated
        return Episode(torch.stack(states), torch.tensor(actions), torch.tensor(rewards))


async def play(observers: list[RRef[Observer]], seconds: float, method: str, learn: bool) -> None:
    """Let all observers play; the time-out cancels the calls, and these their coroutines."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds), asyncio.TaskGroup() as calls:
            for observer in observers:
                calls.create_task(remote(observer).play(method, learn=learn))


async def speed(
    agent: Agent, observers: list[RRef[Observer]], seconds: float, method: str
) -> float:
    """Agent steps per second when observers only play."""
    before, start = agent.steps, time.monotonic()
    await play(observers, seconds, method, learn=False)
    return (agent.steps - before) / (time.monotonic() - start)


async def main(agent: Agent, options: argparse.Namespace) -> dict[str, list[float]]:
    """Train, then measure both ways to select in turn: agent steps per second."""
    names = [f"observer{number}" for number in range(options.observers)]
    async with aiorpc.local_world(names, name="agent"):
        shared = RRef(agent)
        observers = [
            await aiorpc.create(name, Observer, shared, options.environments, 1000 * number)
            for number, name in enumerate(names)
        ]
        with Board(agent):
            await play(observers, options.seconds, "select", learn=True)
        speeds: dict[str, list[float]] = {"select": [], "select_alone": []}
        for method in list(speeds) * 2:  # in turn: these machines change their speed
            speeds[method].append(await speed(agent, observers, options.compare, method))
    return speeds


def report(
    rewards: list[float], speeds: dict[str, list[float]], options: argparse.Namespace
) -> None:
    """Print the figures and write the learning curve."""
    batched, alone = (statistics.mean(speeds[method]) for method in ("select", "select_alone"))
    print(
        f"agent steps/s with {options.observers} x {options.environments} environments: "
        f"batched {batched:,.0f}, unbatched {alone:,.0f} ({batched / alone:.2f} x)"
    )
    if len(rewards) < 20:
        print(f"only {len(rewards)} episodes: give it more --seconds")
        return
    first, last = statistics.mean(rewards[:10]), statistics.mean(rewards[-10:])
    print(f"reward, first ten episodes: {first:.1f}, last ten of {len(rewards)}: {last:.1f}")
    print(f"learning curve: {plot(rewards, options.plot)}")


def arguments() -> argparse.Namespace:
    """What the command line says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=30.0, help="of training")
    parser.add_argument("--compare", type=float, default=2.0, help="seconds a comparing run")
    parser.add_argument("--observers", type=int, default=2, help="processes")
    parser.add_argument("--environments", type=int, default=16, help="in each observer")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plot", type=Path, default=Path("out/cartpole.png"))
    return parser.parse_args()


if __name__ == "__main__":
    options = arguments()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        agent = Agent(options.seed)
        report(agent.rewards, asyncio.run(main(agent, options)), options)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr, flush=True)
        os._exit(130)  # every worker has left; to unload torch would take another second
