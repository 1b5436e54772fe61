"""A process of the tutorial's program, as published, for `benchmarks.cartpole`.

The source is `distributed/rpc/batch/reinforce.py` of pytorch/examples (BSD 3-clause). Changed: it
runs on the CPU, where `cuda()` is a `clone()`. The loss of the variant without batching weighs each
action with its own rewards (as published, its shapes broadcast). An episode is measured instead of
a whole process. Unchanged are its sampler, its dropout, its lock, the gradients that are recorded
while it plays, and `rpc_sync` to `agent_rref.owner()`.
"""

import threading
from time import perf_counter, process_time
from typing import Any

import gymnasium
import torch
from torch import Tensor, nn
from torch.distributed import rpc
from torch.distributions import Categorical
from torch.futures import Future

from ._cartpole_plain import be_worker
from ._cartpole_work import Sizes, Times


class Policy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.affine1 = nn.Linear(4, 128)
        self.dropout = nn.Dropout(p=0.6)
        self.affine2 = nn.Linear(128, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.relu(self.dropout(self.affine1(x)))
        return nn.functional.softmax(self.affine2(x), dim=-1)


class Observer:
    def __init__(self, batch: bool) -> None:
        self.id = rpc.get_worker_info().id - 1
        self.env: gymnasium.Env[Any, Any] = gymnasium.make("CartPole-v1")
        self.env.reset(seed=543)
        self.select_action = Agent.select_action_batch if batch else Agent.select_action

    def run_episode(self, agent_rref: Any, n_steps: int) -> Tensor:
        state, _ = self.env.reset()
        rewards = torch.zeros(n_steps)
        start_step = 0
        for step in range(n_steps):
            state = torch.from_numpy(state).float().unsqueeze(0)
            action = rpc.rpc_sync(
                agent_rref.owner(), self.select_action, args=(agent_rref, self.id, state)
            )
            state, reward, terminated, truncated, _ = self.env.step(action)
            rewards[step] = float(reward)
            if terminated or truncated or step + 1 >= n_steps:
                current, total = rewards[start_step : step + 1], 0.0
                for i in range(current.numel() - 1, -1, -1):
                    total = float(current[i]) + total
                    current[i] = total
                state, _ = self.env.reset()
                start_step = step + 1
        return rewards


class Agent:
    def __init__(self, observers: int, batch: bool) -> None:
        self.agent_rref = rpc.RRef(self)
        self.policy = Policy()
        self.optimizer = torch.optim.Adam(self.policy.parameters(), lr=1e-2)
        self.batch = batch
        self.ob_rrefs = [
            rpc.remote(f"observer{number}", Observer, args=(batch,)) for number in range(observers)
        ]
        self.forget()
        self.future_actions: Future[Any] = Future()
        self.lock = threading.Lock()
        self.pending_states = observers

    def forget(self) -> None:
        self.states = torch.zeros(len(self.ob_rrefs), 1, 4)
        self.saved_batches: list[Tensor] = []
        self.saved_log_probs: dict[int, list[Tensor]] = {k: [] for k in range(len(self.ob_rrefs))}

    @staticmethod
    @rpc.functions.async_execution  # type: ignore[untyped-decorator]
    def select_action_batch(agent_rref: Any, ob_id: int, state: Tensor) -> "Future[Any]":
        self = agent_rref.local_value()
        self.states[ob_id].copy_(state)
        future_action: Future[Any] = self.future_actions.then(
            lambda future_actions: future_actions.wait()[ob_id].item()
        )
        with self.lock:
            self.pending_states -= 1
            if self.pending_states == 0:
                self.pending_states = len(self.ob_rrefs)
                m = Categorical(self.policy(self.states.clone()))
                actions: Tensor = m.sample()  # type: ignore[no-untyped-call]
                log_probs: Tensor = m.log_prob(actions)  # type: ignore[no-untyped-call]
                self.saved_batches.append(log_probs.t()[0])
                future_actions = self.future_actions
                self.future_actions = torch.futures.Future()
                future_actions.set_result(actions)
        return future_action

    @staticmethod
    def select_action(agent_rref: Any, ob_id: int, state: Tensor) -> Any:
        self = agent_rref.local_value()
        m = Categorical(self.policy(state))
        action = m.sample()  # type: ignore[no-untyped-call]
        log_prob: Tensor = m.log_prob(action)  # type: ignore[no-untyped-call]
        self.saved_log_probs[ob_id].append(log_prob)
        return action.item()

    def run_episode(self, n_steps: int) -> None:
        futures = [
            each.rpc_async(timeout=0).run_episode(self.agent_rref, n_steps)
            for each in self.ob_rrefs
        ]
        rewards = torch.stack(torch.futures.wait_all(futures)).t()
        if self.batch:
            probs = torch.stack(self.saved_batches)
        else:
            probs = torch.cat([torch.stack(each) for each in self.saved_log_probs.values()], dim=1)
        loss = (-probs * rewards / len(futures)).sum()
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.forget()


def live(rank: int, sizes: Sizes, where: str, report: Any) -> None:
    """Run one worker. The agent's process sends its measurements to `report`."""
    torch.manual_seed(543)
    be_worker(rank, sizes, where, report, _measure)


def _measure(sizes: Sizes) -> Times:
    agents = {"batched": Agent(sizes.processes, True), "unbatched": Agent(sizes.processes, False)}
    times: Times = {"batched": [], "unbatched": []}
    for agent in agents.values():
        agent.run_episode(sizes.warm)
    for _ in range(sizes.rounds):
        for name, agent in agents.items():
            start, cpu = perf_counter(), process_time()
            agent.run_episode(sizes.steps)
            seconds, cpu = perf_counter() - start, process_time() - cpu
            times[name].append((sizes.steps * sizes.processes, seconds, cpu))
    return times
