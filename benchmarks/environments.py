"""How many steps of environments in a second, by how long a step takes?

64 environments, whose step computes for some microseconds of processor time, and a policy of two
layers. Ways:

- `SyncVectorEnv(64)` of gymnasium, in the process of the policy;
- `AsyncVectorEnv(64)` of gymnasium: a process for each environment;
- this library, a call for each environment: 64 coroutines in the workers ask one policy, batched;
- this library, a call for each worker: `SyncVectorEnv`s there, whose rows are joined to one batch;
- this library, the policy at the environments: each worker follows its weights.

The ways take turns, in processes of their own.

    python -m benchmarks.environments [--quick] [--repeat N] [--workers N]
"""

import argparse
import asyncio
import multiprocessing
import time
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv
from torch import Tensor, nn

import aiorpc_torch as aiorpc
from aiorpc_torch.training import Weights, follow

from ._compare import machine, parse, spread

ENVIRONMENTS = 64
STEPS = [0, 100, 1_000, 10_000]  # microseconds
SECONDS = 2.0  # of each measurement


class Busy(gymnasium.Env[Any, Any]):
    """An environment whose step takes so many microseconds of processor time."""

    observation_space = gymnasium.spaces.Box(-1, 1, (4,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, micros: int) -> None:
        self.seconds, self.state = micros * 1e-6, np.zeros(4, np.float32)

    def reset(self, **_: Any) -> tuple[Any, dict[str, Any]]:
        return self.state, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        end = time.thread_time() + self.seconds  # or those that share a core would be free
        while time.thread_time() < end:
            pass
        return self.state, 0.0, False, False, {}


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 2))


def act(net: nn.Module, states: Any) -> Any:
    with torch.no_grad():
        return net(torch.as_tensor(states)).argmax(1).numpy()


def stepped(step: Callable[[], int], seconds: float) -> tuple[int, float]:
    """Return how many steps were made, and in how many seconds."""
    count, begun = 0, time.perf_counter()
    while time.perf_counter() < begun + seconds:
        count += step()
    return count, time.perf_counter() - begun


# ── gymnasium alone ─────────────────────────────────────────────────────────────────────────────


def in_processes(makers: list[Callable[[], Busy]]) -> AsyncVectorEnv:
    # As in a program of gymnasium's: this process is a spawned one, and so would theirs be, each
    # with an import of torch.
    return AsyncVectorEnv(makers, context="fork")


def alone(kind: Any, micros: int, seconds: float, workers: int) -> float:
    envs, net = kind([lambda: Busy(micros)] * ENVIRONMENTS), network()
    states, _ = envs.reset()

    def step() -> int:
        nonlocal states
        states, *_ = envs.step(act(net, states))
        return ENVIRONMENTS

    step()
    count, took = stepped(step, seconds)
    envs.close()
    return count / took


# ── this library ────────────────────────────────────────────────────────────────────────────────


class Policy:
    def __init__(self) -> None:
        self.net = network()

    @aiorpc.batched(max_size=ENVIRONMENTS, stack=True)
    def act(self, states: Tensor) -> Tensor:  # [batch, 4] -> [batch]
        return torch.as_tensor(act(self.net, states))

    @aiorpc.batched(concat=True, max_weight=ENVIRONMENTS)
    def act_rows(self, states: Tensor) -> Tensor:  # [rows, 4] -> [rows]
        return torch.as_tensor(act(self.net, states))


class Actor:
    def __init__(self, policy: Any, micros: int, count: int) -> None:
        self.policy = aiorpc.remote(policy)
        self.envs = [Busy(micros) for _ in range(count)]
        self.vector = SyncVectorEnv([lambda: Busy(micros)] * count)

    async def by_environment(self, seconds: float) -> float:
        begun = time.perf_counter()
        counts = await asyncio.gather(*(self._play(each, begun + seconds) for each in self.envs))
        return sum(counts) / (time.perf_counter() - begun)

    async def _play(self, env: Busy, end: float) -> int:
        count, (state, _) = 0, env.reset()
        while time.perf_counter() < end:
            action = await self.policy.act(torch.as_tensor(state))
            state, *_ = env.step(int(action))
            count += 1
        return count

    async def by_worker(self, seconds: float) -> float:
        begun, count, (states, _) = time.perf_counter(), 0, self.vector.reset()
        while time.perf_counter() < begun + seconds:
            actions = await self.policy.act_rows(torch.as_tensor(states))
            states, *_ = self.vector.step(actions.numpy())
            count += len(states)
        return count / (time.perf_counter() - begun)

    async def with_own_policy(self, seconds: float) -> float:
        net = network()
        states, _ = self.vector.reset()

        def step() -> int:
            nonlocal states
            states, *_ = self.vector.step(act(net, states))
            return len(states)

        async with await follow("policy", into=net, poll=0.1):
            count, took = await asyncio.to_thread(stepped, step, seconds)
        return count / took


def ours(way: str, micros: int, seconds: float, workers: int) -> float:
    async def measure() -> float:
        names = [f"env{number}" for number in range(workers)]
        async with aiorpc.local_world(names) as me:
            policy = await aiorpc.create(me.name, Policy)
            aiorpc.register("policy", Weights((await aiorpc.fetch(policy)).net.state_dict()))
            actors = await aiorpc.create(names, Actor, policy, micros, ENVIRONMENTS // workers)
            rates: list[float] = await getattr(aiorpc.remote(actors), way)(seconds)
            return sum(rates)

    return asyncio.run(measure())


WAYS: dict[str, tuple[Callable[..., float], Any]] = {
    "SyncVectorEnv": (alone, SyncVectorEnv),
    "AsyncVectorEnv": (alone, in_processes),
    "a call for each environment": (ours, "by_environment"),
    "a call for each worker": (ours, "by_worker"),
    "the policy at the environments": (ours, "with_own_policy"),
}


def send(pipe: Any, name: str, *given: Any) -> None:
    function, what = WAYS[name]
    pipe.send(function(what, *given))


def measure(name: str, micros: int, seconds: float, workers: int) -> float:
    """Return the steps in a second, in a process of its own."""
    spawn = multiprocessing.get_context("spawn")
    mine, its = spawn.Pipe()
    process = spawn.Process(target=send, args=(its, name, micros, seconds, workers))
    process.start()
    its.close()
    found: float = mine.recv()
    process.join()
    return found


def main(given: argparse.Namespace) -> None:
    steps, seconds = (STEPS[:2], 0.5) if given.quick else (STEPS, SECONDS)
    print_row("a step takes", *WAYS)
    for micros in steps:
        found: dict[str, list[float]] = {name: [] for name in WAYS}
        for _ in range(given.repeat):
            for name, each in found.items():
                each.append(measure(name, micros, seconds, given.workers))
        print_row(f"{micros:,} us", *map(spread, found.values()))
    print(f"\nsteps in a second, medians of {given.repeat} repetitions [min–max]")
    print(machine())


def print_row(*cells: str) -> None:
    """Print one line of the table at once: the whole one takes minutes."""
    print("  ".join(each.ljust(30) for each in cells).rstrip(), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--workers", type=int, default=2)
    main(parse(parser))
