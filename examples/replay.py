"""DQN on CartPole-v1: actors that play while the learner learns, with a replay buffer at a ratio.

Actors in processes of their own follow the learner's network (`Weights`, `follow`), at most
`--staleness` versions late (`StalenessLimit`). They play with their own copies, so that a step
needs no call. The learner samples each transition `--ratio` times on average (`Replay`,
`SampleLimit`). `--synchronous` is the same program in turns: publish, every actor plays a rollout,
learn.

    python -m examples.replay --actors 2
    python -m examples.replay --synchronous
"""

import argparse
import asyncio
import random
import time
from collections.abc import Callable
from statistics import mean
from typing import NamedTuple

import torch
from torch import Tensor, nn

import aiorpc_torch as aiorpc

from ._learning import CartPole

BATCH, SEGMENT = 64, 32  # transitions of a step of the learner, and of a rollout
FIRST = 500  # transitions before the first step of the learner
EVERY = 10  # steps of the learner for each version
GAMMA, TARGET = 0.99, 0.01

Transition = tuple[Tensor, int, float, Tensor, bool]


def network() -> nn.Module:
    return nn.Sequential(
        nn.Linear(4, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 2)
    )


class Actor(CartPole):
    """Plays with its own copy of the network, and reports transitions and results of episodes."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.network, self.state, self.total = network(), self.reset(), 0.0
        self.policy: aiorpc.training.Follower | None = None  # in the synchronous form

    async def run(self) -> None:
        """Play until the call is cancelled."""
        limit, replay, scores = [await aiorpc.lookup(name, on="learner") for name in NAMES]
        async with await aiorpc.training.follow(
            "policy", on="learner", into=self.network
        ) as policy:
            while True:
                async with aiorpc.proxy(limit).ticket() as ticket:
                    items, totals = self.segment(await policy.wait(ticket.version))
                    inserts = [aiorpc.proxy(replay).insert(item, ticket) for item in items]
                    await asyncio.gather(
                        *inserts, *(aiorpc.remote(scores).append(each) for each in totals)
                    )

    async def collect(self, version: int) -> tuple[list[Transition], list[float]]:
        """Play one rollout with a version."""
        if self.policy is None:
            self.policy = await aiorpc.training.follow("policy", on="learner", into=self.network)
        return self.segment(await self.policy.wait(version))

    def segment(self, version: int) -> tuple[list[Transition], list[float]]:
        """Play a rollout; return its transitions, and the rewards of the episodes that ended."""
        explore = max(0.05, 1.0 - version / 50)
        items, totals = list[Transition](), list[float]()
        for _ in range(SEGMENT):
            action = self.draw(0.5) if self.draw(explore) else greedy(self.network, self.state)
            before, (self.state, reward, done) = self.state, self.step(action)
            self.total += reward
            items.append((before, action, reward, self.state, done and self.total < 500))
            if done:
                totals.append(self.total)
                self.state, self.total = self.reset(), 0.0
        return items, totals


NAMES = ("limit", "replay", "scores")


@torch.inference_mode()
def greedy(model: nn.Module, state: Tensor) -> int:
    return int(model(state).argmax())


class Learner:
    """Double DQN with a target network that follows slowly."""

    def __init__(self) -> None:
        self.network, self.target = network(), network()
        self.target.load_state_dict(self.network.state_dict())
        self.optimizer = torch.optim.Adam(self.network.parameters(), lr=1e-3)

    def learn(self, items: list[Transition]) -> None:
        columns = [*zip(*items, strict=True)]
        states, later = torch.stack(columns[0]), torch.stack(columns[3])
        actions, rewards, ends = (torch.tensor(columns[index]) for index in (1, 2, 4))
        with torch.no_grad():
            best = self.network(later).argmax(1, keepdim=True)
            value = self.target(later).gather(1, best).squeeze(1)
            wanted = rewards + GAMMA * value * ~ends
        chosen = self.network(states).gather(1, actions.unsqueeze(1)).squeeze(1)
        self.optimizer.zero_grad()
        nn.functional.smooth_l1_loss(chosen, wanted).backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        with torch.no_grad():
            for mine, other in zip(
                self.target.parameters(), self.network.parameters(), strict=True
            ):
                mine.lerp_(other, TARGET)


def evaluate(model: nn.Module, episodes: int) -> float:
    """Return the mean reward of episodes with the best action."""
    environment, totals = CartPole(10_000), list[float]()
    for _ in range(episodes):
        state, total, done = environment.reset(), 0.0, False
        while not done:
            state, reward, done = environment.step(greedy(model, state))
            total += reward
        totals.append(total)
    return mean(totals)


class Progress(NamedTuple):
    """How far the learner is."""

    seconds: float
    steps: int  # of environments
    updates: int  # of the learner
    reward: float  # mean of the last episodes
    version: int

    def __str__(self) -> str:
        return (
            f"{self.updates:,} steps, {self.steps:,} transitions, {self.seconds:.0f} s: version "
            f"{self.version}, last episodes {self.reward:.0f}"
        )


async def learn(
    given: argparse.Namespace, actors: aiorpc.Group[Actor], report: Callable[[Progress], object]
) -> Learner:
    """Learn while actors play, or in turns with them; report after each version."""
    learner, scores = Learner(), list[float]()
    weights = aiorpc.training.Weights(learner.network.state_dict())
    limit = aiorpc.training.StalenessLimit(given.staleness, max_in_flight=2 * given.actors)
    ratio = aiorpc.training.SampleLimit(
        given.ratio, min_size=FIRST, slack=4 * (given.ratio + BATCH)
    )
    replay = aiorpc.training.Replay(
        aiorpc.training.Uniform(20_000, given.seed), None if given.synchronous else ratio
    )
    for name, thing in zip(("policy", *NAMES), (weights, limit, replay, scores), strict=True):
        aiorpc.register(name, thing)
    begun = time.perf_counter()
    for update in range(1, given.steps + 1):
        while given.synchronous and replay.inserted < FIRST + update * BATCH / given.ratio:
            for items, totals in await aiorpc.remote(actors).collect(weights.version):
                scores += totals
                for item in items:
                    await replay.insert(item)
        learner.learn(await replay.sample(BATCH))
        if update % EVERY == 0:
            await limit.advance(await weights.publish(learner.network.state_dict()))
            reward, seconds = mean(scores[-20:] or [0.0]), time.perf_counter() - begun
            report(Progress(seconds, replay.inserted, update, reward, weights.version))
    return learner


async def train(given: argparse.Namespace, report: Callable[[Progress], object]) -> Learner:
    """Train in a world of processes."""
    torch.manual_seed(given.seed)
    random.seed(given.seed)
    names = [f"actor{number}" for number in range(given.actors)]
    async with aiorpc.local_world(names, name="learner", preload=("gymnasium",)):
        firsts = range(100 * given.seed, 100 * given.seed + given.actors)
        actors = await aiorpc.create(names, Actor, aiorpc.each(firsts))
        calls = [] if given.synchronous else [aiorpc.remote(actor).run() for actor in actors]
        async with asyncio.TaskGroup() as group:  # an actor that raises ends the program
            playing = [group.create_task(call) for call in calls]
            learner = await learn(given, actors, report)
            for task in playing:
                task.cancel()
    return learner


def main(given: argparse.Namespace) -> None:
    """Train, print a line for each tenth of the steps, and play without exploring."""

    def show(progress: Progress) -> None:
        if progress.updates % (given.steps // 10) == 0:
            print(progress, flush=True)

    learner = asyncio.run(train(given, show))
    print(f"greedy policy: {evaluate(learner.network, 10):.0f} on average")


def parse(*args: str) -> argparse.Namespace:
    """Return the options of a command line."""
    parser = argparse.ArgumentParser(description="DQN with actors that lag.")
    add = parser.add_argument
    add("--actors", type=int, default=2)
    add("--synchronous", action="store_true", help="actors and learner take turns")
    add("--staleness", type=int, default=2, help="versions")
    add("--ratio", type=float, default=32.0, help="samples for each transition")
    add("--steps", type=int, default=6_000, help="of the learner")
    add("--quick", dest="steps", action="store_const", const=600, help="600 steps, as a check")
    add("--seed", type=int, default=0)
    return parser.parse_args(args or None)


if __name__ == "__main__":
    main(parse())
