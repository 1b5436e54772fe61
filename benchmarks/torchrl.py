"""How does aiorpc_torch compare with TorchRL's inference server and its weight synchronization?

Both serve the same policy to the same environments, in as many processes, one after the other in
each repetition. Weights are counted from the call that sends them until every receiver has them.

    pip install '.[torchrl]'
    python -m benchmarks.torchrl [--quick] [--repeat N] [--processes N] [--megabytes N]
"""

import argparse
import asyncio
import sys
import time
from importlib import metadata
from importlib.util import find_spec

import torch
from torch import Tensor

from aiorpc_torch import RRef, batched, create, local_world, remote
from examples._learning import CartPole

from . import weights
from ._compare import Row, Runs, parse, settle, show
from .batching import actions, new_policy

SCHEMES = ["MultiProcessWeightSyncScheme", "SharedMemWeightSyncScheme"]


class Agent:
    """The policy, and the number of its version."""

    def __init__(self) -> None:
        self.policy, self.version = new_policy(), 0

    @batched(max_size=512, stack=True)
    async def act(self, states: Tensor) -> list[tuple[int, int]]:
        """Return action and version for each state."""
        return [(action, self.version) for action in actions(self.policy, states)]


class Client:
    """A process that plays environments, each in a coroutine."""

    async def play(self, agent: RRef[Agent], environments: int, seconds: float) -> float:
        """Return the steps a second of all environments."""
        until = time.perf_counter() + seconds
        games = [self._play(agent, CartPole(number), until) for number in range(environments)]
        begun = time.perf_counter()
        steps = sum(await asyncio.gather(*games))
        return steps / (time.perf_counter() - begun)

    async def _play(self, agent: RRef[Agent], game: CartPole, until: float) -> int:
        state, steps = game.reset(), 0
        while time.perf_counter() < until:
            action, _ = await remote(agent).act(state)
            state, _, done = game.step(action)
            state = game.reset() if done else state
            steps += 1
        return steps


async def inference(processes: int, environments: int, seconds: float) -> float:
    """Return the steps a second of all environments."""
    names = [f"client{number}" for number in range(processes)]
    async with local_world(["server", *names], start_timeout=600.0):
        agent = await create("server", Agent)
        clients = await create(names, Client)
        await remote(clients).play(agent, environments, 0.2)  # warms up
        return float(sum(await remote(clients).play(agent, environments, seconds)))


def compare(given: argparse.Namespace) -> list[Row]:
    """Measure both in each repetition."""
    from . import _torchrl_ways as theirs

    rows = list[Row]()
    for environments in given.environments:
        sizes = given.processes, environments, given.seconds
        ours, other = list[float](), list[float]()
        for _ in range(given.repeat):
            settle()
            ours.append(asyncio.run(inference(*sizes)))
            other.append(theirs.inference(*sizes))
        what = f"{given.processes} processes, {environments} environments each"
        rows.append(Row(what, "steps/s", Runs(ours, other)))
    mine = 1e3 * torch.tensor([run[3] for run in asyncio.run(weights.measure(given))])
    elements = given.megabytes * weights.MB // 4 // weights.TENSORS
    for scheme in SCHEMES:
        many = given.followers, weights.TENSORS, elements, given.repeat
        seconds = torch.tensor(theirs.weights(scheme, *many))
        what = f"{given.megabytes} MB to {given.followers}, {scheme}"
        rows.append(Row(what, "ms", Runs(mine.tolist(), (1e3 * seconds).tolist())))
    return rows


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="aiorpc_torch compared with TorchRL.")
    add = parser.add_argument
    add("--processes", type=int, default=2, help="processes with environments")
    add("--environments", type=int, nargs="+", default=[1, 16], help="environments of a process")
    add("--seconds", type=float, default=5.0, help="seconds of each measurement")
    add("--followers", type=int, default=4, help="processes that receive weights")
    add("--megabytes", type=int, default=16, help="megabytes of weights")
    given = parse(parser)
    if given.quick:
        given.seconds, given.followers = 0.5, 2
    return given


if __name__ == "__main__":
    given = arguments()
    if not find_spec("torchrl"):
        sys.exit("torchrl is not installed: pip install '.[torchrl]'")
    show(compare(given), other="TorchRL")
    used = ", ".join(f"{name} {metadata.version(name)}" for name in ("torchrl", "tensordict"))
    print(used)
