"""IMPALA on CartPole-v1: actors play while the learner learns, and V-trace corrects the delay.

Actors in processes of their own play environments, each in a coroutine. A rollout begins with a
ticket (`StalenessLimit`) and a version of the network (`Weights`, `follow`), and ends in the
learner's queue (`Replay`). The learner takes rollouts in the order of arrival, learns from each
once, and publishes. It does not wait for actors, nor do they wait for it, unless a rollout becomes
more than `--staleness` versions old.

With `--policy shared` one process answers the actors, in batches (`@batched`); with `--policy own`
each actor has its copy. `--synchronous` is the same program in turns: publish, every environment
plays a rollout, learn. `--kill N` kills actors in the middle, N times: other processes take their
places (`supervised`), and the run goes on.

    python -m examples.impala                                # half a minute on two cores
    python -m examples.impala --policy own --kill 2
    python -m examples.impala --synchronous
"""

import argparse
import asyncio
import contextlib
import itertools
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial
from statistics import mean
from typing import Any, NamedTuple, Self, TypeVar

import torch
from torch import Tensor, nn

import aiorpc_torch as aiorpc

from ._learning import CartPole

T = TypeVar("T")

STEPS = 20  # of an environment in a rollout
GAMMA, ENTROPY = 0.99, 0.01
SCALE = 0.1  # of rewards: values stay below ten
RECENT = 50  # episodes whose mean reward is shown
RESTARTS = 100  # of actors in a run


class Network(nn.Module):
    """A policy and a value of the state."""

    def __init__(self) -> None:
        super().__init__()
        self.policy = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 2))
        self.value = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 1))

    def forward(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Return the log-probabilities of the actions [..., 2], and the values [...]."""
        return self.policy(states).log_softmax(-1), self.value(states).squeeze(-1)


# ── actors ──────────────────────────────────────────────────────────────────────────────────────


class Rollout(NamedTuple):
    """Some steps of one environment. An episode may end in the middle, and another begin."""

    states: Tensor  # [T + 1, 4]: the last one has no action
    actions: Tensor  # [T] int64
    chances: Tensor  # [T]: log-probabilities that the actor gave its actions
    rewards: Tensor  # [T]
    goes_on: Tensor  # [T]: 0 where the episode ends, else 1
    version: int  # that chose the first action
    scores: list[float]  # rewards of the episodes that ended


class Player:
    """A copy of the network that follows the learner's, and chooses actions."""

    network: Network
    policy: aiorpc.training.Follower

    @classmethod
    async def start(cls) -> Self:
        """Return a player that has the newest version."""
        self = cls()
        self.network = Network()
        self.policy = await aiorpc.training.follow("policy", on="learner", into=self.network)
        return self

    async def wait(self, version: int) -> int:
        """Wait until actions are chosen with this version or a later one."""
        return await self.policy.wait(version)

    @aiorpc.batched(max_size=512, stack=True)
    async def act(self, states: Tensor) -> list[tuple[int, float, int]]:
        """Return action, log-probability and version for each state; they come stacked: [B, 4].

        Nothing is awaited here, so a batch computes on one version.
        """
        with torch.inference_mode():
            logs, _ = self.network(states)
            actions = logs.exp().multinomial(1)
            chances = logs.gather(1, actions).flatten().tolist()
        versions = itertools.repeat(self.policy.version)
        return list(zip(actions.flatten().tolist(), chances, versions, strict=False))


class Game(CartPole):
    """An environment that is played in rollouts."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.state, self.score = self.reset(), 0.0

    async def play(self, player: Player) -> Rollout:
        """Play a rollout from where the last one ended."""
        states, rewards, goes_on, scores = [self.state], list[float](), list[float](), list[float]()
        choices = list[Any]()  # of `Player.act`
        for _ in range(STEPS):
            choices.append(await player.act(self.state))
            self.state, reward, done = self.step(choices[-1][0])
            self.score += reward
            if done:
                scores.append(self.score)
                self.state, self.score = self.reset(), 0.0
            states.append(self.state)
            rewards.append(reward)
            goes_on.append(float(not done))
        actions, chances, versions = zip(*choices, strict=True)
        return Rollout(
            torch.stack(states),
            torch.tensor(actions),
            torch.tensor(chances),
            torch.tensor(rewards),
            torch.tensor(goes_on),
            versions[0],
            scores,
        )


class Actor:
    """A process that plays environments, each in a coroutine."""

    def __init__(self, player: Player, seeds: Sequence[int]) -> None:
        self.player = player
        self.games = [Game(seed) for seed in seeds]

    @classmethod
    async def start(cls, shared: aiorpc.RRef[Player] | None, seeds: Sequence[int]) -> Self:
        """Return an actor that asks the shared player, or its own."""
        return cls(await Player.start() if shared is None else aiorpc.proxy(shared), seeds)

    async def run(self) -> None:
        """Play and send rollouts until the call is cancelled."""
        limit, replay = [await aiorpc.lookup(name, on="learner") for name in ("limit", "replay")]

        async def play(game: Game) -> None:
            while True:
                async with aiorpc.proxy(limit).ticket() as ticket:
                    await self.player.wait(ticket.version)
                    await aiorpc.proxy(replay).insert(await game.play(self.player), ticket)

        async with asyncio.TaskGroup() as group:
            for game in self.games:
                group.create_task(play(game))

    async def collect(self, version: int) -> list[Rollout]:
        """Play one rollout of each environment with a version."""
        await self.player.wait(version)
        return await asyncio.gather(*(game.play(self.player) for game in self.games))


# ── the learner ─────────────────────────────────────────────────────────────────────────────────


def vtrace(
    ratios: Tensor, discounts: Tensor, rewards: Tensor, values: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the targets of the values, and the advantages of the actions: [T, B] each.

    V-trace (Espeholt et al. 2018, "IMPALA", equation 1), in the recursive form of its remark 1,
    with c = rho = min(1, pi / mu):

        v_s = V(x_s) + delta_s + gamma c_s (v_{s+1} - V(x_{s+1}))
        delta_s = rho_s (r_s + gamma V(x_{s+1}) - V(x_s))

    The advantage is that of its section 4.2: rho_s (r_s + gamma v_{s+1} - V(x_s)).

    Args:
        ratios: pi / mu of the actions [T, B], the learner's probability by the actor's.
        discounts: gamma, or 0 where an episode ends [T, B].
        rewards: rewards [T, B].
        values: the learner's values of the states [T + 1, B].
    """
    clipped = ratios.clamp(max=1.0)
    deltas = clipped * (rewards + discounts * values[1:] - values[:-1])
    corrections = torch.zeros_like(values)  # v - V
    for step in reversed(range(len(deltas))):
        later = discounts[step] * clipped[step] * corrections[step + 1]
        corrections[step] = deltas[step] + later
    targets = values + corrections
    return targets[:-1], clipped * (rewards + discounts * targets[1:] - values[:-1])


class Learner:
    """The network, and its optimizer."""

    def __init__(self, updates: int) -> None:
        self.network = Network()
        self.optimizer = torch.optim.Adam(self.network.parameters(), lr=3e-3)
        self.schedule = torch.optim.lr_scheduler.LinearLR(self.optimizer, 1.0, 0.01, updates)

    def learn(self, rollouts: Sequence[Rollout]) -> None:
        """Make one step from rollouts of the network's versions."""
        columns = zip(*(rollout[:5] for rollout in rollouts), strict=True)
        states, actions, chances, rewards, goes_on = (torch.stack(one, 1) for one in columns)
        logs, values = self.network(states)
        chosen = logs[:-1].gather(-1, actions.unsqueeze(-1)).squeeze(-1)
        with torch.no_grad():
            targets, advantages = vtrace(
                (chosen - chances).exp(), GAMMA * goes_on, SCALE * rewards, values.detach()
            )
        entropy = -(logs.exp() * logs).sum(-1).mean()
        misses = nn.functional.smooth_l1_loss(values[:-1], targets)
        loss = misses - (chosen * advantages).mean() - ENTROPY * entropy
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.network.parameters(), 1.0)
        self.optimizer.step()
        self.schedule.step()


class Progress(NamedTuple):
    """How far the learner is."""

    seconds: float
    steps: int  # of environments
    updates: int  # of the learner
    reward: float  # mean of the last episodes
    lag: float  # mean age of the last rollouts that were learnt from, in versions

    def __str__(self) -> str:
        return (
            f"{self.seconds:5.1f} s: reward {self.reward:.0f}; {self.steps / self.seconds:,.0f} "
            f"steps and {self.updates / self.seconds:.0f} updates a second, "
            f"rollouts {self.lag:.1f} versions old"
        )


class Queue(deque[Any]):
    """Rollouts in the order of arrival, as the storage of a `Replay`: each is sampled once."""

    def sample(self, size: int) -> list[Rollout]:
        """Return the oldest rollouts."""
        return [self.popleft() for _ in range(size)]


async def again(call: Callable[[], Awaitable[T]], times: int) -> T:
    """Call an actor; if its process is lost, call the one that takes its place."""
    for _ in range(times):
        with contextlib.suppress(aiorpc.WorkerLost):
            return await call()
    return await call()


Source = Callable[[int], Awaitable[Sequence[Rollout]]]
"""A function that announces a version, and returns the next rollouts to learn from."""


@contextlib.asynccontextmanager
async def at_any_time(
    actors: aiorpc.Group[Actor], given: argparse.Namespace
) -> AsyncIterator[Source]:
    """Let actors play all the time, and the learner take the oldest rollouts of the queue."""
    size = given.actors * given.environments
    limit = aiorpc.training.StalenessLimit(given.staleness, max_in_flight=size)
    # A sample waits for `size` rollouts in the queue, and an insert while it has twice as many.
    replay = aiorpc.training.Replay(
        Queue(), aiorpc.training.SampleLimit(1, min_size=size, slack=size)
    )
    aiorpc.register("limit", limit)
    aiorpc.register("replay", replay)

    async def take(version: int) -> Sequence[Rollout]:
        await limit.advance(version)
        rollouts: Sequence[Rollout] = await replay.sample(size)
        return rollouts

    async with asyncio.TaskGroup() as group:  # an actor that raises ends the program
        playing = [group.create_task(again(aiorpc.remote(one).run, given.kill)) for one in actors]
        yield take
        for task in playing:
            task.cancel()


@contextlib.asynccontextmanager
async def in_turns(actors: aiorpc.Group[Actor], given: argparse.Namespace) -> AsyncIterator[Source]:
    """Let each environment play one rollout when the learner asks for it."""

    async def collect(version: int) -> Sequence[Rollout]:
        calls = [again(partial(aiorpc.remote(one).collect, version), given.kill) for one in actors]
        return [*itertools.chain(*await asyncio.gather(*calls))]

    yield collect


Report = Callable[[Progress], object]


async def learn(
    learner: Learner, weights: aiorpc.training.Weights, source: Source, steps: int, report: Report
) -> None:
    """Learn and publish until the environments have made so many steps."""
    begun, made, scores = time.perf_counter(), 0, deque[float](maxlen=RECENT)
    for update in itertools.count(1):
        rollouts = await source(weights.version)
        lag = mean(weights.version - rollout.version for rollout in rollouts)
        await asyncio.to_thread(learner.learn, rollouts)
        await weights.publish(learner.network.state_dict())
        made += STEPS * len(rollouts)
        for rollout in rollouts:
            scores.extend(rollout.scores)
        seconds = time.perf_counter() - begun
        report(Progress(seconds, made, update, mean(scores or [0.0]), lag))
        if made >= steps:
            break


async def train(given: argparse.Namespace, report: Report) -> None:
    """Train in a world of processes; report after each update."""
    torch.manual_seed(given.seed)
    learner = Learner(max(1, given.steps // (STEPS * given.actors * given.environments)))
    weights = aiorpc.training.Weights(learner.network.state_dict())
    names = [f"actor{number}" for number in range(given.actors)]
    others = ["player"] if given.policy == "shared" else []
    kills = [given.steps * part // (given.kill + 1) for part in range(1, given.kill + 1)]

    def after(progress: Progress) -> None:
        report(progress)
        if kills and progress.steps >= kills[0]:
            print(f"{progress.seconds:5.1f} s: an actor is killed", flush=True)
            aiorpc.testing.kill(names[len(kills) % len(names)])
            kills.pop(0)

    preload = ("gymnasium",)
    async with aiorpc.local_world(
        [*names, *others], name="learner", max_restarts=RESTARTS, preload=preload
    ):
        aiorpc.register("policy", weights)
        actors = await start_actors(names, given)
        form = in_turns if given.synchronous else at_any_time
        async with form(actors, given) as source:
            await learn(learner, weights, source, given.steps, after)


async def start_actors(names: Sequence[str], given: argparse.Namespace) -> aiorpc.Group[Actor]:
    """Make an actor on each worker, and the player if they share one."""
    shared = await aiorpc.create("player", Player.start) if given.policy == "shared" else None
    size = given.environments
    firsts = [1_000 * given.seed + size * number for number in range(len(names))]
    seeds = aiorpc.each(range(first, first + size) for first in firsts)
    return await aiorpc.supervised(names, Actor.start, shared, seeds)


def parse(*args: str) -> argparse.Namespace:
    """Return the options of a command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--policy", choices=("shared", "own"), default="shared", help="where actions are chosen")
    add("--synchronous", action="store_true", help="actors and learner take turns")
    add("--staleness", type=int, default=4, help="versions")
    add("--kill", type=int, default=0, metavar="N", help="kill an actor N times in the run")
    add("--actors", type=int, default=2, help="number of actor processes")
    add("--environments", type=int, default=16, help="number of environments of an actor")
    add("--steps", type=int, default=300_000, help="of all environments")
    steps = "20,000 steps, as a check"
    add("--quick", dest="steps", action="store_const", const=20_000, help=steps)
    add("--seed", type=int, default=0)
    return parser.parse_args(args or None)


def main(given: argparse.Namespace) -> None:
    """Train, and print a line for each tenth of the steps."""
    found = list[Progress]()

    def show(progress: Progress) -> None:
        if progress.steps >= given.steps * (len(found) + 1) / 10:
            found.append(progress)
            print(progress, flush=True)

    asyncio.run(train(given, show))
    print(f"mean reward of the last {RECENT} episodes: {found[-1].reward:.0f}")


if __name__ == "__main__":
    main(parse())
