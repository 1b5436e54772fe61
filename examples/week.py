"""IMPALA on CartPole-v1 that outlives its processes: each of them may die at any time.

Each role is a process of its own, on any machine, which its supervisor starts again when it ends:

    until python -m examples.week learner --place file:///shared/week; do sleep 0.1; done

The learner's state is one tree (network, optimizer, schedule, steps), which it publishes after each
update. All other roles follow it, so each of them holds a copy: the learner's next process takes
the newest one from them (`recover`). The keeper saves its copy as well, in case all die at once.
Rollouts travel through the replay. Who calls a process that is lost calls the next one. The
directory, at first in the keeper, moves to another role when its process dies. A role that gets
SIGTERM leaves in order.

Each process prints what it does, a line of JSON each time. The run ends when the environments have
made all steps. docs/guides/week.md has the supervisors.
"""

import argparse
import asyncio
import fcntl
import itertools
import json
import multiprocessing
import os
import signal
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from statistics import mean
from typing import Any

import torch
import torch._dynamo  # optimizers import it, which would hold the event loop for seconds

import aiorpc_torch as aiorpc
from aiorpc_torch.training import Follower, Recovered, Replay, SampleLimit, Weights, follow, recover

from . import impala
from ._learning import CartPole

ENVIRONMENTS = 16  # of an actor
BATCH = 32  # rollouts of an update
RECENT = 50  # episodes whose mean reward is shown
EPISODES = 10  # of an evaluation, at once
POLL = 0.05  # seconds between two versions that enter a network
PAUSE = 0.1  # seconds before another try
SAVE = 10.0  # seconds between two checkpoints


def tell(**values: object) -> None:
    """Print a line, in one piece: the process may end at any time."""
    print(f"{json.dumps(values)}\n", end="", flush=True)


# ── the learner ─────────────────────────────────────────────────────────────────────────────────


class Learner(impala.Learner):
    """A network and all that its training needs, as one tree."""

    steps = 0  # of the environments

    def state(self) -> dict[str, Any]:
        """Return the tree that is published."""
        parts = {name: getattr(self, name).state_dict() for name in self.parts}
        return {"steps": self.steps, **parts}

    def load(self, tree: dict[str, Any]) -> None:
        """Go on from a tree."""
        self.steps = tree["steps"]
        for name in self.parts:
            getattr(self, name).load_state_dict(tree[name])

    parts = ("network", "optimizer", "schedule")


async def learn(given: argparse.Namespace) -> None:
    """Learn until all steps are made, from the newest state that a follower holds."""
    torch.manual_seed(given.seed)
    learner = Learner(given.steps // (BATCH * impala.STEPS))
    found = await recover("learner") or saved(given.checkpoint)
    if found is not None:
        learner.load(found.tree)
    weights = Weights(learner.state(), version=0 if found is None else found.version)
    aiorpc.register("learner", weights)
    tell(recovered=weights.version, steps=learner.steps)
    scores = deque[float](maxlen=RECENT)
    while learner.steps < given.steps:
        rollouts = await sample()
        await asyncio.to_thread(learner.learn, rollouts)
        learner.steps += sum(len(each.rewards) for each in rollouts)
        version = await weights.publish(learner.state())
        scores.extend(itertools.chain.from_iterable(each.scores for each in rollouts))
        reward = round(mean(scores), 1) if scores else None
        tell(version=version, steps=learner.steps, reward=reward)


# ── rollouts on their way ───────────────────────────────────────────────────────────────────────


async def keep(given: argparse.Namespace) -> None:
    """Keep rollouts until the learner takes them; each is sampled once."""
    # A sample waits for a batch, and an insert while there are two.
    replay = Replay(impala.Queue(), SampleLimit(1, min_size=BATCH, slack=BATCH))
    aiorpc.register("replay", replay)
    async for _ in until_the_end(given):
        tell(queued=replay.inserted - replay.sampled)


async def sample() -> Sequence[impala.Rollout]:
    """Return the next rollouts, also if the process that keeps them is lost meanwhile."""
    while True:
        replay = await aiorpc.lookup("replay")  # waits until there is one
        try:
            rollouts: Sequence[impala.Rollout] = await aiorpc.remote(replay).sample(BATCH)
            return rollouts
        except aiorpc.WorkerGone:
            await asyncio.sleep(PAUSE)


# ── actors and evaluator ────────────────────────────────────────────────────────────────────────


class Player(impala.Player):
    """A copy of the network that follows the learner's."""

    def __init__(self) -> None:
        self.network = impala.Network()

    def put_in(self, tree: dict[str, Any]) -> None:
        """Take the part of the learner's tree that a player needs."""
        self.network.load_state_dict(tree["network"])


async def act(given: argparse.Namespace) -> None:
    """Play and send rollouts until all steps are made."""
    player = Player()
    played = sent = 0

    async def play(game: impala.Game) -> None:
        nonlocal played, sent
        replay: Any = None  # until a call finds its worker gone: each lookup asks all workers
        while True:
            rollout = await game.play(player)
            played += len(rollout.rewards)
            try:
                replay = replay or await aiorpc.lookup("replay")
                await aiorpc.remote(replay).insert(rollout)
                sent += len(rollout.rewards)
            except aiorpc.WorkerGone:
                replay = None
                tell(dropped=len(rollout.rewards))
                await asyncio.sleep(PAUSE)
            tell(played=played, sent=sent)
            await asyncio.sleep(given.rest)

    seeds = torch.randint(1 << 30, (ENVIRONMENTS,)).tolist()
    async with asyncio.TaskGroup() as group:
        playing = list[asyncio.Task[None]]()
        async for policy in until_the_end(given, player.put_in):
            player.policy = policy
            playing = playing or [group.create_task(play(impala.Game(seed))) for seed in seeds]
        for each in playing:  # one may wait in `insert`: nothing is sampled any more
            each.cancel()


async def evaluate(given: argparse.Namespace) -> None:
    """Play whole episodes with the most probable actions, again and again."""
    network = impala.Network()
    games = [CartPole(seed) for seed in range(EPISODES)]
    async for policy in until_the_end(given):
        network.load_state_dict(policy.state["network"])
        version = policy.version
        score = mean(await asyncio.to_thread(play_greedily, games, network))
        tell(evaluated=version, score=score)
        await asyncio.sleep(given.pause)


@torch.inference_mode()
def play_greedily(games: Sequence[CartPole], network: impala.Network) -> list[float]:
    """Play an episode of each game; return their rewards."""
    states = {game: game.reset() for game in games}
    scores = dict.fromkeys(games, 0.0)
    while states:
        actions = network(torch.stack([*states.values()]))[0].argmax(1).tolist()
        for game, action in zip([*states], actions, strict=True):
            states[game], reward, done = game.step(action)
            scores[game] += reward
            if done:
                del states[game]
    return [*scores.values()]


# ── each role's process ─────────────────────────────────────────────────────────────────────────


async def until_the_end(
    given: argparse.Namespace, into: Callable[[dict[str, Any]], None] | None = None
) -> AsyncIterator[Follower]:
    """Yield a follower of the learner for each version, until all steps are made.

    With `poll` it takes versions by itself, from whatever process is the learner, and waits for
    that as long as it takes.
    """
    async with await follow("learner", into=into, poll=POLL) as policy:
        version = -1
        while version < policy.version or policy.state["steps"] < given.steps:
            if version < policy.version:
                version = policy.version
                tell(holds=version)
                yield policy
            await asyncio.sleep(POLL)


async def hold(given: argparse.Namespace) -> None:
    """Hold a copy of the learner's state, and save it now and then."""
    due = time.monotonic()
    async for policy in until_the_end(given):
        if given.checkpoint is not None and time.monotonic() >= due:
            due = time.monotonic() + SAVE
            await asyncio.to_thread(save, Recovered(policy.version, policy.state), given.checkpoint)


def save(state: Recovered, path: str) -> None:
    """Write a file, of which nobody sees a half."""
    torch.save(tuple(state), f"{path}.partial")
    os.replace(f"{path}.partial", path)


def saved(path: str | None) -> Recovered | None:
    """Return what the last keeper has saved, None if it has not."""
    if path is None or not os.path.exists(path):
        return None
    return Recovered(*torch.load(path, weights_only=False))


ROLES = {
    "keeper": hold,
    "learner": learn,
    "replay": keep,
    "evaluator": evaluate,
    "actor0": act,
    "actor1": act,
}


async def main(given: argparse.Namespace) -> None:
    """Play a role in the world."""
    names = [*ROLES]
    world = aiorpc.worker(
        given.role,
        rank=names.index(given.role),
        world_size=len(names),
        init_method=given.place,
        heartbeat=given.heartbeat,
        watchdog=given.watchdog,
    )
    async with world as me:
        tell(role=given.role, pid=os.getpid(), restarts=me.restarts)
        try:
            await ROLES[given.role](given)
            await me.serve()  # until all have ended
        except asyncio.CancelledError:  # SIGTERM; peers are told of any other exception
            await me.leave()
            tell(left=given.role)
            raise


def run(given: argparse.Namespace) -> None:
    """Play a role in this process."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # the world is left at SIGTERM, too
    asyncio.run(main(given))


def start(run: Callable[[argparse.Namespace], None], given: argparse.Namespace) -> None:
    """Play a role here, or with `--supervise` in a process of its own, again until that succeeds.

    Such a process is forked from this one, which has imported torch: it starts in no time. With
    `--lock` this one may be a spare: it waits until the last process of another supervisor ends.
    """
    if not given.supervise:
        run(given)
        return
    processes = multiprocessing.get_context("fork")  # there are no threads here
    if given.lock is not None:
        lock = os.open(given.lock, os.O_RDWR | os.O_CREAT)  # forked processes hold it, too
        fcntl.flock(lock, fcntl.LOCK_EX)
    while True:
        process = processes.Process(target=run, args=(given,))
        process.start()
        process.join()
        if process.exitcode == 0:
            return
        time.sleep(PAUSE)


def parse(*args: str) -> argparse.Namespace:
    """Return the options of a command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("role", choices=[*ROLES])
    add(
        "--place", required=True, help="where the roles meet: file:///path or etcd://host:port/name"
    )
    add("--checkpoint", metavar="PATH", help="a file that the keeper writes now and then")
    add("--steps", type=int, default=300_000, help="of all environments")
    add("--rest", type=float, default=0.0, help="seconds that an environment rests after a rollout")
    add("--pause", type=float, default=1.0, help="seconds between two evaluations")
    add("--supervise", action="store_true", help="start the role again whenever it fails")
    add("--lock", metavar="PATH", help="of the role's supervisors, of which one works at a time")
    add("--heartbeat", type=float, default=2.0, help="seconds until a silent peer is lost")
    add("--watchdog", type=float, default=10.0, help="seconds until a process that hangs ends")
    add("--seed", type=int, default=0)
    return parser.parse_args(args or None)


if __name__ == "__main__":
    start(run, parse())
