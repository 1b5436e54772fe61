"""`examples/cartpole.py` in plain torch RPC: the pattern of PyTorch's tutorial.

"Implementing Batch RPC Processing Using Asynchronous Executions", in its strongest form: the loss
weighs each action with its own return in both variants, observers play whole episodes, workers are
addressed by `WorkerInfo`, futures are completed outside the lock, and the sampler is a cheap one.

    python -m examples._reference.cartpole --observers 10 --rounds 10 [--no-batched]
"""

import argparse
import tempfile
import threading
import time
from typing import Any

import torch
from torch import Tensor
from torch.distributed import rpc
from torch.futures import Future

from .._learning import CartPole, Episode, Learner

Full = tuple["Future[Any]", dict[int, Tensor]]


class Agent(Learner):
    """Answers observers, when all of them who still play have asked, and learns."""

    def __init__(self, seed: int, device: str = "cpu") -> None:
        super().__init__(seed, device)
        self.rewards: list[float] = []
        self.steps = 0
        self.lock = threading.Lock()
        self.waiting: dict[int, Tensor] = {}
        self.answer: Future[Any] = Future()
        self.playing = 0

    def begin(self, observers: int) -> None:
        with self.lock:
            self.playing = observers

    def select(self, observer: int, state: Tensor) -> "Future[Any]":
        with self.lock:
            mine: Future[Any] = self.answer.then(lambda answer: answer.value()[observer])
            self.waiting[observer] = state
            full = self._take_if_full()
        self._answer(full)
        return mine

    def end(self) -> None:
        """An observer is done with its round: the others' batch may be full without it."""
        with self.lock:
            self.playing -= 1
            full = self._take_if_full()
        self._answer(full)

    def _take_if_full(self) -> Full | None:
        if not self.waiting or len(self.waiting) < self.playing:
            return None
        full = self.answer, self.waiting
        self.answer, self.waiting = Future(), {}
        return full

    def _answer(self, full: Full | None) -> None:
        if full is None:
            return
        answer, waiting = full
        try:
            chances = self.chances(torch.stack([*waiting.values()]))
            answer.set_result(dict(zip(waiting, chances, strict=True)))
        except Exception as exc:
            answer.set_exception(exc)


agent: Agent  # of the agent's process
environment: CartPole  # of an observer's


@rpc.functions.async_execution  # type: ignore[untyped-decorator]
def select(observer: int, state: Tensor) -> "Future[Any]":
    return agent.select(observer, state)


def select_alone(observer: int, state: Tensor) -> float:
    return agent.chances(state.unsqueeze(0))[0]


def end() -> None:
    agent.end()


def new_environment(seed: int) -> None:
    global environment
    environment = CartPole(seed)


def play(observer: int, method: Any, steps: int) -> list[Episode]:
    """Whole episodes, until there are so many steps."""
    to = rpc.get_worker_info("agent")
    episodes: list[Episode] = []
    try:
        while steps > 0:
            episodes.append(_episode(to, observer, method))
            steps -= len(episodes[-1].actions)
    finally:
        if method is select:
            rpc.rpc_sync(to, end)
    return episodes


def _episode(to: Any, observer: int, method: Any) -> Episode:
    state, done = environment.reset(), False
    states, actions, rewards = [], [], []
    while not done:
        states.append(state)
        chance = rpc.rpc_sync(to, method, args=(observer, state), timeout=0)
        actions.append(environment.draw(chance))
        state, reward, done = environment.step(actions[-1])
        rewards.append(reward)
    return Episode.of(states, actions, rewards)


def new_team(seed: int, observers: int, device: str = "cpu") -> list[Any]:
    """An agent here, and an environment in every other process."""
    global agent
    agent = Agent(seed, device)
    team = [rpc.get_worker_info(f"observer{number}") for number in range(observers)]
    for number, observer in enumerate(team):
        rpc.rpc_sync(observer, new_environment, args=(10_000 * seed + number,))
    return team


def train(team: list[Any], method: Any, steps: int) -> None:
    """A round: everybody plays, and the agent learns."""
    agent.begin(len(team))
    futures = [
        rpc.rpc_async(observer, play, args=(number, method, steps), timeout=0)
        for number, observer in enumerate(team)
    ]
    episodes = [each for episodes in torch.futures.wait_all(futures) for each in episodes]
    agent.learn(episodes)
    agent.rewards += [float(each.rewards.sum()) for each in episodes]
    agent.steps += sum(len(each.actions) for each in episodes)


def run(rank: int, options: argparse.Namespace, where: str) -> None:
    """One process's life."""
    rpc.init_rpc(  # type: ignore[no-untyped-call]
        f"observer{rank - 1}" if rank else "agent",
        rank=rank,
        world_size=options.observers + 1,
        rpc_backend_options=rpc.TensorPipeRpcBackendOptions(init_method=f"file://{where}"),
    )
    if rank == 0:
        team = new_team(options.seed, options.observers, options.device)
        start = time.monotonic()
        for _ in range(options.rounds):
            train(team, select if options.batched else select_alone, options.steps)
        print(f"{agent.steps / (time.monotonic() - start):,.0f} agent steps/s")
        first, last = sum(agent.rewards[:10]) / 10, sum(agent.rewards[-10:]) / 10
        count = len(agent.rewards)
        print(f"reward, first ten episodes: {first:.1f}, last ten of {count}: {last:.1f}")
    rpc.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=100, help="of an observer in a round")
    parser.add_argument("--batched", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--observers", type=int, default=2)
    parser.add_argument("--device", default="cpu", help="of the agent's network")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(  # type: ignore[attr-defined,no-untyped-call]
            run, (options, f"{folder}/store"), nprocs=options.observers + 1
        )


if __name__ == "__main__":
    main()
