"""`examples/reinforce.py` in plain torch RPC: the pattern of PyTorch's tutorial.

"Getting Started with Distributed RPC Framework", in its strongest form: one call a step, which
brings the last reward along; returns of each observer by itself; environments with seeds of their
own; workers addressed by `WorkerInfo`.

    python -m examples._reference.reinforce --observers 2
"""

import argparse
import math
import random
import sys
import tempfile
import time
from typing import Any

import torch
from torch import Tensor
from torch.distributed import rpc

from .._learning import CartPole, Episode, Learner

SOLVED = 475.0
FRESH = 0.05  # of a round in the running reward


class Agent(Learner):
    """Answers observers one by one, keeps a book for each, and learns from a round."""

    def __init__(self, observers: int, seed: int, device: str = "cpu") -> None:
        super().__init__(seed, device)
        self.draws = [random.Random(f"{seed}, {number}") for number in range(observers)]
        self.states: dict[int, list[Tensor]] = {}
        self.actions: dict[int, list[int]] = {}
        self.rewards: dict[int, list[float]] = {}
        self.greedy = False
        self.running = 0.0
        self.worst: list[float] = []
        self.steps = 0

    def begin(self, observers: int, *, greedy: bool) -> None:
        """Forget the round before."""
        self.greedy = greedy
        for book in (self.states, self.actions, self.rewards):
            book.update({number: [] for number in range(observers)})

    def select(self, observer: int, state: Tensor, reward: float | None) -> int:
        """The next action, and the reward of the one before."""
        if reward is not None:
            self.rewards[observer].append(reward)
        chance = self.chances(state.unsqueeze(0))[0]
        draw = 0.5 if self.greedy else self.draws[observer].random()
        action = int(draw < chance)
        self.states[observer].append(state)
        self.actions[observer].append(action)
        return action

    def finish(self, observer: int, reward: float) -> None:
        """The last reward of an episode."""
        self.rewards[observer].append(reward)

    def played(self) -> list[Episode]:
        """Each observer's episode of this round."""
        return [
            Episode.of(self.states[number], self.actions[number], self.rewards[number])
            for number in range(len(self.states))
        ]

    def improve(self) -> None:
        """Learn from the round that was played."""
        episodes = self.played()
        self.learn(episodes)
        self.steps += sum(len(each.actions) for each in episodes)
        self.worst.append(min(float(each.rewards.sum()) for each in episodes))
        self.running += FRESH * (self.worst[-1] - self.running)


agent: Agent  # of the agent's process
environment: CartPole  # of an observer's


def select(observer: int, state: Tensor, reward: float | None) -> int:
    return agent.select(observer, state, reward)


def finish(observer: int, reward: float) -> None:
    agent.finish(observer, reward)


def new_environment(seed: int) -> None:
    global environment
    environment = CartPole(seed)


def play(observer: int) -> None:
    """One episode."""
    to = rpc.get_worker_info("agent")
    state, reward, done = environment.reset(), None, False
    while not done:
        action = rpc.rpc_sync(to, select, args=(observer, state, reward), timeout=0)
        state, reward, done = environment.step(action)
    rpc.rpc_sync(to, finish, args=(observer, reward), timeout=0)


def play_round(team: list[Any], *, greedy: bool) -> None:
    """An episode of every observer, all at once."""
    agent.begin(len(team), greedy=greedy)
    futures = [
        rpc.rpc_async(observer, play, args=(number,), timeout=0)
        for number, observer in enumerate(team)
    ]
    torch.futures.wait_all(futures)


def solve(team: list[Any], episodes: int) -> bool:
    """Learn until it is solved, or so many episodes are played; whether it is."""
    while agent.running <= SOLVED and len(agent.worst) * len(team) < episodes:
        play_round(team, greedy=False)
        agent.improve()
    return agent.running > SOLVED


def evaluate(team: list[Any], episodes: int) -> list[float]:
    """The rewards of so many episodes with the best action, not a drawn one."""
    rewards: list[float] = []
    for _ in range(math.ceil(episodes / len(team))):
        play_round(team, greedy=True)
        rewards += [float(each.rewards.sum()) for each in agent.played()]
    return rewards[:episodes]


def lead(options: argparse.Namespace) -> bool:
    """The agent's process: train and evaluate."""
    global agent
    agent = Agent(options.observers, options.seed, options.device)
    team = [rpc.get_worker_info(f"observer{number}") for number in range(options.observers)]
    for number, observer in enumerate(team):
        rpc.rpc_sync(observer, new_environment, args=(10_000 * options.seed + number,))
    start = time.monotonic()
    solved = solve(team, options.max_episodes)
    seconds = time.monotonic() - start
    print(
        f"{'solved' if solved else 'not solved'}: running reward {agent.running:.1f} after "
        f"{len(agent.worst) * len(team):,} episodes, {agent.steps:,} steps, "
        f"{seconds:.0f} s ({agent.steps / seconds:,.0f} steps/s)"
    )
    rewards = evaluate(team, options.evaluate)
    mean = sum(rewards) / len(rewards)
    print(f"greedy: mean reward {mean:.1f} of {len(rewards)}, least {min(rewards):.0f}")
    return solved


def run(rank: int, options: argparse.Namespace, where: str) -> None:
    """One process's life."""
    rpc.init_rpc(  # type: ignore[no-untyped-call]
        f"observer{rank - 1}" if rank else "agent",
        rank=rank,
        world_size=options.observers + 1,
        rpc_backend_options=rpc.TensorPipeRpcBackendOptions(init_method=f"file://{where}"),
    )
    solved = rank > 0 or lead(options)
    rpc.shutdown()
    sys.exit(not (solved or options.quick))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--observers", type=int, default=2)
    parser.add_argument("--max-episodes", type=int, default=2_000)
    parser.add_argument("--evaluate", type=int, default=10, metavar="N")
    parser.add_argument("--device", default="cpu", help="of the agent's network")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    if options.quick:
        options.max_episodes, options.evaluate = 10, 2
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(  # type: ignore[attr-defined,no-untyped-call]
            run, (options, f"{folder}/store"), nprocs=options.observers + 1
        )


if __name__ == "__main__":
    main()
